"""`Problem`: model, data, split, loss and local training. It does not change during a run."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clients.local_sgd import LocalSGD
from ..clients.local_update import check_local
from ..clients.losses import Loss, criterion_of
from ..clients.params import Workspace
from ..data.arrays import as_split
from ..data.augment import check_transform
from ..data.clients import Clients, Holdout
from ..data.dataset import Data
from ..data.samples import forward, rows
from ..errors import UsageError, shown
from ..metrics.evaluate import Score, client_accuracy, evaluate, per_client
from ..metrics.groups import COLUMNS as CLIENT_COLUMNS
from ..settings import check
from ..tasks import LearningTask, Metric
from ..tasks.metrics import Accuracy
from .checks import check_inputs, check_model, check_whole_numbers

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
    workspace: Workspace  # a resident copy of the model, for evaluation
    clients: Clients
    test: Holdout
    class_counts: np.ndarray | None  # [N, classes]
    share: Tensor  # [N] the clients' weights, sum 1
    optimum: Tensor | None  # [d] where it is known
    test_split: list[np.ndarray] | None = None  # test sample numbers of each client, where clients have their own
    test_partition: str = ""  # how they were assigned, if known
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # facts that are expensive to find, by name

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
        workspace, criterion = Workspace(model, where), criterion_of(data, loss, task, metrics)
        parts, dtype = as_split(split, data.num_train), workspace.w.dtype
        _check_local(local, workspace, len(parts))
        clients, test = Clients(data, parts, where, workspace.input_dtype), Holdout(data, where, workspace.input_dtype)
        test.slice_size = min(test.slice_size, slice_for(check_model(workspace.module, test, data, criterion)))
        used = torch.from_numpy(np.concatenate(parts)).to(where)
        check_whole_numbers(workspace.module, clients.x, "x_train", data, workspace.input_dtype, used)
        check_whole_numbers(workspace.module, test.x, "x_test", data, workspace.input_dtype, torch.arange(len(test), device=where))
        if data.transform is not None:
            check_inputs(workspace.module, check_transform(data.transform, clients.inputs(slice(2))))
        sizes = clients.sizes if check("weighting", weighting) == "samples" else np.ones(len(parts))
        optimum = data.optimum if data.optimum is not None and len(data.optimum) == workspace.w.numel() else None
        return cls(
            *(model, data, parts, str(getattr(split, "spec", "")), local, criterion, weighting, where, precision, workspace, clients, test),
            class_counts=data.class_counts(parts),
            share=torch.from_numpy(sizes / sizes.sum()).to(where, dtype),
            optimum=None if optimum is None else optimum.to(where, dtype),
            test_split=own_test_samples(data, parts, test_split, criterion),
            test_partition="by ids" if test_split is None else str(getattr(test_split, "spec", "")),
        )

    def with_local(self, local: LocalSGD) -> "Problem":
        """The same problem with another local training; all else is shared."""
        _check_local(local, self.workspace, len(self.split))
        return replace(self, local=local)

    @property
    def model(self) -> nn.Module:
        """The model to make copies of; copies share its frozen parameters, also on a GPU."""
        frozen = any(not p.requires_grad for p in self.workspace.module.parameters())
        return self.workspace.module if frozen and self.device.type == "cuda" else self.template

    def evaluate(self, w: Tensor, buffers: dict[str, Tensor]) -> Score:
        """The test loss and accuracy of a model."""
        self.workspace.load(w, buffers)
        return evaluate(self.workspace.module, self.test, self.loss, self.data.num_classes)

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
        self.workspace.load(w, buffers)
        module = self.workspace.module.eval()
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
        self.workspace.load(w, buffers)
        train = Holdout(self.data, self.device, self.workspace.input_dtype, part="train", slice_size=self.test.slice_size)
        found = evaluate(self.workspace.module, train, self.loss, self.data.num_classes)
        tasked = isinstance(self.loss, LearningTask)
        return per_client(metric, found, self.split) if tasked else client_accuracy(found, self.split)


def _check_local(local: LocalSGD, workspace: Workspace, num_clients: int) -> None:
    check_local(local, workspace)
    for name, numbers in local.lists.items():
        if len(numbers) != num_clients:
            raise UsageError(f"{name} has {len(numbers)} numbers, one per client, but there are {num_clients} clients")


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
        if not any(map(len, parts)):
            raise UsageError("test_split gives no client a test sample; leave it out, or give at least one client some")
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


def slice_for(output: Tensor) -> int:
    """How many samples are evaluated at a time, given the outputs of a few."""
    return max(1, MOST_OUTPUTS * len(output) // output.numel())
