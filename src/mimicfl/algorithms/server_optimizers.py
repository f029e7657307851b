"""Server optimizers: how the server applies the change that an algorithm proposes (FedOpt, Reddi et al., 2021).

Any algorithm proposes w_t -> w_t - delta_t, with delta_t = eta_t v_t; the optimizer turns delta_t into the step that is taken. Momentum
averages over rounds; Adam, Yogi and Adagrad also scale every coordinate by its usual size. The algorithm's own memory is not affected.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, flag, number, unit_interval
from ..registry import Registry

Moments = dict[str, Tensor]  # each [d], by name; saved in the checkpoint


class ServerOptimizer:
    """Base class: `init` returns the moments before the first round, `step` updates them and returns the step; w_{t+1} = w_t - step."""

    def init(self, w: Tensor) -> Moments:
        raise NotImplementedError

    def step(self, moments: Moments, delta: Tensor) -> Tensor:
        raise NotImplementedError


def _is_one(thing: object) -> bool:
    return isinstance(thing, ServerOptimizer) or (isinstance(thing, type) and issubclass(thing, ServerOptimizer))


SERVER_OPTIMIZERS: Registry[ServerOptimizer] = Registry(
    "server optimizer", ("server_optimizer",), _is_one, "a name such as adam:lr=0.01, or an object such as server_optimizers.Adam()"
)
register = SERVER_OPTIMIZERS.register


def make(spec: Any) -> ServerOptimizer | None:
    """A server optimizer from its spec (`momentum:0.9`), or the object unchanged; None or "none": the model takes the proposed step."""
    if spec is None or (isinstance(spec, str) and spec == "none"):
        return None
    found = SERVER_OPTIMIZERS.make(spec) if isinstance(spec, str) else spec
    if not isinstance(found, ServerOptimizer):
        raise UsageError(f"server_optimizer must be {SERVER_OPTIMIZERS.wanted}, got {spec!r}")
    return found


@register("momentum")
@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """m_t = momentum m_{t-1} + delta_t, then w_{t+1} = w_t - lr (1 - momentum) m_t.

    The factor 1 - momentum keeps the total step as long as without momentum; `damped=false` leaves it out, as FedAvgM's paper does.
    """

    momentum: float = 0.9
    lr: float = 1.0
    damped: bool = True

    def __post_init__(self) -> None:
        unit_interval("momentum", self.momentum)
        number("lr", self.lr, low=0, open_low=True)
        flag("damped", self.damped)

    def init(self, w: Tensor) -> Moments:
        return {"m": torch.zeros_like(w)}

    def step(self, moments: Moments, delta: Tensor) -> Tensor:
        moments["m"] = self.momentum * moments["m"] + delta
        return self.lr * ((1 - self.momentum) * moments["m"] if self.damped else moments["m"])


@dataclass(frozen=True)
class _Adaptive(ServerOptimizer):
    """m_t = beta1 m_{t-1} + (1 - beta1) delta_t and u_t, an average of delta_t^2; then w_{t+1} = w_t - lr m_t / (sqrt(u_t) + tau).

    As in the paper, u starts at tau^2 and there is no bias correction. The step no longer depends on the scale of delta_t: `lr` sets it.
    """

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        number("lr", self.lr, low=0, open_low=True)
        unit_interval("beta1", self.beta1)
        number("tau", self.tau, low=0, open_low=True)

    def init(self, w: Tensor) -> Moments:
        return {"m": torch.zeros_like(w), "u": torch.full_like(w, self.tau**2)}

    def step(self, moments: Moments, delta: Tensor) -> Tensor:
        moments["m"] = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        moments["u"] = self.second(moments["u"], delta * delta)
        return self.lr * moments["m"] / (moments["u"].sqrt() + self.tau)

    def second(self, u: Tensor, squared: Tensor) -> Tensor:
        """u_t from u_{t-1} and delta_t^2."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Averaged(_Adaptive):
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        unit_interval("beta2", self.beta2)


@register("adam")
@dataclass(frozen=True)
class Adam(_Averaged):
    """u_t = beta2 u_{t-1} + (1 - beta2) delta_t^2 (FedAdam)."""

    def second(self, u: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * u + (1 - self.beta2) * squared


@register("yogi")
@dataclass(frozen=True)
class Yogi(_Averaged):
    """u_t = u_{t-1} - (1 - beta2) delta_t^2 sign(u_{t-1} - delta_t^2) (FedYogi)."""

    def second(self, u: Tensor, squared: Tensor) -> Tensor:
        return u - (1 - self.beta2) * squared * torch.sign(u - squared)


@register("adagrad")
@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """u_t = u_{t-1} + delta_t^2 (FedAdagrad); beta1 is 0 by default, as in the paper's experiments."""

    lr: float = 0.1
    beta1: float = 0.0

    def second(self, u: Tensor, squared: Tensor) -> Tensor:
        return u + squared
