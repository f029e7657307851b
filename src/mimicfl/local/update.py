"""Local SGD: the only client-side training code there is.

The client's part of all algorithms is one affine rule, h = grad F_i(w; batch) + shift + mu (w - w_t), applied K times, with the momentum
and the clipping of gradients that the user wants.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, fading, number, plain, whole
from ..params import Workspace
from .losses import Loss
from .lr import schedule


@dataclass(frozen=True)
class LocalSGD:
    """What a client does in a round: `epochs` passes over its data, or `steps` steps, of SGD with rate `lr`.

    `epochs` or `steps` as a list, one number a client, lets slow clients do less. `batch_size=None` is full-batch gradient descent. Every
    pass is a new shuffle; its last batch may be smaller. `weight_decay` adds weight_decay * w to every gradient: the clients then train
    f_i(w) + weight_decay/2 |w|^2. `momentum` is PyTorch's, from zero in every round: u = momentum u + h, w = w - lr u. `clip_norm`
    shortens every batch's gradient that is longer to this length, before anything is added to it, as `torch.nn.utils.clip_grad_norm_`
    does; 0 is no clipping.
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
                object.__setattr__(self, name, tuple(whole(f"each of {name}", number, high=10_000_000) for number in value))
            elif value is not None:
                object.__setattr__(self, name, whole(name, value, high=10_000_000))
        schedule(self.lr)
        object.__setattr__(self, "weight_decay", number("weight_decay", self.weight_decay, low=0))
        object.__setattr__(self, "momentum", fading("momentum", self.momentum))
        object.__setattr__(self, "clip_norm", number("clip_norm", self.clip_norm, low=0))

    @property
    def extras(self) -> list[str]:
        """What makes its steps other than plain gradients of the loss, by name."""
        return [name for name in ("weight_decay", "momentum", "clip_norm") if getattr(self, name)]

    @property
    def lists(self) -> dict[str, tuple[int, ...]]:
        """What is said client by client."""
        return {name: value for name in ("epochs", "steps") if isinstance(value := getattr(self, name), tuple)}

    def of(self, client: int) -> "LocalSGD":
        """What this client does."""
        return replace(self, **{name: each[client] for name, each in self.lists.items()}) if self.lists else self

    def decayed(self, w_t: Tensor, shift: Tensor | float, mu: float) -> tuple[Tensor | float, float]:
        """Shift and mu with the weight decay in them: decay w = decay w_t + decay (w - w_t), so no engine need know of it."""
        decay = self.weight_decay
        return (shift + decay * w_t, mu + decay) if decay else (shift, mu)

    def worth(self, K: Tensor) -> Tensor:
        """How many gradients' worth the sum of K steps is: K, and more with momentum.

        A gradient then counts in its own step and, ever less, in all later ones; divided by this the sum is a mean of gradients again.
        """
        if not self.momentum:
            return K
        fading = self.momentum ** torch.arange(int(K.max()), dtype=torch.float64, device=K.device)
        return fading.cumsum(0).cumsum(0)[
            K - 1
        ]  # a step holds 1 + beta + beta^2 + ... of a gradient; added up, not in closed form: K = 1 is 1

    def batch_sizes(self, samples: int, client: int = 0) -> list[int]:
        """The sizes of all K batches of one round for a client with so many samples."""
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
        """Which samples those batches hold: as many shuffled passes as are needed, end to end."""
        count = sum(sizes)
        if sizes[0] == samples:  # full batches: their order means nothing, so it may as well be the natural one
            return np.tile(np.arange(samples), len(sizes))
        passes = [rng.permutation(samples) for _ in range(math.ceil(count / samples))]
        return np.concatenate(passes)[:count]


def local_update(
    work: Workspace,
    batches: Iterable[tuple[Tensor, Tensor]],
    eta_L: float,
    loss: Loss,
    shift: Tensor | float = 0.0,
    mu: float = 0.0,
    momentum: float = 0.0,
    clip_norm: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Train the workspace in place; returns g = sum of the K steps (h, or u with momentum), [d], and the sum of the batch losses.

    g is accumulated: (w_t - w) / eta_L would lose digits once eta_L is small.
    """
    w, grad = work.w, work.grad
    w_t = w.clone() if mu else w
    g, u = torch.zeros_like(w), torch.zeros_like(w) if momentum else None
    total = torch.zeros((), dtype=w.dtype, device=w.device)
    shifted = isinstance(shift, Tensor) or shift != 0.0
    for x, y in batches:
        grad.zero_()
        value = loss(work.module(x), y)
        value.backward()
        with torch.no_grad():
            h = grad.mul_(shortening(grad.norm(), clip_norm)) if clip_norm else grad
            if shifted:
                h = h + shift
            if mu:
                h = h + mu * (w - w_t)
            if u is not None:
                h = u.mul_(momentum).add_(h)
            g += h
            w.sub_(h, alpha=eta_L)
            total += value.detach()
    return g, total


def shortening(length: Tensor, most: Tensor | float) -> Tensor:
    """What a gradient of this length is multiplied by to be no longer than `most`; the small number is PyTorch's."""
    return (most / (length + 1e-6)).clamp(max=1.0)
