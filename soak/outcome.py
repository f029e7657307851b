"""The outcome of one trial of the soak."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Verdict = Literal["ok", "refused", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One trial.

    part        which part of the soak: "command lines", "API calls", "engine comparisons", "kills", "long runs"
    verdict     "ok": correct behaviour; "refused": one sentence and exit code 2 (or UsageError); "failed": a defect
    seed        `python -m soak PART --seed SEED --trials 1` repeats this trial
    what        the trial in one line
    detail      for a failure: what was observed and what was expected
    reproduce   for a failure: the smallest command or program that reproduces it
    counts      other counters, e.g. {"native": 1} for the compared engine
    """

    part: str
    verdict: Verdict
    seed: int
    what: str
    detail: str = ""
    reproduce: str = ""
    counts: dict[str, int] = field(default_factory=dict)


class Part(Protocol):
    """The function `trials` of a part: it runs trials until `enough()`; trial k has the seed `seed + k`."""

    def __call__(self, seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]: ...
