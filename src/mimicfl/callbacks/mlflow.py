"""Rows for MLflow."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..metrics.rows import Row
from .interface import RunInfo
from .tracker import Tracker, numbers, settings, title

TAG = "mimicfl.run"
ROUND = "round"  # a separate metric: its last step is the number of rounds that MLflow has
LONGEST = 500  # characters of a parameter


@dataclass
class MLflow(Tracker):
    """Log to the MLflow server or folder at `uri` (default: MLflow's own). Needs the extra `mlflow`.

    A resumed run continues the MLflow run that carries its id as the tag `mimicfl.run`.
    """

    uri: str = ""
    experiment: str = "mimicfl"

    def __post_init__(self) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # training must not wait minutes for a server that is down
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        if self.uri and ("://" not in self.uri or self.uri.startswith("file:")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow refuses a folder otherwise, even one that was asked for
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from mlflow import MlflowClient
        except ImportError:
            raise UsageError("MLflow is not installed: pip install 'mimicfl[mlflow]'") from None
        self._client_class = MlflowClient

    @property
    def spec(self) -> str:
        return f"mlflow:{self.uri}"

    def connect(self, run: RunInfo, run_id: str) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's own deprecations
            self._client: Any = self._client_class(self.uri or None)
            known = self._client.get_experiment_by_name(self.experiment)
            where = known.experiment_id if known else self._client.create_experiment(self.experiment)
            found = self._client.search_runs([where], f"tags.`{TAG}` = '{run_id}'")
            if found:
                self._id = found[0].info.run_id
                return max((m.step for m in self._client.get_metric_history(self._id, ROUND)), default=-1) + 1
            self._id = self._client.create_run(where, tags={TAG: run_id}, run_name=title(run)).info.run_id
            for key, value in settings(run).items():
                self._client.log_param(self._id, key, str(value)[:LONGEST])
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in rows:
                values = numbers(row) | {ROUND: float(row["round"])}
                metrics = [Metric(name, value, 0, row["round"]) for name, value in values.items()]
                self._client.log_batch(self._id, metrics=metrics)

    def close(self, finished: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
