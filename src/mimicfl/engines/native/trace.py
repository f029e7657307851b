"""Traces a module, in training and in evaluation mode, and converts it to a chain of layers."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...clients.params import trainable
from ..capabilities import Unsupported
from ..torch_overrides import pair

BATCH = 3  # samples in the traced batch; verification uses another number, which reveals shapes that depend on the batch size


@dataclass(frozen=True)
class Layer:
    """One layer of the chain. `shape` is its input [channels, height, width], with height and width 1 for flat samples."""

    kind: str  # conv, max_pool, avg_pool, relu, tanh, dropout, linear
    shape: tuple[int, int, int]
    out: tuple[int, int, int]
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    weight: int = -1  # offsets of weights and bias in the flat parameter vector; -1: none
    bias: int = -1
    p: float = 0.0


ELEMENTWISE = {F.relu: "relu", torch.relu: "relu", F.tanh: "tanh", torch.tanh: "tanh", "relu": "relu", "tanh": "tanh", "relu_": "relu"}
MAX_WORDS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
AVG_WORDS = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
POOLS: dict[Any, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys((nn.MaxPool2d, F.max_pool2d, torch.max_pool2d), ("max_pool", MAX_WORDS)),
    **dict.fromkeys((nn.AvgPool2d, F.avg_pool2d), ("avg_pool", AVG_WORDS)),
}
RESHAPES = (torch.flatten, "flatten", "view", "reshape", torch.reshape, nn.Flatten, nn.Unflatten)


def trace(module: nn.Module, sample: tuple[int, ...]) -> list[Layer]:
    """Return the layers of `module`, in order, for inputs of shape `sample`. Raises `Unsupported` with the reason if it is not a chain."""
    _refuse_untraceable_features(module)
    layers = _chain(module, sample, training=True)
    try:
        evaluated = _chain(module, sample, training=False)
    except Unsupported as reason:
        raise Unsupported(f"in evaluation mode {reason}") from None
    if layers != evaluated:
        raise Unsupported("it has different layers in evaluation mode")
    if not any(layer.kind in ("conv", "linear") for layer in layers):
        raise Unsupported("it has no layer with weights")
    return _pool_before_relu(layers)


def _refuse_untraceable_features(module: nn.Module) -> None:
    if any(True for _ in module.buffers()):
        raise Unsupported("it has buffers (BatchNorm and the like)")
    if len(trainable(module)) != len(list(module.parameters())):
        raise Unsupported("some of its parameters are frozen")
    for p in module.parameters():
        if p.dtype != torch.float32:
            raise Unsupported(f"its parameters are {_name(p.dtype)}, not float32")
    for m in module.modules():
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            raise Unsupported(f"its {type(m).__name__} has hooks, which compiled code would not call")
        if "forward" in vars(m) or type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval:
            raise Unsupported(f"its {type(m).__name__} replaces forward, train or eval")


class _Recorded(fx.Interpreter):
    """Runs a graph and records at each node the tensor's shape (None if it is not float32), or the value if it is not a tensor."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["tensor"] = isinstance(value, Tensor)
        n.meta["value"] = None if n.meta["tensor"] else value  # a size
        n.meta["dims"] = tuple(value.shape) if isinstance(value, Tensor) and value.dtype == torch.float32 else None
        return value


def _chain(module: nn.Module, sample: tuple[int, ...], training: bool) -> list[Layer]:
    module = copy.deepcopy(module).cpu().train(training)
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:
        raise Unsupported(f"it cannot be traced ({_first_line(error)})") from None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _Recorded(graph).run(torch.zeros(BATCH, *sample, dtype=torch.float32, device="cpu"))
    except Exception as error:
        raise Unsupported(f"it fails on samples of shape {list(sample)} ({_first_line(error)})") from None
    offsets, position = {}, 0
    for p in module.parameters():
        offsets[id(p)] = position
        position += p.numel()
    return _layers(graph, offsets)


def _layers(graph: fx.GraphModule, offsets: dict[int, int]) -> list[Layer]:
    layers: list[Layer] = []
    previous: fx.Node | None = None
    for node in graph.graph.nodes:
        if node.op == "output":
            if node.args[0] is not previous:
                raise Unsupported("its output is not the end of a chain of layers")
            if previous is None or len(previous.meta["dims"]) != 2:
                raise Unsupported("its output is not one row of numbers per sample")
            break
        if node.op == "get_attr":
            raise Unsupported(f"it uses the tensor {node.target} outside of a layer")
        if node.op != "placeholder":
            if not node.meta["tensor"]:
                continue  # a size, used by a reshape
            if [n for n in node.all_input_nodes if n.meta["tensor"]] != [previous]:
                raise Unsupported(f"{node.name} does not follow the layer before it: not a chain")
            _check_dims(node)
            if layer := _layer(_Step(node, graph, previous), offsets):
                layers.append(layer)
        elif previous is not None:
            raise Unsupported("it takes more than one input")
        previous = node
    return layers


def _check_dims(node: fx.Node) -> None:
    dims = node.meta["dims"]
    if dims is None:
        raise Unsupported(f"{node.name} is not a float32 tensor")
    if not dims or dims[0] != BATCH or 0 in dims:
        raise Unsupported(f"{node.name} does not keep one row per sample")


class _Step:
    """A node of the chain, with the shapes of its input and output."""

    def __init__(self, node: fx.Node, graph: fx.GraphModule, previous: fx.Node | None) -> None:
        assert previous is not None
        self.node, self.name = node, node.name
        self.module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        self.target: Any = type(self.module) if self.module is not None else node.target
        self.dims, self.out = previous.meta["dims"][1:], node.meta["dims"][1:]  # without the batch

    @property
    def size(self) -> tuple[int, int, int]:
        return (math.prod(self.dims), 1, 1)

    def image(self) -> tuple[int, int, int]:
        if len(self.dims) != 3:
            raise Unsupported(f"{self.name} is applied to samples of {len(self.dims)} dimensions, not to images of 3")
        return (self.dims[0], self.dims[1], self.dims[2])

    def settings(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the settings of a layer, whether it is a module or a function call."""
        if self.module is not None:
            return {name: getattr(self.module, name) for name in names if hasattr(self.module, name)}
        args, kwargs = fx.node.map_arg((self.node.args[1:], self.node.kwargs), lambda n: n.meta["value"])
        return {**dict(zip(names, args, strict=False)), **kwargs}


def _layer(step: _Step, offsets: dict[int, int]) -> Layer | None:
    m, target = step.module, step.target
    if target in ELEMENTWISE or target in (nn.ReLU, nn.Tanh):
        return Layer(ELEMENTWISE.get(target) or target.__name__.lower(), step.size, step.size)
    if target is nn.Identity or target in RESHAPES:  # values and their order stay the same; only the shape changes
        if math.prod(step.dims) != math.prod(step.out):
            raise Unsupported(f"{step.name} does not keep one row per sample")
        return None
    if target in POOLS:
        return _pool(step)
    if isinstance(m, nn.Dropout) and target is nn.Dropout:
        return Layer("dropout", step.size, step.size, p=float(m.p)) if m.p > 0 else None
    if isinstance(m, nn.Linear) and target is nn.Linear:
        if len(step.dims) != 1:
            raise Unsupported(f"{step.name} is applied to samples of {len(step.dims)} dimensions, not to flat ones")
        return Layer("linear", step.size, (m.out_features, 1, 1), weight=_at(m.weight, step, offsets), bias=_at(m.bias, step, offsets))
    if isinstance(m, nn.Conv2d) and target is nn.Conv2d:
        return _conv(m, step, offsets)
    if m is not None:
        raise Unsupported(f"it has a {target.__name__} layer, which native does not support")
    raise Unsupported(f"it uses {getattr(target, '__name__', target)}, which native does not support")


def _conv(m: nn.Conv2d, step: _Step, offsets: dict[int, int]) -> Layer:
    given = {"groups": m.groups, "dilation": pair(m.dilation), "padding_mode": m.padding_mode}
    for word, plain in {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}.items():
        if given[word] != plain:
            raise Unsupported(f"the convolution {step.name} has {word}={given[word]!r}")
    if isinstance(m.padding, str):
        raise Unsupported(f"the convolution {step.name} has padding={m.padding!r}")
    out = (m.out_channels, step.out[1], step.out[2])
    sizes = (pair(m.kernel_size), pair(m.stride), pair(m.padding))
    return Layer("conv", step.image(), out, *sizes, _at(m.weight, step, offsets), _at(m.bias, step, offsets))


def _pool(step: _Step) -> Layer:
    kind, names = POOLS[step.target]
    given = step.settings(names)
    plain: dict[str, tuple[Any, ...]] = {"padding": (0, (0, 0)), "dilation": (1, (1, 1))}
    plain |= {"ceil_mode": (False,), "return_indices": (False,), "divisor_override": (None,)}
    for word, allowed in plain.items():
        value = given.get(word, allowed[0])
        if (tuple(value) if isinstance(value, list) else value) not in allowed:
            raise Unsupported(f"the pooling {step.name} has {word}={value}")
    kernel = pair(given["kernel_size"])
    channels, *_ = shape = step.image()
    return Layer(kind, shape, (channels, step.out[1], step.out[2]), kernel, pair(given.get("stride") or kernel))


def _at(parameter: Tensor | None, step: _Step, offsets: dict[int, int]) -> int:
    """Return the offset of a layer's parameter in the flat vector; -1 for None."""
    if parameter is None:
        return -1
    if id(parameter) not in offsets:
        raise Unsupported(f"{step.name} computes its weights from other tensors")
    return offsets[id(parameter)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:80]


def _pool_before_relu(layers: list[Layer]) -> list[Layer]:
    """Swap ReLU and max pooling: relu(max_pool(x)) equals max_pool(relu(x)), gradients included, with a fraction of the work."""
    order = list(layers)
    for k in range(len(order) - 1):
        if order[k].kind == "relu" and order[k + 1].kind == "max_pool":
            pool = order[k + 1]
            order[k : k + 2] = [pool, Layer("relu", pool.out, pool.out)]
    return order
