"""Defences against updates that are well formed but harmful: an adaptive norm bound, and robust aggregation."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, number, shown
from .replies import Update

FACTOR = re.compile(r"([0-9]+(\.[0-9]+)?)x")
FEW = 3  # with fewer norms than this to compare with, an update is only compared with the model
SAMPLES, SENT = "(samples)", "sent:"  # keys of norms beside those of arrays
SANITY = 1e3  # the limit in that case: this many times the model's own scale


@dataclass
class NormBound:
    """Refuses updates that move the model much farther than those of the other clients.

    limit    a fixed distance; None: adaptive
    factor   how many times the median of the clients' last norms an update may reach; None: no adaptive bound

    The median is over clients, not over updates: a client counts once, however often it participates, so fewer than half of the clients
    cannot move it. Norms are those of g, in gradient units, since these change little when the learning rate changes.
    """

    limit: float | None = None
    factor: float | None = None
    last: dict[str, dict[str, float]] = field(default_factory=dict)  # client -> array name ("" for g) -> its last norm

    @classmethod
    def parse(cls, given: Any) -> "NormBound":
        """`"30x"`: thirty times the running median; a number: a fixed distance; None: no bound."""
        if given is None or given == "none":
            return cls()
        if isinstance(given, str) and (found := FACTOR.fullmatch(given.strip())):
            return cls(factor=number("the factor of max_norm", float(found[1]), low=1))
        if isinstance(given, str):
            raise UsageError(f"max_norm must be a number, a multiple of the median such as '30x', or None, got {shown(given)}")
        return cls(limit=number("max_norm", given, low=0, open_low=True))

    def refuse(
        self, updates: dict[str, Update], w: Tensor, buffers: Mapping[str, Tensor], eta_L: float, by_samples: bool
    ) -> dict[str, str]:
        """The clients whose updates must not be aggregated, with the reasons; remembers the norms of the others.

        Where clients are weighted by the samples that they report, these are bounded in the same way.
        """
        norms = {
            client: self._norms(update, buffers) | ({SAMPLES: update.samples} if by_samples else {}) for client, update in updates.items()
        }
        scale = {SAMPLES: float("inf")} if by_samples else {}
        vectors = ["", *(SENT + name for update in list(updates.values())[:1] for name in update.sent)]
        scale |= dict.fromkeys(vectors, SANITY * max(float(w.norm()), len(w) ** 0.5) / eta_L)
        scale |= {name: SANITY * (float(value.double().norm()) + value.numel() ** 0.5) for name, value in buffers.items()}
        refused: dict[str, str] = {}
        for name, sanity in scale.items():
            bound = self._bound({client: found[name] for client, found in norms.items()}, name, sanity)
            for client, found in norms.items():
                if found[name] > bound and client not in refused:
                    refused[client] = self._reason(name, found[name], bound, eta_L)
        self.last |= {client: found for client, found in norms.items() if client not in refused}
        return refused

    def _norms(self, update: Update, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        moved = {name: float((update.buffers[name].double() - value.double()).norm()) for name, value in buffers.items()}
        sent = {SENT + name: float(torch.linalg.vector_norm(value, dtype=torch.float64)) for name, value in update.sent.items()}
        return {"": update.norm} | sent | moved

    def _bound(self, now: dict[str, float], name: str, sanity: float) -> float:
        """The largest admissible norm of one array in this round."""
        if self.limit is not None or self.factor is None:
            return float("inf")
        past = {client: found[name] for client, found in self.last.items() if name in found}
        known = list((past | now).values())
        if len(known) < FEW:
            return sanity
        middle = statistics.median_low(known)
        if len(now) >= FEW:  # a change that most clients of this round share is no attack
            middle = max(middle, statistics.median_low(list(now.values())))
        # A buffer that hardly moves, such as a running mean, may move by its own scale.
        return max(self.factor * middle, 0.0 if name in ("", SAMPLES) or name.startswith(SENT) else sanity / SANITY) if middle else sanity

    def _reason(self, name: str, found: float, bound: float, eta_L: float) -> str:
        if name == SAMPLES:
            return f"it reports {found:.3g} samples, more than {bound:.3g}, {self.factor:g} times the median (max_norm)"
        if name.startswith(SENT):
            vector = name.removeprefix(SENT)
            return f"the norm of its {vector} is {found:.3g}, more than {bound:.3g}, {self.factor:g} times the median (max_norm)"
        if name:
            return f"array {name!r} is {found:.3g} away from the model's, more than {bound:.3g} (max_norm='{self.factor:g}x')"
        return (
            f"its update moves the model by {eta_L * found:.3g}, more than {eta_L * bound:.3g}, {self.factor:g} times the median (max_norm)"
        )

    def check_fixed(self, update: Update, eta_L: float) -> str:
        """Why a fixed bound refuses an update; empty if it does not."""
        if self.limit is None:
            return ""
        for name, value in update.sent.items():
            if eta_L * float(torch.linalg.vector_norm(value, dtype=torch.float64)) > self.limit:
                return f"its {name} would move the model farther than max_norm={self.limit:.3g}"
        if eta_L * update.norm <= self.limit:
            return ""
        return f"its update moves the model by {eta_L * update.norm:.3g}, more than max_norm={self.limit:.3g}"


@dataclass(frozen=True)
class Robust:
    """Robust aggregation.

    clip:R        scale updates that move the model farther than R down to R; with any algorithm, since it sees the scaled updates
    median        coordinate-wise median instead of the mean; only for algorithms without a memory of single clients
    trimmed:S     mean without the share S of the largest and of the smallest values in every coordinate; as for the median
    """

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, given: Any) -> "Robust | None":
        if given is None or given in ("mean", "none"):
            return None
        kind, _, value = str(given).partition(":")
        try:
            if kind == "clip":
                return cls(kind, number("the radius of robust='clip:R'", float(value), low=0, open_low=True))
            if kind == "trimmed":
                share = number("the share of robust='trimmed:S'", float(value), low=0, open_low=True)
                if share < 0.5:
                    return cls(kind, share)
            if kind == "median" and not value:
                return cls(kind)
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
        raise UsageError(f"robust must be 'clip:R', 'median' or 'trimmed:S' with a share S below 0.5, got {shown(given)}")

    @property
    def replaces_mean(self) -> bool:
        return self.kind != "clip"

    def apply(self, g: Tensor, eta_L: float) -> Tensor:
        """The updates [m, d] to aggregate in place of g."""
        if self.kind == "clip":
            norms = torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) * eta_L
            factors: Tensor = (self.value / norms).clamp(max=1.0).to(g.dtype)
            return factors[:, None] * g
        if self.kind == "median":
            return _central(g, (len(g) - 1) // 2)  # one middle value, or the mean of two
        return _central(g, int(self.value * len(g)))


def _central(g: Tensor, cut: int) -> Tensor:
    """For all clients the mean of the values in every coordinate, without the `cut` smallest and largest."""
    ordered: Tensor = torch.sort(g, dim=0)[0]
    center: Tensor = ordered[cut : len(g) - cut].mean(dim=0)
    return center.expand_as(g)
