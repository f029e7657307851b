"""The update of lanes after a gradient, in place: what `clients.local_update` does after the backward pass, for many clients."""

import torch
from torch import Tensor

from ...clients.local_update import shortening
from .buffers import Packed
from .lanes import Lanes


def update_pieces(lanes: Lanes, rows: slice, pieces: list[Tensor]) -> None:
    """Update some lanes, given the batch gradients in consecutive pieces [rows, n]; on a GPU in one pass over memory where possible."""
    if lanes.direct:
        from .cuda.move import VECTORS, move

        mu = lanes.mu if lanes.prox else None
        held = {name: getattr(lanes, name) for name in VECTORS} | {"mu": mu}
        move({name: value if value is None or name == "start" else value[rows] for name, value in held.items()}, pieces)
    else:
        h = torch.cat(pieces, dim=1)
        if lanes.clip is not None:
            h = h * shortening(h.to(lanes.w.dtype).norm(dim=1), lanes.clip[rows])[:, None]
        update_lanes(lanes, rows, h)


def update_lanes(lanes: Lanes, rows: slice, h: Tensor) -> None:
    """Update some lanes, given the batch gradients h [rows, d].

    Finished lanes do not change; `k`, the lanes' number of steps so far, must be counted by the caller.
    """
    w = lanes.w[rows]
    h = h.to(w.dtype)
    going = (lanes.k[rows] < lanes.steps[rows])[:, None]
    if lanes.decay is not None:
        _keep_gradients(lanes, rows, h + lanes.decay[rows, None] * w, going)
    if lanes.shift is not None:
        h = h + lanes.shift[rows]
    if lanes.start is not None:
        h = h + lanes.mu[rows, None] * (w - lanes.start[rows])
    if lanes.rule is not None:
        h = lanes.rule.step(h, w, lanes.k[rows, None] + 1, [slot[rows] for slot in lanes.slots])
    elif lanes.u is not None and lanes.momentum is not None:
        h = lanes.momentum[rows, None] * lanes.u[rows] + h
        lanes.u[rows] = h  # also in finished lanes, where it is not read again
    if lanes.scale is not None:
        h = h * lanes.scale
    h = torch.where(going, h, 0.0)
    lanes.g[rows] += h
    w -= lanes.eta[rows, None] * h
    if lanes.half is not None:
        lanes.half[rows] = w.to(lanes.half.dtype)


def keep_buffers(lanes: Packed, after: Packed, going: Tensor) -> None:
    """Store the buffers after a step, except those of finished lanes; `lanes` are the rows of `Lanes.buffers` that have made the step."""
    for kind, held in lanes.items():
        held.copy_(torch.where(going[:, None], after[kind].to(held.dtype), held))


def _keep_gradients(lanes: Lanes, rows: slice, gradient: Tensor, going: Tensor) -> None:
    """Keep the first and the last gradient of a lane, if clients send them."""
    if lanes.first is not None:
        lanes.first[rows] = torch.where(lanes.k[rows, None] == 0, gradient, lanes.first[rows])
    if lanes.last is not None:
        lanes.last[rows] = torch.where(going, gradient, lanes.last[rows])
