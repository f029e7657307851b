"""One run: a problem, a schedule of active clients, a server, and a recorder of what happened."""

import copy
import dataclasses
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import trait
from ..algorithms.finite import check_global_model
from ..algorithms.server import Server
from ..algorithms.updates import ClientUpdates
from ..callbacks.interface import CallbackSet, RoundInfo, RunInfo
from ..clients import params
from ..engines.interface import TrainRequest
from ..errors import Diverged, UsageError, shown
from ..files import is_scratch
from ..fingerprint import Fingerprint
from ..metrics.diagnostics import Diagnosis, Diagnostics
from ..metrics.evaluate import Score
from ..metrics.groups import Visits, summary
from ..metrics.history import History, read
from ..metrics.recorder import Recorder, scored
from ..metrics.rows import Row
from ..metrics.store import RunFolder, as_folder
from ..participation.run_schedule import Participation
from ..participation.settings import ParticipationSettings
from ..participation.stages import RoundClients
from ..problem import Problem
from .checkpoint import Checkpoints
from .fingerprint import fingerprint
from .traffic import traffic
from .versions import Versions


class Run:
    """The state of a run between two rounds. `set_up` makes one from settings."""

    def __init__(
        self,
        problem: Problem,
        server: Server,
        participation_settings: ParticipationSettings,
        participation: Participation,
        seed: int,
        eval_every: int,
        checkpoint_every: int,
    ) -> None:
        self.problem, self.server, self.participation = problem, server, participation
        self.participation_settings = participation_settings
        self.seed, self.eval_every, self.checkpoint_every = seed, eval_every, checkpoint_every
        self.active = participation.active  # up to the last round, which a callback may decide
        self.planned, self.round = len(self.active), RoundClients()
        self.versions = None if participation.arrivals is None else Versions(server, participation.arrivals)
        self.recorder, self.visits = Recorder(), Visits(len(problem.split))
        self.checkpoints: Checkpoints | None = None  # of a run that is kept in a folder
        self.diagnostics: Diagnostics | None = None  # measures rounds without changing them
        self.diagnosis: Diagnosis | None = None  # of this round
        self.score: Score | None = None  # of the server's model as it is now
        self.callbacks = CallbackSet()
        self.name = ""  # within a comparison or sweep
        self.engine, self.threads = "plain", 0
        self.config: dict[str, Any] = {}
        self.began = time.perf_counter()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Taken before the first round: a custom model may change its attributes while it is used."""
        return fingerprint(self, self.planned)

    @property
    def t(self) -> int:
        return self.recorder.t

    @property
    def rounds(self) -> int:
        return len(self.active)

    def _losses(self, clients: np.ndarray) -> np.ndarray:
        given, n = np.asarray(clients), len(self.problem.split)
        if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= n)):
            raise UsageError(f"losses() takes a list of client numbers from 0 to {n - 1}, got {shown(clients)}")
        return self.problem.client_losses(self.server.w, self.server.buffers, given)

    def open(self, path: str | Path) -> None:
        """Start in this folder, or resume where the same run stopped."""
        path = as_folder(path)
        self.server.limit_memory(folder=path)
        self.recorder.folder = RunFolder.claim(path, self.config)
        try:
            self.checkpoints = Checkpoints(self, self.recorder.folder, self.checkpoint_every)
            self.checkpoints.restore()
        except BaseException:
            self.recorder.close()
            raise

    def checkpoint(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save()

    # -- one round -----------------------------------------------------------------------------------------------

    def begin_round(self) -> np.ndarray:
        """The active clients of this round."""
        self.began = time.perf_counter()
        self.round = self.participation.round(self.t, self._losses)
        return self.round.active

    def request(self, numbers: Tensor | None = None) -> TrainRequest | None:
        """The request to the active clients of this round, which `numbers` holds on the device; None if no client is active."""
        if not len(self.round.active):
            return None
        request = self.server.request(self.t, self.round.active, numbers)
        if self.versions is not None and self.round.versions is not None:
            request = self.versions.applied_to(request, self.round.versions)
        if self.diagnostics is not None:  # they compare the clients' own updates
            request = dataclasses.replace(request, mean_suffices=False)
        return TrainRequest.of(request, self.problem, self.seed)

    def example_request(self) -> TrainRequest:
        return TrainRequest.of(self.server.request(self.t, np.array([0])), self.problem, self.seed)

    def apply(self, request: TrainRequest, updates: ClientUpdates) -> None:
        """Apply the server step, and diagnose it if this round is diagnosed. The round loop checks that updates and model are finite."""
        before = self.diagnostics.before(self.t, self.server) if self.diagnostics else None
        step, g = self.server.advance(request, updates)
        if self.versions is not None:
            self.versions.stepped(self.t)
        if self.diagnostics and before:
            check_global_model(self.server.w, request)
            active = torch.from_numpy(request.active).to(self.problem.device)
            self.diagnosis = self.diagnostics.after(before, self.server.w, step, active, g, request.buffers)
        self.score = None

    def _count(self) -> None:
        """Count what this round sent: every selected client receives the model; those that finish send their updates."""
        uploads = trait(self.server.algorithm, "uploads") if len(self.round.active) else 0
        sent = traffic(self.server, len(self.round.selected), len(self.round.active) + self.round.surplus)
        self.recorder.count(uploads=uploads, **sent)

    def close_round(self, request: TrainRequest | None, loss: float | None, num_runs: int = 1) -> Row:
        """Evaluate, call back, record, and save a checkpoint when it is time.

        `loss` is the mean training loss of the active clients, `num_runs` how many runs train together.
        """
        clients, eta_L, eta = (request.active.tolist(), request.eta_L, request.eta) if request else ([], None, None)
        score = self.evaluated() if self.due else None
        self._count()
        row = self.recorder.row(clients, eta_L, eta, loss, score, round(time.perf_counter() - self.began, 6))
        before = self.recorder.rows[-1].get("virtual_seconds", 0.0) if self.recorder.rows else 0.0
        row |= self.participation.columns(self.t, self.round, before)
        row |= self._client_columns(score, clients)
        if self.problem.optimum is not None:
            row["distance"] = float((self.server.model[0] - self.problem.optimum).norm())
            if not np.isfinite(row["distance"]):
                raise Diverged(f"the model's values are too large for its number format in round {self.t}")
        if self.diagnosis is not None:
            row["diagnosis"], self.diagnosis = self.diagnosis, None
        self.callbacks.record(row, self._round_info, self.recorder.append, lambda: self._last_columns(clients))
        self.end_where_stopped()
        if self.checkpoints is not None:
            self.checkpoints.save_if_due(num_runs)
        return row

    def _last_columns(self, active: list[int]) -> Row:
        """The evaluation of the last model, which is always evaluated."""
        score = self.evaluated()
        return scored(score) | self._client_columns(score, active)

    def _client_columns(self, score: Score | None, active: list[int]) -> dict[str, float | None]:
        """The metric on the clients' own test samples, by participation up to this round; empty if it is not measured."""
        if score is None or not (found := self.problem.client_scores(score)):
            return {}
        return summary(found, self.visits.until(self.recorder.rows, active), self.problem.client_metric.higher_is_better)

    def begin_callbacks(self) -> None:
        """Before the first round, or before the next one of a run that resumes."""
        self.callbacks.begin(RunInfo.of(self.recorder, self.config, self.rounds, self.name, self.problem.directions))

    def _round_info(self, row: Row, run: RunInfo) -> RoundInfo:
        return RoundInfo(row, run, lambda: self.server.model[0].detach().cpu().clone(), self._model)

    def _model(self) -> nn.Module:
        w, buffers = self.server.model
        module = params.load(copy.deepcopy(self.problem.template).to(self.problem.device), w)
        for name, value in module.named_buffers():
            if name in buffers:
                value.copy_(buffers[name])
        return module.eval()

    def end_where_stopped(self) -> None:
        """No rounds follow the one in which a callback stopped the run."""
        if self.recorder.stopped:
            self.active = self.active[: self.t]

    @property
    def due(self) -> bool:
        """Is the model evaluated after this round?"""
        return (self.t + 1) % self.eval_every == 0 or self.t + 1 == self.rounds or self.diagnosis is not None

    def evaluated(self) -> Score:
        if self.score is None:
            self.score = self.problem.evaluate(*self.server.model)
        if not np.isfinite(self.score.loss):
            raise Diverged(f"the test loss is no longer finite after round {self.t}")
        return self.score

    def history(self) -> History:
        """The finished run; written to its folder if it has one."""
        folder, problem, (w, buffers) = self.recorder.folder, self.problem, self.server.model
        if folder is not None and folder.finished:
            return dataclasses.replace(read(folder), template=problem.template)
        accuracy = [] if is_scratch() else problem.client_accuracy(w, buffers)  # a pass over all training samples
        tested = problem.client_scores(self.evaluated()) if problem.test_split is not None else []
        if self.checkpoints is not None:
            self.checkpoints.finish(accuracy, tested)
        buffers = {name: value.cpu() for name, value in buffers.items()}
        kept = (self.config, problem.template, self.fingerprint)
        history = History(self.recorder.rows, w.detach().cpu(), len(problem.split), accuracy, problem.class_counts, buffers, *kept)
        history.client_scores, history.directions = tested, problem.directions
        return history
