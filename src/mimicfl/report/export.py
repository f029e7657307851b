"""The result table as CSV and as LaTeX."""

import csv
import io
from collections.abc import Sequence

from ..metrics.columns import head, show
from ..text import for_spreadsheet
from .columns import NAMES, OWN_TEST
from .spread import mean_std
from .summary import Group, algorithm_title, main_metric, more_metrics
from .verdict import marks

SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {c: f"\\{c}" for c in "&%$#_{}"}


def results_csv(groups: Sequence[Group]) -> str:
    """One line per group: its settings, and mean and standard deviation of every metric after the last round."""
    settings = list(dict.fromkeys(key for g in groups for key in g.settings))
    main = main_metric(groups)
    metrics = dict.fromkeys([main, *more_metrics(groups), *NAMES, *OWN_TEST])
    metrics = {key: None for key in metrics if any(g.finals(key) for g in groups)}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["algorithm", *settings, "seeds", *[f"{key}{end}" for key in metrics for end in ("", "_std")]])
    for g in groups:
        values = [value for key in metrics for value in mean_std(g.finals(key))]
        numbers = ["" if value is None or value != value else f"{value:.6g}" for value in values]
        writer.writerow(
            [for_spreadsheet(each) for each in (algorithm_title(g), *[g.settings.get(key, "") for key in settings])]
            + [len(g.finals(main)), *numbers]
        )
    return out.getvalue()


def results_latex(groups: Sequence[Group]) -> str:
    """A table of algorithms (rows) and settings (columns) for a paper, with the package booktabs.

    Bold: the best mean of a setting, and those that tie with it.
    """
    metric = main_metric(groups)
    settings = list(dict.fromkeys(g.setting for g in groups))
    found = {(algorithm_title(g), g.setting): (g, mark) for g, mark in zip(groups, marks(groups, metric), strict=True)}
    lines = [r"\begin{tabular}{l" + "r" * len(settings) + "}", r"\toprule"]
    lines.append(" & ".join(["algorithm", *[latex(setting or head(metric)) for setting in settings]]) + r" \\")
    lines.append(r"\midrule")
    for algorithm in dict.fromkeys(map(algorithm_title, groups)):
        cells = [_cell(found.get((algorithm, setting)), metric) for setting in settings]
        lines.append(" & ".join([latex(algorithm), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _cell(found: tuple[Group, str] | None, metric: str) -> str:
    if found is None:
        return "--"
    g, mark = found
    value = latex(show(metric, *mean_std(g.finals(metric))).removesuffix(" %"))
    return rf"\textbf{{{value}}}" if mark else value


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(c, c) for c in text).replace("±", r"$\pm$").replace("–", "--")
