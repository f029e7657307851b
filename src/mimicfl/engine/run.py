"""One run: its schedule, state, counts and folder; the loop in `drive` asks it and tells it."""

import dataclasses
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import algorithms
from .. import availability as patterns
from ..data.clients import Clients, Holdout
from ..data.dataset import Data, as_split
from ..errors import Diverged, UsageError, one_of, whole
from ..fingerprint import Fingerprint
from ..local.losses import as_loss
from ..local.lr import schedule as rate_schedule
from ..local.update import LocalSGD
from ..metrics.diagnostics import Diagnosis, Watch
from ..metrics.evaluate import Score, client_accuracy, evaluate
from ..metrics.history import History, Row, read
from ..metrics.store import as_folder
from ..params import Workspace, average_buffers
from ..rows import Budget, Rows
from .checks import check_lists, check_model, check_rate, check_state, pick_device
from .cohort import Answers, Ask
from .fingerprint import fingerprint
from .horizon import plan
from .keeper import Keeper
from .moment import EachRound, look

TOTALS = ("uploads", "vectors_up", "vectors_down", "bytes_up", "bytes_down")


class Run:
    """Everything between two rounds. Arguments as in `simulate`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        data: Data,
        split: Any,
        algorithm: Any,
        availability: Any,
        rounds: int | None,
        uploads: int | None,
        local: LocalSGD,
        global_lr: Any,
        update: str,
        weighting: str,
        loss: Any,
        seed: int,
        device: str,
        eval_every: int,
        precision: str = "fp32",
        state_budget: str = "auto",
    ) -> None:
        for value, kind, name in ((model, nn.Module, "model"), (data, Data, "data"), (local, LocalSGD, "local")):
            if not isinstance(value, kind):
                raise UsageError(f"{name} must be a {kind.__module__.split('.')[0]} {kind.__name__}, got {value!r}")
        data.check_unchanged()
        self.template, self.data, self.local, self.seed = model, data, local, whole("seed", seed, low=0)
        self.update = one_of("update", update, ["sum", "mean"])
        self.eval_every = whole("eval_every", eval_every)
        self.device = pick_device(device)
        self.precision = one_of("precision", precision, ["fp32", "tf32", "bf16"])
        if self.precision != "fp32" and self.device.type != "cuda":
            raise UsageError(f"precision {precision} is for GPUs, and this run is on the {self.device}: use device cuda, or precision fp32")
        self.algorithm = algorithms.make(algorithm)
        self.pattern = patterns.make(availability)
        self.loss = as_loss(data.loss if loss is None else loss)
        self.local_lr = rate_schedule(local.lr)
        self.global_lr = self.local_lr if isinstance(global_lr, str) and global_lr == "local" else rate_schedule(global_lr)
        self.work = Workspace(model, self.device)
        dtype = self.work.w.dtype
        self.split, self.partition = as_split(split, len(data.x_train)), str(getattr(split, "spec", ""))
        check_lists(local, len(self.split))
        self.clients = Clients(data, self.split, self.device, dtype)
        self.test = Holdout(data, self.device, dtype)
        self.class_counts = data.class_counts(self.split)
        check_model(self.work.module, self.test, data, self.loss)
        self.uploads = whole("the algorithm's uploads", getattr(self.algorithm, "uploads", 1))
        self.downloads = whole("the algorithm's downloads", getattr(self.algorithm, "downloads", 1))
        self.available = plan(self.pattern, len(self.split), seed, self.class_counts, rounds, uploads, self.uploads)
        self.planned = len(self.available)
        check_rate(self)
        self.weighting = one_of("weighting", weighting, ["uniform", "samples"])
        sizes = self.clients.sizes if self.weighting == "samples" else np.ones(len(self.split))
        self.share = torch.from_numpy(sizes / sizes.sum()).to(self.device, dtype)  # [N]
        fits = data.optimum is not None and len(data.optimum) == self.work.w.numel()
        self.optimum = data.optimum.to(self.device, dtype) if fits and data.optimum is not None else None

        self.state = self.algorithm.init(self.work.w.clone(), len(self.split))
        check_state(self.state, self.work.w, None, self.algorithm)
        budget = Budget.parse(state_budget)
        for value in vars(self.state).values():
            if isinstance(value, Rows):
                value.budget = budget
        self.buffers = self.work.buffers()
        self.rows: list[Row] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.score: Score | None = None  # of the model as it is now
        self.watch: Watch | None = None  # looks at the rounds from the side, where that is asked for
        self.diagnosis: Diagnosis | None = None  # of this round
        self.each_round: EachRound | None = None
        self.engine = "plain"
        self.threads = 0  # which its bits depend on; 0: they depend on none, or it is not known yet
        self.config: dict[str, Any] = {}
        self.keeper: Keeper | None = None
        self.began = time.perf_counter()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Taken before the first round: a custom model may change its attributes while it is used."""
        return fingerprint(self, self.planned)

    @property
    def t(self) -> int:
        return len(self.rows)

    @property
    def rounds(self) -> int:
        return len(self.available)

    def open(self, path: str | Path, config: dict[str, Any], checkpoint_every: int | None) -> None:
        """Begin in this folder, or go on where the same run stopped."""
        self.config, path = config, as_folder(path)
        for value in vars(self.state).values():
            if isinstance(value, Rows):
                value.budget = dataclasses.replace(value.budget, folder=path)
        self.keeper = Keeper(self, path, config, checkpoint_every)

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.folder.close()

    def recount(self) -> None:
        """The totals as the rows say."""
        if self.rows:
            self.totals = {key: self.rows[-1][key] for key in TOTALS}

    def ask(self) -> Ask | None:
        """What goes out in this round; None if nobody is there."""
        self.began = time.perf_counter()
        active = np.flatnonzero(self.available[self.t])
        return self._ask(active) if len(active) else None

    def ask_anybody(self) -> Ask:
        """What the first client would be asked now: what kind of work this run has."""
        return self._ask(np.array([0]))

    def _ask(self, active: np.ndarray) -> Ask:
        asked = self.algorithm.task(self.state, torch.from_numpy(active).to(self.device))
        task = algorithms.checked_task(asked, self.state.w, len(active), self.algorithm)
        shift, mu = self.local.decayed(self.state.w, task.shift, task.mu)
        task = algorithms.Task(shift.expand(len(active), -1) if isinstance(shift, torch.Tensor) else shift, mu)
        eta_L, eta = self.local_lr(self.t, len(active)), self.global_lr(self.t, len(active))
        return Ask(self.clients, self.local, self.t, self.seed, self.state.w, self.buffers, active, task, eta_L, eta)

    def tell(self, ask: Ask, answers: Answers) -> None:
        """The round's answers reach the server."""
        good = torch.isfinite(answers.loss) & torch.isfinite(answers.g).all(dim=1)
        if not bool(good.all()):
            client = int(ask.active[int((~good).nonzero()[0])])
            raise Diverged(f"the training loss is no longer finite in round {self.t} at client {client} (local rate {ask.eta_L:g})")
        active = torch.from_numpy(ask.active).to(self.device)
        share = self.share[active]
        weights = share / share.sum()
        K = self.local.worth(answers.K)
        g = answers.g if self.update == "sum" else answers.g / K[:, None].to(answers.g.dtype)
        step = algorithms.Step(self.t, ask.eta, ask.eta_L, K, weights, share, self.update)
        seen = self.watch.look(self.t, ask.w, self.buffers, self.state) if self.watch else None
        before, self.state = self.state, self.algorithm.aggregate(self.state, active, g, step)
        check_state(self.state, ask.w, before, self.algorithm)
        if not bool(torch.isfinite(self.state.w).all()):
            raise Diverged(f"the global model is no longer finite in round {self.t} (global rate {ask.eta:g})")
        if self.watch and seen:
            self.diagnosis = self.watch.judge(self.t, seen, self.state.w, step, active, g, self.buffers)
        self.buffers = average_buffers(answers.buffers, weights)
        self._count(len(ask.active))
        self.score = None

    def _count(self, m: int) -> None:
        """Vectors really sent, and their bytes; buffers travel with the model."""
        down = self.downloads
        vector = self.state.w.numel() * self.state.w.element_size()
        extra = sum(b.numel() * b.element_size() for b in self.buffers.values())
        added = (self.uploads, m * self.uploads, m * down, m * (self.uploads * vector + extra), m * (down * vector + extra))
        for key, value in zip(TOTALS, added, strict=True):
            self.totals[key] += value

    def close_round(self, ask: Ask | None, answers: Answers | None) -> Row:
        """Measure, record, and save when it is time."""
        score = self._score() if self.due else None
        row: Row = {
            "round": self.t,
            "active": 0 if ask is None else len(ask.active),
            "clients": [] if ask is None else ask.active.tolist(),
            "empty": ask is None,
            "local_lr": ask.eta_L if ask else None,
            "global_lr": ask.eta if ask else None,
            **self.totals,
            "train_loss": None if answers is None else float(answers.loss.mean()),
            "test_loss": score.loss if score else None,
            "test_accuracy": score.accuracy if score else None,
            "class_accuracy": score.class_accuracy if score else None,
        }
        if self.optimum is not None:
            row["distance"] = float((self.state.w - self.optimum).norm())
            if not np.isfinite(row["distance"]):
                raise Diverged(f"the model has left the range of its numbers in round {self.t}")
        row["seconds"] = round(time.perf_counter() - self.began, 6)
        if self.diagnosis is not None:
            row["diagnosis"], self.diagnosis = self.diagnosis, None
        if self.each_round is not None and look(self.each_round, self, row):
            score = self._score()  # the last model is always tested
            row |= {"test_loss": score.loss, "test_accuracy": score.accuracy, "class_accuracy": score.class_accuracy, "stopped": True}
        self.rows.append(row)
        self.end_where_stopped()
        if self.keeper is not None:
            self.keeper.append(row)
        return row

    def end_where_stopped(self) -> None:
        """There are no rounds after one that `each_round` called the last."""
        if self.rows and self.rows[-1].get("stopped"):
            self.available = self.available[: self.t]

    @property
    def due(self) -> bool:
        """Is the model to be tested after this round?"""
        return (self.t + 1) % self.eval_every == 0 or self.t + 1 == self.rounds or self.diagnosis is not None

    def _score(self) -> Score:
        if self.score is None:
            self.work.load(self.state.w, self.buffers)
            self.score = evaluate(self.work.module, self.test, self.loss, self.data.num_classes)
        if not np.isfinite(self.score.loss):
            raise Diverged(f"the test loss is no longer finite after round {self.t}")
        return self.score

    def history(self) -> History:
        """The finished run; written to its folder if it has one."""
        if self.keeper is not None and self.keeper.folder.finished:
            return dataclasses.replace(read(self.keeper.folder), template=self.template)
        self.work.load(self.state.w, self.buffers)
        train = Holdout(self.data, self.device, self.work.w.dtype, part="train")
        by_client = client_accuracy(evaluate(self.work.module, train, self.loss, self.data.num_classes), self.split)
        if self.keeper is not None:
            self.keeper.finish(by_client)
        buffers = {name: value.cpu() for name, value in self.buffers.items()}
        w = self.state.w.detach().cpu()
        kept = (self.config, self.template, self.fingerprint)
        return History(self.rows, w, len(self.split), by_client, self.class_counts, buffers, *kept)
