"""The local steps of one client, the same for all algorithms.

Every step follows the affine rule h = grad F_i(w; batch) + shift + mu (w - start); the client's optimizer turns h into a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data.samples import Samples, forward
from ..errors import UsageError, nearest
from .local_sgd import LocalSGD
from .losses import Loss
from .optimizers import Momentum, Rule, TorchRule, check_factory
from .params import Terms, Workspace, multipliers

GRADIENTS = ("first_gradient", "last_gradient")  # what clients can send besides g: gradients of their objective at a step


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's local training."""

    g: Tensor  # [d] sum of the steps, in units of the learning rate: the client's model is now start - eta_L g
    total: Tensor  # sum of the batch losses
    steps: int
    sent: dict[str, Tensor] = field(default_factory=dict)  # [d] each, by the names that were asked for


def check_send(send: Sequence[str]) -> None:
    """Raise a `UsageError` unless clients can send vectors with these names."""
    for name in send:
        if name not in GRADIENTS:
            raise UsageError(f"clients cannot send {name!r}; {nearest(name, GRADIENTS)}")


def local_update(
    work: Workspace,
    batches: Iterable[tuple[Samples, Samples]],
    eta_L: float,
    loss: Loss,
    local: LocalSGD | None = None,
    shift: Tensor | float = 0.0,
    mu: float = 0.0,
    send: Sequence[str] = (),
) -> LocalResult:
    """Train the workspace in place, one step per batch. `local` gives optimizer and clipping; its decay is part of shift and mu.

    g is accumulated step by step: (w_t - w) / eta_L would lose digits if eta_L is small.
    """
    local = local or LocalSGD()
    w = work.w
    w_t = w.clone() if mu else w
    g, rule, scale = torch.zeros_like(w), rule_of(local, work, eta_L), work.scale(local.lr_multipliers)
    if isinstance(rule, TorchRule):
        scale = None  # its parameter groups have their own rates
    slots = [torch.zeros_like(w) for _ in range(rule.slots)] if rule else []
    total = torch.zeros((), dtype=w.dtype, device=w.device)
    terms = Terms(shift, mu, w_t)
    sent = {name: torch.zeros_like(w) for name in send}
    k = 0
    for k, (x, y) in enumerate(batches, 1):
        work.zero_grad()
        value = loss(forward(work.module, x), y)
        value.backward()
        total += value.detach()
        with torch.no_grad():
            if not (local.clip_norm or sent or rule or scale is not None):
                work.descend(g, eta_L, terms)
                continue
            h = work.gradient()
            if local.clip_norm:
                h = h.mul_(shortening(h.norm(), local.clip_norm))
            for name, vector in sent.items():
                if k == 1 or name == "last_gradient":
                    torch.add(h, w, alpha=local.l2, out=vector)
            h = terms.added_to(h, w)
            if rule is not None:
                h = rule.step(h, w, k, slots)
            if scale is not None:
                h = h * scale
            work.apply(h, g, eta_L)
    return LocalResult(g, total, k, sent)


def check_local(local: LocalSGD, work: Workspace) -> None:
    """Raise a `UsageError` if the local training does not fit the model: patterns that match nothing, optimizers that cannot step."""
    factors = multipliers(work.module, local.lr_multipliers)
    if callable(local.optimizer):
        check_factory(local.optimizer, work.w, [p.shape for p in work.parameters], factors)


def rule_of(local: LocalSGD, work: Workspace, eta_L: float) -> Rule | None:
    """Return how a client makes steps from gradients; None if a step is the gradient itself."""
    if callable(local.optimizer):
        shapes = [p.shape for p in work.parameters]
        return TorchRule(local.optimizer, work.w, shapes, multipliers(work.module, local.lr_multipliers), eta_L)
    return local.rule or (Momentum(local.momentum) if local.momentum else None)


def shortening(length: Tensor, most: Tensor | float) -> Tensor:
    """Return the factor that clips a gradient of this norm to `most`. The constant 1e-6 is that of PyTorch."""
    return (most / (length + 1e-6)).clamp(max=1.0)
