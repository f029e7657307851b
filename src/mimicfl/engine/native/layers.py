"""Fast layers for any module on a CPU: small convolutions and max pooling, compiled for the shapes a model really uses.

PyTorch's own convolutions are made for large layers; in a small one most of their time is preparation. While a model runs inside
`Quick`, calls whose shape was compiled are answered by our kernels and everything else by PyTorch.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...data.clients import Clients
from ..calls import conv2d_call, pair
from ..support import Unsupported
from .build import load
from .generate import KERNELS, written

MOST_CHANNELS = 32  # beyond that PyTorch's blocked products win
MOST_SHAPES = 32
Shape = tuple[str, tuple[int, ...]]  # the struct of layers.h, and its numbers


class Layers:
    """The compiled functions of the shapes a model was seen to use."""

    def __init__(self, shapes: list[Shape]) -> None:
        text = [written(*KERNELS, "layers.h")]
        for k, (kind, numbers) in enumerate(shapes):
            text += _EXPORTS[kind].replace("LAYER", f"{kind}<{', '.join(map(str, numbers))}>").replace("NAME", f"layer{k}").splitlines()
        self.code = load("\n".join(text))
        self.known: dict[Shape, tuple[Any, Any]] = {}
        for k, shape in enumerate(shapes):
            ways = getattr(self.code, f"layer{k}_forward"), getattr(self.code, f"layer{k}_backward")
            for way, pointers in zip(ways, _POINTERS[shape[0]], strict=True):
                way.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64]
            self.known[shape] = ways


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
_POINTERS = {"Convolution": (4, 6), "MaxPool": (3, 3)}


def quick_layers(module: nn.Module, clients: Clients) -> Layers | None:
    """Compiled layers for what this module does with these samples; None where there is nothing to gain, or no compiler."""
    if clients.dtype != torch.float32:
        return None
    seen = Quick(None)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), seen:
            module(clients.data.inputs(clients.x[:2], clients.dtype))
    except Exception:  # a model that does not bear being watched trains as it is
        return None
    shapes = list(dict.fromkeys(seen.shapes))
    if not shapes or len(shapes) > MOST_SHAPES:
        return None
    try:
        return Layers(shapes)
    except Unsupported:
        return None


class Quick(TorchFunctionMode):
    """Answers convolutions and max pooling by compiled layers; without any, it only notes the shapes that could be."""

    def __init__(self, layers: Layers | None) -> None:
        super().__init__()
        self.layers = layers
        self.shapes: list[Shape] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and (shape := _convolution(*(call := conv2d_call(*args, **kwargs)))):
            self.shapes.append(shape)
            if self.layers and shape in self.layers.known:
                return Conv.apply(*call[:3], shape[1], self.layers.known[shape])
        if func in (F.max_pool2d, torch.max_pool2d) and (shape := _max_pool(*args, **kwargs)):
            self.shapes.append(shape)
            if self.layers and shape in self.layers.known:
                return Pool.apply(args[0] if args else kwargs["input"], shape[1], self.layers.known[shape])
        return func(*args, **kwargs)


def _convolution(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Shape | None:
    """What is compiled for this call; None for what our kernels do not do, or not faster."""
    if not _plain(x) or x.ndim != 4 or w.dtype != torch.float32 or groups != 1 or isinstance(padding, str) or pair(dilation) != (1, 1):
        return None
    if max(w.shape[:2]) > MOST_CHANNELS:
        return None
    return "Convolution", (*x.shape[1:], w.shape[0], *w.shape[2:], *pair(stride), *pair(padding))


def _max_pool(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, *more: Any, **others: Any
) -> Shape | None:
    x = input
    if not _plain(x) or x.ndim != 4 or any(more) or any(others.values()) or pair(padding) != (0, 0) or pair(dilation) != (1, 1):
        return None
    kernel = pair(kernel_size)
    if kernel[0] > x.shape[2] or kernel[1] > x.shape[3]:
        return None
    return "MaxPool", (*x.shape[2:], *kernel, *(pair(stride) if stride else kernel))


def _plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32 and x.device.type == "cpu"


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _ran(failed: int) -> None:
    if failed:
        raise MemoryError("a compiled layer could not allocate its workspace")


class Conv(torch.autograd.Function):
    """A convolution of compiled shape."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[int, ...], ways: tuple[Any, Any]) -> Tensor:
        _, h, w, channels, kh, kw, sh, sw, ph, pw = numbers
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        y = torch.empty(len(x), channels, (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1)
        _ran(ways[0](_at(x), _at(weight), _at(bias), _at(y), len(x)))
        ctx.save_for_backward(x, weight)
        ctx.ways, ctx.biased = ways, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), torch.empty(len(weight)) if ctx.biased else None
        _ran(ctx.ways[1](_at(x), _at(weight), _at(dy), _at(dx), _at(dw), _at(db), len(x)))
        return dx, dw, db, None, None


class Pool(torch.autograd.Function):
    """Max pooling of compiled shape."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: tuple[int, ...], ways: tuple[Any, Any]) -> Tensor:
        h, w, kh, kw, sh, sw = numbers
        x = x.contiguous()
        y = torch.empty(*x.shape[:2], (h - kh) // sh + 1, (w - kw) // sw + 1)
        place = torch.empty(y.shape, dtype=torch.int32)
        ways[0](_at(x), _at(y), _at(place), x.shape[0] * x.shape[1])
        ctx.save_for_backward(place)
        ctx.ways, ctx.shape = ways, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        [place] = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty(ctx.shape)
        ctx.ways[1](_at(dy), _at(place), _at(dx), ctx.shape[0] * ctx.shape[1])
        return dx, None, None
