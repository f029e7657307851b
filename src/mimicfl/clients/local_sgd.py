"""`LocalSGD`: what a client does in one round, and the batches that it trains on."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, integer, number, plain, unit_interval
from .lr import schedule
from .optimizers import Rule

EXTRAS = ("weight_decay", "momentum", "clip_norm")  # what makes a step differ from the plain gradient of the loss


@dataclass(frozen=True)
class LocalSGD:
    """The local training of a client in one round: `epochs` passes over its data, or `steps` steps, of SGD with learning rate `lr`.

    `epochs` or `steps` may be a list with one number per client, so that slow clients do less work. `batch_size=None` means full-batch
    gradient descent. The data is shuffled before every pass; the last batch of a pass may be smaller. `weight_decay` adds
    weight_decay * w to every gradient, so clients minimise f_i(w) + weight_decay/2 |w|^2. `momentum` is that of PyTorch and restarts
    from zero in every round: u = momentum u + h, w = w - lr u. `clip_norm` limits the norm of each batch gradient, before anything is
    added to it, as `torch.nn.utils.clip_grad_norm_` does; 0 means no clipping.
    """

    epochs: int | Sequence[int] | None = None
    batch_size: int | None = 16
    lr: Any = 0.01
    steps: int | Sequence[int] | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give epochs or steps, not both")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("epochs", "steps", "batch_size"):
            value = plain(getattr(self, name))
            if name != "batch_size" and isinstance(value, (list, tuple, range)):
                if not value:
                    raise UsageError(f"{name} must be a number or a list with one number per client, got an empty list")
                object.__setattr__(self, name, tuple(integer(f"each of {name}", number, high=10_000_000) for number in value))
            elif value is not None:
                object.__setattr__(self, name, integer(name, value, high=10_000_000))
        schedule(self.lr)
        object.__setattr__(self, "weight_decay", number("weight_decay", self.weight_decay, low=0))
        object.__setattr__(self, "momentum", unit_interval("momentum", self.momentum))
        object.__setattr__(self, "clip_norm", number("clip_norm", self.clip_norm, low=0))

    @property
    def extras(self) -> list[str]:
        """The names of the options in use that make a step differ from the plain gradient of the loss."""
        return [name for name in EXTRAS if getattr(self, name)]

    @property
    def optimizer(self) -> Any:
        """The optimizer's name, or a function that makes one; `Local` has others than SGD."""
        return "sgd"

    @property
    def lr_multipliers(self) -> Any:
        """Pairs of name pattern and multiplier of the learning rate."""
        return ()

    @property
    def loop(self) -> Any:
        """A function that replaces the local steps."""
        return None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings that identify the local training, without the learning rate."""
        return {key: value for key, value in vars(self).items() if key != "lr"}

    @property
    def described(self) -> dict[str, Any]:
        """The options in use as a run folder shows them: numbers and text."""
        return {name: getattr(self, name) for name in self.extras}

    @property
    def rule(self) -> Rule | None:
        """How an optimizer makes steps from gradients; None for SGD, with or without momentum."""
        return None

    @property
    def program(self) -> Hashable:
        """Equal for local trainings whose clients can train in one program."""
        return bool(self.momentum), bool(self.clip_norm)

    @property
    def passes(self) -> Hashable:
        """Equal for local trainings that draw the same batches of the same samples."""
        return self.epochs, self.steps, self.batch_size

    @property
    def l2(self) -> float:
        """The weight decay that is part of the gradient."""
        return self.weight_decay

    @property
    def only_in_pytorch(self) -> str:
        """Why only plain and workers can train it; empty if every engine may try."""
        return ""

    @property
    def lists(self) -> dict[str, tuple[int, ...]]:
        """The options given as lists, with one number per client."""
        return {name: value for name in ("epochs", "steps") if isinstance(value := getattr(self, name), tuple)}

    def of(self, client: int) -> "LocalSGD":
        """Return the local training of one client."""
        return replace(self, **{name: each[client] for name, each in self.lists.items()}) if self.lists else self

    def decayed(self, w_t: Tensor, shift: Tensor | float, mu: float) -> tuple[Tensor | float, float]:
        """Fold the weight decay into shift and mu, by decay w = decay w_t + decay (w - w_t), so that engines need no support for it."""
        decay = self.l2
        return (shift + decay * w_t, mu + decay) if decay else (shift, mu)

    def worth(self, K: Tensor) -> Tensor:
        """Return the total weight of the gradients in the sum of K steps: K without momentum, more with it.

        With momentum, a gradient also contributes to all later steps, with decreasing weight. Dividing the sum of the steps by the
        total weight gives a mean of gradients.
        """
        if not self.momentum:
            return K
        # A step has the weight 1 + beta + beta^2 + ...; summed, since the closed form would not be exactly 1 for K = 1.
        powers = self.momentum ** torch.arange(int(K.max()), dtype=torch.float64, device=K.device)
        return powers.cumsum(0).cumsum(0)[K - 1]

    def batch_sizes(self, samples: int, client: int = 0) -> list[int]:
        """Return the sizes of all K batches of one round, for a client with this many samples."""
        if self.lists:
            return self.of(client).batch_sizes(samples)
        assert not isinstance(self.epochs, Sequence)
        assert not isinstance(self.steps, Sequence)
        size = min(self.batch_size or samples, samples)
        per_pass = [size] * (samples // size) + ([samples % size] if samples % size else [])
        if self.epochs is not None:
            return per_pass * self.epochs
        assert self.steps is not None
        return (per_pass * math.ceil(self.steps / len(per_pass)))[: self.steps]

    def order(self, samples: int, sizes: list[int], rng: np.random.Generator) -> np.ndarray:
        """Return the sample numbers in all batches, concatenated: as many shuffled passes as needed."""
        count = sum(sizes)
        if sizes[0] == samples:  # the order within a full batch does not matter
            return np.tile(np.arange(samples), len(sizes))
        passes = [rng.permutation(samples) for _ in range(math.ceil(count / samples))]
        return np.concatenate(passes)[:count]
