"""One run: its schedule, state, counts and folder; the loop in `simulate` asks it and tells it."""

import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms
from .. import availability as patterns
from ..algorithms.base import pack, unpack
from ..data.clients import Clients, Holdout
from ..data.dataset import Data, as_split
from ..errors import Diverged, UsageError, one_of, whole
from ..local.losses import as_loss
from ..local.lr import schedule as rate_schedule
from ..local.update import LocalSGD
from ..metrics.evaluate import Score, client_accuracy, evaluate, score
from ..metrics.history import History, Row, read
from ..metrics.store import RunFolder
from ..params import Workspace, average_buffers
from ..registry import describe
from .checks import check_model, check_state, pick_device
from .cohort import Answers, Ask
from .horizon import plan

TOTALS = ("uploads", "vectors_up", "vectors_down", "bytes_up", "bytes_down")
Predictor = Callable[[Tensor], Tensor]  # parameters [d] -> outputs for all test samples
CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints when no interval is given


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
    ) -> None:
        for value, kind, name in ((model, nn.Module, "model"), (data, Data, "data"), (local, LocalSGD, "local")):
            if not isinstance(value, kind):
                raise UsageError(f"{name} must be a {kind.__module__.split('.')[0]} {kind.__name__}, got {value!r}")
        self.template, self.data, self.local, self.seed = model, data, local, whole("seed", seed, low=0)
        self.update = one_of("update", update, ["sum", "mean"])
        self.eval_every = whole("eval_every", eval_every)
        self.device = pick_device(device)
        self.algorithm = algorithms.make(algorithm)
        self.pattern = patterns.make(availability)
        self.loss = as_loss(loss or data.loss)
        self.local_lr = rate_schedule(local.lr)
        self.global_lr = self.local_lr if isinstance(global_lr, str) and global_lr == "local" else rate_schedule(global_lr)
        self.work = Workspace(model, self.device)
        dtype = self.work.w.dtype
        self.split = as_split(split, len(data.x_train))
        self.clients = Clients(data, self.split, self.device, dtype)
        self.test = Holdout(data, self.device, dtype)
        self.class_counts = data.class_counts(self.split)
        check_model(self.work.module, self.test, data, self.loss)
        self.uploads = whole("the algorithm's uploads", getattr(self.algorithm, "uploads", 1))
        self.downloads = whole("the algorithm's downloads", getattr(self.algorithm, "downloads", 1))
        self.available = plan(self.pattern, len(self.split), seed, self.class_counts, rounds, uploads, self.uploads)
        sizes = self.clients.sizes if one_of("weighting", weighting, ["uniform", "samples"]) == "samples" else np.ones(len(self.split))
        self.share = torch.from_numpy(sizes / sizes.sum()).to(self.device, dtype)  # [N]
        fits = data.optimum is not None and len(data.optimum) == self.work.w.numel()
        self.optimum = data.optimum.to(self.device, dtype) if fits and data.optimum is not None else None

        self.state = self.algorithm.init(self.work.w.clone(), len(self.split))
        check_state(self.state, self.work.w, None, self.algorithm)
        self.buffers = self.work.buffers()
        self.rows: list[Row] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.score: Score | None = None  # of the model as it is now
        self.predict: Predictor | None = None  # a faster way to the test outputs, where the engine has one
        self.engine = "plain"
        self.config: dict[str, Any] = {}
        self.folder: RunFolder | None = None
        self.every: int | None = None
        self.began = self.saved_at = time.perf_counter()
        self.saving_took = 0.0

    @property
    def t(self) -> int:
        return len(self.rows)

    @property
    def rounds(self) -> int:
        return len(self.available)

    def use(self, cohort: Any) -> None:
        """Train with this cohort, and test with it where it can."""
        self.engine = cohort.name
        self.predict = cohort.predictor(self.test)

    def ask(self) -> Ask | None:
        """What goes out in this round; None if nobody is there."""
        self.began = time.perf_counter()
        active = np.flatnonzero(self.available[self.t])
        if not len(active):
            return None
        task = self.algorithm.task(self.state, torch.from_numpy(active).to(self.device))
        eta_L, eta = self.local_lr(self.t, len(active)), self.global_lr(self.t, len(active))
        return Ask(self.t, self.seed, self.state.w, self.buffers, active, task, eta_L, eta)

    def tell(self, ask: Ask, answers: Answers) -> None:
        """The round's answers reach the server."""
        active = torch.from_numpy(ask.active).to(self.device)
        share = self.share[active]
        weights = share / share.sum()
        g = answers.g if self.update == "sum" else answers.g / answers.K[:, None].to(answers.g.dtype)
        step = algorithms.Step(self.t, ask.eta, ask.eta_L, answers.K, weights, share, self.update)
        before, self.state = self.state, self.algorithm.aggregate(self.state, active, g, step)
        check_state(self.state, ask.w, before, self.algorithm)
        if not bool(torch.isfinite(self.state.w).all()):
            raise Diverged(f"the global model is no longer finite in round {self.t} (global rate {ask.eta:g})")
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
        due = (self.t + 1) % self.eval_every == 0 or self.t + 1 == self.rounds
        score = self._score() if due else None
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
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
            self._checkpoint_if_due()
        return row

    def _score(self) -> Score:
        if self.score is None:
            if self.predict is not None:
                self.score = score(self.predict(self.state.w), self.test.y, self.loss, self.data.num_classes)
            else:
                self.work.load(self.state.w, self.buffers)
                self.score = evaluate(self.work.module, self.test, self.loss, self.data.num_classes)
            if not np.isfinite(self.score.loss):
                raise Diverged(f"the test loss is no longer finite after round {self.t}")
        return self.score

    # -- the folder ----------------------------------------------------------------------------------------------

    def open(self, path: str | Path, config: dict[str, Any], checkpoint_every: int | None) -> None:
        """Begin in this folder, or go on where the same run stopped."""
        self.config = config
        self.every = checkpoint_every and whole("checkpoint_every", checkpoint_every)
        self.folder = RunFolder.claim(path, config)
        try:
            self._restore()
        except BaseException:
            self.folder.close()
            raise

    def _restore(self) -> None:
        assert self.folder is not None
        name = "final" if self.folder.finished else "checkpoint"
        saved = self.folder.load(name)
        if saved is None:
            self.checkpoint()  # so that there is a good one from the first moment
            self.folder.keep_rows([])
            return
        tensors, facts = saved
        if facts.get("run") != self.fingerprint():
            raise UsageError(
                f"the {name} in {self.folder.path} is of another run (other data, split, model, loss or settings): choose another folder"
            )
        self.rows = self.folder.rows_of(facts)
        self.engine = facts.get("engine", "plain")
        if name == "final":
            return
        self.folder.keep_rows(self.rows)
        unpack(self.state, tensors, self.folder.path)
        self.buffers = {name: tensors[f"buffer.{name}"].to(self.device) for name in self.buffers}
        if self.rows:
            self.totals = {key: self.rows[-1][key] for key in TOTALS}

    def _checkpoint_if_due(self) -> None:
        if self.every:
            due = self.t % self.every == 0
        else:
            due = time.perf_counter() - self.saved_at >= self.saving_took / CHECKPOINT_SHARE
        if due or self.t == self.rounds:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save the state as it is after the last recorded round."""
        assert self.folder is not None
        start = time.perf_counter()
        tensors = pack(self.state) | {f"buffer.{name}": value for name, value in self.buffers.items()}
        self.folder.save("checkpoint", tensors, **self._facts())
        self.saved_at = time.perf_counter()
        self.saving_took = self.saved_at - start

    def _facts(self) -> dict[str, str]:
        return {"round": str(self.t), "run": self.fingerprint(), "engine": self.engine}

    @functools.cache  # noqa: B019  (a run lives as long as its process has use for it)
    def fingerprint(self) -> str:
        """A number for everything the result depends on, code aside."""
        crc = 0
        arrays = [tensor.numpy() for tensor in (self.data.x_train, self.data.y_train, self.data.x_test, self.data.y_test)]
        weights = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for tensor in self.template.state_dict().values()]
        for array in [*arrays, *self.split, self.available, self.share.cpu().numpy(), *weights]:
            crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), crc)
        busy = [(t, m) for t, m in enumerate(self.available.sum(axis=1).tolist()) if m]
        words = [
            describe(algorithms.ALGORITHMS, self.algorithm),
            sorted(
                (key, repr(value)) for key, value in getattr(self.algorithm, "__dict__", {}).items() if isinstance(value, (int, float, str))
            ),
            *[getattr(self.loss, "__qualname__", type(self.loss).__name__), str(self.template), self.device.type],
            *[self.local.epochs, self.local.steps, self.local.batch_size, self.update, self.seed, self.eval_every],
            self.data.facts(),
            [[rate(t, m) for rate in (self.local_lr, self.global_lr)] for t, m in busy],
        ]
        return f"{zlib.crc32(json.dumps(words).encode(), crc):08x}"

    # -- the end -------------------------------------------------------------------------------------------------

    def history(self) -> History:
        """The finished run; written to its folder if it has one."""
        if self.folder is not None and self.folder.finished:
            return dataclasses.replace(read(self.folder), template=self.template)
        self.work.load(self.state.w, self.buffers)
        train = Holdout(self.data, self.device, self.work.w.dtype, part="train")
        by_client = client_accuracy(evaluate(self.work.module, train, self.loss, self.data.num_classes), self.split)
        if self.folder is not None:
            tensors = {"params": self.state.w} | {f"buffer.{name}": value for name, value in self.buffers.items()}
            if by_client:
                tensors["client_accuracy"] = torch.tensor(by_client, dtype=torch.float64)
            if self.class_counts is not None:
                tensors["class_counts"] = torch.from_numpy(self.class_counts)
            self.folder.save("final", tensors, **self._facts())
        buffers = {name: value.cpu() for name, value in self.buffers.items()}
        w = self.state.w.detach().cpu()
        return History(self.rows, w, len(self.split), by_client, self.class_counts, buffers, self.config, self.template)
