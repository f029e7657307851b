"""Fast layers for any module on a CPU: small convolutions and max pooling, compiled for the shapes that a model uses.

PyTorch's convolutions are optimised for large layers; for a small one, setup takes most of the time. While `LayerOverrides` is active,
calls with a compiled shape use our kernels, and everything else uses PyTorch.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...data.clients import Clients
from ...data.samples import forward
from ..capabilities import Unsupported, unsupported_on_error
from ..torch_overrides import conv2d_call, pair
from .build import load
from .channels_last import CHANNELS
from .generate import KERNELS, header_text

MOST_CHANNELS = 32  # with more channels PyTorch's blocked products are faster, except than Winograd's
MOST_WEIGHTS = 512 * 512  # pairs of channels of a Winograd convolution: transformed weights take four times the memory
FEWEST_OUTPUTS = 16  # per channel: the outputs of one tile
MOST_SHAPES = 32
Shape = tuple[str, tuple[int, ...]]  # a struct of layers.h and its template arguments


class Layers:
    """Compiled forward and backward functions for a list of shapes."""

    def __init__(self, shapes: list[Shape]) -> None:
        text = [header_text(*KERNELS, "winograd.h", "channels_last.h", "layers.h")]
        for k, (kind, numbers) in enumerate(shapes):
            text += _EXPORTS[kind].replace("LAYER", f"{kind}<{', '.join(map(str, numbers))}>").replace("NAME", f"layer{k}").splitlines()
        self.code = load("\n".join(text))
        self.known: dict[Shape, tuple[Any, Any]] = {}
        for k, shape in enumerate(shapes):
            functions = getattr(self.code, f"layer{k}_forward"), getattr(self.code, f"layer{k}_backward")
            for function, pointers in zip(functions, _POINTERS[shape[0]], strict=True):
                function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64]
            self.known[shape] = functions


_EXPORTS = {
    "Convolution": """
extern "C" int NAME_forward(const float* x, const float* w, const float* b, float* y, int64_t n) { return LAYER::forward(x, w, b, y, n); }
extern "C" int NAME_backward(const float* x, const float* w, const float* dy, float* dx, float* dw, float* db, int64_t n) {
  return LAYER::backward(x, w, dy, dx, dw, db, n);
}""",
    "MaxPool": """
extern "C" void NAME_forward(const float* x, float* y, int32_t* place, int64_t n) { LAYER::forward(x, y, place, n); }
extern "C" void NAME_backward(const float* dy, const int32_t* place, float* dx, int64_t n) { LAYER::backward(dy, place, dx, n); }""",
}
_EXPORTS["ChannelsLast"] = _EXPORTS["Convolution"]
_POINTERS = {"Convolution": (4, 6), "ChannelsLast": (4, 6), "MaxPool": (3, 3)}


def compile_layers(module: nn.Module, clients: Clients) -> Layers | None:
    """Compile the layers that this module uses on these samples; None if there is nothing to gain, or no compiler."""
    if clients.dtype != torch.float32:
        return None
    seen = LayerOverrides(None)
    try:
        with unsupported_on_error():
            with torch.no_grad(), torch.random.fork_rng(devices=[]), seen:
                forward(module, clients.inputs(slice(2)))
            shapes = list(dict.fromkeys(seen.shapes))
            return Layers(shapes) if 0 < len(shapes) <= MOST_SHAPES else None
    except Unsupported:  # the model then trains without them
        return None


class LayerOverrides(TorchFunctionMode):
    """Replaces convolutions and max pooling by compiled layers; with `layers=None` it only records the shapes that could be compiled."""

    def __init__(self, layers: Layers | None) -> None:
        super().__init__()
        self.layers = layers
        self.shapes: list[Shape] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CALLS:
            read, shape_of, layer = _CALLS[func]
            try:
                call = read(*args, **kwargs)
                shape = shape_of(*call)
            except TypeError:  # wrong arguments: leave the error to PyTorch
                shape = None
            if shape:
                self.shapes.append(shape)
                if self.layers and shape in self.layers.known and not (layer is Pool and _channels_last(call[0])):
                    last = (shape[0] == "ChannelsLast",) if layer is Conv else ()
                    return layer.apply(*call[: layer.tensors], shape[1], self.layers.known[shape], *last)
        return func(*args, **kwargs)


def _convolution(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Shape | None:
    """Return the shape to compile for this call; None if our kernels do not support it or are not faster, or if PyTorch refuses it."""
    if not _images(x) or not _plain(w) or w.ndim != 4 or groups != 1 or _two(dilation) != (1, 1):
        return None
    if bias is not None and not (_plain(bias) and bias.shape == w.shape[:1]):
        return None
    stride, padding, kernel = _two(stride), _two(padding), tuple(w.shape[2:])
    if not (stride and padding) or min(*stride, *w.shape) < 1 or min(padding) < 0 or w.shape[1] != x.shape[1]:
        return None
    if any(k > side + 2 * p for k, side, p in zip(kernel, x.shape[2:], padding, strict=True)):
        return None
    numbers = (*x.shape[1:], w.shape[0], *kernel, *stride, *padding)
    if kernel == (3, 3) and stride == (1, 1) and _winograd(w, (x.shape[2] + 2 * padding[0] - 2) * (x.shape[3] + 2 * padding[1] - 2)):
        return "ChannelsLast", numbers
    return ("Convolution", numbers) if max(w.shape[:2]) <= MOST_CHANNELS else None


def _winograd(w: Tensor, outputs: int) -> bool:
    return all(n % CHANNELS == 0 for n in w.shape[:2]) and w.shape[0] * w.shape[1] <= MOST_WEIGHTS and outputs >= FEWEST_OUTPUTS


def max_pool2d_call(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Any, Any, Any, Any, bool]:
    return (
        input,
        kernel_size,
        kernel_size if stride is None or stride in ((), []) else stride,
        padding,
        dilation,
        ceil_mode or return_indices,
    )


def _max_pool(x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, special: bool) -> Shape | None:
    kernel, steps = _two(kernel_size), _two(stride)
    if not _images(x) or special or _two(padding) != (0, 0) or _two(dilation) != (1, 1):
        return None
    if not (kernel and steps) or min(*kernel, *steps) < 1 or kernel[0] > x.shape[2] or kernel[1] > x.shape[3]:
        return None
    return "MaxPool", (*x.shape[2:], *kernel, *steps)


def _two(value: Any) -> tuple[int, ...] | None:
    """Return a size as two integers; None if it is not one or two integers."""
    if isinstance(value, (tuple, list)) and not (len(value) in (1, 2) and all(type(number) is int for number in value)):
        return None
    return pair(value) if isinstance(value, (tuple, list)) or type(value) is int else None


def _images(x: Any) -> bool:
    return _plain(x) and x.ndim == 4 and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


def _plain(x: Any) -> bool:
    """Return whether it is an ordinary float32 tensor in CPU memory."""
    usual = type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
    return usual and x.layout == torch.strided and not x.is_neg()


def _channels_last(x: Tensor) -> bool:
    """Return whether PyTorch's pooling, which has a kernel for this layout, saves a copy."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("a compiled layer could not allocate its workspace")


class Conv(torch.autograd.Function):
    """A convolution with a compiled shape. `last`: images, gradients and results are in channels-last layout."""

    apply: Any
    tensors = 3

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[int, ...], functions: tuple[Any, Any], last: bool
    ) -> Tensor:
        _, h, w, channels, kh, kw, sh, sw, ph, pw = numbers
        ctx.save_for_backward(x, weight)  # the originals, not the copies below, because second derivatives need them
        ctx.numbers, ctx.functions, ctx.biased = numbers, functions, bias is not None
        ctx.layout = layout = torch.channels_last if last else torch.contiguous_format
        x, weight, bias = x.contiguous(memory_format=layout), weight.contiguous(), None if bias is None else bias.contiguous()
        shape = (len(x), channels, (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1)
        y = torch.empty(shape, dtype=x.dtype, memory_format=layout)
        _check_memory(functions[0](_at(x), _at(weight), _at(bias), _at(y), len(x)))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            stride, padding, biases = ctx.numbers[6:8], ctx.numbers[8:], [len(weight)] if ctx.biased else None
            settings = (biases, stride, padding, (1, 1), False, (0, 0), 1, (True, True, ctx.biased))
            return *torch.ops.aten.convolution_backward(dy, x, weight, *settings), None, None, None
        x, weight, dy = x.contiguous(memory_format=ctx.layout), weight.contiguous(), dy.contiguous(memory_format=ctx.layout)
        dx = torch.empty(x.shape, dtype=x.dtype, memory_format=ctx.layout) if ctx.needs_input_grad[0] else None
        dw, db = x.new_empty(weight.shape), x.new_empty(len(weight)) if ctx.biased else None
        _check_memory(ctx.functions[1](_at(x), _at(weight), _at(dy), _at(dx), _at(dw), _at(db), len(x)))
        return dx, dw, db, None, None, None


class Pool(torch.autograd.Function):
    """Max pooling with a compiled shape."""

    apply: Any
    tensors = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: tuple[int, ...], functions: tuple[Any, Any]) -> Tensor:
        h, w, kh, kw, sh, sw = numbers
        x = x.contiguous()
        y = x.new_empty(*x.shape[:2], (h - kh) // sh + 1, (w - kw) // sw + 1)
        place = x.new_empty(y.shape, dtype=torch.int32)
        functions[0](_at(x), _at(y), _at(place), x.shape[0] * x.shape[1])
        ctx.save_for_backward(place)
        ctx.numbers, ctx.functions, ctx.shape = numbers, functions, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        [place] = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _scattered(dy, place, ctx.shape, ctx.numbers), None, None
        dy = dy.contiguous()
        dx = dy.new_empty(ctx.shape)
        ctx.functions[1](_at(dy), _at(place), _at(dx), ctx.shape[0] * ctx.shape[1])
        return dx, None, None


def _scattered(dy: Tensor, place: Tensor, shape: torch.Size, numbers: tuple[int, ...]) -> Tensor:
    """Compute the gradient of max pooling with PyTorch operations, which can be differentiated again."""
    _, width, _, kw, sh, sw = numbers
    rows = torch.arange(dy.shape[2], device=dy.device)[:, None] * sh + place // kw
    columns = torch.arange(dy.shape[3], device=dy.device) * sw + place % kw
    at = (rows * width + columns).flatten(2)
    return dy.new_zeros(*shape[:2], shape[2] * width).scatter_add(2, at, dy.flatten(2)).view(shape)


_CALLS: dict[Any, tuple[Any, Any, Any]] = {
    torch.conv2d: (conv2d_call, _convolution, Conv),
    F.max_pool2d: (max_pool2d_call, _max_pool, Pool),
    torch.max_pool2d: (max_pool2d_call, _max_pool, Pool),
}
