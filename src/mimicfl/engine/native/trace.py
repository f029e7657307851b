"""A module as a chain of layers, found by tracing what it does, whatever its classes are called."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...params import trainable
from ..support import Unsupported


@dataclass(frozen=True)
class Layer:
    """One step of the chain. `shape` is its input [channels, height, width] (height and width 1 after flattening)."""

    kind: str  # conv, max_pool, avg_pool, relu, tanh, dropout, linear
    shape: tuple[int, int, int]
    out: tuple[int, int, int]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    weight: int = -1  # where its weights and bias begin in the flat parameter vector; -1: none
    bias: int = -1
    p: float = 0.0


ELEMENTWISE = {F.relu: "relu", torch.relu: "relu", F.tanh: "tanh", torch.tanh: "tanh", "relu": "relu", "tanh": "tanh", "relu_": "relu"}
POOLS = {
    "max_pool2d": ("max_pool", ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    "avg_pool2d": ("avg_pool", ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")),
}
RESHAPES = (torch.flatten, "flatten", "view", "reshape", torch.reshape)


def trace(module: nn.Module, sample: tuple[int, ...]) -> list[Layer]:
    """The layers of `module` for inputs of shape `sample`, in order; raises Unsupported with a reason."""
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:
        raise Unsupported(f"it cannot be traced ({str(error).splitlines()[0][:80]})") from None
    offsets = _offsets(module)
    shape = sample if len(sample) == 3 else (_product(sample), 1, 1)
    layers: list[Layer] = []
    previous: fx.Node | None = None
    for node in graph.graph.nodes:
        if node.op == "output":
            if node.args[0] is not previous:
                raise Unsupported("its output is not the end of a chain of layers")
            break
        if node.op == "placeholder":
            if previous is not None:
                raise Unsupported("it takes more than one input")
        else:
            if node.op == "get_attr" or list(node.all_input_nodes) != [previous]:
                raise Unsupported(f"{node.name} does not follow the layer before it: not a chain")
            found = _layer(node, graph, shape, offsets)
            if found == "flatten":
                shape = (_product(shape), 1, 1)
            elif isinstance(found, Layer):
                layers.append(found)
                shape = found.out
        previous = node
    if sum(layer.kind in ("conv", "linear") for layer in layers) == 0:
        raise Unsupported("it has no layer with weights")
    return _pool_before_relu(layers)


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for side in shape:
        n *= side
    return n


def _offsets(module: nn.Module) -> dict[int, int]:
    """Where each parameter begins in the flat vector, by identity."""
    if any(True for _ in module.buffers()):
        raise Unsupported("it has buffers (BatchNorm and the like)")
    if len(trainable(module)) != len(list(module.parameters())):
        raise Unsupported("some of its parameters are frozen")
    offsets, position = {}, 0
    for p in trainable(module):
        if p.dtype != torch.float32:
            raise Unsupported(f"its parameters are {str(p.dtype).removeprefix('torch.')}, not float32")
        offsets[id(p)] = position
        position += p.numel()
    return offsets


def _layer(node: fx.Node, graph: fx.GraphModule, shape: tuple[int, int, int], offsets: dict[int, int]) -> Layer | str | None:
    if node.op == "call_module":
        return _from_module(graph.get_submodule(str(node.target)), node, shape, offsets)
    target: Any = node.target
    if target in ELEMENTWISE:
        return Layer(ELEMENTWISE[target], shape, shape)
    if target in RESHAPES:
        return _reshape(node)
    if getattr(target, "__name__", "") in POOLS:
        return _functional_pool(node, shape)
    raise Unsupported(f"it uses {getattr(target, '__name__', target)}, which has no native form")


def _functional_pool(node: fx.Node, shape: tuple[int, int, int]) -> Layer:
    kind, words = POOLS[node.target.__name__]  # type: ignore[union-attr]
    given = dict(zip(words, node.args[1:], strict=False)) | node.kwargs
    plain = {
        "padding": (0, (0, 0)),
        "dilation": (1, (1, 1)),
        "ceil_mode": (False,),
        "return_indices": (False,),
        "divisor_override": (None,),
    }
    for word, allowed in plain.items():
        if word in given and given[word] not in allowed:
            raise Unsupported(f"the pooling {node.name} has {word}={given[word]}")
    return _pool(kind, shape, given["kernel_size"], given.get("stride") or None)


def _reshape(node: fx.Node) -> str:
    """Only [B, ...] -> [B, everything else] keeps a sample whole; the self-check confirms it on numbers."""
    words = [a for a in node.args[1:] if not isinstance(a, fx.Node)]
    if node.target in (torch.flatten, "flatten"):
        start = words[0] if words else node.kwargs.get("start_dim", 0)
        if start == 1 and len(words) < 2 and "end_dim" not in node.kwargs:
            return "flatten"
    elif words[-1:] in ([-1], [(-1,)]) or (words and isinstance(words[-1], int)):
        return "flatten"
    raise Unsupported(f"{node.name} reshapes in a way that is not a flattening of each sample")


def _from_module(m: nn.Module, node: fx.Node, shape: tuple[int, int, int], offsets: dict[int, int]) -> Layer | str | None:
    if isinstance(m, nn.Identity):
        return None
    if isinstance(m, nn.Flatten) and m.start_dim == 1 and m.end_dim == -1:
        return "flatten"
    if isinstance(m, (nn.ReLU, nn.Tanh)):
        return Layer("relu" if isinstance(m, nn.ReLU) else "tanh", shape, shape)
    if isinstance(m, nn.Dropout):
        return Layer("dropout", shape, shape, p=float(m.p)) if m.p > 0 else None
    if isinstance(m, nn.MaxPool2d) and _pair(m.padding) == (0, 0) and _pair(m.dilation) == (1, 1) and not (m.ceil_mode or m.return_indices):
        return _pool("max_pool", shape, m.kernel_size, m.stride)
    if isinstance(m, nn.AvgPool2d) and _pair(m.padding) == (0, 0) and not m.ceil_mode and m.divisor_override is None:
        return _pool("avg_pool", shape, m.kernel_size, m.stride)
    if isinstance(m, nn.Linear):
        if shape[1:] != (1, 1) or shape[0] != m.in_features:
            raise Unsupported(f"{node.name} is applied to something other than flat samples")
        return Layer("linear", shape, (m.out_features, 1, 1), weight=offsets[id(m.weight)], bias=_bias(m.bias, offsets))
    if isinstance(m, nn.Conv2d):
        return _conv(m, node, shape, offsets)
    raise Unsupported(f"it has a {type(m).__name__} layer with no native form")


def _conv(m: nn.Conv2d, node: fx.Node, shape: tuple[int, int, int], offsets: dict[int, int]) -> Layer:
    if m.groups != 1 or _pair(m.dilation) != (1, 1) or m.padding_mode != "zeros" or isinstance(m.padding, str) or shape[0] != m.in_channels:
        raise Unsupported(f"the convolution {node.name} is grouped, dilated or padded in a special way")
    kernel, stride, padding = _pair(m.kernel_size), _pair(m.stride), _pair(m.padding)
    height, width = ((shape[1 + k] + 2 * padding[k] - kernel[k]) // stride[k] + 1 for k in (0, 1))
    out = (m.out_channels, height, width)
    return Layer("conv", shape, out, kernel, stride, padding, offsets[id(m.weight)], _bias(m.bias, offsets))


def _pool(kind: str, shape: tuple[int, int, int], kernel: Any, stride: Any) -> Layer:
    k, s = _pair(kernel), _pair(stride if stride is not None else kernel)
    out = (shape[0], (shape[1] - k[0]) // s[0] + 1, (shape[2] - k[1]) // s[1] + 1)
    return Layer(kind, shape, out, k, s)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _bias(bias: Tensor | None, offsets: dict[int, int]) -> int:
    return -1 if bias is None else offsets[id(bias)]


def _pool_before_relu(layers: list[Layer]) -> list[Layer]:
    """max_pool(relu(x)) = relu(max_pool(x)), gradients included, and the second form does a fraction of the work."""
    order = list(layers)
    for k in range(len(order) - 1):
        if order[k].kind == "relu" and order[k + 1].kind == "max_pool":
            pool = order[k + 1]
            order[k : k + 2] = [pool, Layer("relu", pool.out, pool.out)]
    return order
