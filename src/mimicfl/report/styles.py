"""How curves are told apart: colours as long as they last, then dashes as well."""

import itertools
from collections.abc import Sequence

from ..registry import parse

# Colours that stay apart for colour-blind readers, on white and on dark.
COLORS = {"fedavg": "#e69f00", "fedprox": "#56b4e9", "scaffold": "#009e73", "mifa": "#cc79a7", "mimic": "#d1495b"} | {
    "fedavgm": "#8c6d31",
    "fedvarp": "#2166ac",
    "fedau": "#7570b3",
}
SPARE = ["#636363", "#1b7837", "#762a83"]
PALETTE = [*SPARE, *COLORS.values()]
Pattern = tuple[float, ...]  # on, off, on, ... in line widths; nothing for a solid line
Dash = tuple[float, Pattern]  # where in the pattern to begin
PATTERNS: list[Pattern] = [(), (3.7, 1.6), (1, 1.65), (6.4, 1.6, 1, 1.6), (1, 4), (6.4, 1.6, 1, 1.6, 1, 1.6)]
NEARLY_SOLID: Pattern = (10, 2)
SOLID: Dash = (0, ())


def styles(groups: Sequence[tuple[str, str]]) -> list[tuple[str, Dash]]:
    """Colour and dashes of every (algorithm, setting); no two have both in common as long as there are pairs."""
    specs, settings = list(dict.fromkeys(spec for spec, _ in groups)), list(dict.fromkeys(setting for _, setting in groups))
    if len(groups) <= len(PALETTE):
        colors = _colors(specs) if len(settings) == 1 else PALETTE
        return [(color, own_dash(spec)) for color, (spec, _) in zip(colors, groups, strict=False)]
    if len(specs) <= len(PALETTE) and len(settings) <= len(PATTERNS):  # a colour an algorithm, a pattern a setting
        color_of, pattern_of = dict(zip(specs, _colors(specs), strict=True)), dict(zip(settings, PATTERNS, strict=False))
        return [(color_of[spec], own_dash(spec, pattern_of[setting])) for spec, setting in groups]
    pairs = itertools.cycle([(color, (0.0, pattern)) for pattern in PATTERNS for color in PALETTE])
    return list(itertools.islice(pairs, len(groups)))


def _colors(specs: Sequence[str]) -> list[str]:
    """The algorithms' own colours, and others for those who have none or are there twice."""
    used: list[str] = []
    for spec in specs:
        own = COLORS.get(parse(spec)[0])
        used.append(own if own and own not in used else next(color for color in PALETTE if color not in used))
    return used


def own_dash(spec: str, pattern: Pattern | None = None) -> Dash:
    """FedProx with a small mu follows FedAvg so closely that it would hide it: it has gaps, or those of its setting elsewhere."""
    if parse(spec)[0] != "fedprox":
        return 0, pattern or ()
    if pattern is None:
        return 0, PATTERNS[1]
    return (sum(pattern) / 2, pattern) if pattern else (0, NEARLY_SOLID)
