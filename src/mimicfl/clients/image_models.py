"""Common benchmark networks for small images: a CNN and a ResNet-18, with GroupNorm instead of BatchNorm by default.

GroupNorm has no running statistics, which would differ widely between clients with few classes.
"""

from collections.abc import Callable

from torch import Tensor, nn

from ..errors import UsageError, integer, one_of

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda width: nn.GroupNorm(max(g for g in range(1, 9) if width % g == 0), width),  # at most eight groups
    "batch": nn.BatchNorm2d,
}
STAGES = (1, 2, 4, 8)  # widths of a ResNet's stages, as multiples of the first


class CNN(nn.Sequential):
    """Two 3x3 convolutions of 32 and 64 channels, each with a norm and max-pooling, then a hidden layer of 128."""

    def __init__(self, channels: int = 3, size: int = 32, outputs: int = 10, norm: str = "group") -> None:
        channels, outputs, norm = integer("channels", channels), integer("outputs", outputs), one_of("norm", norm, list(NORMS))
        if integer("size", size) < 4:
            raise UsageError(f"the CNN halves the image twice and needs at least 4x4 pixels, got {size}x{size}")
        super().__init__(
            *[nn.Conv2d(channels, 32, 3, padding=1), NORMS[norm](32), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Conv2d(32, 64, 3, padding=1), NORMS[norm](64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
            *[nn.Linear(64 * (size // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, outputs)],
        )


class ResNet(nn.Sequential):
    """ResNet-18 for images of 32x32 pixels: a 3x3 convolution, four stages of two residual blocks, average pooling, one linear layer."""

    def __init__(self, channels: int = 3, outputs: int = 10, width: int = 64, norm: str = "group") -> None:
        channels, outputs, width = integer("channels", channels), integer("outputs", outputs), integer("width", width)
        make = NORMS[one_of("norm", norm, list(NORMS))]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), make(width), nn.ReLU()]
        inputs = width
        for stage in (width * multiple for multiple in STAGES):
            layers += [Residual(inputs, stage, make), Residual(stage, stage, make)]
            inputs = stage
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs))


class Residual(nn.Module):
    """Two 3x3 convolutions, added to the input. Where the width grows, the image is halved and the input is projected."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        first, second = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.body = nn.Sequential(first, norm(outputs), nn.ReLU(), second, norm(outputs))
        project = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)] if stride == 2 else []
        self.skip, self.relu = nn.Sequential(*project), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.skip(x))  # type: ignore[no-any-return]
