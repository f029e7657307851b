"""Client availability: a pattern turns a seed into a schedule, bool [rounds, clients]."""

from .distributions import DISTRIBUTIONS, Distribution
from .explicit import Explicit
from .groups import Circles, Outages
from .heterogeneous import Dirichlet, InterleavedSine, LabelCorrelated, Lognormal, Sine, Staircase
from .patterns import (
    PATTERNS,
    Always,
    Bounded,
    Cyclic,
    Markov,
    Pattern,
    Static,
    TimeVarying,
    make,
    register,
    schedule,
)
from .selection import SELECTIONS, BySamples, Candidates, OverSelect, PowerOfChoice, Selection, Uniform
from .statistics import Observed, observe
from .traces.formats import read_trace, write_trace
from .traces.intervals import Trace
from .traces.pattern import FromTrace
from .traces.synthetic import Diurnal, fit
from .traces.twin import twin

__all__ = [
    "DISTRIBUTIONS",
    "PATTERNS",
    "SELECTIONS",
    "Always",
    "Bounded",
    "BySamples",
    "Candidates",
    "Circles",
    "Cyclic",
    "Dirichlet",
    "Distribution",
    "Diurnal",
    "Explicit",
    "FromTrace",
    "InterleavedSine",
    "LabelCorrelated",
    "Lognormal",
    "Markov",
    "Observed",
    "Outages",
    "OverSelect",
    "Pattern",
    "PowerOfChoice",
    "Selection",
    "Sine",
    "Staircase",
    "Static",
    "TimeVarying",
    "Trace",
    "Uniform",
    "fit",
    "make",
    "observe",
    "read_trace",
    "register",
    "schedule",
    "twin",
    "write_trace",
]
