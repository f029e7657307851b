"""What dropouts do to the gradient, measured while a run goes on: `--diagnose every=10`.

At a diagnosed round all clients' full gradients at w_t are computed, present or not, and the applied direction v_t is set against
them. The same for every algorithm; v_t is what the model moved by, divided by the rate (and by the K local steps with update="sum").

Cost: one gradient pass over all training data for a diagnosed round; for A_1 and A_2 one more for every earlier round in which
an active client was last there (`parts=false` leaves them out); `power=R` adds 3 R passes for an estimate of L. Turned off, nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Step
from ..errors import Diverged, UsageError, whole
from ..registry import parse
from ..theory.constants import LinearModel, heterogeneity, power_iteration, sampled_variance
from ..theory.population import Population

Diagnosis = dict[str, Any]


@dataclass(frozen=True)
class Diagnose:
    """Which rounds to look at, and how closely."""

    every: int = 10
    parts: bool = True  # A_1 and A_2
    power: int = 0  # iterations for an estimate of L where it is not known exactly

    def __post_init__(self) -> None:
        whole("every", self.every), whole("power", self.power, low=0, high=1000)
        if not isinstance(self.parts, bool):
            raise UsageError(f"parts must be true or false, got {self.parts!r}")


def plan(given: Any) -> Diagnose | None:
    """`every=10`, `every=1,parts=false`, a number of rounds, or `off`."""
    if given is None or isinstance(given, Diagnose):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return Diagnose(given)
    if not isinstance(given, str):
        raise UsageError(f"diagnose takes every=10, a number of rounds or off, got {given!r}")
    if given.strip() in ("off", ""):
        return None
    _, values, options = parse(f"diagnose:{given}")
    names = [f.name for f in fields(Diagnose)]
    unknown = [key for key in options if key not in names]
    if unknown or len(values) > 1 or (values and "every" in options):
        raise UsageError(f"diagnose {given!r} is not understood: write every=10, and if wanted parts=false or power=10")
    try:
        return Diagnose(**({"every": values[0]} if values else {}) | options)
    except UsageError as error:
        raise UsageError(f"diagnose {given!r}: {error}; write for example every=10") from None


@dataclass(frozen=True)
class Look:
    """A round as it was before the server acted."""

    w: Tensor
    f: float
    g: Tensor  # [N, d] every client's full gradient at w
    memory: dict[str, float]
    began: float


class Watch:
    """Looks at a run from the side; what it remembers between rounds is in `kept`, and belongs into checkpoints."""

    def __init__(
        self, plan: Diagnose, population: Population, available: np.ndarray, batches: Sequence[int], kind: str, low: float | None, seed: int
    ) -> None:
        self.plan, self.population, self.available, self.batches, self.low, self.seed = plan, population, available, batches, low, seed
        self.linear = LinearModel.of(population, kind)
        self.L = float(self.linear.smoothness().max()) if self.linear else None
        self.last = _last_seen(available)
        self.first = int(available.any(axis=1).argmax())
        self.kept: dict[str, Tensor] = {}
        self.pairs: dict[int, list[int]] = {}  # an earlier round -> clients whose next appearance is diagnosed
        self.until: dict[int, int] = {}  # ... and the last of those appearances
        for t in range(len(available)) if plan.parts else []:
            for i in np.flatnonzero(available[t] & (self.last[t] >= 0)) if self.due(t) else []:
                self.pairs.setdefault(int(self.last[t, i]), []).append(int(i))
                self.until[int(self.last[t, i])] = t

    def due(self, t: int) -> bool:
        """The first round with anybody in it, every so many, and the last."""
        return t == self.first or (t + 1) % self.plan.every == 0 or t + 1 == len(self.available)

    def look(self, t: int, w: Tensor, buffers: dict[str, Tensor], state: Any) -> Look | None:
        """Before the server acts; None if this round is neither diagnosed nor needed later."""
        if not self.due(t) and t not in self.pairs:
            return None
        began = time.perf_counter()
        values, g = self.population.gradients(w, buffers)
        memory = {f.name: _row_norm(getattr(state, f.name)[:]) for f in fields(state) if len(getattr(state, f.name).shape) == 2}
        return Look(w.clone(), float(self.population.share @ values), g, memory, began)

    def judge(self, t: int, seen: Look, w: Tensor, step: Step, active: Tensor, g: Tensor, buffers: dict[str, Tensor]) -> Diagnosis | None:
        """After the server acted: the figures of this round, and what later rounds need of it."""
        scale = float(step.K.double().mean()) if step.update == "sum" else 1.0
        rate = step.eta * scale
        full = self.population.mean(seen.g)  # grad f(w_t)
        v = (seen.w.double() - w.double()).to(w.dtype) / rate  # v_t
        found = None
        if self.due(t):
            mean = step.mean(seen.g[active])  # of the active clients' gradients
            sent = step.per_step(g)
            found = {
                **{"eta": rate, "K": float(step.K.double().mean()), "eta_L": step.eta_L, "f": seen.f, "f_low": self.low},
                **{"grad2": _square(full), "v2": _square(v), "E": _square(v - full), "gamma": _square(mean - full)},
                "drift": float(step.weights.double() @ (sent - seen.g[active]).double().square().sum(dim=1)),
                **self._parts(t, seen, full, active.tolist()),
                "newcomers": self._newcomers(t, sent, full, active.tolist()),
                **self._constants(t, seen, buffers),
                "memory": seen.memory,
                "staleness": self._staleness(t),
                "resolution": torch.finfo(w.dtype).eps * float(seen.w.double().norm()) / rate,  # rounding error of v_t, at most
            }
        self._keep(t, seen, full, v)
        if found is not None:
            if not np.isfinite([found[key] for key in ("f", "grad2", "v2", "E", "gamma", "drift", "newcomers")]).all():
                raise Diverged(f"the gradients have left the range of their numbers in round {t}")
            found["passes"] = self.population.passes
            found["seconds"] = round(time.perf_counter() - seen.began, 6)
        return found

    def _parts(self, t: int, seen: Look, full: Tensor, active: list[int]) -> Diagnosis:
        """A_1 = v_t' - grad f(w_t') and A_2 = D_i(w_t') - D_i(w_t) with D_i = grad f - grad f_i, means of their squares over S_t."""
        first, second, both = [], [], torch.zeros_like(full)
        for i in active:
            delta, error = self.kept.pop(f"delta.{i}", None), self.kept.get(f"error.{int(self.last[t, i])}")
            if delta is not None and error is not None:
                change = delta - (full - seen.g[i])
                both += error + change
                first.append(_square(error))
                second.append(_square(change))
        if not first:
            return {"A1": None, "A2": None, "A": None}
        return {"A1": float(np.mean(first)), "A2": float(np.mean(second)), "A": _square(both / len(first))}

    def _keep(self, t: int, seen: Look, full: Tensor, v: Tensor) -> None:
        clients = self.pairs.get(t, [])
        if clients:
            self.kept[f"error.{t}"] = v - full
            self.kept |= {f"delta.{i}": full - seen.g[i] for i in clients}
        over = [key for key in self.kept if key.startswith("error") and self.until[int(key.removeprefix("error."))] <= t]
        for key in over:
            del self.kept[key]

    def _newcomers(self, t: int, sent: Tensor, full: Tensor, active: list[int]) -> float:
        """q_t of Lemma 4: the squared error that clients bring who are there for the first time, over |S_t|."""
        new = [k for k, i in enumerate(active) if self.last[t, i] < 0]
        if len(new) == len(active):
            return _square(sent.mean(dim=0) - full)  # all new at once: it is their mean that counts
        return float((sent[new] - full).double().square().sum()) / len(active)

    def _constants(self, t: int, seen: Look, buffers: dict[str, Tensor]) -> Diagnosis:
        kappa2 = heterogeneity(self.population, seen.g)
        L, how = self.L, self.linear.how if self.linear else "estimate" if self.plan.power else None
        if self.linear:
            variance = self.linear.variance(seen.w, seen.g, self.batches)
        else:
            variance = sampled_variance(self.population, seen.w, seen.g, self.batches, self.seed, t, draws=1, buffers=buffers)
            if self.plan.power:
                L = float(power_iteration(self.population, seen.w, self.plan.power, self.seed, t, buffers).max())
        return {"kappa2": [float(f"{k:.6g}") for k in kappa2], "sigma2": float(variance.max()), "L": L, "L_how": how}

    def _staleness(self, t: int) -> Diagnosis:
        """tau(t, i) of all clients, those never seen counted from before the run."""
        tau = t - self.last[t]
        quantiles = {"median": float(np.median(tau)), "most": float(np.quantile(tau, 0.9)), "max": int(tau.max())}
        return {"active": sorted(tau[self.available[t]].tolist()), **quantiles}


def _last_seen(available: np.ndarray) -> np.ndarray:
    """The last round before t in which client i was there, -1 if none, [T, N]."""
    rounds = np.where(available, np.arange(len(available))[:, None], -1)
    return np.concatenate([np.full((1, available.shape[1]), -1), np.maximum.accumulate(rounds, axis=0)[:-1]])


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _row_norm(rows: Tensor) -> float:
    """The root mean square of the clients' norms, in the algorithm's own units."""
    return float(rows.double().square().sum(dim=1).mean().sqrt())
