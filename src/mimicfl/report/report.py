"""`build(paths)`: everything the report makes, from run folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..files import explained, sweep_dead
from ..metrics.history import read
from ..metrics.store import find_runs
from . import figures, html, theory_figures
from .summary import Group, group


@dataclass(frozen=True)
class Report:
    groups: list[Group]
    page: Path
    pictures: list[Path]
    unfinished: str  # a sentence, or empty


def build(paths: Sequence[str | Path], out: str | Path | None = None) -> Report:
    """Read the runs at or below `paths` and write report.html, curves.png, curves.svg, availability.png, and theory-*.png if diagnosed."""
    folders = find_runs(list(paths))
    histories = [read(folder) for folder in folders]
    if not any(history.rows for history in histories):
        raise UsageError(f"{folders[0].path} has no finished round yet: nothing to report")
    kept = [(f, h) for f, h in zip(folders, histories, strict=True) if h.rows]
    groups = group([h for _, h in kept])
    target = Path(out) if out is not None else Path(paths[0])
    with explained(target):
        target.mkdir(parents=True, exist_ok=True)
        sweep_dead(target)
    picture = figures.curves(groups)
    pictures = [figures.save(picture, target / f"curves.{kind}") for kind in ("png", "svg")]
    longest = max((h for _, h in kept), key=lambda h: len(h.rows))
    schedule = figures.availability(longest.available, f"{longest.config.get('availability')}, seed {longest.config.get('seed')}")
    pictures.append(figures.save(schedule, target / "availability.png"))
    theory, notes = theory_figures.draw(groups)
    pictures += [figures.save(found, target / f"theory-{name}.png") for name, found in theory.items()]
    waiting = [str(f.path) for f in folders if not f.finished]
    more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    unfinished = f"{len(waiting)} of {len(folders)} runs not finished yet: go on with mimicfl resume {waiting[0]}{more}" if waiting else ""
    page = html.write(target / "report.html", groups, [f for f, _ in kept], unfinished, theory, notes)
    return Report(groups, page, pictures, unfinished)
