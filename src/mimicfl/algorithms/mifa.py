"""MIFA: an absent client is represented by the last update it sent (Gu et al., 2021)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import one_of
from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory
from .client_numbers import on_host


@dataclass
class MifaState(State):
    G: ClientMemory  # [N, d] each client's last update
    total: Tensor  # [d] float64: sum of the rows of G, weighted by their share of the population
    seen: Tensor  # [N] bool; in host memory, because the host reads it every round
    weight: Tensor  # [] float64: the share of the population that has been seen


@register("mifa")
@dataclass(frozen=True)
class MIFA(Algorithm[MifaState]):
    """w_{t+1} = w_t - eta_t mean over ALL N clients of their latest update G_i.

    `never_seen` says how a client counts before it first participates: `zero` as a zero update, `exclude` not at all (the mean
    is over the clients seen so far), `wait` keeps the model unchanged until every client has participated once.
    `memory="step"` stores eta*g instead of g, without rescaling (as the script of the MimiC paper's authors does).
    """

    never_seen: str = "zero"
    memory: str = "gradient"
    color = "#cc79a7"
    paper_rank = 4
    authors = "memory=step"

    def __post_init__(self) -> None:
        one_of("never_seen", self.never_seen, ["zero", "exclude", "wait"])
        one_of("memory", self.memory, ["gradient", "step"])

    def init(self, w: Tensor, num_clients: int) -> MifaState:
        seen = torch.zeros(num_clients, dtype=torch.bool, device="cpu")
        total, weight = (torch.zeros(shape, dtype=torch.float64, device=w.device) for shape in (w.shape, ()))
        return MifaState(w, memory(w, num_clients), total, seen, weight)

    def aggregate(self, state: MifaState, active: Tensor, g: Tensor, step: Step) -> None:
        eta, g = (1.0, step.eta * g) if self.memory == "step" else (step.eta, g)
        # float64: large early updates would otherwise leave their rounding error behind forever.
        change = g.double() - state.G[active].double()
        state.total = state.total + step.share.double() @ change  # sum over N of share_i G_i
        state.G[active] = g  # G_i <- g_i for i in S_t; absent clients keep theirs
        clients, seen = on_host(active), state.seen.numpy()
        if not (known := seen[clients]).all():
            new = torch.from_numpy(~known).to(g.device, non_blocking=True)
            state.weight = state.weight + (step.share * new).sum(dtype=torch.float64)
            seen[clients] = True
        if self.never_seen == "wait" and not state.seen.all():
            return
        v = state.total / state.weight if self.never_seen == "exclude" else state.total
        state.w = state.w - eta * v.to(g.dtype)
