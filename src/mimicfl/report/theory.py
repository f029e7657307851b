"""The theory applied to a recorded run: which conditions its rates satisfy, and its bounds compared with measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..clients.local_sgd import EXTRAS
from ..errors import UsageError, integer, number
from ..metrics.history import History
from ..registry import parse
from ..theory.bounds import local_limit, summed_lemma1, theorem1, theorem2, weighted_mean
from ..theory.mixing import certified_rounds, largest_constant, mixing_bound
from ..theory.rates import best_nu, has, largest_c, needs, varphi
from ..theory.rounds import Rounds
from .theory_rows import diagnosed, local_rates, rates


@dataclass(frozen=True)
class Condition:
    """One condition of a theorem, round by round."""

    text: str
    needed_by: str
    holds: np.ndarray  # [rounds checked]
    number: np.ndarray  # the numbers of these rounds

    @property
    def fails_from(self) -> int | None:
        """The first round in which the condition fails, or None."""
        broken = np.flatnonzero(~self.holds)
        return int(self.number[broken[0]]) if len(broken) else None


@dataclass(frozen=True)
class Check:
    """The result of `theory check`."""

    rounds: Rounds
    conditions: list[Condition]
    nu: float | None
    tau_max: int
    c: float  # the largest certified c for the length and constants of this run, with beta = rounds
    beta: float
    length: int  # rounds of the run, including empty ones
    constant: float | None  # the largest constant rate certified by the mixing bound; None if it does not apply
    no_mixing: str  # the reason why the mixing bound does not apply

    @property
    def certified(self) -> int:
        """The number of rounds for which all conditions of Theorem 2 hold."""
        return self._until("Theorem 2")

    @property
    def mixed(self) -> int:
        """The number of rounds for which the mixing bound holds."""
        return self._until("mixing") if self.constant else 0

    def _until(self, name: str) -> int:
        broken = [c.fails_from for c in self.conditions if name in c.needed_by and c.fails_from is not None]
        return min(broken, default=self.length)


def check(history: History, L: float, K: int, tau_max: int | None = None, nu: float | None = None) -> Check:
    """Check in which rounds the conditions of Theorems 1 and 2 hold, for any schedule of rates."""
    if not _uniform(history):
        raise UsageError("the paper's results are for clients that count equally: this run was weighted by samples")
    if terms := not_covered(history.config):
        raise UsageError(f"the paper's results are for synchronous plain SGD: this run had {' and '.join(terms)}")
    rounds = rates(history, K)
    local = local_rates(history)
    phi = varphi(L, K, float(local.max()))
    if tau_max is not None and integer("tau_max", tau_max) < rounds.tau_max:
        raise UsageError(f"tau_max={tau_max} is smaller than the largest gap of the run, {rounds.tau_max}: give at least that")
    falling = rounds.rho > 1 + 1e-12
    known = rounds.head(int(np.argmin(falling)) + 1 if not falling.all() else rounds.T)
    nu = best_nu(known, L, phi, tau_max) if nu is None else number("nu", nu, low=0, high=1, open_low=True)
    enough = np.zeros(rounds.T, dtype=bool)
    if nu is not None:
        enough[: known.T] = has(known, L) >= needs(known, nu, phi, tau_max)
    first = np.array([rounds.active[0].all()])
    small = f"eta_L <= 1/(4 L K) = {local_limit(L, K):.3g}" if K > 1 else "eta_L small enough (K = 1: any is)"
    gaps = "the gaps of this run" if tau_max is None else f"any gaps up to {tau_max}"
    conditions = [
        Condition(small, "Theorem 1", local <= local_limit(L, K), rounds.number),
        Condition(f"eta_t <= 1/L = {1 / L:.3g}", "Theorem 1", rounds.eta <= 1 / L, rounds.number),
        Condition("all clients active in round 0", "Theorem 2, mixing", first, rounds.number[:1]),
        Condition("eta_L constant (if K > 1)", "Theorem 2, mixing", (local == local[0]) | (K == 1), rounds.number),
        Condition("rho_t > 1", "Theorem 2", falling, rounds.number[1:]),
        Condition(f"(*) of docs/theory.md, {gaps}", "Theorem 2", enough, rounds.number),
        Condition(
            "the same as the paper prints it, (lr-2)", "(the paper)", _printed(rounds, L, K, float(local.max()), tau_max), rounds.number
        ),
    ]
    constant, no_mixing = None, ""
    try:
        covered = certified_rounds(rounds, L, K, float(local.max()))
        constant = largest_constant(rounds, L, K, float(local.max()))
        text = "rates within the mixing condition"
        conditions.append(Condition(text, "mixing", np.arange(rounds.T) < covered, rounds.number))
    except UsageError as reason:
        no_mixing = str(reason)
    tau, T = tau_max or rounds.tau_max, len(history.rows)
    c = largest_c(L, rounds.N, tau, T, float(T), None, K, float(local.max()))
    return Check(rounds, conditions, nu, tau, c, float(T), T, constant, no_mixing)


def not_covered(config: Mapping[str, Any]) -> list[str]:
    """What a run has that the theorems exclude."""
    return [
        *[key for key in (*EXTRAS, "lr_multipliers", "loop") if config.get(key)],
        *(["asynchronous training"] if config.get("asynchronous") else []),
        *([f"the server optimizer {name}"] if (name := config.get("server_optimizer", "none")) != "none" else []),
        *([f"the optimizer {name}"] if parse(str(name := config.get("optimizer", "sgd")))[0] != "sgd" else []),
    ]


def _uniform(history: History) -> bool:
    return bool(history.config.get("weighting", "uniform") == "uniform")


def _printed(rounds: Rounds, L: float, K: int, eta_L: float, tau_max: int | None) -> np.ndarray:
    """Condition (lr-2) for the largest nu below every rho_t - 1, the weakest form of it."""
    room = float((rounds.rho - 1).min(initial=1.0))
    if room <= 0:
        return np.zeros(rounds.T, dtype=bool)
    nu = 0.999 * room
    right = (
        (np.append(rounds.rho, 1.0) - nu) * varphi(L, K, eta_L, printed=True) * (tau_max or rounds.tau_max) * rounds.N / (2 * nu * rounds.m)
    )
    return np.asarray(has(rounds, L) / rounds.eta >= right)


@dataclass(frozen=True)
class BoundCurves:
    """The measured weighted mean of the squared gradient norms and its upper bounds, for every number of rounds."""

    number: np.ndarray
    measured: np.ndarray
    grad2: np.ndarray
    bounds: dict[str, np.ndarray]
    notes: list[str]


def bounded(history: History) -> BoundCurves | None:
    """Measurements and bounds of one run; None if it was not diagnosed."""
    found = diagnosed(history)
    if not found:
        return None
    K = round(float(np.mean([d["K"] for d in found])))
    rounds = rates(history, K)
    at = np.array([d["round"] for d in found])
    place = np.maximum(np.searchsorted(at, rounds.number, side="right") - 1, 0)  # the last diagnosis up to each round
    held = {key: np.array([d[key] for d in found], dtype=float)[place] for key in ("grad2", "v2", "E", "gamma", "newcomers")}
    notes = []
    if len(found) < rounds.T:
        notes.append("between diagnosed rounds the last measured values are held; diagnose with every=1 to measure all rounds")
    if any(abs(d["K"] - K) > 1e-9 for d in found):
        notes.append(f"clients take different numbers of local steps; the theory has a single K, so their mean, {K}, is used")
    measured = weighted_mean(rounds.eta, held["grad2"])
    constants = [d["L"] for d in found if d["L"] is not None]
    lines: dict[str, np.ndarray] = {}
    excluded = not_covered(history.config)
    missing = {
        "L is not known, add power=10 to diagnose for an estimate": not constants,
        "the loss is custom and may be negative": found[0]["f_low"] is None,
        "the paper's results are for clients that count equally": not _uniform(history),
        "the paper's results are for synchronous plain SGD, and this run had " + " and ".join(excluded): bool(excluded),
    }
    if any(missing.values()):
        notes.append("no bound: " + next(reason for reason, holds in missing.items() if holds))
    else:
        lines = _bounds(history, rounds, found, held, max(constants), K, notes)
        if found[0]["L_how"] == "estimate":
            notes.append("L is an estimate from power iteration, so the bounds are estimates, too")
    return BoundCurves(rounds.number, measured, held["grad2"], lines, notes)


def _bounds(
    history: History, rounds: Rounds, found: Sequence[dict[str, Any]], held: dict[str, np.ndarray], L: float, K: int, notes: list[str]
) -> dict[str, np.ndarray]:
    Delta = max(found[0]["f"] - found[0]["f_low"], 0.0)
    sigma = max(d["sigma2"] for d in found) ** 0.5
    local = local_rates(history)
    lines = {"Lemma 1 with the measured E_t": summed_lemma1(rounds, Delta, L, held["E"], held["v2"])}
    kappa2 = np.array([max(d["kappa2"][i] for d in found) for i in range(rounds.N)])
    algorithm = parse(str(history.config.get("algorithm", "")))[0]
    try:
        if algorithm == "fedavg":
            active = rounds.active @ kappa2 / rounds.m
            lines["Theorem 1"] = theorem1(rounds, Delta, L, held["gamma"], active, K, local, sigma)
        if algorithm == "mimic" and K > 1 and len(set(local)) > 1:
            notes.append("Theorem 2 needs a constant local rate if K > 1: give --lr a number and --global-lr the schedule")
        elif algorithm == "mimic":
            eta_L = float(local.max())
            bound = theorem2(rounds, Delta, L, held["newcomers"], held["v2"], K, eta_L, sigma)
            if np.isfinite(bound[1:]).any():
                lines["Theorem 2"] = bound
            if sigma == 0 and rounds.active[0].all() and eta_L <= local_limit(L, K):
                drift = 8 * L**2 * eta_L**2 * K * (K - 1) * (held["grad2"] + kappa2.mean())  # Lemma 2, over all clients
                lines["mixing bound"] = mixing_bound(rounds, Delta, L, drift, K, eta_L)
            if not np.isfinite(bound).all():
                notes.append(
                    f"Theorem 2 does not apply from round {int(rounds.number[np.argmax(~np.isfinite(bound))])} on: rho_t > 1 fails there"
                )
    except UsageError as reason:
        notes.append(str(reason))
    if "mixing bound" in lines and np.isinf(lines["mixing bound"]).all():
        del lines["mixing bound"]
        notes.append("no mixing bound: the rates are too large for how fast the clients mix; see mimicfl theory check")
    return lines
