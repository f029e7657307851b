"""The tested pairs of a setting, see `verdict.compared`: for the page and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..metrics.columns import percent
from ..significance import FEW, NO, OPEN, TIE, UNDECIDED, YES
from ..text import for_spreadsheet
from .spread import signed
from .summary import Group, algorithm_title, by_setting, main_metric, with_seeds_in_common
from .verdict import Pair, compared

MOST_OPEN = 15  # pairs that the page shows at once; more are folded
WORDS = {YES: "significant", NO: "significantly behind", TIE: "tied", UNDECIDED: "undecided", FEW: "one seed", OPEN: "no seed in common"}
COLUMNS = ("better", "other", "metric", "seeds", "ahead", "difference", "low", "high", "p", "p_holm", "verdict")


@dataclass(frozen=True)
class PairLine:
    """One line of the table of pairs, as text."""

    setting: str
    better: str
    other: str
    difference: str
    interval: str
    ahead: str  # in how many of the shared seeds
    p: str
    verdict: str


def pair_lines(groups: Sequence[Group]) -> list[PairLine]:
    """The table of the page."""
    return [_line(setting, pair, metric) for setting, metric, pair in _pairs(groups)]


def pairs_csv(groups: Sequence[Group]) -> str:
    """One line per pair: how much better the first ends than the second, with the 95 % interval, p before and after Holm, and the verdict.

    Values are in units of the metric, so a point of accuracy is 0.01.
    """
    found = _pairs(groups)
    settings = list(dict.fromkeys(key for g in groups for key in g.settings)) if any(setting for setting, _, _ in found) else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*settings, *COLUMNS])
    for _, metric, pair in found:
        low, high = pair.lead.interval()
        own = [pair.better.settings.get(key, "") for key in settings]
        names = [for_spreadsheet(each) for each in (*own, pair.better.label, pair.other.label)]
        numbers = [f"{value:.6g}" if tested else "" for value, tested in _numbers(pair, low, high)]
        writer.writerow([*names, metric, pair.lead.pairs, pair.lead.ahead, *numbers, WORDS[pair.outcome]])
    return out.getvalue()


def _numbers(pair: Pair, low: float, high: float) -> list[tuple[float, bool]]:
    """Difference, interval and p values, and whether there are enough seeds for each."""
    tested = pair.lead.pairs > 1
    return [(pair.lead.mean, pair.lead.pairs > 0), *((value, tested) for value in (low, high, pair.lead.p, pair.adjusted))]


def _pairs(groups: Sequence[Group]) -> list[tuple[str, str, Pair]]:
    """Setting, metric and pair; each setting is tested for itself."""
    found = []
    for setting, rivals in by_setting(groups).items():  # the setting is named once, so the labels omit it
        rivals = [replace(g, label=algorithm_title(g)) for g in rivals] if setting else rivals
        metric = main_metric(rivals)
        found += [(setting, metric, pair) for pair in compared(with_seeds_in_common(rivals, metric)[0], metric)]
    return found


def _line(setting: str, pair: Pair, metric: str) -> PairLine:
    lead, show = pair.lead, _in_points if percent(metric) else "{:+.3g}".format
    low, high = lead.interval()
    interval, p = f"{show(low)} to {show(high)}", "< 0.001" if pair.adjusted < 0.001 else f"{pair.adjusted:.2g}"
    if lead.pairs < 2:
        interval = p = "–"
    difference, ahead = (show(lead.mean), f"{lead.ahead} of {lead.pairs}") if lead.pairs else ("–", "–")
    return PairLine(setting, pair.better.label, pair.other.label, difference, interval, ahead, p, WORDS[pair.outcome])


def _in_points(value: float) -> str:
    return signed(100 * value)
