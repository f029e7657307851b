"""What compiled code needs to know about a model, a loss and the data, whatever it runs on."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.params import flatten
from ...data.dataset import Data
from ..capabilities import Unsupported, refuse_transform
from .trace import trace
from .verify import loss_name

MOST_OUTPUTS = 1 << 16  # the loss keeps one sample's outputs on the stack


class Network:
    """A traced model with its loss, and the form in which compiled code reads samples and targets."""

    def __init__(self, model: nn.Module, data: Data, loss: Loss) -> None:
        _check_inputs(data)
        self.data = data
        self.uint8 = data.x_train.dtype == torch.uint8 and not data.augment
        self.kind = loss_name(loss, data)
        self.layers = trace(model, tuple(data.x_train.shape[1:]))
        self.dimension = flatten(model).numel()
        self.outputs = math.prod(self.layers[-1].out)
        self._check_outputs(data)
        self.table = _table(data, self.layers[0].shape[0]) if self.uint8 else floats(1)

    def _check_outputs(self, data: Data) -> None:
        """Check the sizes of outputs and targets, because the compiled loss has no bounds checks."""
        if self.outputs > MOST_OUTPUTS:
            raise Unsupported(f"it has more than {MOST_OUTPUTS} outputs")
        if self.kind == "cross-entropy" and data.num_classes > self.outputs:
            raise Unsupported("it has fewer outputs than classes")
        if self.kind == "mse" and (targets := math.prod(data.y_train.shape[1:])) != self.outputs:
            raise Unsupported(f"it has {self.outputs} outputs but {targets} targets per sample")

    def pool(self, x: Tensor) -> Tensor:
        """Convert samples to the form that the compiled code reads: uint8 as stored, anything else as float32 inputs."""
        pool = x if self.uint8 else self.data.inputs(x, torch.float32)
        if pool.dtype != (torch.uint8 if self.uint8 else torch.float32) or x.shape[1:] != self.data.x_train.shape[1:]:
            raise Unsupported(f"it was not compiled for samples of type {_name(x)} and shape {list(x.shape[1:])}")
        return pool.contiguous()

    def target(self, y: Tensor) -> Tensor:
        return (y.long() if self.kind == "cross-entropy" else y.float()).contiguous()


def refuse_requests(requests: Any, sends: bool = False) -> None:
    """Raise `Unsupported` if the clients of a request do more than compiled code can: other optimizers and, unless it `sends`, uploads."""
    if not sends and (sent := [name for request in requests for name in request.instructions.send]):
        raise Unsupported(f"clients of its algorithm also send {sent[0]}")
    for local in {id(request.local): request.local for request in requests}.values():
        if local.rule is not None or local.lr_multipliers:
            raise Unsupported(f"its clients train with {local.extras[-1]}, compiled code only with SGD and momentum")


def floats(*shape: int) -> Tensor:
    """Allocate memory for the compiled code to fill, independent of PyTorch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _check_inputs(data: Data) -> None:
    refuse_transform(data)
    if not isinstance(data.x_train, Tensor) or not isinstance(data.y_train, Tensor):
        raise Unsupported("its samples are not single tensors")
    for x in (data.x_train, data.x_test):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise Unsupported(f"its inputs are {_name(x)}")
    if (data.x_train.dtype == torch.uint8) != (data.x_test.dtype == torch.uint8):
        raise Unsupported(f"its training samples are {_name(data.x_train)} and its test samples {_name(data.x_test)}")


def _table(data: Data, channels: int) -> Tensor:
    """Return the input value of each of the 256 byte values, per channel, computed with the dataset's formula."""
    shape = data.x_train.shape[1:]
    values = torch.arange(256, dtype=torch.uint8).view(256, *[1] * len(shape)).expand(256, *shape)
    inputs = data.inputs(values, torch.float32).reshape(256, channels, -1)
    if not torch.equal(inputs[:, :, :1].expand_as(inputs), inputs):
        raise Unsupported("its inputs are scaled differently within a channel")
    return inputs[:, :, 0].t().contiguous()


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
