"""Checks that need the model and the device, before the first round."""

import warnings

import torch
from torch import Tensor, nn

from ..data.clients import Holdout
from ..data.dataset import Data
from ..errors import UsageError


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is unknown; use cpu, cuda, cuda:0 or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, but torch finds no GPU here: use device='cpu'")
    return device


def check_model(module: nn.Module, test: Holdout, data: Data) -> None:
    """Does the model take these samples, and are its outputs enough for the classes?"""
    module.eval()
    x, _ = next(iter(test))
    shape = tuple(data.x_train.shape[1:])
    try:
        with torch.no_grad():
            output = module(x[:2])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"the model cannot take samples of shape {shape}: {first}") from error
    module.train()
    outputs = output.shape[1] if isinstance(output, Tensor) and output.ndim > 1 else 1
    if data.num_classes > outputs and not (outputs == 1 and data.num_classes == 2):
        raise UsageError(
            f"the model has {outputs} outputs, the data has {data.num_classes} classes: give its last layer {data.num_classes}"
        )
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        warnings.warn(
            "the model has BatchNorm: its running statistics are averaged over the active clients but get no correction; "
            "GroupNorm has none and suits federated learning better",
            stacklevel=4,
        )
