"""Generates the C++ code of a traced network: buffers of fixed sizes, and kernel calls for the forward and backward passes."""

from pathlib import Path
from typing import ClassVar

from .channels_last import ChannelsLastNet, suits_channels_last
from .net import Net
from .text import at, size, words
from .trace import Layer

HERE = Path(__file__).parent
KERNELS = ("vectors.h", "step.h", "convolution.h", "kernels.h")
WIDE_KERNELS = ("winograd.h", "channels_last.h", "rows.h")
TARGETS = {"cross-entropy": "int64_t", "mse": "float"}


def generate(layers: list[Layer], dimension: int, loss: str, uint8: bool) -> str:
    """Return a C++ translation unit that needs only the standard library."""
    first, last = layers[0], layers[-1]
    net = ChannelsLastNet(layers) if suits_channels_last(layers) else LaneNet(layers)
    channels = first.shape[0] if uint8 else 1
    return "\n".join(
        [
            header_text(*KERNELS, *(WIDE_KERNELS if isinstance(net, ChannelsLastNet) else ())),
            f"typedef {'uint8_t' if uint8 else 'float'} Sample;",
            f"typedef {TARGETS[loss]} Target;",
            "struct Net {",
            f"  static constexpr int D = {dimension}, FEATURES = {size(first.shape)}, CHANNELS = {channels}, OUTPUTS = {last.out[0]};",
            f"  static constexpr int GROUP = {net.group};",
            f"  static constexpr bool ZEROED = {str(not each_written_once(layers, dimension)).lower()};",
            "  struct Work {",
            *[f"    alignas(64) v {name}[{count}];" for name, count in net.vectors.items()],
            *[f"    alignas(64) float {name}[{count}];" for name, count in net.floats.items()],
            *[f"    {declaration}" for declaration in net.declarations],
            "  };",
            *[f"  {line}" for line in net.members(loss)],
            "  static void prepare(Work& s, const float* w) {",
            *[f"    {line}" for line in net.prepare],
            "  }",
            "  static void forward(Work& s, const float* w, int count, bool training, uint64_t key, uint64_t position) {",
            *[f"    {line}" for line in net.forward],
            "  }",
            "  static void backward(Work& s, const float* w, float* grad, int count, bool first) {",
            *[f"    {line}" for line in reversed(net.backward)],
            "  }",
            "};",
            header_text("driver.h"),
        ]
    )


def header_text(*names: str) -> str:
    """Return the concatenated text of these headers, which are the same for every network."""
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


def each_written_once(layers: list[Layer], dimension: int) -> bool:
    """Return whether a backward pass writes every entry of the gradient exactly once; shared or unused parameters prevent this."""
    begins = [begin for layer in layers for begin in (layer.weight, layer.bias) if begin >= 0]
    weights = sum(layer.shape[0] * layer.out[0] * layer.kernel[0] * layer.kernel[1] for layer in layers if layer.weight >= 0)
    biases = sum(layer.out[0] for layer in layers if layer.bias >= 0)
    return len(set(begins)) == len(begins) and weights + biases == dimension


class LaneNet(Net):
    """The samples of a group are in the vector lanes; empty ones are computed, too.

    ReLU works in place in both passes, because it and the layer below need only the sign of its output. Every other layer has its own
    buffers.
    """

    group = "LANES"
    losses: ClassVar = {"cross-entropy": "cross_entropy", "mse": "squared_error"}

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers)
        self.vectors["input"] = size(layers[0].shape)
        self.forward.append("(void)w, (void)count, (void)training, (void)key, (void)position;")
        for k, layer in enumerate(layers):
            self.begin(k)
            if layer.kind != "relu":
                self.vectors[f"a{k}"] = size(layer.out)
            self.outputs.append(self.below if layer.kind == "relu" else f"a{k}")
            if layer.kind != "relu" or k == 0:
                self.vectors[f"d{k}"] = size(layer.out)
            self.gradients.append(f"d{k}" if layer.kind != "relu" or k == 0 else self.gradients[-1])
            getattr(self, f"_{layer.kind}")(k, layer)
        self.backward.append("(void)w, (void)count;")

    def gather(self) -> str:
        return "::gather<FEATURES, CHANNELS>"

    def output(self, buffer: str) -> str:
        return f"((const float*)s.{buffer})[j * LANES + i]"

    def _relu(self, k: int, layer: Layer) -> None:
        n = size(layer.out)
        self.forward.append(f"relu(s.{self.below}, {n});")
        if self.needs_input_gradient:
            self.backward.append(f"relu_back(s.{self.below}, s.{self.gradients[k]}, {n});")

    def _tanh(self, k: int, layer: Layer) -> None:
        n = size(layer.out)
        self.forward.append(f"tanh_layer(s.{self.below}, s.a{k}, {n});")
        if self.needs_input_gradient:
            self.backward.append(f"tanh_back(s.a{k}, s.d{k}, {self.gradient_below(k)}, {n});")

    def _dropout(self, k: int, layer: Layer) -> None:
        n = size(layer.out)
        self.vectors[f"m{k}"] = n
        call = f"dropout(s.{self.below}, s.a{k}, s.m{k}, {n}, {n}, {layer.p!r}f, key + {k}, position);"
        self.forward.append(f"if (training) {call} else memcpy(s.a{k}, s.{self.below}, sizeof(s.a{k}));")
        if self.needs_input_gradient:
            self.backward.append(f"dropout_back(s.m{k}, s.d{k}, {self.gradient_below(k)}, {n});")

    def _pool(self, k: int, layer: Layer, name: str, back: str) -> None:
        sizes = words(*layer.shape, *layer.out[1:], *layer.kernel, *layer.stride)
        self.forward.append(f"{name}<{sizes}>(s.{self.below}, s.a{k});")
        if self.needs_input_gradient:
            self.backward.append(f"{name}_back<{sizes}>({back}s.d{k}, {self.gradient_below(k)});")

    def _linear(self, k: int, layer: Layer) -> None:
        i, o = layer.shape[0], layer.out[0]
        weight, bias = f"w + {layer.weight}", at("w", layer.bias)
        self.floats["turned"] = max(self.floats.get("turned", 0), 16 * ((i + 15) // 16 * 16))
        self.forward.append(f"linear<{i}, {o}>(s.{self.below}, {weight}, {bias}, s.a{k});")
        text = f"linear_weights<{i}, {o}>(s.{self.below}, s.d{k}, grad + {layer.weight}, {at('grad', layer.bias)}, s.turned, first);"
        if self.needs_input_gradient:
            text += f" linear_input<{i}, {o}>(s.d{k}, {weight}, {self.gradient_below(k)});"
        self.backward.append(text)

    def _conv(self, k: int, layer: Layer) -> None:
        (ic, h, w), (oc, oh, ow) = layer.shape, layer.out
        (kh, kw), (sh, sw), (ph, pw) = layer.kernel, layer.stride, layer.padding
        ih, iw = h + 2 * ph, w + 2 * pw
        source = self.below
        if ph or pw:
            source = f"p{k}"
            self.vectors[source] = ic * ih * iw
            self.forward.append(f"spread<{words(ic, h, w, ih, iw, ph, pw, 1, 1)}>(s.{self.below}, s.{source});")
        self.floats[f"k{k}"] = ic * oc * kh * kw
        self.prepare.append(f"pack<{words(ic, oc, kh, kw)}, false>(w + {layer.weight}, s.k{k});")
        sizes = words(ic, ih, iw, oc, kh, kw, sh, sw, oh, ow)
        self.forward.append(f"conv<{sizes}, {ph}, {h}, {pw}, {w}>(s.{source}, s.k{k}, {at('w', layer.bias)}, s.a{k});")
        text = f"conv_weights<{sizes}>(s.{source}, s.d{k}, grad + {layer.weight}, {at('grad', layer.bias)}, first);"
        if self.needs_input_gradient:
            text += self._conv_input(k, layer)
        self.backward.append(text)

    def _conv_input(self, k: int, layer: Layer) -> str:
        """Return the call for the input gradient: a convolution of the output gradient, spread by the stride and padded by the kernel."""
        (ic, h, w), (oc, oh, ow) = layer.shape, layer.out
        (kh, kw), (sh, sw), (ph, pw) = layer.kernel, layer.stride, layer.padding
        rows, columns = (oh - 1) * sh + 1, (ow - 1) * sw + 1
        eh, ew = rows + 2 * (kh - 1), columns + 2 * (kw - 1)
        vh, vw = rows + kh - 1, columns + kw - 1  # the part of the padded input that some output depends on
        self.vectors[f"e{k}"] = oc * eh * ew
        self.floats[f"f{k}"] = ic * oc * kh * kw
        self.prepare.append(f"pack<{words(oc, ic, kh, kw)}, true>(w + {layer.weight}, s.f{k});")
        text = f" spread<{words(oc, oh, ow, eh, ew, kh - 1, kw - 1, sh, sw)}>(s.d{k}, s.e{k});"
        whole = (vh, vw, ph, pw) == (h, w, 0, 0)
        target = self.gradient_below(k) if whole else f"s.c{k}"
        text += f" conv<{words(oc, eh, ew, ic, kh, kw, 1, 1, vh, vw, kh - 1, rows, kw - 1, columns)}>(s.e{k}, s.f{k}, nullptr, {target});"
        if not whole:
            self.vectors[f"c{k}"] = ic * vh * vw
            text += f" crop<{words(ic, h, w, vh, vw, ph, pw)}>({target}, {self.gradient_below(k)});"
        return text
