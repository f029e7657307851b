"""Lanes: places on the device in which clients train side by side, filled from a list of jobs until it is empty.

A lane holds one client's model and sums; every lane is at its own step. Clients that are through make room for the next, so the
lanes stay full whatever the clients' sizes, and a round of many runs is one pass over one list.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .jobs import Jobs, Needs

STEP_OVERHEAD = 20  # launches of a step, counted in lanes' worth of work
ENOUGH_LANES = 512  # more gains nothing
CPU_LANES = 16
ALIGNED = 64  # every lane's vector begins at a multiple of this: libraries have fast kernels for aligned memory only


class Lanes:
    """Static buffers for `m` clients; the engines' programs read and write them in place."""

    def __init__(self, m: int, needs: Needs, w: Tensor, half: bool = False) -> None:
        d, device, dtype = w.shape[-1], w.device, w.dtype
        self.m, self.batch = m, needs.batch

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(m, *shape, device=device, dtype=kind)

        def vectors(kind: torch.dtype = dtype) -> Tensor:
            return zeros(-(-d // ALIGNED) * ALIGNED, kind=kind)[:, :d]

        self.w, self.g, self.total, self.eta, self.mu = vectors(), vectors(), zeros(), zeros(), zeros()
        self.half = vectors(torch.bfloat16) if half else None  # w as a bfloat16 model computes with it
        self.start = vectors() if needs.prox else None  # w_t, which only a proximal term needs
        self.shift = vectors() if needs.shift else None
        self.u = vectors() if needs.momentum else None
        self.momentum = zeros() if needs.momentum else None
        self.clip = zeros() if needs.clip else None
        self.k, self.keys = zeros(kind=torch.long), zeros(kind=torch.long)
        self.steps = torch.ones(m, dtype=torch.long, device=device)
        self.sizes = torch.ones(m, needs.steps, dtype=torch.int32, device=device)
        self.samples = zeros(needs.steps * needs.batch, kind=torch.int32)
        self.moves = zeros(needs.steps * needs.batch, 3, kind=torch.int8) if needs.augment else None

    def load(self, lanes: np.ndarray, chosen: np.ndarray, jobs: Jobs) -> None:
        """Put these jobs into these lanes."""
        at, job = (torch.from_numpy(a).to(self.w.device) for a in (lanes, chosen))
        w = jobs.w[torch.from_numpy(jobs.ask[chosen]).to(self.w.device)]
        self.w[at] = w
        if self.half is not None:
            self.half[at] = w.to(torch.bfloat16)
        self.g[at] = 0.0
        self.total[at] = 0.0
        self.k[at] = 0
        self.steps[at] = torch.from_numpy(jobs.steps[chosen]).to(self.w.device)
        self.eta[at], self.mu[at], self.keys[at] = jobs.eta[job], jobs.mu[job], jobs.keys[job]
        if self.start is not None:
            self.start[at] = w
        if self.shift is not None:
            self.shift[at] = 0.0 if jobs.shift is None else jobs.shift[job]
        if self.u is not None and self.momentum is not None:
            self.u[at], self.momentum[at] = 0.0, jobs.momentum[job]
        if self.clip is not None:
            self.clip[at] = jobs.clip[job]
        self.sizes[at, : jobs.sizes.shape[1]] = jobs.sizes[job]
        self.samples[at, : jobs.samples.shape[1]] = jobs.samples[job]
        if self.moves is not None and jobs.moves is not None:
            self.moves[at, : jobs.moves.shape[1]] = jobs.moves[job]


def work_off(jobs: Jobs, lanes: Lanes, advance: Callable[[int, int], int]) -> tuple[Tensor, Tensor]:
    """All jobs through the lanes; `advance(m, most)` moves the first m lanes by at most so many steps and says by how many."""
    g = torch.empty(len(jobs), jobs.w.shape[1], dtype=jobs.w.dtype, device=jobs.w.device)
    total = torch.empty(len(jobs), dtype=jobs.w.dtype, device=jobs.w.device)
    waiting = list(np.argsort(-jobs.steps, kind="stable"))[::-1]  # the longest first, so that none of them is left to run alone
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
            at, job = torch.from_numpy(done).to(g.device), torch.from_numpy(holds[done]).to(g.device)
            g[job], total[job] = lanes.g[at], lanes.total[at]
            holds[done] = -1
    return g, total


def width(counts: Sequence[int], device: torch.device) -> int:
    """How many lanes for rounds with so many jobs each: a step costs some launches whatever it holds, and a little for each lane."""
    if device.type != "cuda":
        return max(1, min(CPU_LANES, max(counts)))
    tried = sorted({-(-max(counts) // waves) for waves in range(1, 33)} | set(range(4, 257, 4)))
    held = np.asarray([count for count in counts if count])

    def cost(lanes: int) -> float:
        return float((-(-held // lanes)).sum()) * (STEP_OVERHEAD + lanes)

    return min((lanes for lanes in tried if lanes <= ENOUGH_LANES), key=cost)
