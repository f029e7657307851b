"""What compression has left out so far, kept by the client: committed once the server has aggregated the reply that it belongs to.

A reply may be late, lost or refused, and the server's next request says which reply of this client it aggregated last. If that is the last
one, its residual is committed; else the one before it is used again, since nothing of that reply has reached the model. The residual
is a file if the client has a folder for its state, else it is in Flower's memory of the run, which is lost when the SuperNode restarts.
A lost residual loses what it holds, once; the corrections on the server still sum to zero.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError, safe_open

from ..files import make_folder, write_tensors
from .wire import as_array

RECORD = "mimicfl-residual"
Held = tuple[dict[str, torch.Tensor], str]  # "committed" and "pending" [d], and the ticket of the pending one


class Residual:
    """The residual of one client in one experiment."""

    def __init__(self, context: Context, folder: Path | None, config: dict[str, Any], client: str) -> None:
        self.context, self.ticket = context, str(config.get("ticket", ""))
        name = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()
        self.file = None if folder is None else folder / str(config.get("experiment", "")) / f"{name}-residual.safetensors"
        held, pending = self._load()
        key = "pending" if pending and pending == str(config.get("counted", "")) else "committed"
        self.e = held.get(key)  # [d], or None: nothing was left out yet

    def add(self, g: np.ndarray) -> np.ndarray:
        """g + e."""
        return g if self.e is None or self.e.shape != g.shape else g + self.e.numpy().astype(g.dtype)

    def keep(self, left_out: np.ndarray) -> None:
        """Store what this reply leaves out, until the server has aggregated it; before the reply is sent."""
        tensors = {"pending": torch.from_numpy(left_out)} | ({} if self.e is None else {"committed": self.e})
        if self.file is None:
            self.context.state[RECORD] = ArrayRecord({name: as_array(value) for name, value in tensors.items()})
            self.context.state[f"{RECORD}-ticket"] = ConfigRecord({"ticket": self.ticket})
            return
        make_folder(self.file.parent)
        write_tensors(self.file, tensors, {"ticket": self.ticket})

    def _load(self) -> Held:
        if self.file is None:
            records = self.context.state.array_records
            held = {name: torch.from_numpy(array.numpy().copy()) for name, array in records.get(RECORD, ArrayRecord()).items()}
            ticket = self.context.state.config_records.get(f"{RECORD}-ticket", ConfigRecord())
            return held, str(ticket.get("ticket", ""))
        if not self.file.exists():
            return {}, ""
        try:
            with safe_open(self.file, framework="pt") as opened:
                facts = dict(opened.metadata() or {})
                return {key: opened.get_tensor(key) for key in opened.keys()}, facts.get("ticket", "")  # noqa: SIM118
        except (SafetensorError, OSError):
            return {}, ""  # damaged: start again from zero
