"""Checks that updates and models are finite: of many runs at once, so that the host waits for a GPU once per round."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import Diverged
from .updates import ClientUpdates, Request

TOGETHER = {"cuda": 2**26, "cpu": 2**16}  # numbers that are joined for one pass; a CPU gains nothing from joining large vectors


def check_updates(request: Request, good: np.ndarray) -> None:
    """Raise `Diverged` unless the updates of all clients are good."""
    if not good.all():
        client = int(request.active[int((~good).argmax())])
        where = f"in round {request.t} at client {client} (local rate {request.eta_L:g})"
        error = Diverged(f"the training loss is no longer finite {where}")
        error.client = client
        raise error


def check_global_model(w: Tensor, request: Request) -> None:
    """Raise `Diverged` unless the model after this round is finite."""
    if not finite_rows([w[None]])[0].all():
        raise_for_model(request)


def raise_for_model(request: Request) -> None:
    raise Diverged(f"the global model is no longer finite in round {request.t} (global rate {request.eta:g})")


def good_clients(updates: Sequence[ClientUpdates]) -> list[np.ndarray]:
    """Which clients' losses and vectors are finite, bool [m] per run."""
    vectors = [[*([] if each.finite else [each.g]), *each.sent.values()] for each in updates]
    flags = iter(finite_rows([*[each.loss[:, None] for each in updates], *[rows for own in vectors for rows in own]]))
    good = [next(flags) for _ in updates]
    for k, (each, own) in enumerate(zip(updates, vectors, strict=True)):
        for _ in own:
            found = next(flags)
            good[k] = good[k] & (found if each.group is None else found[each.group.cpu().numpy()])
    return good


def finite_rows(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Which rows of each tensor [m, n] are finite, bool [m]."""
    parts = list(_joined(tensors))
    if not parts:
        return []
    # A sum is finite only if all its terms are, and takes one pass without temporary vectors. Large finite terms may overflow, though.
    found = torch.cat([torch.isfinite(joined.sum(dim=1)) for joined in parts]).cpu().numpy()
    if not found.all():
        found = torch.cat([torch.isfinite(joined).all(dim=1) for joined in parts]).cpu().numpy()
    return np.split(found, np.cumsum([len(rows) for rows in tensors])[:-1])


def _joined(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors in order, several with equally long rows as one."""
    waiting: list[Tensor] = []
    for rows in tensors:
        most = TOGETHER.get(rows.device.type, 0)
        if waiting and (rows.shape[1:] != waiting[0].shape[1:] or sum(map(torch.numel, waiting)) + rows.numel() > most):
            yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            waiting = []
        waiting.append(rows)
    if waiting:
        yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
