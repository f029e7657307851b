"""A sweep from a TOML file: settings for all runs, and a `[grid]` of settings to combine."""

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..callbacks.interface import Callback, EachRound
from ..errors import UsageError, integer, nearest
from ..metrics.history import History
from ..settings import SETTINGS, Experiment, from_dict, read_settings
from .execute import Notice, Plan, Progress, run_plan
from .names import folder_name, named_apart, run_name

MOST_RUNS = 100_000


def read_sweep(file: str | Path, given: Mapping[str, Any] | None = None, replaced: Collection[str] = ()) -> Plan:
    """Every combination of the grid, under a name made of what differs: `CELL/ALGORITHM-sSEED`.

    `seed = 3` in the grid is the seeds 0, 1, 2; every other entry is a list of values.

    given             settings that replace those of the file, in the grid as well; a list of values is part of the grid
    replaced          names of further settings of the file that they replace
    """
    own = dict(given or {})
    from_dict({key: value for key, value in own.items() if key not in ("algorithm", "seed")})  # a mistake here is not one of the file
    settings = read_settings(Path(file))
    grid = settings.pop("grid", None)
    if not isinstance(grid, dict) or not grid:
        raise UsageError(
            f'{file} has no [grid]: add one with lists of settings to combine, as in\n[grid]\nalgorithm = ["fedavg", "mimic"]\nseed = 3'
        )
    values = {key.replace("-", "_"): _values(file, key, value) for key, value in grid.items()}
    values |= {key: value for key, value in own.items() if isinstance(value, list) and key in ("algorithm", "seed")}
    fixed = {key: value for key, value in own.items() if key not in values or not isinstance(value, list)}
    values = {key: value for key, value in values.items() if key not in fixed and (key not in replaced or key in own)}
    settings = {key: value for key, value in settings.items() if key not in replaced and key not in own} | fixed
    for key in values:
        if key not in SETTINGS:
            raise UsageError(f"{file}: there is no setting {key!r} for the grid; {nearest(key, SETTINGS)}")
        if key in settings:
            raise UsageError(f"{file}: {key!r} is set both at the top and in the grid")
    integer(f"the number of runs in {file}", math.prod(map(len, values.values())), high=MOST_RUNS)
    pairs: list[tuple[str, Experiment]] = []
    seen: dict[str, str] = {}
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        experiment = from_dict(settings | chosen, str(file))
        name = _name(experiment, {key: value for key, value in chosen.items() if key not in ("algorithm", "seed")})
        # 0 and 0.0 make two names of one run, and so do `fedau` and `fedau:cutoff=50`
        facts = json.dumps(experiment.to_dict() | {"algorithm": ALGORITHMS.meaning(experiment.algorithm)})
        if facts in seen:
            raise UsageError(f"{file}: {seen[facts]} and {name} would be the same run: a value appears twice in the grid")
        seen[facts] = name
        pairs.append((name, experiment))
    return named_apart(pairs)


def sweep(
    file: str | Path,
    out: str | Path | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    **given: Any,
) -> dict[str, History]:
    """Run every combination of the grid in a TOML file; returns the histories by the names of their folders below `out`.

    callbacks         as in `simulate`
    given             settings that replace those of the file, in the grid as well: `sweep("grid.toml", rounds=50, seed=[4, 7])`
    """
    return run_plan(read_sweep(file, given), out, progress, notice, callbacks=callbacks)


def _values(file: str | Path, key: str, value: Any) -> list[Any]:
    if key == "seed" and isinstance(value, int):
        return list(range(integer("seed", value)))
    if not isinstance(value, list) or not value:
        raise UsageError(f"{file}: {key} in the grid must be a list of values, got {value!r}")
    return value


def _name(experiment: Experiment, other: dict[str, Any]) -> str:
    own = run_name(experiment.algorithm, experiment.seed)
    cell = "-".join(
        f"{key}={value}" if key not in ("availability", "dataset", "partition", "model") else str(value) for key, value in other.items()
    )
    clean = folder_name(cell, most=120)
    return f"{clean}/{own}" if clean else own


def cells(plan: Plan) -> dict[str, list[str]]:
    """The runs by the folder they share: one comparison each."""
    found: dict[str, list[str]] = {}
    for name in plan:
        found.setdefault(name.rpartition("/")[0], []).append(name)
    return found
