"""Recommend an algorithm: find the benchmarked pattern that is most similar to a schedule, and report its result.

The findings come with the package, so that an installed mimicfl can answer without the records.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from .. import participation
from ..data import partition
from ..errors import UsageError
from ..experiments.build import load_data
from ..files import write_text
from ..settings import Experiment
from .suite import Part, PatternCase

SHIPPED = Path(__file__).with_name("findings.json")  # written by docs/make.py from records/benchmark
ROUNDS, SEEDS = 400, (0, 1, 2)
WORDS = {
    "rate": "mean participation",
    "spread": "how much participation differs between clients",
    "labels": "how far participation depends on labels",
    "persistence": "how long clients stay available",
    "together": "how strongly the availability of all clients is synchronised",
    "groups": "how strongly groups of clients are correlated",
}


# What a finding of a part does not hold for, as far as it is known.
LIMITS = {
    "digits": "in the benchmark, clients take about 15 local steps per round. With 250 (Fashion-MNIST, LeNet, six seeds) SCAFFOLD and "
    "FedSteer were far behind MIFA and MimiC, and FedGain with --average 9 had the best mean; compare them on your own data with "
    "mimicfl compare"
}


@dataclass(frozen=True)
class Profile:
    """Features of a schedule, each on a scale on which a difference of one is large."""

    rate: float  # log2 of the mean participation
    spread: float  # coefficient of variation of the clients' participation, beyond chance
    labels: float  # the same of the classes' participation, beyond what few clients per class explain
    persistence: float  # correlation of a client's availability in consecutive rounds
    together: float  # mean correlation between clients
    groups: float  # root mean square correlation between clients, beyond chance

    def distance(self, other: "Profile") -> float:
        return math.sqrt(sum((getattr(self, name) - getattr(other, name)) ** 2 for name in WORDS))


def profile(experiment: Experiment) -> Profile:
    """The features of an experiment's availability, averaged over a few seeds of schedule and split."""
    drawn = [_schedule(experiment, seed) for seed in SEEDS]
    if drawn[0][0].shape[1] < 2:
        raise UsageError("recommend compares the availability of clients, and there is only one; raise the number of clients")
    if not any(available.any() for available, _ in drawn):
        raise UsageError(f"no client is available in {len(drawn[0][0])} rounds of this availability, so there is nothing to train")
    found = np.array([_features(*each) for each in drawn])
    return Profile(*(round(value, 4) for value in found.mean(axis=0).tolist()))


def _schedule(e: Experiment, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A schedule [T, N] and the label counts of its clients [N, classes]."""
    data = load_data(e)
    if not data.num_classes or data.y_train.ndim != 1:
        raise UsageError(f"recommend needs data with one class label per sample, and {data.name} has none; compare the algorithms instead")
    split = partition.PARTITIONS.make(e.partition, labels=data.y_train, ids=data.ids, num_clients=e.num_clients, seed=seed)
    counts = np.array([np.bincount(data.y_train[indices].numpy(), minlength=data.num_classes) for indices in split])
    pattern = participation.make(e.availability)
    rounds = len(pattern.values) if isinstance(pattern, participation.Explicit) else ROUNDS
    return participation.schedule(pattern, rounds, len(split), seed, class_counts=counts), counts


def _features(available: np.ndarray, counts: np.ndarray) -> list[float]:
    rounds, clients = available.shape
    p = available.mean(axis=0)
    mean = max(float(p.mean()), 1 / (rounds * clients))
    chance = mean * (1 - mean) / rounds  # variance of p of equal clients
    shares = counts / counts.sum(axis=0, keepdims=True).clip(min=1)
    by_class = (shares * p[:, None]).sum(axis=0)
    by_luck = float(p.var()) * float((shares**2).sum(axis=0).mean())  # a class has few clients, which may happen to be rare ones
    x = available - p
    variance = float((x**2).mean())
    lag = float((x[1:] * x[:-1]).mean()) / variance if variance else 0.0
    scaled = x / np.sqrt((x**2).sum(axis=0)).clip(min=1e-9)
    correlation = (scaled.T @ scaled)[~np.eye(clients, dtype=bool)]
    return [
        math.log2(mean),
        math.sqrt(max(0.0, float(p.var()) - chance)) / mean,
        math.sqrt(max(0.0, float(by_class.var()) - by_luck)) / mean,
        2 * lag,
        3 * float(correlation.mean()),
        3 * math.sqrt(max(0.0, float((correlation**2).mean()) - 1 / rounds)),
    ]


@dataclass(frozen=True)
class Finding:
    """What the benchmark found under one pattern, in words, and what the pattern looks like."""

    part: str
    pattern: str
    about: str
    use: str  # the algorithms to use
    by: str  # its lead in points
    sure: str
    profile: Profile


@dataclass(frozen=True)
class Advice:
    """A finding, and how far its pattern is from the schedule that was asked about."""

    finding: Finding
    distance: float
    differs: list[str]  # features in which the schedules differ most, in words


def pattern_profile(part: Part, pattern: PatternCase) -> Profile:
    return profile(Experiment(**part.settings | {"availability": pattern.availability}).resolved())


def advise(experiment: Experiment, findings: Sequence[Finding]) -> list[Advice]:
    """The findings, nearest pattern first."""
    own = profile(experiment)
    found = []
    for finding in findings:
        apart = {name: abs(getattr(own, name) - getattr(finding.profile, name)) for name in WORDS}
        found.append(Advice(finding, own.distance(finding.profile), [WORDS[name] for name in apart if apart[name] > 0.5]))
    return sorted(found, key=lambda advice: advice.distance)


def write_findings(findings: Sequence[Finding], file: Path = SHIPPED) -> None:
    write_text(file, json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")


def shipped(part: Part) -> list[Finding]:
    """The findings that come with the package."""
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return [Finding(**finding | {"profile": Profile(**finding["profile"])}) for finding in found if finding["part"] == part.name]
