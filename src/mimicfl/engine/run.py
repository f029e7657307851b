"""One run: its schedule, state, counts and folder; the loop in `simulate` asks it and tells it."""

import json
import time
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms, availability
from ..data.clients import Clients, Holdout
from ..data.dataset import Data, as_split
from ..errors import Diverged, UsageError, one_of, whole
from ..local.losses import as_loss
from ..local.lr import schedule as rate_schedule
from ..local.update import LocalSGD
from ..metrics.evaluate import Score, client_accuracy, evaluate
from ..metrics.history import History, Row
from ..metrics.store import RunFolder
from ..params import Workspace, average_buffers
from ..registry import describe
from .checks import check_model, pick_device
from .cohort import Answers, Ask
from .horizon import plan

TOTALS = ("uploads", "vectors_up", "vectors_down", "bytes_up", "bytes_down")
CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints when no interval is given


class Run:
    """Everything between two rounds. Arguments as in `simulate`."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        split: Any,
        algorithm: Any,
        pattern: Any,
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
        self.template, self.data, self.local, self.seed = model, data, local, whole("seed", seed, low=0)
        self.update = one_of("update", update, ["sum", "mean"])
        self.eval_every = whole("eval_every", eval_every)
        self.device = pick_device(device)
        self.algorithm = algorithms.make(algorithm)
        self.pattern = availability.make(pattern)
        self.loss = as_loss(loss or data.loss)
        self.local_lr = rate_schedule(local.lr)
        self.global_lr = self.local_lr if global_lr == "local" else rate_schedule(global_lr)
        self.work = Workspace(model, self.device)
        dtype = self.work.w.dtype
        self.split = as_split(split, len(data.x_train))
        self.clients = Clients(data, self.split, self.device, dtype)
        self.test = Holdout(data, self.device, dtype)
        self.class_counts = data.class_counts(self.split)
        check_model(self.work.module, self.test, data)
        self.uploads = getattr(self.algorithm, "uploads", 1)
        self.available = plan(self.pattern, len(self.split), seed, self.class_counts, rounds, uploads, self.uploads)
        sizes = self.clients.sizes if one_of("weighting", weighting, ["uniform", "samples"]) == "samples" else np.ones(len(self.split))
        self.share = torch.from_numpy(sizes / sizes.sum()).to(self.device, dtype)  # [N]
        self.optimum = (
            data.optimum.to(self.device, dtype) if data.optimum is not None and len(data.optimum) == self.work.w.numel() else None
        )

        self.state = self.algorithm.init(self.work.w.clone(), len(self.split))
        self.buffers = self.work.buffers()
        self.rows: list[Row] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.score: Score | None = None  # of the model as it is now
        self.folder: RunFolder | None = None

    @property
    def t(self) -> int:
        return len(self.rows)

    @property
    def rounds(self) -> int:
        return len(self.available)

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
        self.state = self.algorithm.aggregate(self.state, active, g, step)
        if not bool(torch.isfinite(self.state.w).all()):
            raise Diverged(f"the global model is no longer finite in round {self.t} (global rate {ask.eta:g})")
        self.buffers = average_buffers(answers.buffers, weights)
        self._count(len(ask.active))
        self.score = None

    def _count(self, m: int) -> None:
        """Vectors really sent, and their bytes; buffers travel with the model."""
        down = getattr(self.algorithm, "downloads", 1)
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
        row["seconds"] = round(time.perf_counter() - self.began, 6)
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
            self._checkpoint_if_due()
        return row

    def _score(self) -> Score:
        if self.score is None:
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
        self.saved_at, self.saving_took = time.perf_counter(), 0.0
        try:
            self._restore()
        except BaseException:
            self.folder.close()
            raise

    def _restore(self) -> None:
        assert self.folder is not None
        saved = self.folder.load("checkpoint")
        if saved is None:
            self.folder.keep_rows([])
            self.checkpoint()  # so that there is a good one from the first moment
            return
        tensors, facts = saved
        if facts.get("run") != self.fingerprint():
            raise UsageError(
                f"the checkpoint in {self.folder.path} is of another run (other data, split, model or settings): choose another folder"
            )
        t, rows = int(facts["round"]), self.folder.rows()
        if len(rows) < t:
            raise UsageError(
                f"{self.folder.path}/rows.jsonl is damaged: it has {len(rows)} good rows, the checkpoint is at round {t}; "
                "delete checkpoint.safetensors to train this run again from the start"
            )
        self.rows = rows[:t]
        self.folder.keep_rows(self.rows)
        for field in fields(self.state):
            setattr(self.state, field.name, tensors[f"state.{field.name}"].to(self.device))
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
        tensors: dict[str, Tensor] = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(self.state)}
        tensors |= {f"buffer.{name}": value for name, value in self.buffers.items()}
        self.folder.save("checkpoint", tensors, round=str(self.t), run=self.fingerprint())
        self.saved_at = time.perf_counter()
        self.saving_took = self.saved_at - start

    def fingerprint(self) -> str:
        """A number for everything the result depends on."""
        if not hasattr(self, "_fingerprint"):
            crc = 0
            arrays = [flat.numpy() for flat in (self.data.x_train, self.data.y_train, self.data.x_test, self.data.y_test)]
            for array in [*arrays, *self.split, self.available, self.share.cpu().numpy(), self.initial()]:
                crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), crc)
            rates = [
                [rate(t, m) for rate in (self.local_lr, self.global_lr)] for t, m in enumerate(self.available.sum(axis=1).tolist()) if m
            ]
            words = [
                describe(algorithms.ALGORITHMS, self.algorithm),
                self.local.epochs,
                self.local.steps,
                self.local.batch_size,
                self.update,
                self.seed,
                rates,
            ]
            self._fingerprint = f"{zlib.crc32(json.dumps(words).encode(), crc):08x}"
        return self._fingerprint

    def initial(self) -> np.ndarray:
        return Workspace(self.template, torch.device("cpu")).w.numpy()

    # -- the end -------------------------------------------------------------------------------------------------

    def history(self) -> History:
        """The finished run; written to its folder if it has one."""
        self.work.load(self.state.w, self.buffers)
        train = Holdout(self.data, self.device, self.work.w.dtype, part="train")
        by_client = client_accuracy(evaluate(self.work.module, train, self.loss, self.data.num_classes), self.split)
        if self.folder is not None and not self.folder.finished:
            tensors = {"params": self.state.w} | {f"buffer.{name}": value for name, value in self.buffers.items()}
            if by_client:
                tensors["client_accuracy"] = torch.tensor(by_client, dtype=torch.float64)
            if self.class_counts is not None:
                tensors["class_counts"] = torch.from_numpy(self.class_counts)
            self.folder.save("final", tensors, run=self.fingerprint())
        return History(
            self.rows,
            self.state.w.detach().cpu(),
            len(self.split),
            by_client,
            self.class_counts,
            {name: value.cpu() for name, value in self.buffers.items()},
            getattr(self, "config", {}),
            self.template,
        )
