"""Checks that an engine matches plain for a run, before it is used: on real samples, in training and in evaluation mode.

The compared clients cover all classes, the smallest and the largest client, and a batch that is not full. Each client is compared
separately, at the run's parameters and at perturbed ones, because initial weights of zero can hide an error in a layer.
"""

import copy
import dataclasses
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Instructions
from ..clients.local_sgd import LocalSGD
from ..data.clients import Clients, Holdout
from ..data.samples import Samples, forward, rows
from ..metrics.evaluate import counted_targets
from ..problem import Problem
from ..seeds import stream
from ..tasks import LearningTask
from .capabilities import Unsupported, errors, same_buffer
from .interface import ClientUpdates, Engine, TrainingRun, TrainRequest
from .padding import Padded
from .plain import PlainEngine
from .torch_overrides import without_dropout

CLIENTS = 8  # maximum
STEPS = 2
LOSS_SAMPLES = 128  # maximum
TEST_SAMPLES = 64
# Tolerances, relative to the norm of a client's gradient. Measured on the CPU: at most 4e-7 for the models in tests/engines/engines.py,
# LeNet and a ResNet. If max pooling picks another pixel the error is larger, but then plain is just as unstable.
CLOSE = {"cpu": 1e-4, "fp32": 1e-3, "tf32": 0.1, "bf16": 0.2}
CLOSE_OUTPUTS = {"cpu": 1e-4, "fp32": 1e-3, "tf32": 0.05, "bf16": 0.1}
CLOSE_FLOAT64 = 1e-7
KINK = 1e-3  # relative difference that a rounding error at a kink of the model may cause
NEARBY = 4  # parameters at which clients that differ so little are compared again
UNSTEADY = 10.0  # accepted error, as a multiple of how much plain itself changes when its parameters are perturbed by rounding


class Reference:
    """The updates of plain for a few clients of a run, and the checks that compare engines with them."""

    def __init__(self, run: TrainingRun, plain: PlainEngine) -> None:
        self.run, self.plain, self.problem = run, plain, run.problem
        problem = run.problem
        self.no_dropout = without_dropout(problem.model, problem.clients.inputs(slice(2)))
        # Engines draw dropout masks differently, so they are compared without dropout.
        self.trains = plain if self.no_dropout is None else PlainEngine(self.no_dropout, problem.clients, problem.loss)
        exact, kind = problem.clients.dtype == torch.float64, "cpu" if problem.device.type == "cpu" else problem.precision
        self.close, self.close_outputs = (CLOSE_FLOAT64 if exact else of[kind] for of in (CLOSE, CLOSE_OUTPUTS))
        self.truth: dict[tuple[int, bool], ClientUpdates] = {}

    @cached_property
    def requests(self) -> list[TrainRequest]:
        """Two requests for a few steps: from the run's parameters with the algorithm's instructions, and from perturbed ones without.

        The second one uses the plain gradient because a large shift, or clipping, would hide an error in the gradient.
        """
        request = few_steps(self.run, representative_clients(self.problem), STEPS)
        usual = request.w.square().mean().sqrt().clamp_min(0.05)
        bare = LocalSGD(steps=STEPS, batch_size=self.problem.local.batch_size)
        return [request, dataclasses.replace(request, w=request.w + 0.1 * usual * self.noise, instructions=Instructions(), local=bare)]

    @cached_property
    def noise(self) -> Tensor:
        w = self.problem.workspace.w
        return torch.from_numpy(stream(self.run.seed, "nearby").standard_normal(w.numel())).to(w)

    def updates(self, point: int, rounded: bool = False) -> ClientUpdates:
        """Return the updates of plain for a request, optionally with the parameters perturbed by their rounding error."""
        if (point, rounded) not in self.truth:
            request = self.requests[point]
            w = request.w * (1 + 4 * torch.finfo(request.w.dtype).eps * self.noise) if rounded else request.w
            self.truth[point, rounded] = self.trains.train([dataclasses.replace(request, w=w)])[0]
        return self.truth[point, rounded]

    def check_loss(self) -> None:
        """Raise `Unsupported` if the loss is not a mean over samples, for engines that average per-sample losses."""
        if not self.loss_is_a_mean:
            raise Unsupported(
                "its loss is not a mean over samples (class weights, ignore_index, a sum, or a term that depends on the whole batch)"
            )

    def check_samples(self) -> None:
        """Raise `Unsupported` if a sample's output depends on the other samples of its batch, for engines that pad short batches."""
        if not self.samples_are_independent:
            raise Unsupported("its samples depend on each other within a batch (a mean over the batch, for example)")

    @cached_property
    def samples_are_independent(self) -> bool:
        """Whether half of a batch alone gives the same outputs and buffers as within a batch whose other half is padding, in training mode.

        BatchNorm passes, since its statistics leave out the padding.
        """
        problem, work = self.problem, self.trains.work
        chosen = mixed_rows(self.run)[: max(3, max(batch_sizes(problem)))]  # half of it must be more than one: BatchNorm refuses that
        inputs, half = problem.clients.inputs(chosen), (len(chosen) + 1) // 2
        weights = (torch.arange(len(chosen), device=problem.device) < half).to(work.w.dtype) / half
        for request in self.requests if max(batch_sizes(problem)) > 1 else []:
            with torch.no_grad(), torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
                found = []
                for part, mode in ((inputs, Padded(weights)), (rows(inputs, slice(half)), nullcontext())):
                    work.load(request.w, request.buffers)
                    with mode:
                        found.append((forward(work.module, part)[:half], work.buffers()))
            (outputs, buffers), (alone, after) = found
            if bool(torch.isfinite(alone).all()) and not _near(outputs, alone, self.close_outputs):
                return False
            if not all(same_buffer(buffers[name], value, self.close_outputs) for name, value in after.items()):
                return False
        return True

    @cached_property
    def loss_is_a_mean(self) -> bool:
        """Whether the loss of a batch is the mean of its per-sample losses, in value and gradient, for all classes and batch sizes.

        The loss of a task is a ratio of sums over samples, which engines compute as such.
        """
        if isinstance(self.problem.loss, LearningTask):
            return True
        chosen = mixed_rows(self.run)
        inputs = self.problem.clients.inputs(chosen)
        outputs = [self.evaluated(request.w, inputs) for request in self.requests]
        finite = [output for output in outputs if bool(torch.isfinite(output).all())] or outputs
        return all(_is_mean(self.problem, output, chosen, batch_sizes(self.problem)) for output in finite)

    @torch.no_grad()
    def evaluated(self, w: Tensor, inputs: Samples) -> Tensor:
        """Return the outputs of the plain module in evaluation mode."""
        work = self.plain.work
        work.load(w, self.requests[0].buffers)
        work.module.eval()
        try:
            return forward(work.module, inputs)
        finally:
            work.module.train()

    def check_training(self, engine: Engine) -> None:
        """Compare every client's sum of gradients, loss and other vectors with plain; `engine` must train the model without dropout."""
        for point, request in enumerate(self.requests):
            if point and not bool(torch.isfinite(self.updates(point).g).all()):
                continue  # the model overflows at the perturbed parameters
            kinks = self._compare(engine.train([request])[0], point)
            if bool(kinks.any()):
                self._check_nearby(engine, request, kinks)

    def _compare(self, ours: ClientUpdates, point: int) -> Tensor:
        """Return the clients that differ as at a kink, bool [m]; raise `Unsupported` if a client differs otherwise."""
        true = self.updates(point)
        kinks = torch.zeros(len(true.g), dtype=torch.bool, device=true.g.device)
        for name, off in errors(ours, true).items():
            if bool((off <= self.close).all()):
                continue
            # An engine cannot be expected to be closer than plain is to itself when its parameters are perturbed by rounding.
            moved = errors(self.updates(point, rounded=True), true).get(name, torch.zeros_like(off))
            differ = ~(off <= (UNSTEADY * moved).clamp_min(self.close))
            gradients = name == "g" or name in true.sent
            if bool(differ.any()) and not (gradients and bool((off[differ] <= min(10 * self.close, KINK)).all())):
                raise Unsupported(f"its fast version differs from PyTorch on a test batch by {100 * float(off.max()):.2g} %")
            kinks |= differ
        return kinks

    def _check_nearby(self, engine: Engine, request: TrainRequest, kinks: Tensor) -> None:
        """Raise `Unsupported` unless each of these clients agrees at two of the nearby parameters.

        Where a value lies at the kink of a ReLU, a rounding error decides about its gradient, and no two computations agree. A little
        further away it does not; an error of an engine remains.
        """
        agreed = torch.zeros_like(kinks, dtype=torch.int64)
        for k in range(NEARBY):
            noise = torch.from_numpy(stream(self.run.seed, "nearby", k).standard_normal(request.w.numel())).to(request.w)
            near = dataclasses.replace(request, w=request.w * (1 + 1e-4 * noise))
            off = errors(engine.train([near])[0], self.trains.train([near])[0])
            agreed += torch.stack([each <= self.close for each in off.values()]).all(dim=0)
        if bool((agreed[kinks] < 2).any()):
            raise Unsupported("its fast version differs slightly from PyTorch for a client, at nearby parameters as well")

    def check_evaluation(self, engine: Engine) -> None:
        """Compare the test outputs with the module in evaluation mode, if the engine computes test outputs."""
        test = sample(self.problem.test)
        for request in self.requests:
            found = engine.outputs(request.w[None], [request.buffers], test)
            if found is None:
                return
            true = self.evaluated(request.w, test.data.inputs(test.x, test.dtype))
            if bool(torch.isfinite(true).all()) and not (found[0].shape == true.shape and _near(found[0], true, self.close_outputs)):
                raise Unsupported("its test outputs disagree with PyTorch in evaluation mode")


def _near(ours: Tensor, true: Tensor, tolerance: float) -> bool:
    return bool((ours - true).abs().max() <= tolerance * true.abs().max())


def _is_mean(problem: Problem, output: Tensor, chosen: Tensor, sizes: list[int]) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples, for these batch sizes."""
    targets, samples, rounding = rows(problem.clients.y, chosen), len(chosen), 1e3 * torch.finfo(output.dtype).eps
    x = output.clone().requires_grad_()
    single = torch.stack([problem.loss(x[i : i + 1], rows(targets, slice(i, i + 1))) for i in range(samples)])
    [gradients] = torch.autograd.grad(single.sum(), x)
    for n in [min(size, samples) for size in sizes if size > 1]:
        for begin in sorted({min(begin, samples - n) for begin in range(0, samples, n)}):
            part = slice(begin, begin + n)
            x = output[part].clone().requires_grad_()
            value = problem.loss(x, rows(targets, part))
            [gradient] = torch.autograd.grad(value, x)
            if not (_near(single[part].mean(), value, rounding) and _near(gradients[part] / n, gradient, rounding)):
                return False
    return True


def batch_sizes(problem: Problem) -> list[int]:
    """Return up to three of the batch sizes that occur: the smallest, the largest and one in between."""
    sizes = problem.clients.sizes
    ragged = np.unique(sizes)
    some = ragged[np.unique(np.linspace(0, len(ragged) - 1, 16).astype(int))]
    found = sorted({n for size in some for n in LocalSGD(epochs=1, batch_size=problem.local.batch_size).batch_sizes(int(size))})
    return [found[i] for i in sorted({0, len(found) // 2, len(found) - 1})]


def mixed_rows(run: TrainingRun) -> Tensor:
    """Return training samples that cover every label, and some more, in random order."""
    y = run.problem.clients.y
    used = np.concatenate(run.problem.split)
    some = used[np.linspace(0, len(used) - 1, min(len(used), LOSS_SAMPLES)).astype(int)]
    if isinstance(y, Tensor) and not y.is_floating_point():
        labels = y.cpu().numpy()[used].reshape(len(used), -1)
        _, first = np.unique(labels, return_index=True)
        held = counted_targets(torch.from_numpy(labels), run.problem.loss).all(dim=1).numpy()
        skipped = used[~held][:2]  # first, however many labels there are
        some = np.concatenate([skipped, used[np.unique(first // labels.shape[1])], some])
    order = stream(run.seed, "mixed").permutation(some[:LOSS_SAMPLES])
    return torch.from_numpy(order).to(run.problem.device)


def representative_clients(problem: Problem) -> list[int]:
    """Return the smallest and the largest client, one whose last batch is not full, and more until all classes are covered."""
    sizes, batch = problem.clients.sizes, problem.local.batch_size or int(problem.clients.sizes.max())
    chosen = [int(sizes.argmin()), int(sizes.argmax()), int((sizes % batch != 0).argmax())]
    if problem.class_counts is None:
        chosen += [len(sizes) // 3, 2 * len(sizes) // 3]
    else:
        holds = problem.class_counts > 0
        while len(set(chosen)) < CLIENTS and (missing := holds.any(axis=0) & ~holds[chosen].any(axis=0)).any():
            chosen.append(int(holds[:, missing].sum(axis=1).argmax()))
    return sorted(set(chosen))


def few_steps(run: TrainingRun, clients: list[int], steps: int) -> TrainRequest:
    """Return the run's request to these clients, reduced to a few steps on some of their samples; the last batch may be short."""
    problem, local, request = run.problem, run.problem.local, run.example_request()
    batch = max(local.batch_sizes(int(problem.clients.sizes.max())))
    parts = [_subset(problem, problem.split[client], batch, steps) for client in clients]
    few = Clients(problem.data, parts, problem.device, problem.workspace.input_dtype)
    short = dataclasses.replace(local, epochs=None, steps=steps, weight_decay=local.weight_decay - local.l2, lr=0.01)
    given = request.instructions
    shift = given.shift if isinstance(given.shift, float) else given.shift[:1].expand(len(parts), -1)
    given = Instructions(shift, given.mu, send=given.send)
    return dataclasses.replace(request, clients=few, local=short, active=np.arange(len(parts)), instructions=given, eta_L=1e-6, eta=1e-6)


def _subset(problem: Problem, part: np.ndarray, batch: int, steps: int) -> np.ndarray:
    """Return enough samples for these steps, from all classes of the client if possible; the last batch is as short as the client's."""
    y = problem.clients.y
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        part = part[np.argsort(_rank(y[torch.from_numpy(part).to(y.device)].cpu().numpy()), kind="stable")]
    return part[: (steps - 1) * batch + (len(part) % batch or batch)]


def _rank(labels: np.ndarray) -> np.ndarray:
    """Return for each label how many equal ones precede it; sorting by this makes the classes alternate."""
    order = np.argsort(labels, kind="stable")
    _, begin, counts = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(begin, counts)
    return rank


def sample(test: Holdout) -> Holdout:
    """Return a few test samples, spread over the test set."""
    few = copy.copy(test)
    chosen = torch.linspace(0, len(test) - 1, min(len(test), TEST_SAMPLES)).long()
    few.x, few.y = rows(test.x, chosen), rows(test.y, chosen)
    return few
