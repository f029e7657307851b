"""Records of the benchmark: one file per cell, and the plan that was written before the first run."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import make_folder, write_text
from ..metrics.lock import alone
from .measure import Result
from .suite import Cell, Part, hash_of

FORMAT, PLAN_FORMAT = "mimicfl-benchmark-1", "mimicfl-benchmark-plan-1"
Results = dict[str, Result]  # by the id of the experiment


def read_cell(folder: Path, cell: Cell) -> Results:
    """The recorded runs of a cell; empty if there are none yet."""
    file = _file(folder, cell)
    if not file.exists():
        return {}
    found = _load(file, FORMAT)
    try:
        results = {str(run["id"]): dict(run) | {"environment": found["environments"][run["environment"]]} for run in found["runs"]}
        for run in results.values():
            if "diverged" not in run and not 0 <= run["tail"] <= 1:
                raise ValueError(f"the accuracy of run {run['id']} is {run['tail']}")
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UsageError(f"{file} is not a record of the benchmark ({error!r}); restore it, or delete it to run the cell again") from None
    return results


def add_to_cell(folder: Path, cell: Cell, results: Results) -> Results:
    """Add runs to the file of a cell, and return all that it holds then: another command may have recorded some in the meantime."""
    make_folder(folder / cell.part.name)
    with alone(folder / cell.part.name):
        found = read_cell(folder, cell) | results
        write_cell(folder, cell, found)
    return found


def write_cell(folder: Path, cell: Cell, results: Results) -> None:
    """Replace the file of a cell: one line per run, environments listed once."""
    environments: list[dict[str, Any]] = []
    lines = []
    for run in results.values():
        made = {key: value for key, value in run["environment"].items() if key != "started"}
        if made not in environments:
            environments.append(made)
        lines.append(json.dumps(run | {"environment": environments.index(made)}, separators=(",", ":")))
    head = {"format": FORMAT, "part": cell.part.name, "pattern": cell.pattern.name, "algorithm": cell.grid.algorithm}
    text = json.dumps(head | {"environments": environments}, indent=1).removesuffix("\n}")
    file = _file(folder, cell)
    make_folder(file.parent)
    write_text(file, text + ',\n "runs": [\n' + ",\n".join(lines) + "\n]}\n")


def _file(folder: Path, cell: Cell) -> Path:
    return folder / cell.part.name / f"{cell.name}.json"


def _load(file: Path, expected: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != expected:
            raise ValueError(f"its format is {found['format']!r}, expected {expected!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is not a record of the benchmark ({error}); restore it") from None
    return dict(found)


def plans(folder: Path, part: Part) -> list[dict[str, Any]]:
    """The plan of a part and its amendments, oldest first; each has `hash`, `written`, `reason` and `plan`."""
    file = folder / part.name / "plan.json"
    if not file.exists():
        return []
    versions = _load(file, PLAN_FORMAT)["versions"]
    for version in versions:
        if version["hash"] != hash_of(version["plan"]):
            raise UsageError(f"{file} was edited: the plan of {version['written']} no longer has its hash; restore it")
    return list(versions)


def register(folder: Path, part: Part, amend: str | None = None) -> str:
    """Write the plan before the first run and return its hash. A plan that has changed since is refused unless amended with a reason."""
    make_folder(folder / part.name)
    with alone(folder / part.name):
        return _register(folder, part, amend)


def _register(folder: Path, part: Part, amend: str | None) -> str:
    plan, versions = part.plan(), plans(folder, part)
    if not versions or versions[-1]["hash"] != hash_of(plan):
        if versions and not amend:
            changed = ", ".join(changes(versions[-1]["plan"], plan))
            raise UsageError(
                f"the suite differs from its plan in {folder / part.name / 'plan.json'} ({changed}); "
                "give --amend 'REASON' to record the change next to the plan"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        versions.append({"hash": hash_of(plan), "written": now, "reason": amend or "first plan", "plan": plan})
        write_text(folder / part.name / "plan.json", json.dumps({"format": PLAN_FORMAT, "versions": versions}, indent=1) + "\n")
    return str(versions[-1]["hash"])


def changes(before: Any, after: Any, where: str = "") -> list[str]:
    """The places at which two plans differ.

    >>> changes({"part": {"seeds": 20, "target": 0.9}}, {"part": {"seeds": 10, "target": 0.9}})
    ['part.seeds: 20 -> 10']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [c for key in keys for c in changes(before.get(key), after.get(key), f"{where}.{key}".lstrip("."))]
    if isinstance(before, list) and isinstance(after, list) and all(isinstance(item, dict) for item in [*before, *after]):
        old, new = ({item.get("name") or item.get("algorithm"): item for item in items} for items in (before, after))
        return changes(old, new, where)
    same = before == after or (before is None and after == "")  # plans from before a setting existed lack its empty default
    return [] if same else [f"{where}: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
