"""The result table as CSV and as LaTeX."""

import csv
import io
from collections.abc import Sequence

from ..metrics.columns import head, show
from ..text import for_spreadsheet
from .columns import NAMES, OWN_TEST, axis
from .spread import mean_std
from .summary import Group, algorithm_title, main_metric, more_metrics
from .verdict import marks

WIDEST = 60  # characters of all settings, side by side at the head of a table
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
    """A table for a paper, with the package booktabs: a row per algorithm and a column per setting, or the other way round if the settings
    have long names.

    Bold: the best mean of a setting, and those that tie with it.
    """
    metric = main_metric(groups)
    settings, algorithms = (list(dict.fromkeys(each)) for each in ([g.setting for g in groups], map(algorithm_title, groups)))
    found = {(algorithm_title(g), g.setting): (g, mark) for g, mark in zip(groups, marks(groups, metric), strict=True)}
    if sum(map(len, settings)) <= WIDEST:
        heads, left = ["algorithm", *(setting or head(metric) for setting in settings)], 1
        rows = [[latex(a), *(_cell(found.get((a, s)), metric) for s in settings)] for a in algorithms]
    else:
        varied, values = list(dict.fromkeys(key for g in groups for key in g.settings)), {g.setting: g.settings for g in groups}
        heads, left = [*varied, *algorithms], len(varied)
        rows = [
            [*(latex(values[s].get(key, "")) for key in varied), *(_cell(found.get((a, s)), metric) for a in algorithms)] for s in settings
        ]
    form = "l" * left + "r" * (len(heads) - left)
    body = [" & ".join(row) + r" \\" for row in rows]
    top = [r"\begin{tabular}{" + form + "}", r"\toprule", " & ".join(map(latex, heads)) + r" \\", r"\midrule"]
    name = " ".join(axis(metric).split())
    about = f"% {name}, mean and standard deviation over seeds; bold: the best mean of a setting, and those that tie with it"
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", about, ""])


def _cell(found: tuple[Group, str] | None, metric: str) -> str:
    if found is None:
        return "--"
    g, mark = found
    value = latex(show(metric, *mean_std(g.finals(metric))).removesuffix(" %"))
    return rf"\textbf{{{value}}}" if mark else value


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(c, c) for c in text).replace("±", r"$\pm$").replace("–", "--")
