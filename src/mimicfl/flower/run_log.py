"""Rows and checkpoints of a federation, in the format of the simulator, so that `mimicfl report` reads both."""

import secrets
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UsageError
from ..metrics.recorder import Recorder, Saved
from ..metrics.store import RunFolder, check_same
from .checkpoints import CheckpointStore


class RunLog(Recorder):
    """Rows and checkpoints of a federation, stored in a folder if one is given, and the id under which clients store their state."""

    def __init__(self, path: str | Path | None, config: dict[str, Any], keep: int = 5) -> None:
        super().__init__(None if path is None else RunFolder.claim(path, config))
        self.experiment = secrets.token_hex(8)
        self.checkpoints = None if self.folder is None else CheckpointStore(self.folder, keep)
        if self.folder is not None:
            try:
                kept = config if "availability" in self.folder.config else {k: v for k, v in config.items() if k != "availability"}
                check_same(self.folder, kept)  # earlier versions did not store the availability
            except UsageError:
                self.close()
                raise

    def resume(self, layout: str) -> Saved | None:
        """Restore the rows and return the last checkpoint; None if there is none. Raises `UsageError` if its model differs."""
        saved = None if self.checkpoints is None else self.checkpoints.load()
        if self.folder is None or saved is None:
            if self.folder is not None:
                self.folder.keep_rows([])
            return None
        facts = saved[1]
        if facts.get("layout") != layout:
            raise UsageError(f"{self.folder.path} holds a federation with another model; choose another folder")
        self.restore(self.folder.rows_of(facts))
        self.folder.keep_rows(self.rows)
        self.experiment = facts["experiment"]
        return saved

    def checkpoint(self, tensors: dict[str, Tensor], facts: dict[str, str], layout: str, changed: dict[str, set[int]]) -> None:
        """Write a checkpoint, with the rows of the clients that changed since the last one; marks them as saved."""
        if self.checkpoints is not None:
            more = {"round": str(self.t), "experiment": self.experiment, "layout": layout}
            self.checkpoints.save(tensors, facts | more, changed)
        for clients in changed.values():
            clients.clear()
