"""A network compiled for a GPU, or for a CPU to test the same code without one."""

import ctypes
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from ....clients.local_update import GRADIENTS
from ....clients.losses import Loss
from ....data.dataset import Data
from ...capabilities import unsupported_on_error
from ..build import load
from ..network import Network
from .cuda import Kernels, shared_memory
from .generate import generate
from .plan import THREADS

SENT = dict(zip(GRADIENTS, ("FIRST", "LAST"), strict=True))
RESERVED = 1024  # bytes of shared memory for the kernel's own variables
EMULATED = 227 * 1024  # bytes of shared memory of the emulated block


class Launch(ctypes.Structure):
    """The arguments of one launch, as driver.h declares them."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("w0", "model", "g", "loss", "pool", "table", "target", "rows", "begin", "sizes", "step")],
        *[(name, ctypes.c_void_p) for name in ("shift", "eta", "mu", "beta", "decay", "sent_first", "sent_last", "space", "next")],
        ("m", ctypes.c_int32),
    ]


@dataclass
class Batches:
    """The batches of all clients of a round, and the clients' models and rates, as tensors on the device; see driver.h."""

    w0: Tensor  # [models, d]
    model: Tensor  # [m]
    pool: Tensor
    target: Tensor
    rows: Tensor
    begin: Tensor  # [m]
    sizes: Tensor
    step: Tensor  # [m, 2]
    shift: Tensor  # [m] addresses, 0 for none
    eta: Tensor  # [m]
    mu: Tensor  # [m]
    beta: Tensor  # [m]
    decay: Tensor  # [m]


class DeviceProgram(Network):
    """Trains clients and evaluates models of one network on a device; on a CPU, one item after another."""

    @unsupported_on_error()
    def __init__(
        self, model: nn.Module, data: Data, loss: Loss, lanes: int, device: torch.device, extras: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(model, data, loss)
        self.device, self.extras, cuda = device, extras, device.type == "cuda"
        limit = shared_memory(device) if cuda else EMULATED
        source = generate(self.layers, self.dimension, self.kind, self.uint8, lanes, limit - RESERVED, extras)
        self.table = self.table.to(device)
        self.shared, self.space = 4 * source.shared, source.space  # bytes; floats
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        self.kernels = Kernels(source.code, device) if cuda else None
        self.library = None if cuda else load(source.code, ("-O1",))  # only for tests
        self.spaces = torch.empty(0, self.space, dtype=torch.float32, device=device)

    def _space(self, blocks: int) -> Tensor:
        """Memory for the parameters and the large activations of each block; kept, since launches on a stream follow each other."""
        if len(self.spaces) < blocks:
            self.spaces = torch.empty(blocks, self.space, dtype=torch.float32, device=self.device)
        return self.spaces

    def train(self, batches: Batches) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Train one round; return g [m, d], the summed batch losses [m], and the gradients [m, d] that are sent."""
        m = len(batches.begin)
        g = torch.empty(m, self.dimension, dtype=torch.float32, device=self.device)
        loss = torch.empty(m, dtype=torch.float64, device=self.device)
        sent = {name: torch.empty_like(g) for name in GRADIENTS if SENT[name] in self.extras}
        following = torch.zeros(1, dtype=torch.int32, device=self.device)
        held = {each.name: getattr(batches, each.name) for each in fields(batches)}
        held |= {"g": g, "loss": loss, "table": self.table, "space": self._space(min(m, self.blocks)), "next": following}
        held |= {f"sent_{name.split('_')[0]}": tensor for name, tensor in sent.items()}
        given = Launch(**{name: tensor.data_ptr() for name, tensor in held.items()}, m=m)
        if self.kernels:
            self.kernels.launch("mimicfl_train", min(m, self.blocks), THREADS, self.shared, [given])
        else:
            self.library.mimicfl_train(ctypes.byref(given))  # type: ignore[union-attr]
        return g, loss, sent

    def evaluate(self, w: Tensor, pool: Tensor) -> Tensor:
        """Return the outputs [models, n, outputs] of models [models, d] in evaluation mode."""
        out = torch.empty(len(w), len(pool), self.outputs, dtype=torch.float32, device=self.device)
        for begin in range(0, len(w), self.blocks):
            part = w[begin : begin + self.blocks].contiguous()
            parts = max(1, self.blocks // len(part))
            blocks = len(part) * parts
            tensors = [part, pool, self.table, out[begin : begin + self.blocks], self._space(blocks)]
            addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
            values = [*addresses[:3], ctypes.c_int(len(pool)), *addresses[3:], ctypes.c_int(parts)]
            if self.kernels:
                self.kernels.launch("mimicfl_outputs", blocks, THREADS, self.shared, values)
            else:
                self.library.mimicfl_outputs(*values, ctypes.c_int(blocks))  # type: ignore[union-attr]
        return out

    def predict(self, w: Tensor, pool: Tensor, count: int) -> Tensor:
        return self.evaluate(w[None], pool)[0]

    def step(self, w: Tensor, pool: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [d] and the loss [1] of all these samples as one batch."""
        n, zero, up = len(pool), np.zeros(1), self.on_device
        steps, rows = up(np.array([0, 1]), np.int64), up(np.arange(n), np.int32)
        first, sizes = up(zero, np.int64), up(np.array([n]), np.int32)
        rates = [up(zero, np.float32) for _ in range(4)]
        batches = Batches(w[None], up(zero, np.int32), pool, target, rows, first, sizes, steps, up(zero, np.int64), *rates)
        g, loss, _ = self.train(batches)
        return g[0], loss

    def on_device(self, array: np.ndarray, kind: type) -> Tensor:
        """Copy an array to the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=kind))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.kernels else tensor
