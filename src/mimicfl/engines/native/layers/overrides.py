"""Compiles the layers that a module uses, and runs them instead of PyTorch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ....clients.losses import Loss
from ....data.clients import Clients
from ....data.samples import forward, rows
from ...capabilities import Unsupported, unsupported_on_error
from ...torch_overrides import COMPOSED
from ..build import load
from ..generate import KERNELS, header_text
from . import attention, convolution, linear, loss, pooling
from .kinds import HEADER, Call, Functions, Kind, Memory, Shape

MOST_SHAPES = 32
SAVED_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # older versions of PyTorch lack it
PARTS = (convolution, pooling, attention, linear, loss)
KINDS: dict[str, Kind] = {name: kind for part in PARTS for name, kind in part.KINDS.items()}
CALLS: dict[Any, Callable[..., Call | None]] = {function: call for part in PARTS for function, call in part.CALLS.items()}
REPLACED = {*CALLS, *COMPOSED, *loss.TRACKED}
HEADERS = (*KERNELS, "winograd.h", "channels_last.h", "layers.h", "softmax.h")


class Layers:
    """The compiled functions of a list of shapes, and what their calls remember."""

    def __init__(self, shapes: list[Shape]) -> None:
        self.memory = Memory()
        self.known: dict[Shape | None, Functions] = {None: ()}
        if linear.faster():
            linear.compiled_gradients()  # here, since processes that are forked later would each load it again
        if shapes:
            exports = [KINDS[kind].export(kind, numbers, f"layer{k}") for k, (kind, numbers) in enumerate(shapes)]
            code = load("\n".join([header_text(*HEADERS), HEADER, *exports]))
            self.known |= {shape: KINDS[shape[0]].load(code, f"layer{k}") for k, shape in enumerate(shapes)}

    @property
    def prefer_channels_last(self) -> bool:
        """Return whether compiled layers use images in that layout."""
        return any(shape and shape[0] == "ChannelsLast" for shape in self.known)


def compile_layers(module: nn.Module, clients: Clients, loss: Loss) -> Layers | None:
    """Compile the layers that this module uses on these samples; None if there is nothing to gain."""
    if clients.dtype != torch.float32:
        return None
    seen, two = LayerOverrides(None), slice(2)
    try:
        with unsupported_on_error(), torch.no_grad(), torch.random.fork_rng(devices=[]), seen:
            loss(forward(module, clients.inputs(two)), rows(clients.y, two))
        shapes = list(dict.fromkeys(seen.shapes))
        if not shapes or len(shapes) > MOST_SHAPES:
            return None
        with unsupported_on_error():
            return Layers([shape for shape in shapes if shape])
    except Unsupported:  # without a compiler, some calls can still be replaced
        return Layers([]) if None in seen.shapes else None


class LayerOverrides(TorchFunctionMode):
    """Replaces PyTorch calls by faster ones; with `layers=None` it only records the shapes that could be compiled."""

    def __init__(self, layers: Layers | None) -> None:
        super().__init__()
        self.layers = layers
        self.shapes: list[Shape | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in REPLACED:
            return func(*args, **kwargs)
        observed = _observed()
        result = self._replaced(func, args, kwargs) if func in CALLS and not observed else None
        if result is None and func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if self.layers and func in loss.TRACKED and not observed:
            self.layers.memory.product = loss.track(self.layers.memory.product, func, result, args, kwargs)
        return result

    def _replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the replaced call; None if PyTorch must run it."""
        try:
            call = CALLS[func](*args, **kwargs)
        except TypeError:  # wrong arguments: leave the error to PyTorch
            return None
        if call is None:
            return None
        self.shapes.append(call.shape)
        known = self.layers.known if self.layers else {}
        return call.run(known[call.shape], self.layers.memory) if self.layers and call.shape in known else None


def _observed() -> bool:
    """Return whether PyTorch transforms the calls (torch.func, forward-mode derivatives), or repeats them later (checkpoints).

    It cannot transform compiled functions, and repeats calls outside of the model's `forward`, where they are not replaced.
    """
    return bool(SAVED_HOOKS(False) or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
