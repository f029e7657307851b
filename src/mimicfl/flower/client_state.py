"""Client state on disk: the correction c, and the last update while the server has not yet acknowledged it.

c_i = v_t - g_i needs v_t, which the server knows only after the client has replied, and a reply may be late or lost. The update
therefore stays *pending* until the server's next request acknowledges a reply of this client and sends the v_t of its round. The client
then commits c; a pending update that was not acknowledged is dropped. Both are in one file, which is replaced atomically.
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
from ..files import make_folder, write_tensors
from .wire import MIMICFL, read_config, tensor


@dataclass
class ClientState:
    """The state of one client in one experiment. A round token identifies one request of the server and the reply to it.

    In messages and files the token keeps the key `ticket`.
    """

    file: Path
    request: dict[str, Any]  # the request's record: experiment, epoch, ticket, counted, ...
    c: Tensor  # [d]
    token: str = ""  # of the reply that c was computed from; empty: none yet, c = 0
    epoch: str = ""
    pending: Tensor | None = None  # [d] g of the last reply
    pending_token: str = ""

    @classmethod
    def open(cls, folder: Path, request: dict[str, Any], client: str, w: Tensor) -> "ClientState":
        """Load the client's state, or create an empty one."""
        name = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()  # client ids may contain any character
        file = folder / str(request["experiment"]) / f"{name}.safetensors"
        if not file.exists():
            return cls(file, request, torch.zeros_like(w))
        try:
            with safe_open(file, framework="pt") as opened:
                facts = dict(opened.metadata() or {})
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            tensors, facts = {}, {}
        if "c" not in tensors or tensors["c"].shape != w.shape or tensors["c"].dtype != w.dtype:
            return cls(file, request, torch.zeros_like(w), epoch="damaged")  # the state is lost: `reconcile` returns False
        return cls(file, request, tensors["c"], facts["ticket"], facts["epoch"], tensors.get("pending"), facts["pending_ticket"])

    def reconcile(self, content: RecordDict) -> bool:
        """Commit or drop the pending update; returns False if the correction that the server relies on is lost."""
        if self.epoch != self.request["epoch"]:  # a new epoch: all corrections restart at zero
            self.epoch, self.token, self.pending, self.c = str(self.request["epoch"]), "", None, torch.zeros_like(self.c)
        counted = str(self.request["counted"])
        if counted == self.token:
            self.pending = None  # c is up to date; later replies were not acknowledged
            return True
        if self.pending is None or self.pending_token != counted or "v" not in content.array_records:
            return False
        v = tensor(content, "v", "v")
        self.c, self.token, self.pending = v - self.pending, counted, None  # c_i <- v_t - g_i
        return True

    def corrected(self, g: Tensor, K: float) -> Tensor:
        """Return g + c, to be sent. Writes g to disk first, so that a reply never exists without its pending update."""
        if self.request["update"] == "mean":
            g = g / K
        sent = g + self.c
        clip = float(self.request.get("clip", 0.0))
        if clip and float(sent.abs().max()) > clip:
            raise UsageError(f"the update reaches {float(sent.abs().max()):.3g}, more than clip={clip:g}; raise clip")
        self.pending, self.pending_token = g, str(self.request["ticket"])
        make_folder(self.file.parent)
        facts = {"ticket": self.token, "epoch": self.epoch, "pending_ticket": self.pending_token}
        write_tensors(self.file, {"c": self.c, "pending": g}, facts)
        return sent

    def status(self) -> dict[str, str]:
        """What the server needs to know: the token of the reply that c was computed from, and the token of this request."""
        return {"committed": self.token, "ticket": str(self.request["ticket"])}


def is_lost(content: RecordDict) -> bool:
    """Whether a reply reports that the client has lost its correction."""
    return read_config(content, MIMICFL).get("lost") in (1, True)
