"""The page about the paper: published and our results side by side, and a verdict on each claim, computed from the records."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from .._version import __version__
from ..errors import UsageError
from ..files import make_folder, write_text
from ..metrics.history import History
from ..paper.choices import CHOICES
from ..paper.records import AUTOTUNED_VERSIONS, Records, repeats
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES
from ..paper.study import Study
from ..registry import parse
from ..significance import FEW, LEVEL, NO, OPEN, TIE, UNDECIDED, YES
from ..text import visible
from . import figures
from .html import PAGE, embedded, escaping
from .paper_figures import draw
from .paper_values import SAME, ColumnResults, Lookup, Value, comparisons, costs_differ, lookup_in, value
from .paper_verdicts import AS_PRINTED, FIRST, FIRST_ROUNDS, Verdict, judge
from .spread import mean_std, signed
from .summary import title

RULE = (
    "The first table of each section follows the paper's protocol: accuracy in percent after the last round, at the paper's number of "
    "uploads and with its learning rate, mean ± standard deviation over seeds. The verdicts use the mean over the last tenth of each run, "
    "because the last round alone is noise for algorithms that oscillate. Differences are paired: for each seed, all algorithms share the "
    "split, the schedule, the initial model and the batches. Intervals are 95 % intervals of the paired t test; p values are adjusted for "
    f"all comparisons of a table (Holm). MimiC is *first* if it is ahead of every other algorithm with p < {LEVEL:g}, *not first* if an "
    f"algorithm is ahead of it with p < {LEVEL:g}, and *tied* if every algorithm that it does not lead is equivalent to it within "
    f"± {SAME:g} point (two one-sided tests). Results *agree* with the published ones if they are equivalent within ± {AS_PRINTED:g} "
    f"points, and *disagree* if they differ with p < {LEVEL:g}. Everything else is *undecided*: three seeds decide little."
)
PROTOCOL = (
    "Three limits of the paper's protocol apply. It counts two uploads per round for SCAFFOLD, although the server can compute SCAFFOLD's "
    "new control variate from the one vector that a client sends; SCAFFOLD therefore runs half the rounds. The tables *at equal rounds* "
    "stop the others where SCAFFOLD stops. The learning rate is not tuned and is too small for all algorithms: in the study `tune-rates` "
    "the largest rate is the best for each. And in Table IV and Figures 6 to 8 the clients are exchangeable, that is, all are absent "
    "equally often in expectation: dropouts then add variance, but no bias."
)
BASES = {FIRST: "At the paper's number of uploads", FIRST_ROUNDS: "At equal rounds"}
AGAIN = (
    "`--again` repeats recorded runs and compares the results; add `--algorithms mimic` for one cell. A repeated run uses the engine and "
    "the lanes of its record, and no order of summation is chosen by timing. On the same hardware and versions every round should "
    "therefore be identical, whichever other runs share the GPU."
)
MARKS = {YES: "✓", TIE: "≈", NO: "✗", UNDECIDED: "○", FEW: "?", OPEN: "…"}


@dataclass(frozen=True)
class Entry:
    """One cell of a table, as text."""

    published: str
    ours: str
    difference: str
    best: bool


@dataclass(frozen=True)
class Tails:
    """Means over the last tenth of the runs, as text: for each algorithm, in each column, the mean and MimiC's lead."""

    title: str
    rows: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Section:
    study: Study
    rows: list[tuple[str, list[Entry]]]
    tails: list[Tails]
    recorded: str
    commands: list[str]
    made: str
    verdicts: list[Verdict]
    figures: dict[str, Figure]


def write_paper_report(records: Records, seeds: Sequence[int], page: Path, document: Path, figure_folder: Path) -> list[Section]:
    """Write the HTML page, the Markdown document and its figures."""
    if not records:
        raise UsageError("there is no record yet; run one of the experiments first, see mimicfl reproduce --list")
    lookup = lookup_in(records, seeds)
    verdicts = judge(lookup)
    sections = [_section(study, records, seeds, lookup, verdicts) for study in STUDIES.values()]
    for folder in (page.parent, document.parent, figure_folder):
        make_folder(folder)
    for section in sections:
        for name, figure in section.figures.items():
            figures.save(figure, figure_folder / f"paper-{name}.png")
    main = [v for v in verdicts if v.of_the_paper]
    facts = {
        "sections": sections,
        "claims": {claim: [v for v in main if v.claim == claim] for claim in dict.fromkeys(v.claim for v in main)},
        "marks": MARKS,
        "summary": summary(main),
        "rule": RULE,
        "protocol": PROTOCOL,
        "choices": CHOICES,
        "again": _again(records),
    }
    html, plain = escaping(), jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["as_text"] = _as_text
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    template = html.from_string((PAGE / "paper.html").read_text(encoding="utf-8"))
    write_text(page, template.render(**facts, embedded=embedded, version=__version__, style=style))
    template = plain.from_string((PAGE / "paper.md").read_text(encoding="utf-8"))
    write_text(document, template.render(**facts, figure_folder=_relative(figure_folder, document.parent)) + "\n")
    return sections


def summary(verdicts: Sequence[Verdict]) -> str:
    """The outcome of the paper's main claim, in one sentence per basis."""
    found = [f"{words}: {_counts([v for v in verdicts if v.claim == claim])}." for claim, words in BASES.items()]
    waiting = sum(v.outcome in (FEW, OPEN) for v in verdicts)
    return " ".join(found) + (f" {waiting} of {len(verdicts)} claims need more runs." if waiting else "")


def _counts(first: Sequence[Verdict]) -> str:
    decided = [v.outcome for v in first if v.outcome not in (FEW, OPEN)]
    return (
        f"MimiC is first in {decided.count(YES)} of {len(decided)} settings, tied in {decided.count(TIE)}, "
        f"behind in {decided.count(NO)}, undecided in {decided.count(UNDECIDED)}"
    )


def cell_text(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> str:
    """Our result of a cell, as text."""
    found = value(cell, records, seeds, scale)
    return "–" if found is None else _result(found, len(seeds))


def published_text(study: Study, algorithm: str, column: str) -> str:
    """The published result of a cell, as text; empty if there is none."""
    found = study.published.get(algorithm, {}).get(column)
    return "" if found is None else f"{found[0]:.2f}" + (f" ± {found[1]:.2f}" if found[1] is not None else "")


def _section(study: Study, records: Records, seeds: Sequence[int], lookup: Lookup, verdicts: Sequence[Verdict]) -> Section:
    found = {(a, c): lookup(study.name, c, a) for a in study.algorithms for c in study.columns}
    rows = [(title(a), [_entry(study, a, c, found, len(seeds)) for c in study.columns]) for a in study.algorithms]
    by_column = {c: [run for a in study.algorithms if (v := found[a, c]) for run in v.runs.values()] for c in study.columns}
    runs = [run for column in by_column.values() for run in column]
    whole = len(study.columns) * len(study.algorithms) * len(seeds)
    made = sorted({str(run.environment.get("gpu" if _on_gpu(run) else "processor") or "?") for run in runs})
    return Section(
        study,
        rows,
        _tails(study, lookup),
        f"{len(runs)} of {whole} runs recorded",
        _commands(study, len(seeds), by_column),
        ", ".join(made),
        [v for v in verdicts if v.study == study.name],
        draw(study, records, seeds),
    )


def _tails(study: Study, lookup: Lookup) -> list[Tails]:
    """The tables of means over the last tenth: at the paper's uploads and, where that makes a difference, at equal rounds."""
    if "mimic" not in study.algorithms or len(study.algorithms) == 1:
        return []
    return [found for equal in (False, True) if (found := _tail_table(study, lookup, equal))]


def _tail_table(study: Study, lookup: Lookup, equal_rounds: bool) -> Tails | None:
    found = comparisons(study, lookup, equal_rounds)
    if not found or (equal_rounds and not costs_differ(study, lookup)):
        return None
    rounds = sorted({each.rounds for each in found.values() if each.rounds})
    where = f"at equal rounds ({' or '.join(map(str, rounds))})" if rounds else "at the paper's number of uploads"
    rows = [(title(a), [_tail_entry(found.get(column), a) for column in study.columns]) for a in study.algorithms]
    return Tails(f"Mean over the last tenth of the run, {where}", rows)


def _tail_entry(here: ColumnResults | None, algorithm: str) -> tuple[str, str]:
    if here is None:
        return "–", "–"
    mean, std = mean_std(list(here.tails[algorithm].values()))
    return f"{mean:.2f}" + (f" ± {std:.2f}" if std is not None else ""), here.lead(algorithm) if algorithm in here.leads else ""


def _on_gpu(run: History) -> bool:
    return str(run.config.get("device", "")).startswith("cuda")


def _entry(study: Study, algorithm: str, column: str, found: dict[tuple[str, str], Value | None], seeds: int) -> Entry:
    printed, ours = study.published.get(algorithm, {}).get(column), found[algorithm, column]
    rivals = [v.by_seed for (a, c), v in found.items() if c == column and v]
    shared = set.intersection(*map(set, rivals)) if rivals else set()  # compare only on seeds that all have
    ends = [sum(by_seed[seed] for seed in shared) for by_seed in rivals]
    return Entry(
        published=published_text(study, algorithm, column),
        ours="–" if ours is None else _result(ours, seeds),
        difference=signed(ours.mean - printed[0]) if ours and printed else "",
        best=bool(ours and shared and len(ends) > 1 and sum(ours.by_seed[seed] for seed in shared) == max(ends)),
    )


def _result(ours: Value, seeds: int) -> str:
    """Mean and standard deviation, and the number of seeds if some are missing."""
    few = f" ({len(ours.by_seed)} of {seeds} seeds)" if len(ours.by_seed) < seeds else ""
    return f"{ours.mean:.2f}" + (f" ± {ours.std:.2f}" if ours.std is not None else "") + few


def _commands(study: Study, seeds: int, made: dict[str, list[History]]) -> list[str]:
    """The command that makes this table, and those that repeat each column on the device it was made on."""
    large = study.dataset == "cifar10"  # bfloat16 needs a GPU
    cuda = " --device cuda"
    again, anywhere = [], large
    for column, runs in made.items():
        places: dict[bool, list[str]] = {}
        for run in runs:
            places.setdefault(large or _on_gpu(run), []).append(parse(str(run.config["algorithm"]))[0])
        for gpu, names in places.items():
            some = f" --algorithms {' '.join(dict.fromkeys(names))}" if len(places) > 1 else ""
            again.append(f"mimicfl reproduce {study.name} --columns {shlex.quote(column)}{some} --seeds {seeds}{cuda * gpu} --again")
            anywhere |= gpu
    return [f"mimicfl reproduce {study.name} --seeds {seeds}{cuda * anywhere}", *again]


def _again(records: Records) -> str:
    """What to expect of a repeated run."""
    changing = sum(not repeats(run) for run in records.values())
    when = f"with a version whose compiler chose by timing ({', '.join(AUTOTUNED_VERSIONS)}), or in two environments"
    except_for = f"This does not hold for {changing} of the {len(records)} records, which were made on a GPU {when}."
    return f"{AGAIN} {except_for}" if changing else AGAIN


def _as_text(value: str) -> str:
    """Escape text of a record for Markdown: one line, no markup, no HTML."""
    return re.sub(r"([\\`*_\[\]<>&|#!~])", r"\\\1", " ".join(visible(value, keep="").split()))


def _relative(path: Path, base: Path) -> str:
    try:
        return str(path.relative_to(base))
    except ValueError:
        return str(path.resolve())
