"""Custom local loops: one function replaces a client's local steps, `mf.Local(loop=function)`.

The function gets a `ClientWork` and changes `work.model` in place. It returns the mean training loss, or a dict with "loss" and
the vectors [d] that the algorithm's instructions ask for by name.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError, number, shown
from .local_sgd import LocalSGD
from .local_update import LocalResult
from .losses import Loss
from .params import Workspace


class ClientWork:
    """What a custom local loop works with.

    model    the client's model, in training mode, at its start point
    batches  the batches (x, y) of this round, in order; they can be iterated several times
    loss     the loss of (output, target)
    lr       the local learning rate
    round    the round, from 0
    client   the number of the client
    add_terms()   after a backward pass, adds the terms of the algorithm (shift, mu) and the weight decay to the gradients
    """

    def __init__(
        self, frame: Workspace, batches: Sequence[Any], lr: float, loss: Loss, key: tuple[int, int], shift: Tensor | float, mu: float
    ) -> None:
        self.model: nn.Module = frame.module
        self.batches: Iterable[Any] = batches
        self.lr, self.loss = lr, loss
        self.round, self.client = key
        self._frame, self._shift, self._mu, self._start = frame, shift, mu, _vector_of(frame)
        self._needs_terms = isinstance(shift, Tensor) or shift != 0.0 or mu != 0.0

    @torch.no_grad()
    def add_terms(self) -> None:
        self._needs_terms = False
        shift = self._shift if isinstance(self._shift, Tensor) else torch.full_like(self._start, self._shift)
        terms = shift + self._mu * (_vector_of(self._frame) - self._start)
        for p, term in zip(self._frame.parameters, terms.split(self._frame.sizes), strict=True):
            term = term.view(p.shape).to(p.dtype)
            p.grad = term if p.grad is None else p.grad + term


def run_loop(
    frame: Workspace,
    batches: Sequence[Any],
    lr: float,
    loss: Loss,
    local: LocalSGD,
    key: tuple[int, int],
    shift: Tensor | float,
    mu: float,
    send: Sequence[str],
) -> LocalResult:
    """Train a client with its custom loop. g is (start - end) / lr in float64, since a loop reports no steps."""
    work = ClientWork(frame, batches, lr, loss, key, shift, mu)
    name = getattr(local.loop, "__name__", type(local.loop).__name__)
    _reset(frame)
    found = local.loop(work)
    if work._needs_terms:
        raise UsageError(
            f"the loop {name} omits the terms that the algorithm or the weight decay adds to a step; "
            "call work.add_terms() after every backward pass"
        )
    g = ((work._start.double() - _vector_of(frame).double()) / lr).to(frame.w.dtype)
    _reset(frame)
    given = found if isinstance(found, dict) else {"loss": found}
    value = given.get("loss")
    mean = _mean_loss(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, name)
    total = torch.tensor(mean * len(batches), dtype=frame.w.dtype, device=frame.w.device)
    return LocalResult(g, total, len(batches), {each: _vector(given.get(each), each, name, frame.w) for each in send})


def _vector_of(frame: Workspace) -> Tensor:
    """The parameters as a vector [d]. Those in half precision are as rounded as a loop sees them: rounding is no part of its update."""
    return torch.cat([p.detach().reshape(-1).to(frame.w.dtype) for p in frame.parameters])


def _mean_loss(value: Any, loop: str) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        return value  # the server then ends the run as diverged
    return number(f"the loss that the loop {loop} returns", value)


def _vector(value: Any, asked: str, loop: str, w: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != w.shape:
        raise UsageError(f"the algorithm asks for {asked}: the loop {loop} must return it as a vector {tuple(w.shape)}, got {shown(value)}")
    return value.detach().to(w)


def _reset(frame: Workspace) -> None:
    """A loop may replace p.data or p.grad, freeze parameters or switch to evaluation mode; the next client must not be affected.

    A loop starts with gradients of zero, not with None, on every engine.
    """
    frame.module.train()
    frame.grad.zero_()
    rounded = {id(p) for p, _, _ in frame.rounded}
    for p, w, g in zip(frame.parameters, frame.w.split(frame.sizes), frame.grad.split(frame.sizes), strict=True):
        p.requires_grad_(True)
        if id(p) in rounded:
            p.grad = None
        else:
            p.data, p.grad = w.view(p.shape), g.view(p.shape)
