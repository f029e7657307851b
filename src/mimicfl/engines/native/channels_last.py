"""Buffers and kernel calls of a network whose channels are in the vector lanes (winograd.h, channels_last.h, rows.h).

The layout for networks of wide convolutions: a batch that does not fill the lanes wastes nothing, and 3x3 convolutions need a quarter of
the multiplications.
"""

from typing import ClassVar

from .net import Net
from .text import at, size, words
from .trace import Layer

CHANNELS = 16  # in the lanes of the widest vectors; narrower ones divide it
GROUP = 32  # samples that are computed together


def suits_channels_last(layers: list[Layer]) -> bool:
    """Return whether all convolutions fill the lanes, one is a Winograd convolution, and no image follows a fully connected layer."""
    if layers[0].kind != "conv" or not any(is_winograd(layer) for layer in layers):
        return False
    image: tuple[int, int, int] | None = layers[0].shape
    for layer in layers:
        if layer.kind == "linear":
            image = None
        elif layer.kind in ("conv", "max_pool", "avg_pool"):
            if layer.shape != image or (layer.kind == "conv" and layer.out[0] % CHANNELS):
                return False
            image = layer.out
    return True


def is_winograd(layer: Layer) -> bool:
    wide = layer.shape[0] % CHANNELS == 0 and layer.out[0] % CHANNELS == 0
    return layer.kind == "conv" and layer.kernel == (3, 3) and layer.stride == (1, 1) and wide


class ChannelsLastNet(Net):
    """The channels of a pixel are in the vector lanes. ReLU works in place in both passes."""

    group = str(GROUP)
    losses: ClassVar = {"cross-entropy": "rows_cross_entropy", "mse": "rows_squared_error"}

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers)
        self.forward.append("(void)w, (void)training, (void)key, (void)position;")
        self.image: tuple[int, int, int] | None = layers[0].shape
        self._buffer("input", size(layers[0].shape))
        self.workspaces: list[str] = []
        for k, layer in enumerate(layers):
            self.begin(k)
            own = layer.kind != "relu"
            if own:
                self._buffer(f"a{k}", size(layer.out))
                self._buffer(f"d{k}", size(layer.out))
            self.outputs.append(f"a{k}" if own else self.below)
            self.gradients.append(f"d{k}" if own else self.gradients[-1])
            getattr(self, f"_{layer.kind}")(k, layer)
            if layer.kind not in ("relu", "tanh", "dropout"):
                self.image = layer.out if layer.kind != "linear" else None
        self.backward.append("(void)w;")
        if self.workspaces:
            self.declarations.append(f"alignas(64) float work[largest({{{words(*self.workspaces)}}})];")

    def gather(self) -> str:
        channels, height, width = self.layers[0].shape
        return f"rows_gather<{channels}, {height * width}>"

    def output(self, buffer: str) -> str:
        return f"s.{buffer}[i * OUTPUTS + j]"

    def _buffer(self, name: str, per_sample: int) -> None:
        self.floats[name] = -(-GROUP * per_sample // CHANNELS) * CHANNELS

    def _used(self, layer: Layer) -> str:
        """The number of vectors that a group's samples take in a buffer."""
        return f"vectors(count * {size(layer.out)})"

    def _relu(self, k: int, layer: Layer) -> None:
        self.forward.append(f"relu((v*)s.{self.below}, {self._used(layer)});")
        if self.needs_input_gradient:
            self.backward.append(f"relu_back((v*)s.{self.below}, (v*)s.{self.gradients[k]}, {self._used(layer)});")

    def _tanh(self, k: int, layer: Layer) -> None:
        self.forward.append(f"tanh_layer((v*)s.{self.below}, (v*)s.a{k}, {self._used(layer)});")
        if self.needs_input_gradient:
            self.backward.append(f"tanh_back((v*)s.a{k}, (v*)s.d{k}, (v*){self.gradient_below(k)}, {self._used(layer)});")

    def _dropout(self, k: int, layer: Layer) -> None:
        self._buffer(f"m{k}", size(layer.out))
        used, n = self._used(layer), f"vectors(GROUP * {size(layer.out)})"
        call = f"dropout((v*)s.{self.below}, (v*)s.a{k}, (v*)s.m{k}, {n}, {used}, {layer.p!r}f, key + {k}, position);"
        self.forward.append(f"if (training) {call} else memcpy(s.a{k}, s.{self.below}, sizeof(v) * {used});")
        if self.needs_input_gradient:
            self.backward.append(f"dropout_back((v*)s.m{k}, (v*)s.d{k}, (v*){self.gradient_below(k)}, {used});")

    def _pool(self, k: int, layer: Layer, name: str, back: str) -> None:
        kind = f"PoolLast<{words(*layer.shape, *layer.out[1:], *layer.kernel, *layer.stride)}>"
        self.forward.append(f"{kind}::{name}(s.{self.below}, s.a{k}, count);")
        if self.needs_input_gradient:
            self.backward.append(f"{kind}::{name}_back({back}s.d{k}, {self.gradient_below(k)}, count);")

    def _linear(self, k: int, layer: Layer) -> None:
        i, o = layer.shape[0], layer.out[0]
        x, below = self.below, self.gradient_below(k) if self.needs_input_gradient else "nullptr"
        turned = ""
        if self.image and self.image[1] * self.image[2] > 1:  # PyTorch's order of features is [channel][y][x]
            c, hw = self.image[0], self.image[1] * self.image[2]
            x = f"t{k}"
            self._buffer(x, i)
            self._buffer(f"u{k}", i)
            self.forward.append(f"transpose<{hw}, {c}>(s.{self.below}, s.{x}, count);")
            if self.needs_input_gradient:
                turned, below = f" transpose_back<{hw}, {c}>(s.u{k}, {below}, count);", f"s.u{k}"
        kind, weight = f"<{i}, {o}>", f"w + {layer.weight}"
        self.forward.append(f"rows_linear{kind}(s.{x}, {weight}, {at('w', layer.bias)}, s.a{k}, count);")
        grads = f"grad + {layer.weight}, {at('grad', layer.bias)}"
        call = f"rows_linear_back{kind}(s.{x}, {weight}, s.d{k}, {below}, {grads}, count, first, s.work);"
        self.backward.append(call + turned)
        self.workspaces.append("rows_linear_room(GROUP)")

    def _conv(self, k: int, layer: Layer) -> None:
        if is_winograd(layer):
            self._winograd(k, layer)
        else:
            self._direct(k, layer)

    def _bias(self, k: int, layer: Layer) -> str:
        if layer.bias < 0:
            return ""
        c, h, w = layer.out
        return f" sum_positions<{c}>(s.d{k}, grad + {layer.bias}, (size_t)count * {h * w}, first);"

    def _winograd(self, k: int, layer: Layer) -> None:
        (ic, h, w), (ph, pw) = layer.shape, layer.padding
        kind, weight = f"Winograd<{words(ic, h, w, layer.out[0], ph, pw)}>", f"w + {layer.weight}"
        self.declarations.append(f"alignas(64) float k{k}[{kind}::PACKED];")
        self.workspaces.append(f"{kind}::WORK")
        self.prepare.append(f"{kind}::pack<false>({weight}, s.k{k});")
        self.forward.append(f"{kind}::forward(s.{self.below}, s.k{k}, {at('w', layer.bias)}, s.a{k}, count, s.work);")
        below, turned = "nullptr", "nullptr"
        if self.needs_input_gradient:
            below, turned = self.gradient_below(k), f"s.f{k}"
            self.declarations.append(f"alignas(64) float f{k}[{kind}::PACKED];")
            self.prepare.append(f"{kind}::pack<true>({weight}, {turned});")
        call = f"{kind}::backward(s.{self.below}, {turned}, s.d{k}, {below}, grad + {layer.weight}, first, count, s.work);"
        self.backward.append(call + self._bias(k, layer))

    def _direct(self, k: int, layer: Layer) -> None:
        (ic, h, w), (oc, _, _), (ph, pw) = layer.shape, layer.out, layer.padding
        kind = f"Direct<{words(ic, h + 2 * ph, w + 2 * pw, oc, *layer.kernel, *layer.stride)}>"
        weight, source = f"w + {layer.weight}", self.below
        if ph or pw:
            source = f"p{k}"
            self._buffer(source, ic * (h + 2 * ph) * (w + 2 * pw))
            self.forward.append(f"pad<{words(ic, h, w, ph, pw)}>(s.{self.below}, s.{source}, count);")
        self.declarations.append(f"alignas(64) float k{k}[{kind}::PACKED];")
        self.workspaces.append(f"{kind}::PACKED")
        self.prepare.append(f"{kind}::pack({weight}, s.k{k});")
        self.forward.append(f"{kind}::forward(s.{source}, s.k{k}, {at('w', layer.bias)}, s.a{k}, count);")
        text = f"{kind}::weights(s.{source}, s.d{k}, s.work, count); {kind}::unpack(s.work, grad + {layer.weight}, first);" + self._bias(
            k, layer
        )
        if self.needs_input_gradient:
            self.declarations.append(f"alignas(64) float f{k}[{kind}::PACKED];")
            self.prepare.append(f"{kind}::pack_turned({weight}, s.f{k});")
            target = self.gradient_below(k)
            if ph or pw:
                self._buffer(f"c{k}", ic * (h + 2 * ph) * (w + 2 * pw))
                target = f"s.c{k}"
            text += f" {kind}::input(s.d{k}, s.f{k}, {target}, count);"
            if ph or pw:
                text += f" unpad<{words(ic, h, w, ph, pw)}>({target}, {self.gradient_below(k)}, count);"
        self.backward.append(text)
