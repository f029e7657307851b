"""The page of the benchmark and docs/benchmark.md: recommendations, leaderboard, curves, failures. Everything is computed from records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from matplotlib.figure import Figure

from .. import algorithms
from .._version import __version__
from ..algorithms.client_memory import ClientMemory
from ..benchmark.analysis import MARGIN, Entry, Table, analyse, deviations, ranking
from ..benchmark.grid import Config
from ..benchmark.measure import COSTS, METRICS
from ..benchmark.recommend import Finding, pattern_profile
from ..benchmark.records import plans
from ..benchmark.suite import LOCAL_STEPS, PARTS, PROTOCOL, Part
from ..files import make_folder, write_text
from ..significance import LEVEL, Paired, Ranking
from . import figures
from .benchmark_figures import critical_difference, curves, means
from .html import PAGE, embedded, escaping
from .paper_values import interval
from .styles import title_of

CAPTIONS = {
    "means": "Mean test accuracy over the last tenth of the run, with 95 % intervals over seeds. A filled point is the best mean, or not "
    f"significantly worse and at most {MARGIN:g} points behind. "
    "In brackets: how many of the algorithms are complete, if not all are; then none is filled.",
    "curves": "Test accuracy in each round, mean over seeds.",
    "ranks": "Mean rank of each algorithm over the patterns; 1 is best. A bar joins algorithms whose ranks differ by less than the "
    "critical difference of the Nemenyi test: over these patterns, their order is not decided.",
}


@dataclass
class Overview:
    """What is recorded of one part of the suite."""

    part: Part
    tables: list[Table]
    plan: str
    deviations: list[str]

    @property
    def begun(self) -> bool:
        return self.done[0] > 0

    @property
    def done(self) -> tuple[int, int]:
        """Recorded runs, and all runs as far as known."""
        states = [entry.state for table in self.tables for entry in table.entries.values()]
        return sum(state.done for state in states), sum(state.total for state in states)


@dataclass
class Chapter(Overview):
    """The same with everything that a page shows."""

    ranks: Ranking | None
    figures: dict[str, Figure]


def overview(part: Part, records: Path) -> Overview:
    tables, versions = analyse(part, records), plans(records, part)
    plan = f"{versions[0]['hash']}, written {versions[0]['written'][:16]}" if versions else "not written yet"
    return Overview(part, tables, plan, deviations(part, records, tables))


def chapter(part: Part, records: Path) -> Chapter:
    found = overview(part, records)
    shown, ranks = [table for table in found.tables if table.order], ranking(found.tables)
    drawn = {"means": means(shown), "curves": curves(shown)} if shown else {}
    drawn |= {"ranks": critical_difference(ranks)} if ranks else {}
    return Chapter(**vars(found), ranks=ranks, figures=drawn)


def findings(part: Part, records: Path) -> list[Finding]:
    """What the records say under each pattern for which all algorithms are complete."""
    tables = [table for table in analyse(part, records) if table.best]
    return [Finding(part.name, t.pattern.name, t.pattern.about, *use(t), pattern_profile(part, t.pattern)) for t in tables]


def write_benchmark_report(records: Path, page: Path, document: Path, figure_folder: Path) -> list[Chapter]:
    """Write the HTML page, the Markdown document and its figures."""
    chapters = [chapter(part, records) for part in PARTS.values()]
    for folder in (page.parent, document.parent, figure_folder):
        make_folder(folder)
    for each in chapters:
        for name, figure in each.figures.items():
            figures.save(figure, figure_folder / f"benchmark-{each.part.name}-{name}.png")
    facts: dict[str, Any] = {
        "chapters": [c for c in chapters if c.begun],
        "waiting": [c for c in chapters if not c.begun],
        "protocol": PROTOCOL,
        "metrics": METRICS,
        "costs": COSTS,
        "margin": MARGIN,
        "glance": glance([c for c in chapters if c.begun]),
        "steps": LOCAL_STEPS,
        "version": __version__,
    }
    facts |= {"use": use, "cell": cell, "metric": metric_text, "cost": cost_text, "config": config_text, "title_of": title_of}
    facts |= {"memory": memory_text, "commands": commands, "embedded": embedded, "captions": CAPTIONS}
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    template = escaping().from_string((PAGE / "benchmark.html").read_text(encoding="utf-8"))
    write_text(page, template.render(**facts, style=style))
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = plain.from_string((PAGE / "benchmark.md").read_text(encoding="utf-8"))
    write_text(document, template.render(**facts, figure_folder=figure_folder.name).rstrip() + "\n")
    return chapters


def names_of(found: Sequence[str]) -> str:
    titles = [title_of(name) for name in found]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} or {titles[-1]}"


def use(table: Table) -> tuple[str, str, str]:
    """Which algorithms to use under a pattern, their lead in points, and the evidence for it."""
    order, best = table.candidates, table.best
    if not best:
        return "–", "–", f"{len(order)} of {len(order) + table.missing} algorithms complete"
    rest = [name for name in order if name not in best]
    if not rest:
        return names_of(best), "–", f"no significant difference among the {len(best)} compared"
    nearest = table.tests[best[0], rest[0]]
    by = f"{interval(nearest.difference)} over {title_of(rest[0])}"
    unsure = f"more than {MARGIN:g} points, but not significant: " if nearest.adjusted >= LEVEL else ""
    sure = f"{unsure}p {_p(nearest.adjusted)} (sign flips {_p(nearest.flips, adjusted=False)}), {nearest.difference.pairs} seeds"
    return names_of(best), by, sure


def glance(chapters: Sequence[Chapter]) -> list[tuple[str, list[str]]]:
    """What to use under each pattern, one text per chapter: the recommended algorithms."""
    about = {t.pattern.name: t.pattern.about.removesuffix("; all take part in the first round") for c in chapters for t in c.tables}
    tables = [{t.pattern.name: t for t in c.tables} for c in chapters]
    return [(text, [names_of(own[name].best) if name in own and own[name].best else "–" for own in tables]) for name, text in about.items()]


def _p(value: float, adjusted: bool = True) -> str:
    text = "< 0.001" if value < 0.001 else f"= {value:.2g}"
    return f"{text} after Holm" if adjusted else text


def cell(table: Table, name: str) -> str:
    """Mean and 95 % interval of an algorithm, or how far it is."""
    entry = table.entries[name]
    if entry.state.stage != "complete":
        return f"{entry.state.stage}, {entry.state.done} of {entry.state.total} runs" if entry.state.done else "–"
    values = list(entry.by_seed().values())
    low, high = Paired.of(values).interval()
    failed = f", {entry.diverged} diverged" if entry.diverged else ""
    return f"{entry.mean():.1f} [{low:.1f}, {high:.1f}]{failed}"


def metric_text(entry: Entry, metric: str) -> str:
    """The mean over the runs that have the metric; where some diverged, how many those are."""
    mean = entry.mean(metric) if entry.state.stage == "complete" else None
    if mean is None:
        return "–"
    measured = len(entry.by_seed(metric))
    return f"{mean:.1f}" if measured == len(entry.runs) else f"{mean:.1f} ({measured} of {len(entry.runs)})"


def cost_text(entry: Entry, what: str) -> str:
    """The median cost to the target, and how many runs reach it."""
    if entry.state.stage != "complete":
        return "–"
    median, reached = entry.to_target(what)
    if median is not None and what == "round":
        median += 1  # rounds are numbered from 0
    number = "never" if median is None else f"{median / 1e6:.2f} MB" if what == "bytes_up" else f"{median:.0f}"
    return number if reached in (0, len(entry.runs)) else f"{number} ({reached} of {len(entry.runs)})"


def config_text(entry: Entry) -> str:
    config: Config | None = entry.state.chosen
    if config is None:
        return "–"
    grown = f" (+{entry.state.extended})" if entry.state.extended else ""
    return ", ".join(f"{name} {value:g}" for name, value in config.items()) + grown


def memory_text(part: Part, name: str) -> str:
    """How many model-sized vectors the server keeps between rounds, besides the model; N is the number of clients."""
    state = algorithms.make(name).init(torch.zeros(7), 5)
    kept = [value for key, value in vars(state).items() if key != "w"]
    rows = sum(isinstance(value, ClientMemory) or (isinstance(value, torch.Tensor) and value.shape == (5, 7)) for value in kept)
    single = sum(isinstance(value, torch.Tensor) and value.shape == (7,) for value in kept) + bool(part.settings.get("average"))
    return " + ".join(filter(None, ["N" if rows == 1 else f"{rows} N" if rows else "", str(single) if single else ""])) or "0"


def commands(part: Part) -> list[str]:
    device = f" --device {part.device}" if part.device != "cpu" else ""
    return [f"mimicfl benchmark run {part.name}{device}", f"mimicfl benchmark status {part.name}", "mimicfl benchmark page"]
