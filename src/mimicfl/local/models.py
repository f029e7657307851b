"""Models of the paper and small ones for quick work; any other `nn.Module` is as welcome.

>>> from mimicfl import models
>>> sum(p.numel() for p in models.LeNet().parameters())
44426
"""

import itertools
import math
from typing import Any

from torch import nn

from ..data.dataset import Data
from ..errors import UsageError, flag, probability, shown, whole
from ..registry import Registry
from ..seeds import torch_stream

MODELS: Registry[nn.Module] = Registry("model", ("model",))
register = MODELS.register


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between: MLP(64, 32, 10) has 64 inputs, 32 hidden units, 10 outputs."""

    def __init__(self, *sizes: int) -> None:
        if len(sizes) < 2:
            raise UsageError("an MLP needs at least its input and output size, as in MLP(64, 32, 10)")
        layers: list[nn.Module] = [nn.Flatten()]
        for inside, outside in itertools.pairwise(sizes):
            layers += [nn.Linear(whole("layer size", inside), whole("layer size", outside)), nn.ReLU()]
        super().__init__(*layers[:-1])


class Logistic(nn.Sequential):
    """One linear layer on the flattened input."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        size = whole("inputs", inputs), whole("outputs", outputs)
        super().__init__(nn.Flatten(), nn.Linear(*size, bias=flag("bias", bias)))


class LeNet(nn.Sequential):
    """The paper's network for Fashion-MNIST: convolutions of 6 and 16 channels (5x5), then 256-120-84-10."""

    def __init__(self, channels: int = 1, size: int = 28, outputs: int = 10) -> None:
        channels, outputs = whole("channels", channels), whole("outputs", outputs)
        side = ((whole("size", size) - 4) // 2 - 4) // 2
        if side < 1:
            raise UsageError(f"LeNet needs images of at least 16x16 pixels, got {size}x{size}")
        super().__init__(
            *[nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
            *[nn.Linear(16 * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)],
        )


class VGG11(nn.Sequential):
    """The paper's network for CIFAR-10: eight 3x3 convolutions without BatchNorm, a 512-512-10 head with dropout."""

    def __init__(self, channels: int = 3, size: int = 32, outputs: int = 10, dropout: float = 0.5) -> None:
        channels, outputs, dropout = whole("channels", channels), whole("outputs", outputs), probability("dropout", dropout)
        if whole("size", size) < 32:
            raise UsageError(f"VGG-11 halves the image five times and needs at least 32x32 pixels, got {size}x{size}")
        layers: list[nn.Module] = []
        width = channels
        for stage in [(64,), (128,), (256, 256), (512, 512), (512, 512)]:
            for out in stage:
                layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
                width = out
            layers.append(nn.MaxPool2d(2))
        features = width * (size // 32) ** 2
        layers += [nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, 512), nn.ReLU()]
        layers += [nn.Dropout(dropout), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, outputs)]
        super().__init__(*layers)
        # With PyTorch's usual weights the signal dies out over eleven layers: at the paper's rate the loss has not moved after
        # 900 steps. With He's it is the same size in every layer, and falls from the first.
        for p in list(self.parameters())[:-2]:  # not of the last layer
            if p.ndim > 1:
                nn.init.kaiming_normal_(p, nonlinearity="relu")
            else:
                nn.init.zeros_(p)


@register("mlp")
def _mlp(*hidden: int, data: Data) -> nn.Module:
    """`mlp` or `mlp:200,100`: hidden layers by size."""
    return MLP(_inputs(data), *(hidden or (32,)), _outputs(data))


@register("logistic")
def _logistic(data: Data) -> nn.Module:
    return Logistic(_inputs(data), _outputs(data))


@register("linear")
def _linear(data: Data) -> nn.Module:
    """No bias: the model whose optimum the synthetic data knows."""
    return Logistic(_inputs(data), _outputs(data), bias=False)


@register("lenet")
def _lenet(data: Data) -> nn.Module:
    return LeNet(*_image(data), _outputs(data))


@register("vgg11")
def _vgg11(data: Data, dropout: float = 0.5) -> nn.Module:
    return VGG11(*_image(data), _outputs(data), dropout)


def build(spec: str, data: Data, seed: int = 0) -> nn.Module:
    """A named model that fits the data, with initial weights that depend on the seed alone."""
    if not isinstance(data, Data):
        raise UsageError(f"data must be a mimicfl.Data, got {shown(data)}")
    try:
        with torch_stream(whole("seed", seed, low=0), "model"):
            model = MODELS.make(spec, data=data)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # an error in the user's model
            raise
        raise UsageError(f"model {spec!r} does not fit into memory: make it smaller") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {spec!r} must be made as an nn.Module, got {type(model).__name__}")
    return model


def _inputs(data: Data) -> int:
    return math.prod(data.x_train.shape[1:])


def _outputs(data: Data) -> int:
    if data.loss == "binary":
        return 1
    return data.num_classes or math.prod(data.y_train.shape[1:])


def _image(data: Data) -> tuple[int, int]:
    shape: Any = tuple(data.x_train.shape[1:])
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(f"this model needs square images [channels, height, width], the data has samples of shape {shape}; try mlp")
    return shape[0], shape[1]
