"""Names of runs and their folders; lists of algorithms and seeds as users write them."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from .. import algorithms
from ..errors import UsageError, integer, shown
from ..fingerprint import digest
from ..registry import parse, split_at_commas
from ..settings import Experiment


def folder_name(text: str, most: int = 100) -> str:
    """A spec as a folder name; a hash of the spec is added if characters had to be replaced."""
    name = "".join(c if c.isalnum() or c in ".-=" else "_" for c in text)
    lost = len(name) > most or any(c not in ".-=_:,[] " and not c.isalnum() for c in text)
    return f"{name[:most]}-{digest(text)[:8]}" if lost else name


def run_name(algorithm: str, seed: int) -> str:
    return f"{folder_name(algorithm)}-s{seed}"


def named_apart(pairs: Sequence[tuple[str, Experiment]]) -> dict[str, Experiment]:
    """Experiments by folder name; different experiments with the same name get a hash of their settings."""
    counts = collections.Counter(name for name, _ in pairs)
    return {name if counts[name] == 1 else f"{name}-{digest(e.to_dict())[:8]}": e for name, e in pairs}


def _split_specs(texts: Sequence[str]) -> list[str]:
    """`["fedavg,fedprox:mu=0.1,mimic"]` as three specs: a comma begins a new one where an algorithm's name follows it."""
    specs: list[str] = []
    for text in texts:
        for k, part in enumerate(split_at_commas(text)):
            if k == 0 or parse(part)[0] in algorithms.ALGORITHMS.factories or "=" not in part:
                specs.append(part.strip())
            else:
                specs[-1] += f",{part}"
    return [spec for spec in specs if spec]


def algorithm_list(given: Any) -> list[str]:
    """Algorithms as texts, each once; they may be given as names, objects or classes, many or one."""
    one = isinstance(given, str) or algorithms.is_algorithm(given)
    if not one and not isinstance(given, Iterable):
        raise UsageError(f"algorithms must be a list such as ['fedavg', 'mimic'], got {given!r}")
    specs = _split_specs([algorithms.spell(each) for each in ([given] if one else _listed("algorithms", given))])
    return list({algorithms.ALGORITHMS.meaning(spec): spec for spec in reversed(specs)}.values())[::-1]  # two spellings are one algorithm


def _listed(what: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError:  # a 0-dimensional tensor or array has __iter__ but raises
        raise UsageError(f"{what} must be a list, got {shown(values)}") from None


def seed_list(seeds: Any) -> list[int]:
    """`3` is the seeds 0, 1, 2; `4,7` or a list is the seeds 4 and 7 (`4,` is the one seed 4); nothing is `3`."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        return list(dict.fromkeys(integer("a seed", number, low=0) for number in _listed("seeds", seeds)))
    text = "3" if seeds is None else str(seeds)
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"seeds takes a count (3) or a list (0,5,7), got {text!r}") from None
    if "," not in text:
        return list(range(integer("seeds", numbers[0], high=10_000))) if numbers else []
    return list(dict.fromkeys(integer("a seed", number, low=0) for number in numbers))
