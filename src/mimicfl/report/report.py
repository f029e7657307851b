"""`write_report(paths)`: write the report page and the figures of run folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..files import explained, make_folder, remove_dead, write_text
from ..fingerprint import digest
from ..metrics.client_ids import counted_as_joined
from ..metrics.history import read
from ..metrics.lock import is_locked
from ..metrics.store import RunFolder, find_runs
from ..text import counted
from . import figures, html, theory_figures
from .export import results_csv, results_latex
from .pairs import pairs_csv
from .summary import Group, group

MOST_NAMES = 3  # in the name of the folder of a report


@dataclass(frozen=True)
class Report:
    groups: list[Group]
    page: Path
    figures: list[Path]
    unfinished: str  # a message about unfinished runs, or empty


def write_report(paths: Sequence[str | Path], out: str | Path | None = None, live: float = 0) -> Report:
    """Read the runs at or below `paths` and write report.html, curves.png, curves.svg, curves.pdf, availability.png, results.csv,
    results.tex and pairs.csv.

    Diagnosed runs also get theory-*.png. Without `out`, the report of one path is written into it, and the report of several paths into a
    new folder beside the first, so that no path loses its own page. With `live`, only the page is written, and it reloads itself after that
    many seconds.
    """
    folders = find_runs(list(paths))
    histories = [read(folder) for folder in folders]
    if not any(history.rows for history in histories):
        raise UsageError(f"{folders[0].path} has no finished round yet, so there is nothing to report; run it first")
    kept = [(f, h) for f, h in zip(folders, histories, strict=True) if h.rows]
    groups = group([h for _, h in kept])
    target = Path(out) if out is not None else _default_folder(list(map(Path, paths)))
    with explained(make_folder(target)):
        remove_dead(target)
    theory, notes = theory_figures.draw(groups)
    written = [] if live else _write_figures(groups, target)
    written += [figures.save(found, target / f"theory-{name}.png") for name, found in theory.items()]
    unfinished = _unfinished(folders)
    page = html.write(target / "report.html", groups, [f for f, _ in kept], unfinished, theory, notes, live)
    return Report(groups, page, written, unfinished)


def _unfinished(folders: Sequence[RunFolder]) -> str:
    """How many runs are not finished, and what to do about those that no process is working on."""
    waiting = [folder.path for folder in folders if not folder.finished]
    stopped = [path for path in waiting if not is_locked(path)]
    said = f"{len(folders) - len(waiting)} of {counted(len(folders), 'run')} finished" if waiting else ""
    if len(waiting) > len(stopped):
        said += f", {len(waiting) - len(stopped)} running"
    if stopped:
        said += f"; continue with mimicfl resume {stopped[0]}" + (f" and {len(stopped) - 1} more" if len(stopped) > 1 else "")
    return said


def _write_figures(groups: Sequence[Group], target: Path) -> list[Path]:
    """Write the figures, and the result table as CSV and LaTeX."""
    overview = figures.overview(groups)
    written = [figures.save(overview, target / f"curves.{kind}") for kind in ("png", "svg", "pdf")]
    longest = max((run for g in groups for run in g.runs), key=lambda run: len(run.rows))
    clients = "client, in the order of joining" if counted_as_joined(longest.rows) else "client"
    schedule = figures.availability(longest.active, ", ".join(figures.schedule_words(longest.config)), clients)
    written.append(figures.save(schedule, target / "availability.png"))
    write_text(target / "results.csv", results_csv(groups))
    write_text(target / "results.tex", results_latex(groups))
    write_text(target / "pairs.csv", pairs_csv(groups))
    return written


def _default_folder(paths: Sequence[Path]) -> Path:
    """`runs/report-a-b` for the runs `runs/a` and `runs/b`; a hash replaces names that are too many."""
    names = list(dict.fromkeys(path.resolve() for path in paths))
    if len(names) == 1:
        return paths[0]
    parents = {path.parent for path in names}
    short = len(names) <= MOST_NAMES and len(parents) == 1
    return paths[0].parent / "-".join(["report", *([path.name for path in names] if short else [digest(list(map(str, names)))[:6]])])
