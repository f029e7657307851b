"""The models of the paper, and small ones for quick experiments. Any other `nn.Module` works as well.

>>> from mimicfl import models
>>> sum(p.numel() for p in models.LeNet().parameters())
44426
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..data.dataset import Data
from ..errors import UsageError, flag, integer, probability, shown
from ..registry import Registry
from ..seeds import torch_stream
from .image_models import CNN, ResNet

MODELS: Registry[nn.Module] = Registry("model", ("model",))
register = MODELS.register


class MLP(nn.Sequential):
    """Fully connected layers with ReLU in between: MLP(64, 32, 10) has 64 inputs, 32 hidden units and 10 outputs."""

    def __init__(self, *sizes: int) -> None:
        if len(sizes) < 2:
            raise UsageError("an MLP needs at least its input and output size, as in MLP(64, 32, 10)")
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(integer("layer size", inputs), integer("layer size", outputs)), nn.ReLU()]
        super().__init__(*layers[:-1])


class Logistic(nn.Sequential):
    """One linear layer on the flattened input."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        size = integer("inputs", inputs), integer("outputs", outputs)
        super().__init__(nn.Flatten(), nn.Linear(*size, bias=flag("bias", bias)))


class LeNet(nn.Sequential):
    """The paper's network for Fashion-MNIST: convolutions of 6 and 16 channels (5x5), then 256-120-84-10."""

    def __init__(self, channels: int = 1, size: int = 28, outputs: int = 10) -> None:
        channels, outputs = integer("channels", channels), integer("outputs", outputs)
        side = ((integer("size", size) - 4) // 2 - 4) // 2
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
        channels, outputs, dropout = integer("channels", channels), integer("outputs", outputs), probability("dropout", dropout)
        if integer("size", size) < 32:
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
        # With PyTorch's default initialisation the signal vanishes over eleven layers: at the paper's learning rate the loss does not
        # change in 900 steps. He initialisation keeps its scale in every layer, and the loss decreases from the first step.
        for p in list(self.parameters())[:-2]:  # all layers but the last
            if p.ndim > 1:
                nn.init.kaiming_normal_(p, nonlinearity="relu")
            else:
                nn.init.zeros_(p)


class Transformer(nn.Module):
    """A causal transformer that predicts the next token at every position: tokens [B, L] to scores [B, L, vocabulary].

    Pre-norm blocks with learned positions, `heads` heads and a hidden layer of four times the width.
    """

    def __init__(self, vocabulary: int, length: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        for name, value in (("vocabulary", vocabulary), ("length", length), ("width", width), ("layers", layers), ("heads", heads)):
            integer(name, value)
        if width % heads:
            raise UsageError(f"width must be a multiple of heads, got {width} and {heads}")
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for weight in (self.embed.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal self-attention and a hidden layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, L, width / heads] each
        # Written out: torch's fused attention cannot be stacked over clients.
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        x = x + self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        return x + self.hidden(x)  # type: ignore[no-any-return]


@register("transformer")
def _transformer(data: Data, width: int = 96, layers: int = 3, heads: int = 4) -> nn.Module:
    """`transformer` or `transformer:width=192,layers=6`, for token prediction."""
    x = _single(data)
    if x.is_floating_point() or x.ndim != 2 or not data.num_classes:
        raise UsageError("model transformer needs integer tokens [samples, length] and a class per position, as in dataset sotu")
    return Transformer(max(data.num_classes, int(max(x.max(), data.x_test.max())) + 1), x.shape[1], width, layers, heads)


@register("mlp")
def _mlp(*hidden: int, data: Data) -> nn.Module:
    """`mlp` or `mlp:200,100`; the numbers are the sizes of the hidden layers."""
    return MLP(_inputs(data), *(hidden or (32,)), _outputs(data))


@register("logistic")
def _logistic(data: Data) -> nn.Module:
    return Logistic(_inputs(data), _outputs(data))


@register("linear")
def _linear(data: Data) -> nn.Module:
    """A linear model without bias, the model for which the optimum of the synthetic data is known."""
    return Logistic(_inputs(data), _outputs(data), bias=False)


@register("lenet")
def _lenet(data: Data) -> nn.Module:
    return LeNet(*_image(data), _outputs(data))


@register("vgg11")
def _vgg11(data: Data, dropout: float = 0.5) -> nn.Module:
    return VGG11(*_image(data), _outputs(data), dropout)


@register("cnn")
def _cnn(data: Data, norm: str = "group") -> nn.Module:
    return CNN(*_image(data), _outputs(data), norm)


@register("resnet")
def _resnet(data: Data, width: int = 64, norm: str = "group") -> nn.Module:
    """ResNet-18."""
    return ResNet(_image(data)[0], _outputs(data), width, norm)


def build(spec: str, data: Data, seed: int = 0) -> nn.Module:
    """Build a model by name for this data. Its initial weights depend only on the seed."""
    if not isinstance(data, Data):
        raise UsageError(f"data must be a mimicfl.Data, got {shown(data)}")
    try:
        with torch_stream(integer("seed", seed, low=0), "model"):
            model = MODELS.make(spec, data=data)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # an error in the user's model
            raise
        raise UsageError(f"model {spec!r} does not fit into memory: make it smaller") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {spec!r} must return an nn.Module, got {type(model).__name__}")
    return model


def _inputs(data: Data) -> int:
    return math.prod(_single(data).shape[1:])


def _single(data: Data) -> Tensor:
    """The training inputs, for the models that take one tensor."""
    if not isinstance(data.x_train, Tensor):
        raise UsageError("the models by name take one tensor per sample, but this data has several inputs; bring your own nn.Module")
    return data.x_train


def _outputs(data: Data) -> int:
    if data.loss == "binary":
        return 1
    return data.num_classes or math.prod(data.y_train.shape[1:])


def _image(data: Data) -> tuple[int, int]:
    shape: Any = tuple(_single(data).shape[1:])
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(f"this model needs square images [channels, height, width], but the samples have shape {shape}; try mlp")
    return shape[0], shape[1]
