"""Who answers when: a pattern turns a seed into a bool schedule [rounds, clients]."""

from .measures import Observed, observe
from .patterns import (
    PATTERNS,
    Always,
    Bounded,
    Cyclic,
    Explicit,
    LabelCorrelated,
    Markov,
    Pattern,
    Static,
    TimeVarying,
    make,
    register,
    schedule,
)

__all__ = [
    "PATTERNS",
    "Always",
    "Bounded",
    "Cyclic",
    "Explicit",
    "LabelCorrelated",
    "Markov",
    "Observed",
    "Pattern",
    "Static",
    "TimeVarying",
    "make",
    "observe",
    "register",
    "schedule",
]
