"""Rows for Weights & Biases."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, flag
from ..metrics.recorder import Row
from .interface import RunInfo
from .tracker import Tracker, keep_state, numbers, settings, state, title

PATIENCE = 30  # seconds to wait for the server at the start of a run


@dataclass
class WandB(Tracker):
    """Log to a project of Weights & Biases. Needs the extra `wandb`.

    offline   write to disk only, below `folder`; `wandb sync` uploads it later
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
        self._about, known = run, self._rounds_on_disk(run, run_id) if self.offline else 0
        if self._strict and 0 < len(run.rows) <= known:
            self._handle: Any = None  # nothing to send: W&B would write an empty run
            return known
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
            settings=self._wandb.Settings(init_timeout=PATIENCE, silent=True, quiet=True, console="off"),
        )
        return known if self.offline else int(self._handle.step)

    def _rounds_on_disk(self, run: RunInfo, run_id: str) -> int:
        """Offline, only the run folder knows which rounds were written. `track send` writes all of them again if W&B's files are gone."""
        known = state(run).get(self.spec, 0)
        gone = self._strict and not any(Path(self.folder, "wandb").glob(f"offline-run-*-{run_id}*"))
        return 0 if gone or not isinstance(known, int) else known

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._handle.log(numbers(row), step=row["round"])
        if self.offline:
            keep_state(self._about, {self.spec: rows[-1]["round"] + 1})

    def close(self, finished: bool) -> None:
        if self._handle is not None:
            self._handle.finish(exit_code=0 if finished else 1)
