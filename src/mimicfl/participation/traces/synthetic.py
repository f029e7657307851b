"""`diurnal`: a synthetic trace with the statistics of recorded ones, and its fit to a trace.

Each device alternates between available and unavailable (an alternating renewal process, heterogeneous over the devices). Unavailable times
are exponential with a rate that follows the time of day; available times are lognormal. How much of the time a device is available follows
a beta distribution, and some devices are never available. A fitted spec is a few numbers, which can be shared where the trace cannot.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import UsageError, number, one_of, probability, unit_interval
from ...seeds import stream
from ...text import counted
from ..heterogeneous import scaled
from ..patterns import Pattern, register
from .intervals import DAY, Trace
from .pattern import sampled

OMEGA = 2 * np.pi / DAY
MOST_INTERVALS = 100_000  # per device


@register("diurnal")
@dataclass(frozen=True)
class Diurnal(Pattern):
    """Phones that are available at night and for minutes: synthetic, with the statistics of recorded traces.

    The defaults follow what is published on FLASH's devices (Yang et al., 2021): about 7 % of the time available on average, 30 % of
    the devices never, intervals with a median of 140 s and a mean near 1,900 s, most of the time at night.

    round       seconds per round
    mean        average availability over all devices, including those never available
    never       share of devices that are never available
    spread      standard deviation of the availability of the other devices
    median      of the intervals, in seconds
    sigma       standard deviation of the logarithm of the intervals
    longest     no interval is longer, in seconds
    amplitude   how much the rate of new intervals varies over the day: 0 not at all, close to 1 almost to zero
    hour        hour of the day at which new intervals are most frequent
    when        available at the `start` of a round, or `throughout` it
    """

    round: float = 270.0
    mean: float = 0.07
    never: float = 0.3
    spread: float = 0.12
    median: float = 140.0
    sigma: float = 2.8
    longest: float = 43_200.0
    amplitude: float = 0.7
    hour: float = 0.5
    when: str = "start"

    def __post_init__(self) -> None:
        for name in ("round", "median", "longest"):
            number(name, getattr(self, name), low=0, open_low=True)
        probability("mean", self.mean), probability("never", self.never), unit_interval("amplitude", self.amplitude)
        number("sigma", self.sigma, low=0, high=10), number("spread", self.spread, low=0, high=1), number("hour", self.hour, low=0, high=24)
        one_of("when", self.when, ["start", "throughout"])
        if self.mean > 1 - self.never:
            raise UsageError(
                f"mean={self.mean:g} cannot be reached if {100 * self.never:g} % of the devices are never available; lower never"
            )
        if self.longest <= self.median:
            raise UsageError(f"longest={self.longest:g} must be above median={self.median:g}")

    @property
    def round_seconds(self) -> float | None:
        return float(self.round)

    def duties(self, num_clients: int, seed: int) -> np.ndarray:
        """The share of time that each client is available, [N]."""
        rng = stream(seed, "diurnal devices")
        weights = self._beta(rng, num_clients)
        weights[rng.permutation(num_clients)[: round(self.never * num_clients)]] = 0.0
        present = weights > 0
        duties = np.zeros(num_clients)
        if present.any():
            duties[present] = scaled(weights[present], min(0.98, self.mean * num_clients / present.sum()), 0.0)
        return np.asarray(np.minimum(duties, 0.98))

    def _beta(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Beta with the mean of the devices that are ever available and standard deviation `spread`, as far as one exists."""
        mean = min(self.mean / (1 - self.never), 0.98) if self.never < 1 else 0.0
        if not mean or not self.spread:
            return np.full(size, max(mean, 1e-9))
        total = max(mean * (1 - mean) / self.spread**2 - 1, 0.02)
        return np.asarray(np.maximum(rng.beta(mean * total, (1 - mean) * total, size), 1e-9))

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return self.duties(num_clients, seed) if self.when == "start" else None

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return sampled(self.trace(rounds * self.round, num_clients, seed), rounds, self.round, self.when, wrap=False)

    def trace(self, seconds: float, num_clients: int, seed: int) -> Trace:
        """The intervals of all clients up to this time; a longer trace begins with the same intervals."""
        duty = self.duties(num_clients, seed)
        devices = np.flatnonzero(duty > 0)
        quiet = self._mean_length() * (1 - duty[devices]) / duty[devices]  # mean unavailable time
        rng = stream(seed, "availability")
        on = rng.random(len(devices)) < duty[devices]
        # Available at time 0: such an interval is drawn in proportion to its length, and 0 is a uniform point of it.
        left = self._lengths(rng.random(len(devices)), biased=True) * rng.random(len(devices))
        now = np.where(on, left, 0.0)
        parts = [(devices[on], np.zeros(int(on.sum())), left[on])]
        for k in range(MOST_INTERVALS):
            live = now < seconds
            if not live.any():
                break
            rng = stream(seed, "availability", k)
            wait, chance = rng.exponential(size=len(devices)), rng.random(len(devices))
            start = self._after(now[live], wait[live] * quiet[live])
            length = self._lengths(chance[live])
            parts.append((devices[live], start, start + length))
            now[live] = start + length
        device, start, end = (np.concatenate(part) for part in zip(*parts, strict=True))
        kept = start < seconds
        names = [str(i) for i in range(num_clients)]
        return Trace.of(names, device[kept], start[kept], np.minimum(end[kept], seconds), np.full(num_clients, seconds), "diurnal")

    def _lengths(self, chance: np.ndarray, biased: bool = False) -> np.ndarray:
        """Lognormal lengths below `longest` for uniform numbers; `biased`: in proportion to the length."""
        middle = np.log(self.median) + (self.sigma**2 if biased else 0)
        if not self.sigma:
            return np.full(len(chance), self.median)
        top = _normal_cdf((np.log(self.longest) - middle) / self.sigma)
        return np.asarray(np.exp(middle + self.sigma * _normal_quantile(np.maximum(chance * top, 1e-300))))

    def _mean_length(self) -> float:
        return float(self._lengths((np.arange(10_000) + 0.5) / 10_000).mean())

    def _passed(self, t: np.ndarray) -> np.ndarray:
        """The integral of the daily rate 1 + amplitude cos(omega (t - peak)) up to t."""
        peak = 3600 * self.hour
        return np.asarray(t + self.amplitude / OMEGA * (np.sin(OMEGA * (t - peak)) + np.sin(OMEGA * peak)))

    def _after(self, now: np.ndarray, wait: np.ndarray) -> np.ndarray:
        """The time at which the daily rate has accumulated to `wait` since `now`, by bisection."""
        target = self._passed(now) + wait
        low, high = target - 2 * self.amplitude / OMEGA - 1, target + 2 * self.amplitude / OMEGA + 1
        for _ in range(50):
            middle = (low + high) / 2
            early = self._passed(middle) < target
            low, high = np.where(early, middle, low), np.where(early, high, middle)
        return np.asarray(np.maximum(high, now))


def _normal_cdf(x: float) -> np.ndarray:
    return np.asarray(torch.special.ndtr(torch.from_numpy(np.asarray(x, dtype=float))).numpy())


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    return np.asarray(torch.special.ndtri(torch.from_numpy(np.asarray(p, dtype=float))).numpy())


def fit(trace: Trace, seconds: float = 270.0) -> Diurnal:
    """The `diurnal` pattern with the statistics of a trace."""
    number("round", seconds, low=0, open_low=True)
    duty, lengths = trace.duty, trace.lengths
    kept = lengths > 0
    if kept.sum() < 10:
        raise UsageError(f"the trace has only {counted(int(kept.sum()), 'interval')}, too few to fit a pattern: at least 10 are needed")
    start, length, log = trace.start[kept], lengths[kept], np.log(lengths[kept])
    share = length / trace.period[trace.device[kept]]  # of its device's time
    # The daily wave of availability is that of the starts, weighted by length and smoothed by the intervals themselves. Dividing by the
    # wave of an interval that begins at 0 leaves the wave of the starts.
    wave = np.sum(np.exp(1j * OMEGA * start) * (np.exp(1j * OMEGA * length) - 1) / (1j * OMEGA) * share / length) / share.sum()
    smoothed = np.mean((np.exp(1j * OMEGA * length) - 1) / (1j * OMEGA)) / length.mean()
    amplitude = 2 * wave / smoothed
    found = {
        "mean": duty.mean(),
        "never": (duty == 0).mean(),
        "spread": duty[duty > 0].std(),
        "median": np.exp(np.median(log)),
        "sigma": log.std(),
        "longest": max(length.max(), 2 * np.exp(np.median(log))),
        "amplitude": min(abs(amplitude), 0.95),
        "hour": np.angle(amplitude) / OMEGA / 3600 % 24,
    }
    rounded: dict[str, Any] = {name: float(f"{value:.3g}") for name, value in found.items()}
    return Diurnal(round=seconds, **rounded)
