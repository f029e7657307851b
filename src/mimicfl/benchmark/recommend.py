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
# What the nearest pattern must have in common with the schedule, and the least value of the feature that shows it.
KINDS = {"persistence": 0.2, "groups": 0.25, "spread": 0.3, "labels": 0.3}
WORDS = {
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

    @property
    def participation(self) -> float:
        """The mean participation."""
        return float(2**self.rate)

    @property
    def kind(self) -> dict[str, int]:
        """By feature of KINDS, whether the schedule has it (1, or -1 with the opposite sign) or not (0)."""
        values = {name: getattr(self, name) for name in KINDS}
        return {name: int(math.copysign(abs(value) >= KINDS[name], value)) for name, value in values.items()}

    def distance(self, other: "Profile") -> float:
        """How far two schedules are apart in structure; the mean participation does not count."""
        return math.sqrt(sum((getattr(self, name) - getattr(other, name)) ** 2 for name in WORDS))

    def sentence(self) -> str:
        """The schedule in words."""
        if self.participation > 0.995:
            return "every client is always available"
        kind = self.kind
        stay = ("independently from round to round", "for several rounds in a row", "rarely in consecutive rounds")[kind["persistence"]]
        words = [
            f"on average, clients are available in {shown_rate(self)} of the rounds; {stay}",
            "their availability is correlated" if kind["groups"] else "independently of each other",
            "some much more often than others" if kind["spread"] else "all about equally often",
        ]
        return ", ".join([*words, *["those with certain labels more rarely"] * bool(kind["labels"])])


def shown_rate(of: Profile) -> str:
    return f"{100 * of.participation:.{2 if of.participation < 0.995 else 3}g} %"


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
    available = participation.schedule(pattern, rounds, len(split), seed, class_counts=counts)
    return available[int(pattern.warm_start and rounds > 1) :], counts  # the forced round says nothing about availability


def _features(available: np.ndarray, counts: np.ndarray) -> list[float]:
    rounds, clients = available.shape
    p = available.mean(axis=0)
    mean = max(float(p.mean()), 1 / (rounds * clients))
    shares = counts / counts.sum(axis=0, keepdims=True).clip(min=1)
    by_class = (shares * p[:, None]).sum(axis=0)
    by_luck = float(p.var()) * float((shares**2).sum(axis=0).mean())  # a class has few clients, which may happen to be rare ones
    x = available - p
    variance = float((x**2).mean())
    lag = float((x[1:] * x[:-1]).mean()) / variance if variance else 0.0
    stay = min(max(lag, 0.0), 0.95)  # rounds that resemble the previous ones count less (as for a process of first order)
    chance = mean * (1 - mean) / rounds * (1 + stay) / (1 - stay)  # variance of p of equal clients
    by_chance = (1 + stay**2) / (1 - stay**2) / rounds  # mean square correlation of independent clients
    scaled = x / np.sqrt((x**2).sum(axis=0)).clip(min=1e-9)
    correlation = (scaled.T @ scaled)[~np.eye(clients, dtype=bool)]
    return [
        math.log2(mean),
        math.sqrt(max(0.0, float(p.var()) - chance)) / mean,
        math.sqrt(max(0.0, float(by_class.var()) - by_luck)) / mean,
        2 * lag,
        3 * float(correlation.mean()),
        3 * math.sqrt(max(0.0, float((correlation**2).mean()) - by_chance)),
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
    own: Profile  # of the schedule that was asked about
    differs: list[str]  # features in which the schedules differ most, in words

    @property
    def distance(self) -> float:
        return self.own.distance(self.finding.profile)

    @property
    def unlike(self) -> int:
        """In how many features only one of the two schedules has the structure."""
        return sum(self.own.kind[name] != value for name, value in self.finding.profile.kind.items())

    @property
    def factor(self) -> float:
        """How many times more often clients participate in one of the two schedules."""
        return float(2 ** abs(self.own.rate - self.finding.profile.rate))


def pattern_profile(part: Part, pattern: PatternCase) -> Profile:
    return profile(Experiment(**part.settings | {"availability": pattern.availability}).resolved())


def advise(experiment: Experiment, findings: Sequence[Finding]) -> list[Advice]:
    """The findings, nearest pattern first: the one with the same kind of structure, then with the least distance.

    The rate comes last: it differs much less between the recorded patterns than their structure does.
    """
    own = profile(experiment)
    found = []
    for finding in findings:
        apart = {name: abs(getattr(own, name) - getattr(finding.profile, name)) for name in WORDS}
        found.append(Advice(finding, own, [WORDS[name] for name in apart if apart[name] > 0.5]))
    return sorted(found, key=lambda advice: (advice.unlike, round(advice.distance, 1), advice.factor))


def write_findings(findings: Sequence[Finding], file: Path = SHIPPED) -> None:
    write_text(file, json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")


def shipped(part: Part) -> list[Finding]:
    """The findings that come with the package."""
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return [Finding(**finding | {"profile": Profile(**finding["profile"])}) for finding in found if finding["part"] == part.name]
