"""Checks a compiled network before it is used: compares it with the module and the loss on samples of all classes."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...clients.losses import Loss, cross_entropy, mse
from ...clients.params import flatten, trainable
from ...data.clients import Clients
from ...data.dataset import Data
from ...data.samples import as_tensor, single
from ...seeds import number
from ...tasks import Classification, LearningTask, Regression
from ..capabilities import Unsupported
from ..torch_overrides import without_dropout
from .trace import BATCH

SPACED, CLASSES = 24, 40  # samples spread over the data, plus one from each class, for at most this many classes
# Tolerances relative to the largest value. A wrong layer causes far larger errors, float32 rounding far smaller ones.
OUTPUTS, GRADIENT = 1e-4, 1e-3
FLOOR = 1e-6  # the least value that an error is relative to
# Where rounding decides which pixel max pooling picks, no two computations of a gradient agree. A gradient that differs by at most KINK is
# compared at other parameters, and must agree at all but one of them; an error in the compiled code remains.
KINK, OTHERS = 0.1, 3
DISAGREES = "its compiled form disagrees with PyTorch on a test batch ({})"


def loss_name(loss: Loss, data: Data) -> str:
    """Return the name of the compiled loss that equals this loss on these labels. Raises `Unsupported` if there is none."""
    if loss is mse or type(loss) is Regression:
        return "mse"
    if isinstance(loss, LearningTask) and type(loss) is not Classification:
        raise Unsupported(f"its task is {loss.name}")
    if isinstance(loss, Classification):
        _all_counted(loss, data)
    elif loss is not cross_entropy and loss is not F.cross_entropy:
        _plain_cross_entropy(loss, data)
    if not data.num_classes or data.y_train.ndim != 1:
        raise Unsupported("its labels are not one class per sample")
    return "cross-entropy"


def _all_counted(task: Classification, data: Data) -> None:
    if any(bool((y == task.ignore_index).any()) for y in (data.y_train, data.y_test)):
        raise Unsupported(f"its task ignores class {task.ignore_index}, which some samples have")


def _plain_cross_entropy(loss: Loss, data: Data) -> None:
    """Raise `Unsupported` unless the loss is nn.CrossEntropyLoss with settings equivalent to the defaults."""
    if not isinstance(loss, nn.CrossEntropyLoss) or type(loss) is not nn.CrossEntropyLoss or "forward" in vars(loss):
        raise Unsupported("its loss is neither cross-entropy nor mse")
    for word, plain in {"weight": None, "reduction": "mean", "label_smoothing": 0.0}.items():
        if (given := getattr(loss, word)) is not plain and given != plain:
            raise Unsupported(f"its CrossEntropyLoss has {word}={given}")
    if any(bool((y == loss.ignore_index).any()) for y in (data.y_train, data.y_test)):
        raise Unsupported(f"its CrossEntropyLoss ignores class {loss.ignore_index}, which some samples have")
    if loss._forward_hooks or loss._forward_pre_hooks or loss._backward_hooks or loss._backward_pre_hooks:
        raise Unsupported("its CrossEntropyLoss has hooks")


class Program(Protocol):
    """The functions of a compiled program that are checked."""

    def pool(self, x: Tensor) -> Any: ...

    def target(self, y: Tensor) -> Any: ...

    def predict(self, w: Tensor, pool: Any, count: int) -> Tensor: ...

    def step(self, w: Tensor, pool: Any, target: Any) -> tuple[Tensor, Tensor]: ...


def verify(program: Program, make: Callable[[nn.Module], Program], model: nn.Module, clients: Clients, loss: Loss) -> None:
    """Compare outputs in evaluation mode, and loss and gradient in training mode; the model is not changed."""
    data = clients.data
    rows = torch.from_numpy(probe_rows(single(clients.y)))
    x = single(clients.x)[rows]
    _evaluation(program, perturbed(model), data, (x, data.x_test[probe_rows(data.y_test)].to(clients.device)))
    no_dropout = without_dropout(model, data.inputs(x, torch.float32))
    if no_dropout is not None:  # engines draw dropout masks differently, so training is compared without dropout
        program, model = make(no_dropout), no_dropout
    if _gradient_error(program, perturbed(model), clients, loss, rows) > GRADIENT:
        errors = [_gradient_error(program, perturbed(model, k), clients, loss, rows) for k in range(1, OTHERS + 1)]
        if sum(error > GRADIENT for error in errors) > 1:
            raise Unsupported(DISAGREES.format("gradient"))


def _evaluation(program: Program, model: nn.Module, data: Data, samples: tuple[Tensor, ...]) -> None:
    model.eval()
    for x in samples:
        with torch.no_grad():
            exact = as_tensor(model(data.inputs(x, torch.float32)))
        _agree("outputs in evaluation mode", program.predict(flatten(model), program.pool(x), 1), exact, OUTPUTS)


def _gradient_error(program: Program, model: nn.Module, clients: Clients, loss: Loss, rows: Tensor) -> float:
    """The largest error of the gradient in training mode, relative to its largest value. Raises `Unsupported` if the loss is wrong, or if
    the error is larger than rounding at a kink can cause."""
    model.train()
    x, y = single(clients.x)[rows], single(clients.y)[rows]
    output = as_tensor(model(clients.data.inputs(x, torch.float32)))
    value = loss(output, y)
    gradients = torch.autograd.grad(value, trainable(model), allow_unused=True, materialize_grads=True)
    exact = torch.cat([g.reshape(-1) for g in gradients])
    g, ours = program.step(flatten(model), program.pool(x), program.target(y))
    _agree("loss", ours, value.detach().reshape(1), OUTPUTS, floor=1.0)
    _agree("gradient", g, exact, KINK)
    return float((g.to(exact.dtype) - exact).abs().max() / exact.abs().max().clamp_min(FLOOR))


def _agree(what: str, ours: Tensor, exact: Tensor, tolerance: float, floor: float = FLOOR) -> None:
    scale = float(exact.abs().max().clamp_min(floor))
    if ours.shape != exact.shape or not torch.allclose(ours.to(exact.dtype), exact, rtol=0, atol=tolerance * scale):
        raise Unsupported(DISAGREES.format(what))


def probe_rows(y: Tensor) -> np.ndarray:
    """Return rows spread over the samples plus the first one of each class; always more than the traced batch."""
    rows = np.linspace(0, len(y) - 1, min(len(y), SPACED)).astype(np.int64)
    if y.ndim == 1 and not y.is_floating_point():
        rows = np.concatenate([rows, np.unique(y.cpu().numpy(), return_index=True)[1][:CLASSES]])
    return np.resize(np.unique(rows), max(len(np.unique(rows)), BATCH + 1))


def perturbed(model: nn.Module, k: int = 0) -> nn.Module:
    """Return a copy with perturbed weights, because zeros could hide an error."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(number(0, "native check", k))
    with torch.no_grad():
        for p in trainable(model):
            fan_in = p[0].numel() if p.ndim > 1 else 4
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu").to(p.device), alpha=0.5 / fan_in**0.5)
    return model
