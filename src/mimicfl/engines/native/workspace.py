"""A workspace whose steps are compiled: gradients stay where PyTorch puts them, and one pass over the vectors applies them.

The default workspace sets a gradient vector to zero, lets PyTorch add to it, and takes two more passes for a step. For models of millions
of parameters that is a tenth of the time of a step, because the vectors do not fit into the caches.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ...clients.params import Terms, Workspace
from ..capabilities import Unsupported
from .build import load
from .generate import header_text

HEADERS = ("vectors.h", "step.h", "descend.h")


class CompiledWorkspace(Workspace):
    """Raises `Unsupported` without a compiler, and for models that are not float32 on a CPU."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module, device)
        if device.type != "cpu" or self.rounded or self.w.dtype != torch.float32:
            raise Unsupported("steps are compiled for float32 on a CPU")
        self._descend: Any = load(header_text(*HEADERS)).mimicfl_descend
        self._descend.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_float] * 2 + [ctypes.c_int64]
        self._descend.restype = None
        self._sizes = (ctypes.c_int64 * len(self.sizes))(*self.sizes)
        self._parts = [part.view(p.shape) for p, part in zip(self.parameters, self.grad.split(self.sizes), strict=True)]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def gradient(self) -> Tensor:
        for p, part in zip(self.parameters, self._parts, strict=True):
            part.zero_() if p.grad is None else part.copy_(_dense(p.grad))
        return self.grad

    def descend(self, g: Tensor, eta: float, terms: Terms) -> None:
        shift = terms.shift if isinstance(terms.shift, Tensor) else None
        if (terms.shift != 0) if shift is None else (shift.dtype != g.dtype):  # the compiled pass adds float32 vectors only
            return super().descend(g, eta, terms)
        kept = [None if p.grad is None else _dense(p.grad).contiguous() for p in self.parameters]
        gradients = (ctypes.c_void_p * len(kept))(*(None if each is None else each.data_ptr() for each in kept))
        vectors = (self.w, g, terms.start, None if shift is None else shift.contiguous())
        pointers = [None if vector is None else vector.data_ptr() for vector in vectors]
        self._descend(*pointers, gradients, self._sizes, eta, terms.mu, len(kept))
        return None


def _dense(gradient: Tensor) -> Tensor:
    """Return the gradient as numbers in memory: embeddings may have sparse gradients, complex numbers leave a sign to be applied."""
    return (gradient if gradient.layout == torch.strided else gradient.to_dense()).resolve_neg()
