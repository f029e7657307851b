"""The update of lanes after a gradient, in place: what `clients.local_update` does after the backward pass, for many clients."""

import torch
from torch import Tensor

from ...clients.local_update import shortening
from .buffers import Packed
from .lanes import Lanes

EVERYTHING = slice(None)


def update_pieces(lanes: Lanes, rows: slice, pieces: list[Tensor]) -> None:
    """Update some lanes, given the batch gradients in consecutive pieces [rows, n]; on a GPU in one pass over memory where possible."""
    if lanes.clip is not None:
        length = torch.stack([piece.to(lanes.w.dtype).norm(dim=1) for piece in pieces]).norm(dim=0)
        pieces = [piece * shortening(length, lanes.clip[rows])[:, None] for piece in pieces]
    bare = lanes.u is None and lanes.decay is None and lanes.scale is None
    begin = 0
    for h in pieces:
        part = slice(begin, begin + h.shape[1])
        if bare and lanes.w.is_cuda and lanes.w.dtype == torch.float32:
            _move(lanes, rows, h, part)
        else:
            update_lanes(lanes, rows, h, part)
        begin = part.stop


def _move(lanes: Lanes, rows: slice, h: Tensor, part: slice) -> None:
    """The same as `update_lanes` for plain SGD, in one kernel."""
    from .batched.kernels import move

    half, shift, start = (None if held is None else held[rows, part] for held in (lanes.half, lanes.shift, lanes.start))
    scalars = (lanes.eta[rows], lanes.mu[rows], lanes.k[rows], lanes.steps[rows])
    move(lanes.w[rows, part], lanes.g[rows, part], h, half, shift, start, scalars)


def update_lanes(lanes: Lanes, rows: slice, h: Tensor, part: slice = EVERYTHING) -> None:
    """Update some lanes, in some entries of their vectors, given the batch gradients h [rows, part].

    Finished lanes do not change; `k`, the lanes' number of steps so far, must be counted by the caller.
    """
    w = lanes.w[rows, part]
    h = h.to(w.dtype)
    going = (lanes.k[rows] < lanes.steps[rows])[:, None]
    if lanes.decay is not None:
        _keep_gradients(lanes, rows, part, h + lanes.decay[rows, None] * w, going)
    if lanes.shift is not None:
        h = h + lanes.shift[rows, part]
    if lanes.start is not None:
        h = h + lanes.mu[rows, None] * (w - lanes.start[rows, part])
    if lanes.rule is not None:
        h = lanes.rule.step(h, w, lanes.k[rows, None] + 1, [slot[rows, part] for slot in lanes.slots])
    elif lanes.u is not None and lanes.momentum is not None:
        h = lanes.momentum[rows, None] * lanes.u[rows, part] + h
        lanes.u[rows, part] = h  # also in finished lanes, where it is not read again
    if lanes.scale is not None:
        h = h * lanes.scale[part]
    h = torch.where(going, h, 0.0)
    lanes.g[rows, part] += h
    w -= lanes.eta[rows, None] * h
    if lanes.half is not None:
        lanes.half[rows, part] = w.to(lanes.half.dtype)


def keep_buffers(lanes: Packed, after: Packed, going: Tensor) -> None:
    """Store the buffers after a step, except those of finished lanes; `lanes` are the rows of `Lanes.buffers` that have made the step."""
    for kind, held in lanes.items():
        held.copy_(torch.where(going[:, None], after[kind].to(held.dtype), held))


def _keep_gradients(lanes: Lanes, rows: slice, part: slice, gradient: Tensor, going: Tensor) -> None:
    """Keep the first and the last gradient of a lane, if clients send them."""
    if lanes.first is not None:
        lanes.first[rows, part] = torch.where(lanes.k[rows, None] == 0, gradient, lanes.first[rows, part])
    if lanes.last is not None:
        lanes.last[rows, part] = torch.where(going, gradient, lanes.last[rows, part])
