"""Diagnostics: how client dropouts affect the gradient, measured during a run (`--diagnose every=10`).

In a diagnosed round the full gradients of all clients at w_t are computed, active or not, and compared with the applied direction v_t.
This works the same way for every algorithm: v_t is the change of the model divided by the rate (and by K, the local steps, with
update="sum").

Cost: one gradient pass over all training data per diagnosed round. A_1 and A_2 need one more pass for every earlier round in which an
active client last participated; `parts=false` omits them. `power=R` adds 3 R passes for an estimate of L. Without diagnostics there is
no cost.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Step
from ..algorithms.server import Server
from ..errors import Diverged, UsageError, integer
from ..registry import parse
from ..theory.constants import LinearModel, heterogeneity, power_iteration, sampled_variance
from ..theory.population import Population

Diagnosis = dict[str, Any]


@dataclass(frozen=True)
class Diagnose:
    """Which rounds to diagnose, and in how much detail."""

    every: int = 10
    parts: bool = True  # A_1 and A_2
    power: int = 0  # iterations for an estimate of L where it is not known exactly

    def __post_init__(self) -> None:
        integer("every", self.every), integer("power", self.power, low=0, high=1000)
        if not isinstance(self.parts, bool):
            raise UsageError(f"parts must be true or false, got {self.parts!r}")


def parse_diagnose(given: Any) -> Diagnose | None:
    """Parse `every=10`, `every=1,parts=false`, a number of rounds, or `off`."""
    if given is None or isinstance(given, Diagnose):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return Diagnose(given)
    if not isinstance(given, str):
        raise UsageError(f"diagnose must be a text such as every=10, a number of rounds or off, got {given!r}")
    if given.strip() in ("off", ""):
        return None
    _, values, options = parse(f"diagnose:{given}")
    names = [f.name for f in fields(Diagnose)]
    unknown = [key for key in options if key not in names]
    if unknown or len(values) > 1 or (values and "every" in options):
        raise UsageError(f"diagnose {given!r} is not understood; write every=10, optionally with parts=false or power=10")
    try:
        return Diagnose(**({"every": values[0]} if values else {}) | options)
    except UsageError as error:
        raise UsageError(f"diagnose {given!r}: {error}; for example, write every=10") from None


@dataclass(frozen=True)
class Before:
    """Measurements of a round taken before the server's step."""

    w: Tensor
    f: float
    g: Tensor  # [N, d] every client's full gradient at w
    memory: dict[str, float]
    began: float


class Diagnostics:
    """Measures the rounds of a run without changing them. `kept` holds what later rounds need and is saved in checkpoints."""

    def __init__(
        self,
        settings: Diagnose,
        population: Population,
        active: np.ndarray,
        batches: Sequence[int],
        kind: str,
        low: float | None,
        seed: int,
    ) -> None:
        self.settings, self.population, self.active = settings, population, active
        self.batches, self.low, self.seed = batches, low, seed
        self.linear = LinearModel.of(population, kind)
        self.L = float(self.linear.smoothness().max()) if self.linear else None
        self.last = _last_participation(active)
        self.first = int(active.any(axis=1).argmax())
        self.kept: dict[str, Tensor] = {}
        self.pairs: dict[int, list[int]] = {}  # an earlier round -> clients whose next participation is diagnosed
        self.until: dict[int, int] = {}  # an earlier round -> the last of those participations
        for t in range(len(active)) if settings.parts else []:
            for i in np.flatnonzero(active[t] & (self.last[t] >= 0)) if self.due(t) else []:
                self.pairs.setdefault(int(self.last[t, i]), []).append(int(i))
                self.until[int(self.last[t, i])] = t

    def due(self, t: int) -> bool:
        """Whether round t is diagnosed: the first round with active clients, every `every`-th round, and the last."""
        return t == self.first or (t + 1) % self.settings.every == 0 or t + 1 == len(self.active)

    def before(self, t: int, server: Server) -> Before | None:
        """Measure what the server's step will change. Returns None if the round is neither diagnosed nor needed later."""
        if not self.due(t) and t not in self.pairs:
            return None
        began = time.perf_counter()
        w, state = server.w, server.state
        values, g = self.population.gradients(w, server.buffers)
        memory = {f.name: _row_norm(getattr(state, f.name)[:]) for f in fields(state) if len(getattr(state, f.name).shape) == 2}
        return Before(w.clone(), float(self.population.share @ values), g, memory, began)

    def after(self, seen: Before, w: Tensor, step: Step, active: Tensor, g: Tensor, buffers: dict[str, Tensor]) -> Diagnosis | None:
        """Compute the diagnosis of this round after the server's step, and keep what later rounds need."""
        t = step.t
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
                "resolution": torch.finfo(w.dtype).eps * float(seen.w.double().norm()) / rate,  # upper bound of the rounding error of v_t
            }
        self._keep(t, seen, full, v)
        if found is not None:
            if not np.isfinite([found[key] for key in ("f", "grad2", "v2", "E", "gamma", "drift", "newcomers")]).all():
                raise Diverged(f"the gradients are not finite in round {t}")
            found["passes"] = self.population.passes
            found["seconds"] = round(time.perf_counter() - seen.began, 6)
        return found

    def _parts(self, t: int, seen: Before, full: Tensor, active: list[int]) -> Diagnosis:
        """Means over S_t of |A_1|² and |A_2|²: A_1 = v_t' - grad f(w_t'), A_2 = D_i(w_t') - D_i(w_t), where D_i = grad f - grad f_i."""
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

    def _keep(self, t: int, seen: Before, full: Tensor, v: Tensor) -> None:
        clients = self.pairs.get(t, [])
        if clients:
            self.kept[f"error.{t}"] = v - full
            self.kept |= {f"delta.{i}": full - seen.g[i] for i in clients}
        over = [key for key in self.kept if key.startswith("error") and self.until[int(key.removeprefix("error."))] <= t]
        for key in over:
            del self.kept[key]

    def _newcomers(self, t: int, sent: Tensor, full: Tensor, active: list[int]) -> float:
        """q_t of Lemma 4: the squared error of clients that participate for the first time, divided by |S_t|."""
        new = [k for k, i in enumerate(active) if self.last[t, i] < 0]
        if len(new) == len(active):
            return _square(sent.mean(dim=0) - full)  # all are new: only the error of their mean counts
        return float((sent[new] - full).double().square().sum()) / len(active)

    def _constants(self, t: int, seen: Before, buffers: dict[str, Tensor]) -> Diagnosis:
        kappa2 = heterogeneity(self.population, seen.g)
        L, how = self.L, self.linear.how if self.linear else "estimate" if self.settings.power else None
        if self.linear:
            variance = self.linear.variance(seen.w, seen.g, self.batches)
        else:
            variance = sampled_variance(self.population, seen.w, seen.g, self.batches, self.seed, t, draws=1, buffers=buffers)
            if self.settings.power:
                L = float(power_iteration(self.population, seen.w, self.settings.power, self.seed, t, buffers).max())
        return {"kappa2": [float(f"{k:.6g}") for k in kappa2], "sigma2": float(variance.max()), "L": L, "L_how": how}

    def _staleness(self, t: int) -> Diagnosis:
        """Statistics of tau(t, i) over all clients; clients that never participated count from round -1."""
        tau = t - self.last[t]
        quantiles = {"median": float(np.median(tau)), "most": float(np.quantile(tau, 0.9)), "max": int(tau.max())}
        return {"active": sorted(tau[self.active[t]].tolist()), **quantiles}


def _last_participation(active: np.ndarray) -> np.ndarray:
    """The last round before t in which client i participated, or -1; [T, N]."""
    rounds = np.where(active, np.arange(len(active))[:, None], -1)
    return np.concatenate([np.full((1, active.shape[1]), -1), np.maximum.accumulate(rounds, axis=0)[:-1]])


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _row_norm(rows: Tensor) -> float:
    """The root mean square of the rows' norms, in the units that the algorithm uses."""
    return float(rows.double().square().sum(dim=1).mean().sqrt())
