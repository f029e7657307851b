"""The parts of a run, as its fingerprint, its checkpoints and its callbacks see them."""

from typing import Any, Protocol

from ..algorithms.server import Server
from ..callbacks.interface import CallbackSet
from ..engines.interface import TrainingRun
from ..fingerprint import Fingerprint
from ..metrics.diagnostics import Diagnostics
from ..metrics.recorder import Recorder
from ..participation.run_schedule import Participation
from ..participation.settings import ParticipationSettings
from .versions import Versions


class RunParts(TrainingRun, Protocol):
    server: Server
    recorder: Recorder
    participation_settings: ParticipationSettings
    participation: Participation
    versions: Versions | None  # of an asynchronous run: the models that clients may still be training from
    planned: int  # rounds, also if a callback stops the run earlier
    eval_every: int
    config: dict[str, Any]  # the settings, as kept in the folder
    diagnostics: Diagnostics | None
    callbacks: CallbackSet

    @property
    def fingerprint(self) -> Fingerprint: ...

    def end_where_stopped(self) -> None: ...
