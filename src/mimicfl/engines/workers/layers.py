"""How the modules of workers use compiled layers and channels-last images."""

import faulthandler
import os
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.params import Workspace
from ...data.clients import Clients
from ...data.samples import as_tensor
from ..capabilities import Unsupported, unsupported_on_error
from ..native.layers import LayerOverrides, Layers
from ..native.workspace import CompiledWorkspace
from .process import fork


def compiled_workspace(model: nn.Module, clients: Clients) -> Workspace | None:
    try:
        with unsupported_on_error():
            return CompiledWorkspace(model, clients.device)
    except Unsupported:
        return None


def channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert images to channels-last layout, in which convolutions on a CPU are about 10 % faster; custom loops may pass other inputs."""
    if not (inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4):
        return inputs
    x = inputs[0]
    c, h, w = x.shape[1:]
    last = x.contiguous(memory_format=torch.channels_last)
    return (last if c > 1 else last.as_strided(x.shape, (h * w, 1, w, 1)), *inputs[1:])  # the strides of one channel are ambiguous


class WithLayers:
    """Mixed in before a module's class: its forward pass uses compiled layers. So does that of a copy, which custom loops may make."""

    layers: ClassVar[Layers]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with LayerOverrides(self.layers):
            return super().forward(*inputs, **named)  # type: ignore[misc]


class LossWithLayers:
    """Calls a loss with compiled layers. Custom loops may read the attributes of the loss."""

    def __init__(self, layers: Layers, loss: Loss) -> None:
        self.__layers, self.__loss = layers, loss

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with LayerOverrides(self.__layers):
            return self.__loss(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__loss, name)


def takes_channels_last(module: nn.Module, clients: Clients) -> bool:
    """Return whether the model has image convolutions and accepts channels-last inputs (`x.view(len(x), -1)`, for one, does not)."""
    if not isinstance(clients.x, Tensor) or clients.x.ndim != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    inputs = channels_last(module, (clients.inputs(slice(2)),))
    child = fork()  # tried in a child: PyTorch's backward pass crashes for some layers in this layout, such as GroupNorm on the inputs
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        faulthandler.disable()  # a crash here is an answer, not an error to print
        torch.set_num_threads(1)
        as_tensor(module(*inputs)).sum().backward()
        status = 0
    finally:
        os._exit(status)
