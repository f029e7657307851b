"""Lanes: static buffers on the device in which clients train in parallel, filled from a list of jobs until it is empty.

A lane holds one client's model and its sum of gradients. Lanes progress independently: when a client finishes, the next one takes its
lane. The lanes therefore stay full even if clients have different sizes, and a round of many runs is one pass over one list.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .jobs import Jobs, Needs, Results

STEP_OVERHEAD = 20  # cost of a step's launches, in units of one lane's work
ENOUGH_LANES = 512  # more lanes gain nothing
CPU_LANES = 16
ALIGNED = 64  # every lane's vector begins at a multiple of this, because libraries have fast kernels only for aligned memory


class Lanes:
    """Static buffers for `m` clients; the engines' programs read and write them in place."""

    def __init__(self, m: int, needs: Needs, jobs: Jobs, half: bool = False, scale: Tensor | None = None, pieces: bool = False) -> None:
        """`half`: the model uses a bfloat16 copy; `scale`: multipliers of the learning rate; `pieces`: gradients come in pieces."""
        w = jobs.w
        d, device, dtype = w.shape[-1], w.device, w.dtype
        self.m, self.batch = m, needs.batch

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(m, *shape, device=device, dtype=kind)

        def vectors(kind: torch.dtype = dtype) -> Tensor:
            return zeros(-(-d // ALIGNED) * ALIGNED, kind=kind)[:, :d]

        # One kernel updates float32 lanes with plain SGD. It computes w from g and w_t, which lanes with the same start share.
        self.direct = pieces and w.is_cuda and dtype == torch.float32 and needs.plain_sgd and scale is None
        self.g, self.total, self.eta, self.mu = vectors(), zeros(), zeros(), zeros()
        self.w = self.g if self.direct and half else vectors()  # the kernel then writes only the bfloat16 copy
        self.half = vectors(torch.bfloat16) if half else None  # bfloat16 copy of w, used by the model
        self.prox = needs.prox
        self.start = vectors() if needs.prox or self.direct else None  # w_t
        self.origin = zeros(kind=torch.long) if self.direct else None  # the row of a lane's w_t in `start`
        self.shared = SharedStarts(m)
        self.shift = vectors() if needs.shift else None
        self.rule, self.scale = needs.rule, scale  # scale: [d] multipliers of the learning rate
        slots = needs.rule.slots if needs.rule else int(needs.momentum)
        self.u = vectors() if slots > 0 else None  # momentum or first moment, and second moment
        self.v = vectors() if slots > 1 else None
        self.momentum = zeros() if needs.momentum else None
        self.clip = zeros() if needs.clip else None
        self.first = vectors() if needs.first else None
        self.last = vectors() if needs.last else None
        self.decay = zeros() if needs.first or needs.last else None
        self.k, self.keys = zeros(kind=torch.long), zeros(kind=torch.long)
        self.steps = torch.ones(m, dtype=torch.long, device=device)
        self.sizes = torch.ones(m, needs.steps, dtype=torch.int32, device=device)
        self.samples = zeros(needs.steps * needs.batch, kind=torch.int32)
        self.moves = zeros(needs.steps * needs.batch, 3, kind=torch.int8) if needs.augment else None
        self.buffers = {name: zeros(rows.shape[1], kind=rows.dtype) for name, rows in jobs.buffers.items()}

    @property
    def slots(self) -> list[Tensor]:
        """What the optimizer of each lane keeps, [m, d] each."""
        return [slot for slot in (self.u, self.v) if slot is not None]

    def load(self, lanes: np.ndarray, chosen: np.ndarray, jobs: Jobs) -> None:
        """Load these jobs into these lanes."""
        at, job = (places(a, self.w.device) for a in (lanes, chosen))
        request = torch.from_numpy(jobs.request[chosen]).to(self.w.device)
        w = jobs.w[request]
        self.w[at] = w
        for name, held in self.buffers.items():
            held[at] = jobs.buffers[name][request]
        if self.half is not None:
            self.half[at] = w.to(torch.bfloat16)
        self.g[at] = 0.0
        self.total[at] = 0.0
        self.k[at] = 0
        self.steps[at] = torch.from_numpy(jobs.steps[chosen]).to(self.w.device)
        self.eta[at], self.mu[at], self.keys[at] = jobs.eta[job], jobs.mu[job], jobs.keys[job]
        if self.origin is not None and self.start is not None:
            rows, fresh = self.shared.place(lanes, jobs.request[chosen])
            self.origin[at] = torch.from_numpy(rows).to(w.device)
            for which, row in fresh:
                self.start[row] = jobs.w[which]
        elif self.start is not None:
            self.start[at] = w
        if self.shift is not None:
            self.shift[at] = 0.0 if jobs.shift is None else jobs.shift[job]
        for slot in self.slots:
            slot[at] = 0.0
        if self.momentum is not None:
            self.momentum[at] = jobs.momentum[job]
        if self.clip is not None:
            self.clip[at] = jobs.clip[job]
        if self.decay is not None:
            self.decay[at] = jobs.decay[job]
        self.sizes[at, : jobs.sizes.shape[1]] = jobs.sizes[job]
        self.samples[at, : jobs.samples.shape[1]] = jobs.samples[job]
        if self.moves is not None and jobs.moves is not None:
            self.moves[at, : jobs.moves.shape[1]] = jobs.moves[job]


class SharedStarts:
    """Assigns rows of `Lanes.start` to the requests whose jobs are in the lanes. There are at least as many rows as lanes."""

    def __init__(self, m: int) -> None:
        self.clear(m)

    def clear(self, m: int) -> None:
        self.request = np.full(m, -1)  # of each lane
        self.row: dict[int, int] = {}  # of each request

    def place(self, lanes: np.ndarray, requests: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Put jobs of these requests into these lanes; return their rows, and the (request, row) that must be filled first."""
        self.request[lanes] = requests
        held = set(self.request.tolist())
        self.row = {request: row for request, row in self.row.items() if request in held}
        free = iter(sorted(set(range(len(self.request))) - set(self.row.values())))
        fresh = [(request, next(free)) for request in dict.fromkeys(requests.tolist()) if request not in self.row]
        self.row |= dict(fresh)
        return np.array([self.row[request] for request in requests.tolist()]), fresh


def run_jobs(jobs: Jobs, lanes: Lanes, advance: Callable[[int, int], int]) -> Results:
    """Train all jobs in the lanes.

    `advance(m, most)` advances the first m lanes by at most `most` steps and returns the number of steps.
    """

    def rows(*shape: int) -> Tensor:
        return torch.empty(len(jobs), *shape, dtype=jobs.w.dtype, device=jobs.w.device)

    d, sent = jobs.w.shape[1], {f"{name}_gradient": held for name in ("first", "last") if (held := getattr(lanes, name)) is not None}
    buffers = {name: given.new_empty(len(jobs), given.shape[1]) for name, given in jobs.buffers.items()}
    results = Results(rows(d), rows(), {name: rows(d) for name in sent}, buffers)
    lanes.shared.clear(lanes.m)  # requests are numbered per list of jobs
    waiting = list(np.argsort(-jobs.steps, kind="stable"))[::-1]  # longest first, so that no long job runs alone at the end
    holds = np.full(lanes.m, -1)
    left = np.zeros(lanes.m, dtype=np.int64)
    while waiting or (holds >= 0).any():
        free = np.flatnonzero(holds < 0)[: len(waiting)]
        if len(free):
            chosen = np.array([waiting.pop() for _ in free])
            lanes.load(free, chosen, jobs)
            holds[free], left[free] = chosen, jobs.steps[chosen]
        busy = np.flatnonzero(holds >= 0)
        left[busy] -= advance(int(busy[-1]) + 1, int(left[busy].min() if waiting else left[busy].max()))
        done = busy[left[busy] <= 0]
        if len(done):
            at, job = (places(numbers, jobs.w.device) for numbers in (done, holds[done]))
            results.g[job], results.total[job] = lanes.g[at], lanes.total[at]
            for name, held in sent.items():
                results.sent[name][job] = held[at]
            for name, held in lanes.buffers.items():
                results.buffers[name][job] = held[at]
            holds[done] = -1
    return results


def places(numbers: np.ndarray, device: torch.device) -> slice | Tensor:
    """Return rows as an index: a slice if they are consecutive, because a slice is copied faster than a list of rows."""
    if (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers).to(device)


def width(counts: Sequence[int], device: torch.device) -> int:
    """Choose the number of lanes for rounds with these numbers of jobs; a step has a fixed launch cost and a small cost per lane."""
    if device.type != "cuda":
        return max(1, min(CPU_LANES, max(counts)))
    tried = sorted({-(-max(counts) // waves) for waves in range(1, 33)} | set(range(4, 257, 4)))
    held = np.asarray([count for count in counts if count])

    def cost(lanes: int) -> float:
        return float((-(-held // lanes)).sum()) * (STEP_OVERHEAD + lanes)

    return min((lanes for lanes in tried if lanes <= ENOUGH_LANES), key=cost)
