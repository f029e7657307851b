"""The page about the paper: its tables and figures with ours beside them, and a verdict on each claim. All from the records."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from .._version import __version__
from ..errors import UsageError
from ..files import explained, write_text
from ..metrics.history import History
from ..paper.choices import CHOICES
from ..paper.records import BY_THE_CLOCK, Records, repeats
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES
from ..paper.study import Study
from ..registry import parse
from ..text import visible
from . import figures
from .gap import FEW, NO, OPEN, TIE, YES, signed
from .html import PAGE, embedded, escaping
from .paper_figures import draw
from .paper_verdicts import FIRST, Value, Verdict, judge, value
from .summary import title

RULE = (
    "Accuracies in percent after the last round, mean ± standard deviation over seeds. A lead counts when it exceeds one standard error of "
    "the differences, taken seed by seed: all algorithms share a seed's split, schedule, first model and batches. MimiC is called first "
    "where its lead over every other algorithm counts, and not first where another's lead over it does. With three seeds, five equal "
    "algorithms would get a ✓ in 3 settings of 100 and a ✗ in 47: a ✓ says more than a ✗, and it is also said in how many seeds MimiC is "
    "ahead."
)
AGAIN = (
    "`--again` makes recorded runs once more and compares; add `--algorithms mimic` for one cell. A run is made again on the engine and "
    "with the lanes that its record names, and no order of summation is chosen by timing, so that on the same hardware and versions every "
    "round of it should be the same, in any company."
)
MARKS = {YES: "✓", TIE: "≈", NO: "✗", FEW: "?", OPEN: "…"}


@dataclass(frozen=True)
class Entry:
    """One cell as the page shows it."""

    published: str
    ours: str
    difference: str
    best: bool


@dataclass(frozen=True)
class Section:
    study: Study
    rows: list[tuple[str, list[Entry]]]
    recorded: str
    commands: list[str]
    made: str
    verdicts: list[Verdict]
    pictures: dict[str, Figure]


def build(records: Records, seeds: Sequence[int], page: Path, document: Path, pictures: Path) -> list[Section]:
    """Write the HTML page, the Markdown document and its pictures."""
    if not records:
        raise UsageError("there is no record yet: run one of the experiments first, see mimicfl reproduce --list")
    verdicts = judge(records, seeds)
    sections = [_section(study, records, seeds, verdicts) for study in STUDIES.values()]
    for folder in (page.parent, document.parent, pictures):
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for name, figure in section.pictures.items():
            figures.save(figure, pictures / f"paper-{name}.png")
    main = [v for v in verdicts if v.of_the_paper]
    facts = {
        "sections": sections,
        "claims": {claim: [v for v in main if v.claim == claim] for claim in dict.fromkeys(v.claim for v in main)},
        "marks": MARKS,
        "summary": summary(main),
        "rule": RULE,
        "choices": CHOICES,
        "again": _again(records),
    }
    html, plain = escaping(), jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["as_text"] = _as_text
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    template = html.from_string((PAGE / "paper.html").read_text(encoding="utf-8"))
    write_text(page, template.render(**facts, embedded=embedded, version=__version__, style=style))
    template = plain.from_string((PAGE / "paper.md").read_text(encoding="utf-8"))
    write_text(document, template.render(**facts, pictures=_relative(pictures, document.parent)) + "\n")
    return sections


def summary(verdicts: Sequence[Verdict]) -> str:
    """How the paper's main claim fares, in one sentence."""
    first = [v for v in verdicts if v.claim == FIRST and v.outcome not in (FEW, OPEN)]
    count = {outcome: sum(v.outcome == outcome for v in first) for outcome in (YES, TIE, NO)}
    waiting = sum(v.outcome in (FEW, OPEN) for v in verdicts)
    ahead = f"MimiC is first beyond one standard error in {count[YES]} of {len(first)} settings"
    text = f"{ahead}, within it in {count[TIE]}, behind in {count[NO]}."
    return text + (f" {waiting} of {len(verdicts)} claims wait for runs." if waiting else "")


def cell_text(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> str:
    found = value(cell, records, seeds, scale)
    return "–" if found is None else _ours(found, len(seeds))


def published_text(study: Study, algorithm: str, column: str) -> str:
    found = study.published.get(algorithm, {}).get(column)
    return "" if found is None else f"{found[0]:.2f}" + (f" ± {found[1]:.2f}" if found[1] is not None else "")


def _section(study: Study, records: Records, seeds: Sequence[int], verdicts: Sequence[Verdict]) -> Section:
    found = {(a, c): value(Cell(study, c, a), records, seeds) for a in study.algorithms for c in study.columns}
    rows = [(title(a), [_entry(study, a, c, found, len(seeds)) for c in study.columns]) for a in study.algorithms]
    by_column = {c: [run for a in study.algorithms for run in Cell(study, c, a).found(records, seeds)] for c in study.columns}
    runs = [run for column in by_column.values() for run in column]
    whole = len(study.columns) * len(study.algorithms) * len(seeds)
    made = sorted({str(run.environment.get("gpu" if _on_gpu(run) else "processor") or "?") for run in runs})
    return Section(
        study,
        rows,
        f"{len(runs)} of {whole} runs recorded",
        _commands(study, len(seeds), by_column),
        ", ".join(made),
        [v for v in verdicts if v.study == study.name],
        draw(study, records, seeds),
    )


def _on_gpu(run: History) -> bool:
    return str(run.config.get("device", "")).startswith("cuda")


def _entry(study: Study, algorithm: str, column: str, found: dict[tuple[str, str], Value | None], seeds: int) -> Entry:
    printed, own = study.published.get(algorithm, {}).get(column), found[algorithm, column]
    rivals = [v.by_seed for (a, c), v in found.items() if c == column and v]
    shared = set.intersection(*map(set, rivals)) if rivals else set()  # where some lack seeds, the others are judged without them
    ends = [sum(by_seed[seed] for seed in shared) for by_seed in rivals]
    return Entry(
        published=published_text(study, algorithm, column),
        ours="–" if own is None else _ours(own, seeds),
        difference=signed(own.mean - printed[0]) if own and printed else "",
        best=bool(own and shared and len(ends) > 1 and sum(own.by_seed[seed] for seed in shared) == max(ends)),
    )


def _ours(own: Value, seeds: int) -> str:
    """Mean and spread; a cell that lacks seeds says how many it has."""
    few = f" ({len(own.by_seed)} of {seeds} seeds)" if len(own.by_seed) < seeds else ""
    return f"{own.mean:.2f}" + (f" ± {own.std:.2f}" if own.std is not None else "") + few


def _commands(study: Study, seeds: int, made: dict[str, list[History]]) -> list[str]:
    """What makes this table, and what makes each of its columns again where it was made."""
    large = study.dataset == "cifar10"  # in bfloat16, which needs a GPU
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
    """What to expect of a run that is made once more."""
    about = sum(not repeats(run) for run in records.values())
    when = f"when the compiler still chose by timing (version {', '.join(BY_THE_CLOCK)}), or in two places"
    but = f"Not so yet for {about} of the {len(records)} records, which were made on a GPU {when}."
    return f"{AGAIN} {but}" if about else AGAIN


def _as_text(value: str) -> str:
    """Text of a record, escaped for Markdown: one line, no markup, no HTML."""
    return re.sub(r"([\\`*_\[\]<>&|#!~])", r"\\\1", " ".join(visible(value, keep="").split()))


def _relative(path: Path, base: Path) -> str:
    try:
        return str(path.relative_to(base))
    except ValueError:
        return str(path.resolve())
