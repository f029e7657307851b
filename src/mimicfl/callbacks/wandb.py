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
        return f"wandb:{self.project}" + (",offline=true" if self.offline else "")

    def connect(self, run: RunInfo, run_id: str) -> int:
        self._about = run
        os.makedirs(self.folder, exist_ok=True)
        self._handle: Any = self._wandb.init(
            project=self.project,
            id=run_id,
            name=title(run),
            config=settings(run),
            dir=str(self.folder),
            mode="offline" if self.offline else "online",
            resume="allow",
            reinit="create_new",  # the runs of a comparison train together
            settings=self._wandb.Settings(init_timeout=PATIENCE, silent=True, console="off"),
        )
        # Offline, only the run folder knows how far the last attempt came.
        known = state(run).get(self.spec, 0) if self.offline else self._handle.step
        return known if isinstance(known, int) else 0

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._handle.log(numbers(row), step=row["round"])
        if self.offline:
            keep_state(self._about, {self.spec: rows[-1]["round"] + 1})

    def close(self, finished: bool) -> None:
        self._handle.finish(exit_code=0 if finished else 1, quiet=True)
