"""Titles, colours and line styles of algorithms; dashes distinguish curves where colours are not enough."""

import itertools
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from matplotlib.colors import is_color_like

from ..algorithms import ALGORITHMS, trait
from ..algorithms.base import SHOWN_AS
from ..algorithms.base import title_of as declared_title
from ..registry import parse
from ..text import visible

SPARE = ["#636363", "#1b7837", "#762a83"]  # distinct from the algorithms' colours for colour-blind readers, on light and dark backgrounds
MOST_COLORS = 11  # more curves than this share colours and differ in their dashes
Pattern = tuple[float, ...]  # on, off, on, ... in line widths; empty for a solid line
Dash = tuple[float, Pattern]  # offset into the pattern, and the pattern
PATTERNS: list[Pattern] = [(), (3.7, 1.6), (1, 1.65), (6.4, 1.6, 1, 1.6), (1, 4), (6.4, 1.6, 1, 1.6, 1, 1.6)]
NEARLY_SOLID: Pattern = (10, 2)
SOLID: Dash = (0, ())


_REMEMBERED: dict[str, SimpleNamespace] = {}  # custom algorithms of runs whose plugins are not loaded


def remember(spec: str, shown_as: Mapping[str, Any]) -> None:
    """Show an algorithm as it was declared when the run was made, unless it is registered here."""
    if shown_as:
        kept = {key: kind(shown_as.get(key) or "") for key, kind in SHOWN_AS.items()}
        if not (re.fullmatch(r"#?\w+", kept["color"]) and is_color_like(kept["color"])):
            kept["color"] = ""  # a file may hold anything
        _REMEMBERED[parse(spec)[0]] = SimpleNamespace(**kept)


def _declared(name: str) -> object:
    return ALGORITHMS.factories.get(name) or _REMEMBERED.get(name)


def styles(groups: Sequence[tuple[str, str]]) -> list[tuple[str, Dash]]:
    """Colour and dashes of every (algorithm, setting), distinct as long as there are enough combinations."""
    specs, settings = list(dict.fromkeys(spec for spec, _ in groups)), list(dict.fromkeys(setting for _, setting in groups))
    if len(settings) == 1 and len(specs) <= MOST_COLORS:
        return [(color, dash_of(spec)) for color, spec in zip(_colors(specs), specs, strict=True)]
    if 1 < len(specs) <= len(palette()) and len(settings) <= len(PATTERNS):  # one colour per algorithm, one pattern per setting
        colors_of, pattern_of = dict(zip(specs, _colors(specs), strict=True)), dict(zip(settings, PATTERNS, strict=False))
        return [(colors_of[spec], dash_of(spec, pattern_of[setting])) for spec, setting in groups]
    if len(groups) <= MOST_COLORS:
        return [(color, dash_of(spec)) for color, (spec, _) in zip(palette(), groups, strict=False)]
    pairs = itertools.cycle([(color, (0.0, pattern)) for pattern in PATTERNS for color in palette()])
    return list(itertools.islice(pairs, len(groups)))


def algorithm_colors(titles_and_specs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """One colour per algorithm, by its title."""
    specs = dict(titles_and_specs)
    if len(specs) <= len(palette()):
        return dict(zip(specs, _colors(list(specs.values())), strict=True))
    return dict(zip(specs, itertools.cycle(palette()), strict=False))


def _colors(specs: Sequence[str]) -> list[str]:
    """The colours that the algorithms declare, and spare ones where a colour is missing or taken."""
    used: list[str] = []
    for spec in specs:
        declared = color_of(parse(spec)[0])
        used.append(declared if declared and declared not in used else next(color for color in palette() if color not in used))
    return used


def color_of(name: str) -> str:
    """The colour that a registered algorithm declares; empty if it declares none."""
    return str(trait(_declared(name), "color") or "")


def title_of(name: str) -> str:
    """The title of a registered algorithm: the one it declares, or its class name. Other names are returned unchanged."""
    return visible(declared_title(_declared(name)), keep="") or name


def is_emphasized(spec: str) -> bool:
    """Whether an algorithm asks for a thicker line."""
    return bool(trait(_declared(spec.partition(":")[0]), "emphasized"))


def palette() -> list[str]:
    """All colours, those that belong to no algorithm first."""
    return [*SPARE, *dict.fromkeys(color for name in ALGORITHMS.factories if (color := color_of(name)))]


def dash_of(spec: str, pattern: Pattern | None = None) -> Dash:
    """The dashes of a curve: those of the setting, shifted or with gaps added if the algorithm asks to be dashed."""
    if not trait(_declared(parse(spec)[0]), "dashed"):
        return 0, pattern or ()
    if pattern is None:
        return 0, PATTERNS[1]
    return (sum(pattern) / 2, pattern) if pattern else (0, NEARLY_SOLID)
