"""Does an engine match plain for this run? Checked before it is used, on real samples, in training and in evaluation mode.

The compared clients cover the classes, the smallest and the largest client and a batch that is not full. They are compared one by one, at
the run's parameters and at perturbed ones: initial weights that are zero can hide a layer.
"""

import copy
import dataclasses
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Task
from ..data.clients import Clients, Holdout
from ..local.update import LocalSGD
from ..seeds import stream
from .calls import without_dropout
from .cohort import Answers, Ask, Cohort, PlainCohort
from .run import Run
from .support import Unsupported, distances

CLIENTS = 8  # at most
STEPS = 2
LOSS_SAMPLES = 128  # at most
TEST_SAMPLES = 64
# Tolerances, relative to the length of a client's gradient. Measured on the CPU: at most 4e-7 on the models of tests/engine/cohorts.py,
# LeNet and a ResNet. If a maximum moves to another pixel the error is larger, but then plain is just as unstable.
CLOSE = {"cpu": 1e-4, "fp32": 1e-3, "tf32": 0.1, "bf16": 0.2}
CLOSE_OUTPUTS = {"cpu": 1e-4, "fp32": 1e-3, "tf32": 0.05, "bf16": 0.1}
CLOSE_FLOAT64 = 1e-7
UNSTEADY = 10.0  # accepted multiple of plain's own change when its parameters are perturbed by rounding


class Reference:
    """The updates of plain for a few clients of a run."""

    def __init__(self, run: Run, plain: PlainCohort) -> None:
        self.run, self.plain = run, plain
        self.quiet = without_dropout(run.template, run.data.inputs(run.clients.x[:2].clone(), run.clients.dtype))
        # Every engine draws dropout differently, so they are compared without it.
        self.trains = plain if self.quiet is None else PlainCohort(self.quiet, run.clients, run.loss)
        exact, kind = run.clients.dtype == torch.float64, "cpu" if run.device.type == "cpu" else run.precision
        self.close, self.close_outputs = (CLOSE_FLOAT64 if exact else of[kind] for of in (CLOSE, CLOSE_OUTPUTS))
        self.truth: dict[tuple[int, bool], Answers] = {}

    @cached_property
    def asks(self) -> list[Ask]:
        """A few steps from the run's parameters, with the algorithm's task; and from perturbed ones with the plain gradient, since a
        large shift, or clipping, would hide an error in it."""
        ask = few_steps(self.run, telling_clients(self.run), STEPS)
        usual = ask.w.square().mean().sqrt().clamp_min(0.05)
        bare = LocalSGD(steps=STEPS, batch_size=self.run.local.batch_size)
        return [ask, dataclasses.replace(ask, w=ask.w + 0.1 * usual * self.noise, task=Task(), local=bare)]

    @cached_property
    def noise(self) -> Tensor:
        w = self.run.state.w
        return torch.from_numpy(stream(self.run.seed, "nearby").standard_normal(w.numel())).to(w)

    def answers(self, point: int, rounded: bool = False) -> Answers:
        """Updates of plain from these parameters, or from the same perturbed by their rounding error."""
        if (point, rounded) not in self.truth:
            ask = self.asks[point]
            w = ask.w * (1 + 4 * torch.finfo(ask.w.dtype).eps * self.noise) if rounded else ask.w
            self.truth[point, rounded] = self.trains.train([dataclasses.replace(ask, w=w)])[0]
        return self.truth[point, rounded]

    def check_loss(self) -> None:
        """For engines that average the losses of single samples: refuse other losses."""
        if not self.loss_is_a_mean:
            raise Unsupported(
                "its loss is not a mean over samples (class weights, ignore_index, a sum, or a term that depends on the whole batch)"
            )

    def check_samples(self) -> None:
        """For engines that pad short batches: refuse models in which a sample's output depends on the others in its batch."""
        if not self.samples_are_independent:
            raise Unsupported("its samples depend on each other within a batch (BatchNorm, or a mean over the batch)")

    @cached_property
    def samples_are_independent(self) -> bool:
        """Does half of a batch give the same outputs alone, in training mode?"""
        run, work = self.run, self.trains.work
        rows = mixed_rows(run)[: max(2, max(batch_sizes(run)))]
        inputs, half = run.data.inputs(run.clients.x[rows], run.clients.dtype), (len(rows) + 1) // 2
        for ask in self.asks if max(batch_sizes(run)) > 1 else []:
            with torch.no_grad(), torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
                outputs = []
                for part in (inputs, inputs[:half]):
                    work.load(ask.w, run.buffers)
                    outputs.append(work.module(part)[:half])
            if bool(torch.isfinite(outputs[0]).all()) and not _near(outputs[1], outputs[0], self.close_outputs):
                return False
        return True

    @cached_property
    def loss_is_a_mean(self) -> bool:
        """In value and gradient, on samples of all classes, for the batch sizes that occur."""
        rows, clients = mixed_rows(self.run), self.run.clients
        inputs = clients.data.inputs(clients.x[rows], clients.dtype)
        outputs = [self.evaluated(ask.w, inputs) for ask in self.asks]
        finite = [output for output in outputs if bool(torch.isfinite(output).all())] or outputs
        return all(_is_mean(self.run, output, rows, batch_sizes(self.run)) for output in finite)

    @torch.no_grad()
    def evaluated(self, w: Tensor, inputs: Tensor) -> Tensor:
        """Outputs of the plain module in evaluation mode."""
        work = self.plain.work
        work.load(w, self.run.buffers)
        work.module.eval()
        try:
            output: Tensor = work.module(inputs)
            return output
        finally:
            work.module.train()

    def check_training(self, cohort: Cohort) -> None:
        """Compare every client's sum of gradients and loss; `cohort` trains the model without dropout."""
        for point, ask in enumerate(self.asks):
            true = self.answers(point)
            if point and not bool(torch.isfinite(true.g).all()):
                continue  # the model is not finite at perturbed parameters
            self._compare(cohort.train([ask])[0], point)

    def _compare(self, ours: Answers, point: int) -> None:
        true = self.answers(point)
        for part in ("g", "loss"):
            off = distances(getattr(ours, part), getattr(true, part))
            if bool((off <= self.close).all()):
                continue
            # No engine can be closer than plain is to itself when its parameters are perturbed by rounding.
            moved = distances(getattr(self.answers(point, rounded=True), part), getattr(true, part))
            if not bool((off <= (UNSTEADY * moved).clamp_min(self.close)).all()):
                raise Unsupported(f"its fast form disagrees with PyTorch on a test batch by {100 * float(off.max()):.2g} %")

    def check_evaluation(self, cohort: Cohort) -> None:
        """Compare test outputs, if the engine computes any, with the module in evaluation mode."""
        test = sample(self.run.test)
        for ask in self.asks:
            found = cohort.outputs(ask.w[None], [self.run.buffers], test)
            if found is None:
                return
            true = self.evaluated(ask.w, test.data.inputs(test.x, test.dtype))
            if bool(torch.isfinite(true).all()) and not (found[0].shape == true.shape and _near(found[0], true, self.close_outputs)):
                raise Unsupported("its test outputs disagree with PyTorch in evaluation mode")


def _near(ours: Tensor, true: Tensor, tolerance: float) -> bool:
    return bool((ours - true).abs().max() <= tolerance * true.abs().max())


def _is_mean(run: Run, output: Tensor, rows: Tensor, sizes: list[int]) -> bool:
    """Is the loss of a batch the mean of the losses of its samples, for these batch sizes?"""
    targets, rounding = run.clients.y[rows], 1e3 * torch.finfo(output.dtype).eps
    x = output.clone().requires_grad_()
    single = torch.stack([run.loss(x[i : i + 1], targets[i : i + 1]) for i in range(len(rows))])
    [gradients] = torch.autograd.grad(single.sum(), x)
    for n in [min(size, len(rows)) for size in sizes if size > 1]:
        for begin in sorted({min(begin, len(rows) - n) for begin in range(0, len(rows), n)}):
            part = slice(begin, begin + n)
            x = output[part].clone().requires_grad_()
            value = run.loss(x, targets[part])
            [gradient] = torch.autograd.grad(value, x)
            if not (_near(single[part].mean(), value, rounding) and _near(gradients[part] / n, gradient, rounding)):
                return False
    return True


def batch_sizes(run: Run) -> list[int]:
    """Batch sizes that occur: the smallest, the largest and one between."""
    sizes = run.clients.sizes
    ragged = np.unique(sizes)
    some = ragged[np.unique(np.linspace(0, len(ragged) - 1, 16).astype(int))]
    found = sorted({n for size in some for n in LocalSGD(epochs=1, batch_size=run.local.batch_size).batch_sizes(int(size))})
    return [found[i] for i in sorted({0, len(found) // 2, len(found) - 1})]


def mixed_rows(run: Run) -> Tensor:
    """Training samples that cover every label, and some more."""
    y = run.clients.y.cpu()
    used = np.concatenate(run.split)
    some = used[np.linspace(0, len(used) - 1, min(len(used), LOSS_SAMPLES)).astype(int)]
    if not y.is_floating_point():
        labels = y.numpy()[used].reshape(len(used), -1)
        _, first = np.unique(labels, return_index=True)
        some = np.concatenate([used[np.unique(first // labels.shape[1])], some])
    order = stream(run.seed, "mixed").permutation(some[:LOSS_SAMPLES])
    return torch.from_numpy(order).to(run.device)


def telling_clients(run: Run) -> list[int]:
    """The smallest and the largest client, one with a batch that is not full, and more until all classes are covered."""
    sizes, batch = run.clients.sizes, run.local.batch_size or int(run.clients.sizes.max())
    chosen = [int(sizes.argmin()), int(sizes.argmax()), int((sizes % batch != 0).argmax())]
    if run.class_counts is None:
        chosen += [len(sizes) // 3, 2 * len(sizes) // 3]
    else:
        holds = run.class_counts > 0
        while len(set(chosen)) < CLIENTS and (missing := holds.any(axis=0) & ~holds[chosen].any(axis=0)).any():
            chosen.append(int(holds[:, missing].sum(axis=1).argmax()))
    return sorted(set(chosen))


def few_steps(run: Run, clients: list[int], steps: int) -> Ask:
    """The run's request to these clients, for a few steps on some of their samples: full batches and one that is not."""
    batch = max(run.local.batch_sizes(int(run.clients.sizes.max())))
    parts = [_few(run, run.split[client], batch, steps) for client in clients]
    ask = run.ask_anybody()
    few = Clients(run.data, parts, run.device, run.work.w.dtype)
    local = LocalSGD(steps=steps, batch_size=run.local.batch_size, momentum=run.local.momentum, clip_norm=run.local.clip_norm)
    shift = ask.task.shift if isinstance(ask.task.shift, float) else ask.task.shift[:1].expand(len(parts), -1)
    task = Task(shift, ask.task.mu)
    return dataclasses.replace(ask, clients=few, local=local, active=np.arange(len(parts)), task=task, eta_L=1e-6, eta=1e-6)


def _few(run: Run, part: np.ndarray, batch: int, steps: int) -> np.ndarray:
    """Enough samples for these steps, from all classes of the client if possible; the last batch has the size of the client's last."""
    y = run.clients.y
    if y.ndim == 1 and not y.is_floating_point():
        part = part[np.argsort(_rank(y[torch.from_numpy(part).to(y.device)].cpu().numpy()), kind="stable")]
    return part[: (steps - 1) * batch + (len(part) % batch or batch)]


def _rank(labels: np.ndarray) -> np.ndarray:
    """For each label, how many equal ones precede it: sorted by this, the classes alternate."""
    order = np.argsort(labels, kind="stable")
    _, begin, counts = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(begin, counts)
    return rank


def sample(test: Holdout) -> Holdout:
    """Test samples spread over the test set."""
    few = copy.copy(test)
    rows = torch.linspace(0, len(test.x) - 1, min(len(test.x), TEST_SAMPLES), device=test.x.device).long()
    few.x, few.y = test.x[rows], test.y[rows]
    return few
