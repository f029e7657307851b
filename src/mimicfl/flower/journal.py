"""The federation's run folder: rows and checkpoints as the simulator writes them, so that resuming and reports are the same."""

import json
import secrets
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UsageError
from ..metrics.store import Row, RunFolder, check_same

TOTALS = ("uploads", "vectors_up", "vectors_down", "bytes_up", "bytes_down")


class Journal:
    """What happened, round by round; kept in a folder if there is one."""

    def __init__(self, path: str | Path | None, config: dict[str, Any]) -> None:
        self.folder = None if path is None else RunFolder.claim(path, config)
        if self.folder is not None:
            try:
                check_same(self.folder, config, longer=True)
            except UsageError:
                self.folder.close()
                raise
        self.rows: list[Row] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.experiment = secrets.token_hex(8)  # the name under which clients keep what is theirs

    @property
    def t(self) -> int:
        return len(self.rows)

    def restore(self, layout: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The last checkpoint, if this folder has one."""
        if self.folder is None:
            return None
        saved = self.folder.load("checkpoint")
        if saved is None:
            self.folder.keep_rows([])
            return None
        tensors, facts = saved
        if facts.get("layout") != layout:
            raise UsageError(f"{self.folder.path} holds a federation with another model: choose another folder")
        self.rows = self.folder.rows_of(facts)
        self.folder.keep_rows(self.rows)
        self.experiment = facts["experiment"]
        if self.rows:
            self.totals = {key: self.rows[-1][key] for key in TOTALS}
        return tensors, facts

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)

    def save(self, tensors: dict[str, Tensor], facts: dict[str, str], layout: str) -> None:
        """A checkpoint as of the last row."""
        if self.folder is not None:
            facts = facts | {"round": str(self.t), "experiment": self.experiment, "layout": layout}
            self.folder.save("checkpoint", tensors, **facts)

    def finish(self, w: Tensor, buffers: dict[str, Tensor]) -> None:
        if self.folder is not None:
            tensors = {"params": w} | {f"buffer.{name}": value for name, value in buffers.items()}
            self.folder.save("final", tensors, round=str(self.t), clients=json.dumps([]))

    def reopen(self) -> None:
        """A finished federation is given more rounds."""
        if self.folder is not None:
            (self.folder.path / "final.safetensors").unlink(missing_ok=True)

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()
