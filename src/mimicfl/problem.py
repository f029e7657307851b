"""`Problem`: model, data, split, loss and local training. It does not change during a run."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .clients.local_sgd import LocalSGD
from .clients.local_update import check_local
from .clients.losses import Loss, criterion_of, cross_entropy, mse
from .clients.params import Workspace
from .data.arrays import as_split
from .data.augment import check_transform
from .data.clients import Clients, Holdout
from .data.convert import check_counted, classes_without, same_shape
from .data.dataset import Data
from .data.samples import Samples, count, forward, rows, shapes
from .errors import UsageError, first_line, shown
from .metrics.evaluate import Score, client_accuracy, counted, evaluate, ignored_by, per_client
from .metrics.groups import COLUMNS as CLIENT_COLUMNS
from .settings import check
from .tasks import LearningTask, Metric
from .tasks.metrics import Accuracy

MOST_OUTPUTS = 2**24  # numbers that an evaluation holds at a time


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked when it is created: the model accepts the samples, its outputs match the targets, and the loss is finite."""

    template: nn.Module  # with the initial weights
    data: Data
    split: list[np.ndarray]  # training sample numbers of each client
    partition: str  # how the split was made, if known
    local: LocalSGD
    loss: Loss  # a task is its loss
    weighting: str
    device: torch.device
    precision: str
    work: Workspace  # a resident copy of the model, for evaluation
    clients: Clients
    test: Holdout
    class_counts: np.ndarray | None  # [N, classes]
    share: Tensor  # [N] the clients' weights, sum 1
    optimum: Tensor | None  # [d] where it is known
    test_split: list[np.ndarray] | None = None  # test sample numbers of each client, where clients have their own
    test_partition: str = ""  # how they were assigned, if known

    @classmethod
    def of(
        cls,
        model: nn.Module,
        data: Data,
        split: Any,
        local: LocalSGD,
        loss: Any,
        weighting: str,
        device: str,
        precision: str,
        task: Any = None,
        metrics: Any = None,
        test_split: Any = None,
    ) -> "Problem":
        """The problem from the user's objects."""
        for value, kind, name in ((model, nn.Module, "model"), (data, Data, "data"), (local, LocalSGD, "local")):
            if not isinstance(value, kind):
                raise UsageError(f"{name} must be a {kind.__module__.split('.')[0]} {kind.__name__}, got {value!r}")
        data.check_unchanged()
        where = find_device(device)
        check("precision", precision)
        if precision != "fp32" and where.type != "cuda":
            raise UsageError(f"precision {precision} needs a GPU, but this run is on the {where}: use device cuda, or precision fp32")
        work, criterion = Workspace(model, where), criterion_of(data, loss, task, metrics)
        parts, dtype = as_split(split, data.num_train), work.w.dtype
        check_local(local, work)
        for name, numbers in local.lists.items():
            if len(numbers) != len(parts):
                raise UsageError(f"{name} has {len(numbers)} numbers, one per client, but there are {len(parts)} clients")
        clients, test = Clients(data, parts, where, work.input_dtype), Holdout(data, where, work.input_dtype)
        test.slice_size = min(test.slice_size, slice_for(check_model(work.module, test, data, criterion)))
        if data.transform is not None:
            check_inputs(work.module, check_transform(data.transform, clients.inputs(slice(2))))
        sizes = clients.sizes if check("weighting", weighting) == "samples" else np.ones(len(parts))
        optimum = data.optimum if data.optimum is not None and len(data.optimum) == work.w.numel() else None
        return cls(
            *(model, data, parts, str(getattr(split, "spec", "")), local, criterion, weighting, where, precision, work, clients, test),
            class_counts=data.class_counts(parts),
            share=torch.from_numpy(sizes / sizes.sum()).to(where, dtype),
            optimum=None if optimum is None else optimum.to(where, dtype),
            test_split=own_test_samples(data, parts, test_split, criterion),
            test_partition="by ids" if test_split is None else str(getattr(test_split, "spec", "")),
        )

    @property
    def model(self) -> nn.Module:
        """The model to make copies of; copies share its frozen parameters, also on a GPU."""
        frozen = any(not p.requires_grad for p in self.work.module.parameters())
        return self.work.module if frozen and self.device.type == "cuda" else self.template

    def evaluate(self, w: Tensor, buffers: dict[str, Tensor]) -> Score:
        """The test loss and accuracy of a model."""
        self.work.load(w, buffers)
        return evaluate(self.work.module, self.test, self.loss, self.data.num_classes)

    @property
    def client_metric(self) -> Metric:
        """The metric on each client's own test samples."""
        metric = self.loss.client_metric if isinstance(self.loss, LearningTask) else Accuracy()
        assert metric is not None  # checked with the test split
        return metric

    @property
    def directions(self) -> dict[str, bool]:
        """Whether a larger value is better, by column of the rows, for the metrics of a task."""
        if not isinstance(self.loss, LearningTask):
            return {}
        found = {metric.column: metric.higher_is_better for metric in self.loss.metrics}
        if self.test_split is not None:  # otherwise the task may have no metric per client
            own = [column for column in CLIENT_COLUMNS if column != "clients_spread"]
            found |= dict.fromkeys(own, self.client_metric.higher_is_better)
        return found

    def client_scores(self, score: Score) -> list[float | None]:
        """The metric on each client's own test samples; empty if clients have none of their own."""
        if self.test_split is None:
            return []
        if isinstance(self.loss, LearningTask):
            return per_client(self.client_metric, score, self.test_split)
        return client_accuracy(score, self.test_split)

    def client_losses(self, w: Tensor, buffers: dict[str, Tensor], clients: np.ndarray) -> np.ndarray:
        """A model's training loss on all samples of each of these clients."""
        self.work.load(w, buffers)
        module = self.work.module.eval()
        found = []
        with torch.no_grad():
            for client in clients:
                index = torch.from_numpy(self.split[client]).to(self.device)
                found.append(float(self.loss(forward(module, self.clients.inputs(index)), rows(self.clients.y, index))))
        module.train()
        return np.array(found)

    def client_accuracy(self, w: Tensor, buffers: dict[str, Tensor]) -> list[float | None]:
        """A model's accuracy on each client's own training samples; None for a client whose targets are all ignored."""
        metric = self.loss.client_metric if isinstance(self.loss, LearningTask) else Accuracy()
        if metric is None or metric.name != "accuracy":
            return []
        self.work.load(w, buffers)
        train = Holdout(self.data, self.device, self.work.input_dtype, part="train", slice_size=self.test.slice_size)
        found = evaluate(self.work.module, train, self.loss, self.data.num_classes)
        tasked = isinstance(self.loss, LearningTask)
        return per_client(metric, found, self.split) if tasked else client_accuracy(found, self.split)


def own_test_samples(data: Data, split: list[np.ndarray], given: Any, criterion: Loss) -> list[np.ndarray] | None:
    """The test samples of each client: as given, or those with the client's id in the data's client column."""
    if given is None:
        if data.test_ids is None or (owners := client_ids(data.ids, split)) is None:
            return None
        parts = [np.flatnonzero(np.isin(data.test_ids, sorted(own))) for own in owners]
    else:
        parts = as_split(given, data.num_test, "test samples", empty=True)
        if len(parts) != len(split):
            raise UsageError(
                f"test_split has {len(parts)} clients but the split has {len(split)}; give one array per client, or an empty one"
            )
    known = criterion.client_metric is not None if isinstance(criterion, LearningTask) else bool(data.num_classes)
    if not known and given is not None:
        raise UsageError("test_split needs a metric per client: give a task, such as 'regression', or metrics such as accuracy or rmse")
    return parts if known and any(map(len, parts)) else None


def client_ids(ids: np.ndarray, split: list[np.ndarray]) -> list[set[Any]] | None:
    """The ids of each client's samples; None if clients share an id, as in a split that ignores the ids."""
    owners = [set(np.unique(ids[part]).tolist()) for part in split]
    return owners if sum(map(len, owners)) == len(set().union(*owners)) else None


def find_device(name: str) -> torch.device:
    if isinstance(name, str) and name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name) if isinstance(name, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {shown(name)} is unknown; use cpu, cuda, cuda:0 or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' is not available: torch finds no GPU; use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} was asked for, this machine has {torch.cuda.device_count()} GPU(s), counted from 0")
    return device


def check_model(module: nn.Module, test: Holdout, data: Data, loss: Loss) -> Tensor:
    """Check that the model accepts the samples, its outputs match the classes, and the loss accepts both; return two samples' outputs."""
    chosen = probe_rows(test.y, loss)
    x, y = data.inputs(rows(test.x, chosen), test.dtype), rows(test.y, chosen)
    samples = count(x)
    module.eval()
    try:
        output = forward(module, x)
    except Exception as error:
        shape = f"samples of shape {shapes(x)}" if isinstance(x, Tensor) else f"inputs ({shapes(x)})"
        raise UsageError(f"the model does not accept {shape}: {first_line(error)}") from error
    module.train()
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != samples:
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"the model must return one tensor with one row per sample, got {got} for {samples} samples")
    if isinstance(loss, LearningTask):
        loss.check(output, y, data)
        loss.check_metrics(output.detach(), y)
    else:
        check_classes(output, y, data, loss)
    check_loss(output, y, loss)
    warn_about_batch_norm(module)
    return output


def probe_rows(y: Samples, loss: Loss) -> Tensor:
    """Two test samples to try the model on, with targets that are not ignored if possible: otherwise a mean over targets is nan."""
    if isinstance(y, Tensor) and not y.is_floating_point():
        held = counted(y, loss).reshape(len(y), -1).any(dim=1).nonzero()[:2, 0]
        if len(held):
            return held
    return torch.arange(min(2, count(y)))


def slice_for(output: Tensor) -> int:
    """How many samples are evaluated at a time, given the outputs of a few."""
    return max(1, MOST_OUTPUTS * len(output) // output.numel())


def warn_about_batch_norm(module: nn.Module) -> None:
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        warnings.warn(
            "the model has BatchNorm: its running statistics are averaged over the active clients but get no correction; "
            "GroupNorm has none and suits federated learning better",
            stacklevel=5,
        )


def check_classes(output: Tensor, y: Samples, data: Data, loss: Loss) -> None:
    """Check that the outputs match the classes."""
    if isinstance(y, Tensor):
        check_outputs(output, y, loss)
    outputs = output.shape[1] if output.ndim > 1 else 1
    if outputs == 1 and loss is cross_entropy:  # the loss would always be 0
        raise UsageError("cross-entropy needs one output per class and at least two, but the model has 1; add outputs or use loss='binary'")
    if not data.num_classes:
        return
    check_counted(data.y_test, ignored_by(loss))
    classes = classes_without(ignored_by(loss), data.y_train, data.y_test)
    one_for_two = outputs == 1 and classes <= 2 and loss is not cross_entropy
    if classes > outputs and not one_for_two:
        raise UsageError(f"the model has {outputs} outputs but the data has {classes} classes: change its last layer to {classes} outputs")


def check_loss(output: Tensor, y: Samples, loss: Loss) -> None:
    """Check that the loss accepts outputs and targets, and that it is finite."""
    try:
        value = loss(output, y)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"it returns a tensor of shape {tuple(value.shape)}, but must return one number: the mean over the batch")
        value.backward()
    except Exception as error:
        targets = f"targets of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"targets ({shapes(y)})"
        raise UsageError(f"the loss does not fit outputs of shape {tuple(output.shape)} and {targets}: {first_line(error)}") from error
    check_broadcasting(output.detach(), y, loss, value.detach())
    if not bool(torch.isfinite(value)):
        raise UsageError("the loss of the initial model is not finite on the test data: check the data's scale and the model")


def check_broadcasting(output: Tensor, y: Samples, loss: Loss, value: Tensor) -> None:
    """Outputs [B, 1] and targets [B] have one output per target, but their difference is [B, B]: a loss must not depend on that."""
    if not isinstance(y, Tensor) or not y.is_floating_point() or output.shape == y.shape or output.numel() != y.numel():
        return
    try:
        aligned = loss(output.view_as(y), y)
    except Exception:  # a loss may need the shape that the outputs have
        return
    if not torch.allclose(aligned, value, rtol=1e-3, equal_nan=True):
        raise UsageError(
            f"the loss compares every output with every target, since outputs are {tuple(output.shape)} and targets {tuple(y.shape)}; "
            f"give y the shape of the outputs"
        )


def check_inputs(module: nn.Module, x: Samples) -> None:
    """Check that the model accepts a batch as the data's transform returns it."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if isinstance(x, Tensor) and x.is_cuda else []):
            forward(module.eval(), x)
    except Exception as error:
        raise UsageError(f"the model does not accept a batch that transform returns ({shapes(x)}): {first_line(error)}") from error
    module.train()


def check_outputs(output: Tensor, y: Tensor, loss: Loss) -> None:
    """Outputs must be [batch, classes, ...] for targets [batch, ...], since accuracy is taken along the second dimension."""
    if y.is_floating_point():
        if loss is mse and not same_shape(output, y):
            raise UsageError(f"loss 'mse' needs one output per target: got {tuple(output.shape)} for {tuple(y.shape)}")
        return
    shapes = f"outputs of shape {tuple(output.shape)}, targets of shape {tuple(y.shape)}"
    if output.ndim < 2 or output.shape[1] == 1:
        fits = output.numel() == y.numel()
    else:
        fits = output.shape[2:] == y.shape[1:]
        if not fits and output.shape[1:-1] == y.shape[1:]:
            turned = "transpose(1, 2)" if output.ndim == 3 else "movedim(-1, 1)"
            raise UsageError(f"the classes must be the output's second dimension, not its last ({shapes}); return output.{turned}")
    if not fits:
        raise UsageError(
            f"the model's output must be [batch, classes, ...] where targets are [batch, ...] ({shapes}); "
            "give other targets, such as several labels per sample, as real numbers"
        )
