"""More candidates of `gain_search.py`: where clients start, and bounds on what a single client's memory can do.

    python benchmarks/local_candidates.py fmnist --device cuda --algorithms "fedgain average=9" "guarded:horizon=400 average=9"

takes the arguments of gain_search.py. What they gave: records/2026-11-19-local-steps.md; for `blended`, records/2026-11-20-one-default.md.
"""

from dataclasses import dataclass, replace
from typing import Any

import gain_search
import torch
from torch import Tensor

import mimicfl as mf
from mimicfl.algorithms.base import Instructions, Step, register
from mimicfl.algorithms.fedsteer import SteerState
from mimicfl.errors import number


@dataclass
class CentredState(SteerState):
    T: Tensor  # [] float64: local rate times local steps in the last round


@register("centred")
@dataclass(frozen=True)
class Centred(mf.FedSteer):
    """Client i starts at w_t + offset T (y_i - v), T = eta_L K, so that its path is centred where the path of the model will be.

    `share` of FedSteer's shift acts in the local steps besides. offset=0.5,share=0: only the start differs from FedVARP or FedGain.
    """

    offset: float = 0.5
    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("offset", self.offset, low=0)
        number("share", self.share, low=0, high=1)

    def init(self, w: Tensor, num_clients: int) -> CentredState:
        return CentredState(**vars(super().init(w, num_clients)), T=torch.zeros((), dtype=torch.float64, device=w.device))

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        shift = super().instructions(state, active).shift
        return Instructions(shift=self.share * shift, start=state.w - (self.offset * state.T).to(state.w.dtype) * shift)

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        super().aggregate(state, active, g, step)  # FedSteer reads the same instructions
        state.T = state.K * step.eta_L


@dataclass
class ProximalState(SteerState):
    eta_L: Tensor  # [] float64: local rate of the last round; 0 before the first


@register("proximal")
@dataclass(frozen=True)
class Proximal(mf.FedSteer):
    """FedSteer whose local steps are pulled back to w_t by mu (w - w_t), mu = 1 / (eta_L reach), as in FedProx.

    A client then moves at most as far as `reach` steps would take it. g / kappa is its mean gradient with weights that favour the last
    steps, kappa = reach (1 - (1 - 1/reach)^K). `share` of the shift acts. As reach grows, it becomes FedSteer.
    """

    reach: float = 100.0
    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("reach", self.reach, low=1)

    def init(self, w: Tensor, num_clients: int) -> ProximalState:
        return ProximalState(**vars(super().init(w, num_clients)), eta_L=torch.zeros((), dtype=torch.float64, device=w.device))

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        rate, given = float(state.eta_L), super().instructions(state, active)
        return replace(given, shift=self.share * given.shift, mu=1 / (rate * self.reach) if rate else 0.0)

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        given = self.instructions(state, active)
        kept, K = 1 - step.eta_L * given.mu, step.K.double()  # the rate may have changed since the last round
        kappa = (1 - kept**K) / (1 - kept) if given.mu else K
        plain = step.per_step(g) * (K / kappa).to(g.dtype)[:, None] - given.shift
        state.eta_L, state.K = torch.full_like(state.eta_L, step.eta_L), step.weights.double() @ K  # FedSteer's horizon needs K
        steps: Any = 1.0 if step.update == "mean" else step.weights.double() @ kappa
        mf.FedGain.aggregate(self, state, active, plain, replace(step, eta=step.eta * steps))  # type: ignore[arg-type]


@register("blended")
@dataclass(frozen=True)
class Blended(mf.FedSteer):
    """FedSteer where clients take few local steps, FedGain where they take many: `half` is the number of steps in the middle.

    With b = 1 / (1 + (K / half)^2), b of the shift acts in the local steps, the memories follow the direction by (1 - b) gain, and the
    model moves b of the way from FedGain's direction towards the mean of the active clients' steps.
    """

    half: float = 60.0
    gain: float = 0.75

    def blend(self, state: Any) -> Any:
        return 1 / (1 + (state.K / self.half) ** 2)

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        shift: Any = super().instructions(state, active).shift
        return Instructions(shift=self.blend(state).to(shift.dtype) * shift)

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        now = (step.per_step(g) - self.instructions(state, active).shift).double()
        state.K = step.weights.double() @ step.K.double()
        b, share, k = self.blend(state), step.share.double(), state.k[active]
        total, left = share @ (now + state.c[active].double()), 1 - state.k_mean
        all_follow = (total + (share @ (1 - k)) * state.v) / share.sum()
        v = state.v = (left * state.v + total) / (left + share @ k)
        held = (1 - b) * self.gain
        state.k_mean = state.k_mean + share @ (held - k)
        state.k[active] = held
        state.c[active] = (held * v - now).to(g.dtype)
        eta: Any = step.eta * (1.0 if step.update == "mean" else state.K)
        state.w = state.w - (eta * (v + b * (all_follow - v))).to(g.dtype)


@dataclass
class ClippedState(SteerState):
    r: Tensor  # [N] float64: norm of each client's last mean gradient; 0 before the first


@register("clipped")
@dataclass(frozen=True)
class Clipped(mf.FedSteer):
    """FedSteer whose shifts have at most `bound` times the median norm of the memories; with `memory`, a bound on what is received, too."""

    bound: float = 1.0
    memory: float = 0.0  # 0: no bound

    def init(self, w: Tensor, num_clients: int) -> ClippedState:
        return ClippedState(**vars(super().init(w, num_clients)), r=torch.zeros(num_clients, dtype=torch.float64, device=w.device))

    def typical(self, state: Any) -> Tensor:
        seen = state.r[state.r > 0]
        return seen.median() if len(seen) else state.r.new_zeros(())

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        given = super().instructions(state, active)
        shift: Any = given.shift
        if not self.bound:
            return given
        factor = self.bound * self.typical(state) / shift.norm(dim=1).double().clamp(min=1e-30)
        return replace(given, shift=shift * factor.clamp(max=1.0).to(shift.dtype)[:, None])

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        shift: Any = self.instructions(state, active).shift
        r = state.r.clone()  # the old norms stay until FedSteer has asked for the instructions once more
        r[active] = (step.per_step(g) - shift).norm(dim=1).double()
        if self.memory:
            factor = (self.memory * r[r > 0].median() / r[active].clamp(min=1e-30)).clamp(max=1.0)
            r[active] *= factor
            K = 1 if step.update == "mean" else step.K[:, None].to(g.dtype)
            g = factor.to(g.dtype)[:, None] * (g - K * shift) + K * shift
        super().aggregate(state, active, g, step)
        state.r = r


@register("guarded")
@dataclass(frozen=True)
class Guarded(mf.FedSteer):
    """FedSteer that takes at most `guard` times the median norm from a client, and does not shift one that exceeded this last time."""

    guard: float = 3.0
    cut: int = 1  # 0: such a client is shifted as before, by its bounded memory

    def init(self, w: Tensor, num_clients: int) -> ClippedState:
        return ClippedState(**vars(super().init(w, num_clients)), r=torch.zeros(num_clients, dtype=torch.float64, device=w.device))

    def factor(self, r: Tensor, active: Tensor) -> Tensor:
        """By how much the last mean gradient of each active client exceeds the bound, [m], at most 1."""
        typical = r[r > 0].median() if bool((r > 0).any()) else r.new_zeros(())  # over all clients seen so far
        return torch.where(r[active] > 0, (self.guard * typical / r[active].clamp(min=1e-30)).clamp(max=1.0), 1.0)

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        given = super().instructions(state, active)
        kept = self.factor(state.r, active)
        kept = (kept == 1).to(state.w.dtype) if self.cut else torch.ones_like(kept).to(state.w.dtype)
        return replace(given, shift=given.shift * kept[:, None])

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        shift: Any = self.instructions(state, active).shift
        r = state.r.clone()  # the old norms stay until FedSteer has asked for the instructions once more
        r[active] = (step.per_step(g) - shift).norm(dim=1).double()
        K = 1 if step.update == "mean" else step.K[:, None].to(g.dtype)
        g = self.factor(r, active).to(g.dtype)[:, None] * (g - K * shift) + K * shift
        super().aggregate(state, active, g, step)
        state.r = r


@dataclass
class MeasuredState(SteerState):
    visits: Tensor  # [N] int64
    echo: Tensor  # [2] float64: sum of the estimates of 1 - phi, and their number


@register("measured")
@dataclass(frozen=True)
class Measured(mf.FedSteer):
    """FedSteer whose shift is a (1 + delta xi), xi = 1 or -1 at random: xi identifies how much of a memory repeats its own shift.

    p_i = phi grad f_i(w) - (1 - phi) a (1 + delta xi) s, so that -xi <p_i - y_i, s> / (a delta |s|^2) has mean 1 - phi, whatever the rest
    of p_i is. The strength is a = limit / (1 - phi), at most 1.
    """

    delta: float = 0.3
    limit: float = 0.5

    def init(self, w: Tensor, num_clients: int) -> MeasuredState:
        visits = torch.zeros(num_clients, dtype=torch.int64, device=w.device)
        return MeasuredState(**vars(super().init(w, num_clients)), visits=visits, echo=torch.zeros(2, dtype=torch.float64, device=w.device))

    def strength(self, state: Any) -> Tensor:
        prior = 15.0  # visits that say: a = 1
        echo = (state.echo[0] + prior * self.limit) / (state.echo[1] + prior)
        return (self.limit / echo.clamp(min=1e-9)).clamp(max=1.0)

    def xi(self, state: Any, active: Tensor) -> Tensor:
        """Scrambled, not in turn: y_i holds the last xi, and a xi that follows from it would count the echo twice."""
        mixed = state.visits[active] * 131_071 + active + 1
        for factor in (73_244_475, 73_244_475):
            mixed = ((mixed ^ (mixed >> 16)) * factor) % 2**32
        return 1.0 - 2.0 * ((mixed >> 15) % 2).double()

    def instructions(self, state: Any, active: Tensor) -> Instructions:
        given = super().instructions(state, active)
        a = self.strength(state) * (1 + self.delta * self.xi(state, active))
        return replace(given, shift=given.shift * a.to(state.w.dtype)[:, None])

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        full: Any = super().instructions(state, active).shift
        s, xi, a = full.double(), self.xi(state, active), self.strength(state)
        guess = state.v - s
        p = step.per_step(g).double() - (a * (1 + self.delta * xi))[:, None] * s
        new = p - guess
        squares = (s * s).sum(dim=1)
        bound = (2 * squares.sqrt() / new.norm(dim=1).clamp(min=1e-30)).clamp(max=1.0)  # outliers
        found = -xi * bound * (new * s).sum(dim=1) / (a * self.delta * squares.clamp(min=1e-30))
        shifted = squares > 0
        echo = state.echo + torch.stack([found[shifted].sum(), shifted.sum().double()])
        super().aggregate(state, active, g, step)
        state.echo = echo
        state.visits[active] += 1


if __name__ == "__main__":
    gain_search.main()
