"""Client optimizers: the step that follows from a gradient. Their memory restarts from zero in every round.

A rule returns the step divided by the learning rate, so that a client's final model is start - eta_L g for every optimizer. The same code
serves one client, with vectors [d], and many clients in lanes, with vectors [m, d].
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..errors import UsageError, first_line, number, plain, shown, unit_interval
from ..registry import Registry

OPTIMIZERS: Registry[dict[str, Any]] = Registry("optimizer", ("optimizer",))
BETAS, EPS = (0.9, 0.999), 1e-8
Shapes = Sequence[torch.Size]  # of the trainable parameters


class Rule(Protocol):
    """Turns gradients into steps."""

    slots: ClassVar[int]  # vectors that a client keeps during a round

    def step(self, h: Tensor, w: Tensor, k: int | Tensor, slots: Sequence[Tensor]) -> Tensor:
        """Return the k-th step (from 1) from w along the gradient h, and update the slots in place."""


@dataclass(frozen=True)
class Momentum:
    """SGD with momentum: u = momentum u + h; the step is u, or with Nesterov's momentum h + momentum u."""

    momentum: float
    nesterov: bool = False
    slots: ClassVar[int] = 1

    def step(self, h: Tensor, w: Tensor, k: int | Tensor, slots: Sequence[Tensor]) -> Tensor:
        u = slots[0].mul_(self.momentum).add_(h)
        return h + self.momentum * u if self.nesterov else u


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015); with `decay` AdamW (Loshchilov and Hutter, 2019), whose weight decay bypasses the moments."""

    betas: tuple[float, float] = BETAS
    eps: float = EPS
    decay: float = 0.0
    slots: ClassVar[int] = 2

    def step(self, h: Tensor, w: Tensor, k: int | Tensor, slots: Sequence[Tensor]) -> Tensor:
        m, v = slots
        m.mul_(self.betas[0]).add_(h, alpha=1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(h, h, value=1 - self.betas[1])
        first, second = (self._correction(beta, k, h.dtype) for beta in self.betas)
        step: Tensor = (m / first) / (v.sqrt() / second**0.5 + self.eps)
        return step + self.decay * w if self.decay else step

    @staticmethod
    def _correction(beta: float, k: int | Tensor, dtype: torch.dtype) -> Any:
        """Return 1 - beta^k, computed in float64: in float32 it would have an error of 6e-5 for beta = 0.999 and k = 1."""
        return 1 - beta**k if isinstance(k, int) else (1 - torch.pow(beta, k.double())).to(dtype)


@OPTIMIZERS.register("sgd")
def sgd(momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> dict[str, Any]:
    """Stochastic gradient descent."""
    return {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}


@OPTIMIZERS.register("adam")
def adam(betas: Any = BETAS, eps: float = EPS, weight_decay: float = 0.0) -> dict[str, Any]:
    """Adam; weight decay is added to the gradient."""
    return {"betas": betas, "eps": eps, "weight_decay": weight_decay}


@OPTIMIZERS.register("adamw")
def adamw(betas: Any = BETAS, eps: float = EPS, weight_decay: float = 0.0) -> dict[str, Any]:
    """Adam with decoupled weight decay."""
    return {"betas": betas, "eps": eps, "weight_decay": weight_decay}


def checked_betas(given: Any) -> tuple[float, float]:
    values = plain(given)
    if not isinstance(values, (list, tuple)) or len(values) != 2:
        raise UsageError(f"betas must be two numbers, as in betas=(0.9, 0.999), got {shown(given)}")
    return unit_interval("the first of betas", values[0]), unit_interval("the second of betas", values[1])


def checked_multipliers(given: Any) -> tuple[tuple[str, float], ...]:
    """`lr_multipliers` as pairs of name pattern and number."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    try:
        return tuple((_pattern(pattern), number(f"the multiplier of {pattern!r}", value, low=0)) for pattern, value in pairs)
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"lr_multipliers must map name patterns to numbers, as in {{'head.*': 10}}, got {shown(given)}") from None


def _pattern(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"lr_multipliers: a name pattern must be a string, as in 'head.*', got {shown(value)}")
    return value


class TorchRule:
    """The steps of any `torch.optim` optimizer, made by a factory from parameters and a learning rate.

    It works on a copy of the parameters in float64: a step is the difference of the parameters before and after it, divided by the
    learning rate, which in float32 would lose digits.
    """

    slots: ClassVar[int] = 0

    def __init__(self, factory: Callable[..., Any], w: Tensor, shapes: Shapes, multipliers: Sequence[float], lr: float) -> None:
        self.lr = lr
        self.w = w.detach().to(torch.float64, copy=True)
        self.grad = torch.zeros_like(self.w)
        sizes = [shape.numel() for shape in shapes]
        # In their own shapes: Adafactor and Muon treat matrices differently from vectors.
        parameters = [nn.Parameter(part.view(shape)) for part, shape in zip(self.w.split(sizes), shapes, strict=True)]
        for p, part, grad in zip(parameters, self.w.split(sizes), self.grad.split(sizes), strict=True):
            p.data, p.grad = part.view(p.shape), grad.view(p.shape)
        groups = [{"params": [p], "lr": lr * factor} for p, factor in zip(parameters, multipliers, strict=True)]
        self.optimizer = factory(groups if set(multipliers) != {1.0} else parameters, lr=lr)

    def step(self, h: Tensor, w: Tensor, k: int | Tensor, slots: Sequence[Tensor]) -> Tensor:
        before = self.w.clone()
        self.grad.copy_(h)
        self.optimizer.step()
        return ((before - self.w) / self.lr).to(h.dtype)


def check_factory(factory: Callable[..., Any], w: Tensor, shapes: Shapes, multipliers: Sequence[float]) -> None:
    """Raise a `UsageError` unless the factory makes an optimizer that can take a step with a given gradient."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        rule = TorchRule(factory, w, shapes, multipliers, 1e-3)
    except Exception as error:
        raise UsageError(f"optimizer {name} cannot be made with (parameters, lr=...): {first_line(error)}") from error
    if not isinstance(rule.optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer {name} must return a torch.optim.Optimizer, got {shown(rule.optimizer)}")
    closure = inspect.signature(rule.optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(f"optimizer {name} evaluates the loss several times per step, which clients cannot do; use a custom loop")
    try:
        step = rule.step(torch.full_like(w, 1e-3), w, 1, ())
    except Exception as error:
        raise UsageError(f"optimizer {name} cannot take a step: {first_line(error)}") from error
    if not bool(torch.isfinite(step).all()):
        raise UsageError(f"optimizer {name} took a step that is not finite on its first gradient")
