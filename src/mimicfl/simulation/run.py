"""One run: a problem, a schedule of active clients, a server, and a recorder of what happened."""

import copy
import dataclasses
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import algorithms, participation
from ..algorithms import server_optimizers
from ..algorithms.client_memory import Budget, ClientMemory
from ..algorithms.server import ClientUpdates, Server
from ..callbacks.interface import CallbackSet, RoundInfo, RunInfo
from ..clients import params
from ..clients.lr import schedule as rate_schedule
from ..engines.interface import TrainRequest
from ..errors import Diverged, UsageError, integer
from ..fingerprint import Fingerprint
from ..metrics.diagnostics import Diagnosis, Diagnostics
from ..metrics.evaluate import Score
from ..metrics.groups import Visits, summary
from ..metrics.history import History, read
from ..metrics.recorder import Recorder, Row, scored
from ..metrics.store import RunFolder, as_folder
from ..participation import distributions, selection
from ..participation.asynchronous import Buffered
from ..participation.rates import EstimatedRates, known_rates
from ..participation.run_schedule import participation as run_participation
from ..participation.stages import Round, Stages
from ..problem import Problem
from ..settings import check
from .checkpoint import Checkpoints
from .checks import check_learning_rates, check_units
from .fingerprint import fingerprint
from .versions import Versions
from .virtual_time import bytes_sent, client_seconds


class Run:
    """The state of a run between two rounds. Arguments as in `simulate`."""

    def __init__(
        self,
        problem: Problem,
        *,
        algorithm: Any,
        availability: Any,
        rounds: int | None,
        uploads: int | None,
        global_lr: Any,
        update: str,
        seed: int,
        eval_every: int,
        server_optimizer: Any = "none",
        select: Any = "all",
        deadline: float = 0.0,
        speed: Any = "none",
        bandwidth: Any = "none",
        asynchronous: int = 0,
        concurrency: int = 0,
        participation_rates: str = "known",
        state_budget: str = "auto",
        checkpoint_every: int | None = None,
    ) -> None:
        self.problem, self.seed, self.eval_every = problem, check("seed", seed), check("eval_every", eval_every)
        check("update", update)
        made = algorithms.make(algorithm)
        self.uploads = integer("the algorithm's uploads", algorithms.trait(made, "uploads"))
        self.downloads = integer("the algorithm's downloads", algorithms.trait(made, "downloads"))
        self.pattern = participation.make(availability)
        self.participation_rates = check("participation_rates", participation_rates)
        local_lr = rate_schedule(problem.local.lr)
        follows = isinstance(global_lr, str) and global_lr == "local"
        self.server = Server(
            made,
            problem.work.w.clone(),
            problem.work.buffers(),
            problem.share,
            local_lr=local_lr,
            global_lr=local_lr if follows else rate_schedule(global_lr),
            update=update,
            steps_to_K=problem.local.worth,
            optimizer=server_optimizers.make(server_optimizer),
            warm_start=self.pattern.warm_start,
        )
        self.distributions = [distributions.make(name, given) for name, given in (("speed", speed), ("bandwidth", bandwidth))]
        stages = Stages(
            selection.make(select),
            client_seconds(problem, self.seed, sum(self._bytes(1)), *self.distributions),
            check("deadline", deadline) or None,
            problem.clients.sizes,
            seed,
            self.pattern.round_seconds,
        )
        buffered = Buffered(check("asynchronous", asynchronous), check("concurrency", concurrency)) if asynchronous else None
        if concurrency and not asynchronous:
            raise UsageError("concurrency is for asynchronous training; give asynchronous=10, the arrivals per server step")
        self.stages = stages if stages.clock or not stages.trivial else None
        drawn_from = (self.pattern, stages, len(problem.split), seed, problem.class_counts)
        self.participation = run_participation(*drawn_from, rounds, uploads, self.uploads, buffered)
        self.buffered = () if buffered is None else (buffered,)
        events = self.participation.arrivals
        self.versions = None if events is None else Versions(self.server, events)
        self.available = self.participation.active
        self.active_per_round = self.available.sum(axis=1)  # an estimate if the selection depends on the model
        self.planned, self.round = len(self.available), Round()
        if algorithms.trait(made, "needs_participation_rates"):
            self._give_rates(stages)
        check_learning_rates(problem, self.available, self.server, known=not stages.selection.needs_model)
        check_units(problem, self.server)
        self._limit_memory(Budget.parse(state_budget))
        self.recorder, self.visits = Recorder(), Visits(len(problem.split))
        self.checkpoint_every = checkpoint_every
        self.checkpoints: Checkpoints | None = None  # of a run that is kept in a folder
        self.diagnostics: Diagnostics | None = None  # measures rounds without changing them
        self.diagnosis: Diagnosis | None = None  # of this round
        self.score: Score | None = None  # of the model as it is now
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
        return len(self.available)

    def _give_rates(self, stages: Stages) -> None:
        """Tell the server how often clients participate."""
        n = len(self.problem.split)
        if self.participation_rates == "known":
            known = known_rates(self.pattern, stages, n, self.seed, self.problem.class_counts, asynchronous=bool(self.buffered))
            self.server.participation_rates = lambda active: known[active]
        else:
            estimate = EstimatedRates(n, forced=int(self.pattern.warm_start))
            self.server.participation_rates = lambda active: estimate.update(self.recorder.rows, active)

    def _losses(self, clients: np.ndarray) -> np.ndarray:
        return self.problem.client_losses(self.server.w, self.server.buffers, clients)

    def _limit_memory(self, budget: Budget) -> None:
        for value in vars(self.server.state).values():
            if isinstance(value, ClientMemory):
                value.budget = budget

    def open(self, path: str | Path) -> None:
        """Begin in this folder, or resume where the same run stopped."""
        path = as_folder(path)
        for value in vars(self.server.state).values():
            if isinstance(value, ClientMemory):
                value.budget = dataclasses.replace(value.budget, folder=path)
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

    def request(self) -> TrainRequest | None:
        """The request to the active clients of this round; None if no client is available."""
        self.began = time.perf_counter()
        self.round = self.participation.round(self.t, self._losses)
        if not len(self.round.active):
            return None
        request = self.server.request(self.t, self.round.active)
        if self.versions is not None and self.round.versions is not None:
            request = self.versions.applied_to(request, self.round.versions)
        if self.diagnostics is not None:  # they compare the clients' own updates
            request = dataclasses.replace(request, mean_suffices=False)
        return TrainRequest.of(request, self.problem, self.seed)

    def example_request(self) -> TrainRequest:
        return TrainRequest.of(self.server.request(self.t, np.array([0])), self.problem, self.seed)

    def apply(self, request: TrainRequest, updates: ClientUpdates) -> None:
        """Apply the server step, and diagnose it if this round is diagnosed."""
        before = self.diagnostics.before(self.t, self.server) if self.diagnostics else None
        step, g = self.server.apply(request, updates)
        if self.versions is not None:
            self.versions.stepped(self.t)
        if self.diagnostics and before:
            active = torch.from_numpy(request.active).to(self.problem.device)
            self.diagnosis = self.diagnostics.after(before, self.server.w, step, active, g, request.buffers)
        self.score = None

    def _bytes(self, clients: int) -> tuple[int, int]:
        """The bytes that clients send up and down."""
        return clients * bytes_sent(self.server, self.uploads), clients * bytes_sent(self.server, self.downloads)

    def _count(self) -> None:
        """Count what this round sent: every selected client receives the model; those that finish send their updates."""
        down, up = len(self.round.selected), len(self.round.active) + self.round.surplus
        sent = {"vectors_up": up * self.uploads, "vectors_down": down * self.downloads}
        self.recorder.count(
            uploads=self.uploads if len(self.round.active) else 0, bytes_up=self._bytes(up)[0], bytes_down=self._bytes(down)[1], **sent
        )

    def _participation_columns(self) -> dict[str, Any]:
        """What the row says about the stages and the clock, if the run has them."""
        if self.stages is None:
            return {}
        columns: dict[str, Any] = (
            {} if self.stages.trivial or self.round.versions is not None else self.round.columns(len(self.problem.split))
        )
        if self.stages.clock:
            before = self.recorder.rows[-1]["virtual_seconds"] if self.recorder.rows else 0.0
            if self.round.versions is not None:
                columns["staleness"] = (self.t - self.round.versions).tolist()
            columns["virtual_seconds"] = round(self.participation.stages.ends(self.t, before, self.round.seconds), 6)
        return columns

    def close_round(self, request: TrainRequest | None, updates: ClientUpdates | None) -> Row:
        """Evaluate, call back, record, and save a checkpoint when it is time."""
        clients, eta_L, eta = (request.active.tolist(), request.eta_L, request.eta) if request else ([], None, None)
        loss = None if updates is None else float(updates.loss.mean())
        score = self.evaluated() if self.due else None
        self._count()
        row = self.recorder.row(clients, eta_L, eta, loss, score, round(time.perf_counter() - self.began, 6))
        row |= self._participation_columns()
        row |= self._client_columns(score, clients)
        if self.problem.optimum is not None:
            row["distance"] = float((self.server.w - self.problem.optimum).norm())
            if not np.isfinite(row["distance"]):
                raise Diverged(f"the model is too large for its number format in round {self.t}")
        if self.diagnosis is not None:
            row["diagnosis"], self.diagnosis = self.diagnosis, None
        if self.callbacks.measure(row, self._round_info):
            last = self.evaluated()  # the last model always is
            row |= {**scored(last), **self._client_columns(last, clients), "stopped": True}
        self.recorder.append(row)
        self.callbacks.watch(row, self._round_info)
        self.end_where_stopped()
        if self.checkpoints is not None:
            self.checkpoints.save_if_due()
        return row

    def _client_columns(self, score: Score | None, active: list[int]) -> dict[str, float | None]:
        """The metric on the clients' own test samples, by participation up to this round; nothing where it is not measured."""
        if score is None or not (found := self.problem.client_scores(score)):
            return {}
        return summary(found, self.visits.until(self.recorder.rows, active), self.problem.client_metric.higher_is_better)

    def begin_callbacks(self) -> None:
        """Before the first round, or before the next one of a run that resumes."""
        folder = None if self.recorder.folder is None else self.recorder.folder.path
        self.callbacks.begin(RunInfo(self.name, self.config, self.rounds, folder, tuple(self.recorder.rows), self.problem.directions))

    def _round_info(self, row: Row, run: RunInfo) -> RoundInfo:
        return RoundInfo(row, run, lambda: self.server.w.detach().cpu().clone(), self._model)

    def _model(self) -> nn.Module:
        module = params.load(copy.deepcopy(self.problem.template).to(self.problem.device), self.server.w)
        for name, value in module.named_buffers():
            if name in self.server.buffers:
                value.copy_(self.server.buffers[name])
        return module.eval()

    def end_where_stopped(self) -> None:
        """No rounds follow the one in which a callback stopped the run."""
        if self.recorder.rows and self.recorder.rows[-1].get("stopped"):
            self.available = self.available[: self.t]

    @property
    def due(self) -> bool:
        """Is the model evaluated after this round?"""
        return (self.t + 1) % self.eval_every == 0 or self.t + 1 == self.rounds or self.diagnosis is not None

    def evaluated(self) -> Score:
        if self.score is None:
            self.score = self.problem.evaluate(self.server.w, self.server.buffers)
        if not np.isfinite(self.score.loss):
            raise Diverged(f"the test loss is no longer finite after round {self.t}")
        return self.score

    def history(self) -> History:
        """The finished run; written to its folder if it has one."""
        folder, server, problem = self.recorder.folder, self.server, self.problem
        if folder is not None and folder.finished:
            return dataclasses.replace(read(folder), template=problem.template)
        accuracy = problem.client_accuracy(server.w, server.buffers)
        tested = problem.client_scores(self.evaluated()) if problem.test_split is not None else []
        if self.checkpoints is not None:
            self.checkpoints.finish(accuracy, tested)
        buffers = {name: value.cpu() for name, value in server.buffers.items()}
        kept = (self.config, problem.template, self.fingerprint)
        history = History(self.recorder.rows, server.w.detach().cpu(), len(problem.split), accuracy, problem.class_counts, buffers, *kept)
        history.client_scores, history.directions = tested, problem.directions
        return history
