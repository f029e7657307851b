"""Formats the outcomes as a table and a list of failures, for the screen and in Markdown."""

from collections import Counter
from collections.abc import Iterable, Sequence

from .outcome import Outcome

HEAD = ("part", "tried", "ok", "refused cleanly", "failed", "counts")
SEEDS = 8  # number of seeds shown per failure


def lines(outcomes: Sequence[Outcome], parts: Iterable[str]) -> list[tuple[str, ...]]:
    """Return one line per part, in order, and one for the total."""
    found = []
    for part in parts:
        own = [outcome for outcome in outcomes if outcome.part == part]
        counts: Counter[str] = Counter()
        for outcome in own:
            counts.update(outcome.counts)
        found.append((part, *_numbers(own), ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))))
    return [*found, ("all", *_numbers(outcomes), "")]


def _numbers(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    return tuple(f"{number:,}" for number in (len(outcomes), verdicts["ok"], verdicts["refused"], verdicts["failed"]))


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one paragraph per kind of failure; failures whose details begin with the same line are of one kind."""
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.verdict == "failed":
            kinds.setdefault((outcome.part, outcome.detail.partition("\n")[0]), []).append(outcome)
    return [_paragraph(part, kind, found) for (part, kind), found in sorted(kinds.items(), key=lambda item: -len(item[1]))]


def _paragraph(part: str, kind: str, found: list[Outcome]) -> str:
    smallest = min(found, key=lambda outcome: len(outcome.reproduce or outcome.what))
    seeds = ", ".join(str(outcome.seed) for outcome in found[:SEEDS]) + (", ..." if len(found) > SEEDS else "")
    rest = smallest.detail.partition("\n")[2].strip()
    parts = [
        f"{part}: {kind}",
        f'{len(found)} times; seeds {seeds}; again: python -m soak "{part}" --seed {smallest.seed} --trials 1',
        f"trial {smallest.seed}: {smallest.what}",
        *([rest] if rest else []),
        *(["reproduce:", *(f"    {line}" for line in smallest.reproduce.splitlines())] if smallest.reproduce else []),
    ]
    return "\n".join(parts)


def markdown(outcomes: Sequence[Outcome], parts: Sequence[str], heading: str) -> str:
    rows = [HEAD, ("---",) * len(HEAD), *lines(outcomes, parts)]
    text = [f"# {heading}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    for paragraph in failures(outcomes):
        title, *rest = paragraph.split("\n")
        text += [f"## {title}", "", "```text", *rest, "```", ""]
    return "\n".join(text)
