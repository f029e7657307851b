"""What a client keeps on its own disk: its correction c, and an update of which it does not yet know whether it was counted.

c_i = v_t - g_i needs v_t, which the server knows only after the client has answered, and an answer may be late or lost. So the
update stays *pending* until the server says, with the next letter, which answer of this client it counted last, and what v was.
Only then is c committed; a pending update that was not counted is dropped. Both live in one file, replaced in one step.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UsageError
from ..files import explained, write_tensors
from .wire import OURS, tensor, words


@dataclass
class Held:
    """One client's memory of one experiment. A ticket names one letter of the server, and so the answer to it."""

    file: Path
    words: dict[str, Any]  # what the letter says: experiment, epoch, ticket, counted, ...
    c: Tensor  # [d]
    ticket: str = ""  # of the answer that c comes from; empty: none yet, c = 0
    epoch: str = ""
    pending: Tensor | None = None  # [d] g of the last answer
    pending_ticket: str = ""

    @classmethod
    def open(cls, folder: Path, words: dict[str, Any], client: str, w: Tensor) -> "Held":
        """The memory as it is on disk, or an empty one."""
        name = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()  # a client's id is no file name
        file = folder / str(words["experiment"]) / f"{name}.safetensors"
        if not file.exists():
            return cls(file, words, torch.zeros_like(w))
        try:
            with safe_open(file, framework="pt") as opened:
                facts = dict(opened.metadata() or {})
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            tensors, facts = {}, {}
        if "c" not in tensors or tensors["c"].shape != w.shape or tensors["c"].dtype != w.dtype:
            return cls(file, words, torch.zeros_like(w), epoch="damaged")  # what it held is lost; `settle` will say so
        return cls(file, words, tensors["c"], facts["ticket"], facts["epoch"], tensors.get("pending"), facts["pending_ticket"])

    def settle(self, content: RecordDict) -> bool:
        """Commit or drop what is pending; False if the correction that the server counts on is not here."""
        if self.epoch != self.words["epoch"]:  # everybody starts again from zero
            self.epoch, self.ticket, self.pending, self.c = str(self.words["epoch"]), "", None, torch.zeros_like(self.c)
        counted = str(self.words["counted"])
        if counted == self.ticket:
            self.pending = None  # c is already right; whatever came after it was not counted
            return True
        if self.pending is None or self.pending_ticket != counted or "v" not in content.array_records:
            return False
        v = tensor(content, "v", "v")
        self.c, self.ticket, self.pending = v - self.pending, counted, None  # c_i <- v_t - g_i
        return True

    def corrected(self, g: Tensor, K: float) -> Tensor:
        """g + c to be sent; g is on disk before anything leaves."""
        if self.words["update"] == "mean":
            g = g / K
        sent = g + self.c
        clip = float(self.words.get("clip", 0.0))
        if clip and float(sent.abs().max()) > clip:
            raise UsageError(f"the update reaches {float(sent.abs().max()):.3g}, secure aggregation is set to clip={clip:g}: raise it")
        self.pending, self.pending_ticket = g, str(self.words["ticket"])
        with explained(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
        facts = {"ticket": self.ticket, "epoch": self.epoch, "pending_ticket": self.pending_ticket}
        write_tensors(self.file, {"c": self.c, "pending": g}, facts)
        return sent

    def says(self) -> dict[str, str]:
        """What the server may know: the answer c comes from, and the letter this answers."""
        return {"committed": self.ticket, "ticket": str(self.words["ticket"])}


def is_lost(content: RecordDict) -> bool:
    return bool(words(content, OURS).get("lost"))
