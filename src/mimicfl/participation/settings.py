"""The settings of a run that determine participation, as objects."""

from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from . import distributions, patterns, selection
from .asynchronous import Buffered
from .distributions import Distribution
from .patterns import Pattern
from .selection import Selection


@dataclass(frozen=True)
class ParticipationSettings:
    pattern: Pattern
    selection: Selection
    deadline: float | None
    speed: Distribution | None
    bandwidth: Distribution | None
    buffered: Buffered | None  # how an asynchronous run steps
    rates: str  # the participation rates that an algorithm needs are known or estimated

    @classmethod
    def of(
        cls,
        availability: Any,
        select: Any,
        deadline: float,
        speed: Any,
        bandwidth: Any,
        asynchronous: int,
        concurrency: int,
        participation_rates: str,
    ) -> "ParticipationSettings":
        """Made from specs or objects, as `simulate` takes them."""
        if concurrency and not asynchronous:
            raise UsageError("concurrency is for asynchronous training; give asynchronous=10, the arrivals per server step")
        return cls(
            patterns.make(availability),
            selection.make(select),
            deadline or None,
            distributions.make("speed", speed),
            distributions.make("bandwidth", bandwidth),
            Buffered(asynchronous, concurrency) if asynchronous else None,
            participation_rates,
        )
