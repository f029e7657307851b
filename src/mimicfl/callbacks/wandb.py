"""Rows for Weights & Biases."""

import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, flag
from ..metrics.rows import Row
from .interface import RunInfo
from .tracker import Tracker, keep_state, numbers, settings, state, title

PATIENCE = 30  # seconds to wait for the server at the start of a run; offline, W&B's own process may need longer on a busy machine


@dataclass
class WandB(Tracker):
    """Log to a project of Weights & Biases. Needs the extra `wandb`.

    offline   write to disk only, below `folder`; `wandb sync` uploads it. A resumed run replaces its files by new ones with all rounds
    """

    project: str = "mimicfl"
    offline: bool = False
    folder: str | Path = "."

    def __post_init__(self) -> None:
        flag("offline", self.offline)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import wandb
        except ImportError:
            raise UsageError("Weights & Biases is not installed: pip install 'mimicfl[wandb]'") from None
        self._wandb: Any = wandb

    @property
    def spec(self) -> str:
        where = "" if str(self.folder) == "." else f",folder={self.folder}"
        return f"wandb:{self.project}{',offline=true' if self.offline else ''}{where}"

    def connect(self, run: RunInfo, run_id: str) -> int:
        self._about = run
        self._handle: Any = None
        attempts = [] if not self.offline else sorted(Path(self.folder, "wandb").glob(f"offline-run-*-{run_id}*"))
        if self._strict and attempts and 0 < len(run.rows) <= (known := _whole(state(run).get(self.spec))):
            return known  # nothing to send: W&B would write an empty run
        for attempt in attempts:  # replaced by one with all rounds: a killed process may have left it empty
            if not any(attempt.glob("*.synced")):
                shutil.rmtree(attempt, ignore_errors=True)
        os.makedirs(self.folder, exist_ok=True)
        self._handle = self._wandb.init(
            project=self.project,
            id=run_id,
            name=title(run),
            config=settings(run),
            dir=str(Path(self.folder).resolve()),  # absolute: W&B writes from a process that may have another working directory
            mode="offline" if self.offline else "online",
            resume=None if self.offline else "allow",
            reinit="create_new",  # the runs of a comparison train together
            settings=self._wandb.Settings(init_timeout=PATIENCE * (10 if self.offline else 1), silent=True, quiet=True, console="off"),
        )
        return 0 if self.offline else int(self._handle.step)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._handle.log(numbers(row), step=row["round"])

    def close(self, finished: bool) -> None:
        if self._handle is None:
            return
        self._handle.finish(exit_code=0 if finished else 1)
        if self.offline:  # only now all rounds are on disk
            keep_state(self._about, {self.spec: self._sent})


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
