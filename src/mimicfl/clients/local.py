"""`Local`: what a client does in one round, with any optimizer or with a custom loop."""

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, flag, number, shown
from ..registry import parse
from .local_sgd import LocalSGD
from .optimizers import BETAS, EPS, OPTIMIZERS, Adam, Momentum, Rule, checked_betas, checked_multipliers


@dataclass(frozen=True)
class Local(LocalSGD):
    """The local training of a client in one round, as `LocalSGD` describes it, with an `optimizer`:

    optimizer       "sgd", "adam", "adamw", a spec such as "adamw:betas=[0.9,0.99]", or a factory of any torch.optim optimizer, called as
                    optimizer(parameters, lr=...): `torch.optim.RMSprop`, or a function
    nesterov        Nesterov's momentum, for SGD with `momentum`
    betas, eps      of Adam and AdamW
    weight_decay    of AdamW is decoupled from the gradient, as in PyTorch, but 0 by default
    lr_multipliers  local learning rates per parameter: {"head.*": 10, "*.bias": 0} multiplies the rate of the parameters whose name
                    matches; the first pattern that matches applies
    loop            a function that replaces the local steps, see `mimicfl.clients.loop`

    Every optimizer restarts from zero in every round.
    """

    optimizer: Any = field(default="sgd", kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)
    betas: tuple[float, float] = field(default=BETAS, kw_only=True)
    eps: float = field(default=EPS, kw_only=True)
    lr_multipliers: Any = field(default=(), kw_only=True)
    loop: Callable[..., Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str):
            self._take_options(self.optimizer)
        elif not callable(self.optimizer):
            expected = f"a name ({', '.join(OPTIMIZERS)}) or a function of (parameters, lr), such as torch.optim.RMSprop"
            raise UsageError(f"optimizer must be {expected}, got {shown(self.optimizer)}")
        super().__post_init__()
        object.__setattr__(self, "nesterov", flag("nesterov", self.nesterov))
        object.__setattr__(self, "betas", checked_betas(self.betas))
        object.__setattr__(self, "eps", number("eps", self.eps, low=0, open_low=True))
        object.__setattr__(self, "lr_multipliers", checked_multipliers(self.lr_multipliers))
        self._check_combination()

    def _take_options(self, spec: str) -> None:
        """Move the options of a spec to the fields of the same name, so that equal settings are equal however they are written."""
        name, values, given = parse(spec)
        made, usual = OPTIMIZERS.make(spec), OPTIMIZERS.make(name)
        said = {*list(made)[: len(values)], *given}
        for option, value in made.items():
            if option not in said:
                continue
            if (now := getattr(self, option)) not in (usual[option], value):
                raise UsageError(f"{option} is {shown(now)}, but {value} in the optimizer {spec!r}; give it once")
            object.__setattr__(self, option, value)
        object.__setattr__(self, "optimizer", name)

    def _check_combination(self) -> None:
        if self.loop is not None and not callable(self.loop):
            raise UsageError(f"loop must be a function of the client's work, got {shown(self.loop)}")
        name = self.optimizer if isinstance(self.optimizer, str) else "a custom optimizer"
        takes = {"sgd": ("momentum", "nesterov"), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}.get(name, ())
        if self.loop is not None:
            name, takes = "a custom loop", ()
            if self.optimizer != "sgd" or self.clip_norm or self.lr_multipliers:
                raise UsageError("a custom loop makes its own steps: remove optimizer, clip_norm and lr_multipliers")
        usual = {each.name: each.default for each in fields(self)}
        for option in ("momentum", "nesterov", "betas", "eps"):
            if option not in takes and getattr(self, option) != usual[option]:
                raise UsageError(f"{option} is not an option of {name}; remove it")
        if callable(self.optimizer) and self.weight_decay:
            raise UsageError("a custom optimizer has its own weight decay: set it in the function that creates the optimizer")
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov needs momentum, as in momentum=0.9")

    @property
    def extras(self) -> list[str]:
        names = [name for name in ("nesterov", "lr_multipliers", "loop") if getattr(self, name)]
        return super().extras + (["optimizer"] if self.optimizer != "sgd" else []) + names

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings. Those that `LocalSGD` lacks are left out at their defaults, so that equal training has an equal fingerprint."""
        added = {each.name: each.default for each in fields(self) if each.kw_only}
        return {key: value for key, value in super().fingerprint.items() if key not in added or value != added[key]}

    @property
    def described(self) -> dict[str, Any]:
        found = {name: value for name, value in super().described.items() if name != "nesterov"}
        options = [(name, usual) for name, usual in (("nesterov", False), ("betas", BETAS), ("eps", EPS)) if getattr(self, name) != usual]
        if options or "optimizer" in found:
            values = ",".join(f"{name}={json.dumps(getattr(self, name))}" for name, _ in options)
            found["optimizer"] = (self.optimizer if isinstance(self.optimizer, str) else _name(self.optimizer)) + (values and f":{values}")
        if "lr_multipliers" in found:
            found["lr_multipliers"] = ",".join(f"{pattern}={factor:g}" for pattern, factor in self.lr_multipliers)
        return found | ({"loop": _name(self.loop)} if self.loop else {})

    @property
    def rule(self) -> Rule | None:
        if self.optimizer in ("adam", "adamw"):
            return Adam(self.betas, self.eps, self.weight_decay if self.optimizer == "adamw" else 0.0)
        return Momentum(self.momentum, nesterov=True) if self.nesterov else None

    @property
    def program(self) -> Hashable:
        custom = None if isinstance(self.optimizer, str) else self.optimizer
        return (super().program, self.rule, self.lr_multipliers, custom, self.loop)

    @property
    def l2(self) -> float:
        return 0.0 if self.optimizer == "adamw" else self.weight_decay

    @property
    def only_in_pytorch(self) -> str:
        if self.loop is not None:
            return "its clients have a custom loop"
        return "" if isinstance(self.optimizer, str) else "its clients have a custom optimizer"

    def worth(self, K: Tensor) -> Tensor:
        """Return the total weight of the gradients in the sum of K steps for SGD; for other optimizers K itself."""
        if self.optimizer != "sgd":
            return K
        if not self.nesterov:
            return super().worth(K)
        # A step holds as much as the next step without Nesterov's momentum: h + beta u_k = u_{k+1} for equal gradients.
        powers = self.momentum ** torch.arange(int(K.max()) + 1, dtype=torch.float64, device=K.device)
        return powers.cumsum(0)[1:].cumsum(0)[K - 1]


def _name(thing: Any) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))
