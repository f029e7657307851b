"""The parts of a run, as its fingerprint, its checkpoints and its callbacks see them."""

from typing import Any, Protocol

import numpy as np

from ..algorithms.server import Server
from ..callbacks.interface import CallbackSet
from ..fingerprint import Fingerprint
from ..metrics.diagnostics import Diagnostics
from ..metrics.recorder import Recorder
from ..participation.run_schedule import Participation
from ..participation.settings import ParticipationSettings
from ..problem import Problem
from .versions import Versions


class RunParts(Protocol):
    problem: Problem
    server: Server
    recorder: Recorder
    participation_settings: ParticipationSettings
    active: np.ndarray  # bool [rounds, N]
    participation: Participation
    versions: Versions | None  # of an asynchronous run: the models that clients may still be training from
    planned: int  # rounds, also if a callback stops the run earlier
    seed: int
    eval_every: int
    config: dict[str, Any]  # the settings, as kept in the folder
    diagnostics: Diagnostics | None
    callbacks: CallbackSet
    engine: str
    threads: int

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def t(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    def end_where_stopped(self) -> None: ...
