"""Rows for TensorBoard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..metrics.rows import Row
from .interface import RunInfo
from .tracker import Tracker, file_title, numbers, settings

SUFFIX = ".mimicfl"  # how the names of our event files end


@dataclass
class TensorBoard(Tracker):
    """Write event files below `folder`, one subfolder per run: `tensorboard --logdir FOLDER`. Needs the extra `tensorboard`.

    A subfolder's name is that of the run and an id, so runs of several comparisons can share a folder. A resumed run
    replaces its event files by new ones with all rounds, so that no step appears twice.
    """

    folder: str | Path = "tensorboard"

    def __post_init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("TensorBoard is not installed: pip install 'mimicfl[tensorboard]'") from None
        self._writer_class: Any = SummaryWriter

    @property
    def spec(self) -> str:
        return f"tensorboard:{self.folder}"

    def connect(self, run: RunInfo, run_id: str) -> int:
        target = Path(self.folder) / file_title(run, run_id)
        for old in target.glob(f"events.out.tfevents.*{SUFFIX}"):
            old.unlink()
        self._writer = self._writer_class(str(target), filename_suffix=SUFFIX)
        self._writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings(run).items()))
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in numbers(row).items():
                self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
