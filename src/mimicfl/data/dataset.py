"""`Data`: training and test samples as stored in the files, and the scaling that turns them into model inputs."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, check_callable, number, shown
from . import sources
from .arrays import as_rows, channels, labels_of, mark_as_held, optimum_of, raw
from .augment import Transform
from .convert import flat, number_of_classes, one_label_type, one_type
from .samples import S, Samples, check_alike, count, mapped, named, owned, paired, rows, shapes, tensors

TENSORS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(eq=False)
class Data:
    """Samples and labels, as tensors or arrays, in any shape that the model accepts.

    Inputs may also be a dict of tensors, passed to the model as keywords, or a tuple of tensors, passed as positional arguments; masks
    are entries like any other. Targets may be a dict or tuple as well, for a loss or task that reads them.

    uint8 inputs stay uint8 in memory and become `(x / scale - mean) / std` per batch on the device; other inputs are used
    unchanged. Integer labels are classes, floating-point labels are regression targets. Labels may have a second dimension,
    [samples, positions], in which -100 marks positions without a target.

    Training and test samples must have the same shape and kind (uint8, integer, floating point, bool), and so must labels.
    If the widths differ, as in float32 and float64, both are stored in the wider type, which is exact. Class labels become int64.

    Data is immutable: it copies its arrays, its fields cannot be assigned, and `check_unchanged` detects edits in place. To change
    the data, create a new object: `dataclasses.replace(data, y_train=...)`.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    name: str = "custom"
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None  # None: cross-entropy for classes, mse for real targets
    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)  # per channel
    std: tuple[float, ...] = (1.0,)
    augment: bool = False  # random crop and horizontal flip of training images
    ids: Any = None  # [n_train] the client of each training sample, if known
    optimum: Tensor | None = field(default=None, repr=False)  # [d] the minimiser of the training loss, if known
    test_ids: Any = None  # [n_test] the client of each test sample, if clients have their own test samples
    transform: Transform | None = None  # of a batch of training inputs: transform(x, generator), on the device
    task: Any = None  # what the targets mean, see `mimicfl.tasks`; None: classes or real targets, by their type
    num_classes: int = field(init=False, default=0)
    _scaling: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _resident: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _seal: dict[str, int] = field(init=False, repr=False)  # a checksum per field; once it is set, the object is immutable

    def __post_init__(self) -> None:
        self._convert_samples()
        self._convert_labels()
        self._check_options()
        for name in TENSORS:
            mapped(mark_as_held, getattr(self, name))
        self._seal = self._checksums()

    def _convert_samples(self) -> None:
        copies: dict[int, Samples] = {}  # an array passed as both training and test samples is copied once
        given = {name: getattr(self, name) for name in TENSORS}
        for name, value in given.items():
            if id(value) not in copies:
                copies[id(value)] = owned(value, name)
            setattr(self, name, copies[id(value)])
        for part in ("train", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            if count(x) != count(y):
                raise UsageError(f"x_{part} has {count(x)} samples but y_{part} has {count(y)} labels")
            if count(x) == 0:
                raise UsageError(f"x_{part} is empty: give at least one {'training' if part == 'train' else 'test'} sample")
        check_alike("samples", self.x_train, self.x_test)
        self.x_train, self.x_test = paired(one_type, "x", self.x_train, self.x_test)

    def _convert_labels(self) -> None:
        train, test = (mapped(flat, y) for y in (self.y_train, self.y_test))
        check_alike("labels", train, test)
        self.y_train, self.y_test = paired(one_label_type, "y", train, test)
        if isinstance(self.y_train, Tensor) and not self.y_train.is_floating_point():
            self.num_classes = number_of_classes(self.y_train, self.y_test)

    def _check_options(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"the name of the data must be a string, got {shown(self.name)}")
        if not isinstance(self.augment, bool):
            raise UsageError(f"augment must be True or False, got {shown(self.augment)}; apply your own transforms beforehand")
        single = self.x_train if isinstance(self.x_train, Tensor) else None
        if self.augment and (single is None or single.ndim != 4):
            raise UsageError("augment=True crops and flips images: x_train must be [samples, channels, height, width]")
        check_callable("transform", self.transform)
        per = single.shape[1] if single is not None and single.ndim > 1 else 1
        self.scale, self.mean, self.std = number("scale", self.scale), channels("mean", self.mean, per), channels("std", self.std, per)
        if not self.scale or not all(self.std):
            raise UsageError("scale and std must not be 0")
        for name, entry in named(self.x_train, "x").items() if single is None and self.scale > 1 else ():
            if entry.dtype == torch.uint8 and not bool((entry > 1).any()):  # 1 would become 1/255
                raise UsageError(f"{name} holds only 0 and 1 as uint8, which are scaled like pixels: convert a mask to bool or float")
        if self.loss is None:
            self.loss = "cross-entropy" if self.num_classes else "mse"
        if not callable(self.loss) and (not isinstance(self.loss, str) or not self.loss):
            raise UsageError(f"loss must be a name or a function of (output, target), got {shown(self.loss)}")
        self.optimum = optimum_of(self.optimum)
        for name, samples, part in (("ids", self.num_train, "training"), ("test_ids", self.num_test, "test")):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, found := labels_of(given, name))
                if found.shape != (samples,):
                    raise UsageError(f"{name} must hold one id per {part} sample ({samples}), got shape {found.shape}")
        if self.test_ids is not None and self.ids is None:
            raise UsageError("test_ids are the clients of the test samples: give ids, the clients of the training samples, as well")
        if self.test_ids is not None and (self.ids.dtype.kind in "US") != (self.test_ids.dtype.kind in "US"):
            raise UsageError(f"ids are {self.ids.dtype} but test_ids are {self.test_ids.dtype}: give both as numbers or both as strings")

    @classmethod
    def from_datasets(
        cls,
        train: Any,
        test: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        targets: str | Sequence[str] | None = None,
        client: str | None = None,
        **options: Any,
    ) -> "Data":
        """Read two map-style torch datasets, whose samples are pairs (inputs, target) or dicts.

        collate   joins a list of samples into a batch, as in a DataLoader; it must pad every batch to the same shapes
        targets   the entry, or entries, of a dict that are the target; the others are the inputs
        client    the entry of a dict that names the sample's client
        options   further fields of `Data`, such as task="token-prediction"

        Every sample is read once, so random transforms of a dataset are fixed; `transform` is called for every batch.
        """
        return cls(**sources.from_datasets(train, test, collate, targets, client), **options)

    @classmethod
    def from_huggingface(
        cls, dataset: Any, test: Any = None, *, inputs: str | Sequence[str], target: Any, client: str | None = None, **options: Any
    ) -> "Data":
        """Read a `datasets.DatasetDict` with the parts train and test, or two `datasets.Dataset`, by columns.

        inputs    a column, or a list of columns that are passed to the model as keywords
        target    the column, or columns, of the target
        client    the column that names the sample's client: `mf.partition.by_ids(data.ids)` is then the natural split
        options   further fields of `Data`, such as task="token-prediction"
        """
        return cls(**sources.from_huggingface(dataset, test, inputs, target, client), **options)

    @property
    def num_train(self) -> int:
        """The number of training samples."""
        return count(self.x_train)

    @property
    def num_test(self) -> int:
        """The number of test samples."""
        return count(self.x_test)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_not_sealed(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._check_not_sealed(name)
        object.__delattr__(self, name)

    def _check_not_sealed(self, name: str) -> None:
        if "_seal" in vars(self):
            given = any(f.name == name and f.init for f in fields(self))
            remedy = f"; create a new one with dataclasses.replace(data, {name}=...)" if given else ""
            raise UsageError(f"Data is immutable: {name} cannot be changed{remedy}")

    def changed(self) -> bool:
        """Return whether anything was edited in place since this Data was created. Reads all arrays."""
        return bool(self._edited())

    def check_unchanged(self) -> None:
        """Raise a `UsageError` if anything was edited in place since this Data was created."""
        if edited := self._edited():
            raise UsageError(
                f"{' and '.join(edited)} of the data {self.name!r} was edited in place: "
                f"edit a copy and create a new one with dataclasses.replace(data, {edited[0]}=...)"
            )

    def _edited(self) -> list[str]:
        now = self._checksums()
        edited = [name for name, value in now.items() if value != self._seal[name]]
        if edited:  # drop cached values derived from the old contents
            self._scaling.clear()
            self._resident.clear()
        return edited

    def _checksums(self) -> dict[str, int]:
        """Return a checksum of every field that can change a result."""
        found = {name: _checksum(getattr(self, name)) for name in TENSORS}
        found["optimum"] = 0 if self.optimum is None else _checksum(self.optimum)
        found["ids"] = _ids_checksum(self.ids)
        if self.test_ids is not None:  # only then: data without them keeps the description that it had before
            found["test_ids"] = _ids_checksum(self.test_ids)
        for name in ("scale", "mean", "std", "augment", "num_classes"):
            found[name] = zlib.crc32(repr(getattr(self, name)).encode())
        found["loss"] = zlib.crc32(self.loss.encode()) if isinstance(self.loss, str) else 0  # functions have no stable text representation
        return found

    def checksum(self) -> int:
        """Return one checksum of the current samples and labels."""
        crc = 0
        for name in TENSORS:
            for tensor in tensors(getattr(self, name)):
                crc = zlib.crc32(raw(tensor), crc)
        return crc

    def described(self) -> list[Any]:
        """Return everything that identifies this data, except the loss, as plain values taken when it was created."""
        held = {key: x for name in TENSORS for key, x in named(getattr(self, name), name).items()}
        described = [[name, str(x.dtype), list(x.shape)] for name, x in held.items()]
        return [described, sorted((name, value) for name, value in self._seal.items() if name != "loss")]

    def facts(self) -> list[Any]:
        """Return the values that determine the model's inputs, besides the samples."""
        return [self.scale, list(self.mean), list(self.std), self.augment]

    def class_counts(self, split: list[np.ndarray]) -> np.ndarray | None:
        """Count the targets of each class per client, [N, classes]; return None if the targets are not classes."""
        if not self.num_classes:
            return None
        labels = self.y_train.numpy()
        per_client = (labels[part].reshape(-1) for part in split)
        return np.stack([np.bincount(targets[targets >= 0], minlength=self.num_classes) for targets in per_client])

    def subset(self, part: Any) -> "Data":
        """Return the same data with only these training samples, for example those of one client."""
        chosen = as_rows(part, self.num_train, "the subset")
        ids = None if self.ids is None else self.ids[chosen]
        return replace(self, x_train=rows(self.x_train, chosen), y_train=rows(self.y_train, chosen), ids=ids)

    def inputs(self, x: S, dtype: torch.dtype) -> S:
        """Convert stored samples to model inputs."""
        return mapped(lambda each: self._input(each, dtype), x)  # type: ignore[return-value]

    def _input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype != torch.uint8:
            return x.to(dtype) if x.is_floating_point() else x
        key = (x.device, dtype, x.ndim)
        if key not in self._scaling:  # created once per device: a copy from the host in every batch would stall a GPU
            shape = (-1, *[1] * (x.ndim - 2)) if x.ndim > 2 else (-1,)
            self._scaling[key] = tuple(torch.tensor(fact, dtype=dtype, device=x.device).view(shape) for fact in (self.mean, self.std))
        mean, std = self._scaling[key]
        scaled: Tensor = (x.to(dtype) / self.scale - mean) / std
        return scaled

    def resident(self, part: str, device: torch.device, dtype: torch.dtype) -> tuple[Samples, Samples]:
        """Return the samples and targets of a part ("train" or "test") on a device, unscaled. All runs on this data share them.

        Real targets have the type in which losses are computed: `dtype`, or float32 if that is half precision.
        """
        key = (part, device, dtype)
        if key not in self._resident:
            x, y = (self.x_train, self.y_train) if part == "train" else (self.x_test, self.y_test)
            exact = torch.promote_types(dtype, torch.float32)  # the loss of a model in half precision is computed in float32
            targets = mapped(lambda each: each.to(device, exact) if each.is_floating_point() else each.to(device), y)
            self._resident[key] = mapped(lambda each: each.to(device), x), targets
        return self._resident[key]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        kind = f"{self.num_classes} classes" if self.num_classes else "real targets"
        shape = "x".join(map(str, self.x_train.shape[1:])) if isinstance(self.x_train, Tensor) else shapes(self.x_train)
        return f"Data({self.name}: {self.num_train:,} training and {self.num_test:,} test samples of {shape}, {kind})"


def _checksum(samples: Samples) -> int:
    if isinstance(samples, Tensor):
        return zlib.crc32(raw(samples), zlib.crc32(f"{samples.dtype} {tuple(samples.shape)}".encode()))
    crc = 0
    for name, tensor in named(samples, type(samples).__name__).items():
        crc = zlib.crc32(f"{name} {_checksum(tensor)}".encode(), crc)
    return crc


def _ids_checksum(ids: np.ndarray | None) -> int:
    return 0 if ids is None else zlib.crc32(np.ascontiguousarray(ids).tobytes(), len(ids))
