"""`Data`: training and test samples, as the files hold them, with what turns them into model inputs."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, number, shown, whole
from .arrays import channels, hold, labels_of, optimum_of, own, raw

CROP_PADDING = 4  # pixels of black border that a random crop may reach into, as usual for CIFAR-10
IGNORED = -100  # torch's label for positions without a target
TENSORS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(eq=False)
class Data:
    """Samples and labels; tensors or arrays, in any shape the model takes.

    uint8 inputs stay uint8 in memory and become `(x / scale - mean) / std` batch by batch on the device; other inputs
    are used as they are. Integer labels are classes, floating ones are regression targets. Labels may have a second dimension,
    [samples, positions]; there -100 marks positions without a target.

    Training and test samples must agree in shape and kind (uint8, whole numbers, real numbers, truth values), and so must labels.
    Numbers of different widths, such as float32 and float64, are stored in the wider type, which is exact. Labels become int64.

    A Data is a value: it copies its arrays, its fields cannot be assigned, and `check_unchanged` detects edits in place. To change
    the data, make a new object: `dataclasses.replace(data, y_train=...)`.
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
    ids: Any = None  # [n_train] the client each training sample belongs to, where the data knows
    optimum: Tensor | None = field(default=None, repr=False)  # [d] the known minimiser, where there is one
    num_classes: int = field(init=False, default=0)
    _scaling: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _resident: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _seal: dict[str, int] = field(init=False, repr=False)  # a checksum per field; once it is set, nothing can be assigned

    def __post_init__(self) -> None:
        self._take_samples()
        self._take_labels()
        self._take_facts()
        for name in TENSORS:
            hold(getattr(self, name))
        self._seal = self._checksums()

    def _take_samples(self) -> None:
        taken: dict[int, Tensor] = {}  # an array given both as training and as test samples is copied once
        given = {name: getattr(self, name) for name in TENSORS}
        for name, value in given.items():
            if id(value) not in taken:
                taken[id(value)] = own(value, name)
            setattr(self, name, taken[id(value)])
        for part in ("train", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            if len(x) != len(y):
                raise UsageError(f"x_{part} has {len(x)} samples but y_{part} has {len(y)} labels")
            if len(x) == 0:
                raise UsageError(f"x_{part} is empty: give at least one {'training' if part == 'train' else 'test'} sample")
        _check_shapes("samples", self.x_train, self.x_test)
        self.x_train, self.x_test = _one_type(self.x_train, self.x_test)

    def _take_labels(self) -> None:
        train, test = (_flat(y) for y in (self.y_train, self.y_test))
        if train.is_floating_point() != test.is_floating_point():
            raise UsageError("y_train and y_test differ in kind: one holds classes (integers), the other real targets")
        _check_shapes("labels", train, test)
        if train.is_floating_point():
            wider = torch.promote_types(train.dtype, test.dtype)
            self.y_train, self.y_test = train.to(wider), test.to(wider)
        else:
            self.y_train, self.y_test = train.long(), test.long()
            self.num_classes = _number_of_classes(self.y_train, self.y_test)

    def _take_facts(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"the name of the data must be a string, got {shown(self.name)}")
        if not isinstance(self.augment, bool):
            raise UsageError(f"augment must be True or False, got {shown(self.augment)}; apply your own transforms beforehand")
        if self.augment and self.x_train.ndim != 4:
            raise UsageError("augment=True crops and flips images: x_train must be [samples, channels, height, width]")
        count = self.x_train.shape[1] if self.x_train.ndim > 1 else 1
        self.scale, self.mean, self.std = number("scale", self.scale), channels("mean", self.mean, count), channels("std", self.std, count)
        if not self.scale or not all(self.std):
            raise UsageError("scale and std must not be 0")
        if self.loss is None:
            self.loss = "cross-entropy" if self.num_classes else "mse"
        if not callable(self.loss) and (not isinstance(self.loss, str) or not self.loss):
            raise UsageError(f"loss must be a name or a function of (output, target), got {shown(self.loss)}")
        self.optimum = optimum_of(self.optimum)
        if self.ids is not None:
            self.ids = labels_of(self.ids, "ids")
            if self.ids.shape != (len(self.x_train),):
                raise UsageError(f"ids must hold one id per training sample ({len(self.x_train)}), got shape {self.ids.shape}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_once_sealed(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_once_sealed(name)
        object.__delattr__(self, name)

    def _refuse_once_sealed(self, name: str) -> None:
        if "_seal" in vars(self):
            given = any(f.name == name and f.init for f in fields(self))
            remedy = f"; make a new one with dataclasses.replace(data, {name}=...)" if given else ""
            raise UsageError(f"Data is immutable: {name} cannot be changed{remedy}")

    def changed(self) -> bool:
        """Has anything been edited in place since this Data was made? Reads all arrays."""
        return bool(self._edited())

    def check_unchanged(self) -> None:
        """Raise a `UsageError` if anything was edited in place since this Data was made."""
        if edited := self._edited():
            raise UsageError(
                f"{' and '.join(edited)} of the data {self.name!r} was edited in place: "
                f"edit a copy and make a new one with dataclasses.replace(data, {edited[0]}=...)"
            )

    def _edited(self) -> list[str]:
        now = self._checksums()
        edited = [name for name, value in now.items() if value != self._seal[name]]
        if edited:  # drop what was derived from the old contents
            self._scaling.clear()
            self._resident.clear()
        return edited

    def _checksums(self) -> dict[str, int]:
        """A checksum of every field that can change a result."""
        found = {name: _checksum(getattr(self, name)) for name in TENSORS}
        found["optimum"] = 0 if self.optimum is None else _checksum(self.optimum)
        found["ids"] = 0 if self.ids is None else zlib.crc32(np.ascontiguousarray(self.ids).tobytes(), len(self.ids))
        for name in ("scale", "mean", "std", "augment", "num_classes"):
            found[name] = zlib.crc32(repr(getattr(self, name)).encode())
        found["loss"] = zlib.crc32(self.loss.encode()) if isinstance(self.loss, str) else 0  # functions have no stable text
        return found

    def checksum(self) -> int:
        """One checksum of all samples and labels as they are now."""
        crc = 0
        for name in TENSORS:
            crc = zlib.crc32(raw(getattr(self, name)), crc)
        return crc

    def described(self) -> list[Any]:
        """Everything except the loss that identifies this data, as plain values, as of when it was made."""
        tensors = [[name, str(getattr(self, name).dtype), list(getattr(self, name).shape)] for name in TENSORS]
        return [tensors, sorted((name, value) for name, value in self._seal.items() if name != "loss")]

    def facts(self) -> list[Any]:
        """What determines the model's inputs besides the samples."""
        return [self.scale, list(self.mean), list(self.std), self.augment]

    def class_counts(self, split: list[np.ndarray]) -> np.ndarray | None:
        """How many targets of each class every client holds, [N, classes]; None for regression."""
        if not self.num_classes:
            return None
        labels = self.y_train.numpy()
        held = (labels[part].reshape(-1) for part in split)
        return np.stack([np.bincount(own[own >= 0], minlength=self.num_classes) for own in held])

    def subset(self, part: Any) -> "Data":
        """The same data with these training samples only: what one client holds."""
        rows = as_rows(part, len(self.x_train), "the subset")
        ids = None if self.ids is None else self.ids[rows]
        return replace(self, x_train=self.x_train[rows], y_train=self.y_train[rows], ids=ids)

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored samples as model inputs."""
        if x.dtype != torch.uint8:
            return x.to(dtype) if x.is_floating_point() else x
        key = (x.device, dtype, x.ndim)
        if key not in self._scaling:  # made once per device: a copy from the host in every batch would stall a GPU
            shape = (-1, *[1] * (x.ndim - 2)) if x.ndim > 2 else (-1,)
            self._scaling[key] = tuple(torch.tensor(fact, dtype=dtype, device=x.device).view(shape) for fact in (self.mean, self.std))
        mean, std = self._scaling[key]
        scaled: Tensor = (x.to(dtype) / self.scale - mean) / std
        return scaled

    def resident(self, part: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The samples ("train" or "test") and targets on a device, as stored; once there, all runs on this data share them."""
        key = (part, device, dtype)
        if key not in self._resident:
            x, y = (self.x_train, self.y_train) if part == "train" else (self.x_test, self.y_test)
            self._resident[key] = x.to(device), y.to(device, dtype) if y.is_floating_point() else y.to(device)
        return self._resident[key]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        kind = f"{self.num_classes} classes" if self.num_classes else "real targets"
        shape = "x".join(map(str, self.x_train.shape[1:]))
        return f"Data({self.name}: {len(self.x_train):,} training and {len(self.x_test):,} test samples of {shape}, {kind})"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(raw(tensor), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def _check_shapes(what: str, train: Tensor, test: Tensor) -> None:
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{tuple(train.shape[1:])} and {tuple(test.shape[1:])}"
        raise UsageError(f"training and test {what} differ in shape: {shapes} per sample")


def _kind(x: Tensor) -> str:
    if x.dtype in (torch.uint8, torch.bool):
        return str(x.dtype).removeprefix("torch.")
    return "real" if x.is_floating_point() else "integer"


def _one_type(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their two types. Kinds must not be mixed, since only uint8 is scaled."""
    if _kind(train) != _kind(test):
        scaled = "; uint8 samples are scaled by scale, mean and std and others are not" if torch.uint8 in (train.dtype, test.dtype) else ""
        raise UsageError(f"x_train is {train.dtype} but x_test is {test.dtype}: convert one to the type of the other{scaled}")
    wider = torch.promote_types(train.dtype, test.dtype)
    return train.to(wider), test.to(wider)


def _flat(y: Tensor) -> Tensor:
    """Class labels of shape [n, 1] are read as [n]."""
    return y[:, 0].contiguous() if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point() else y


def _number_of_classes(*labels: Tensor) -> int:
    for y in labels:
        wrong = (y < 0) if y.ndim == 1 else (y < 0) & (y != IGNORED)
        if bool(wrong.any()):
            raise UsageError(
                f"labels must be 0, 1, 2, ..., got the negative label {int(y[wrong][0])} "
                f"({IGNORED} marks positions without a target where labels are [samples, positions])"
            )
    most = max(int(y.max()) if y.numel() else -1 for y in labels)
    if most < 0:
        raise UsageError("the labels contain no class; give at least one label of 0 or more")
    return whole("the number of classes (largest label + 1)", most + 1, high=1_000_000)


def crop_and_flip(x: Tensor, moves: Tensor) -> Tensor:
    """Shift each image [B, C, H, W] by its row of `moves` (down, right, mirrored) [B, 3]; black comes in at the border."""
    b, c, h, w = x.shape
    padded = torch.nn.functional.pad(x, [CROP_PADDING] * 4)
    rows = moves[:, :1] + torch.arange(h, device=x.device)  # [B, H]
    columns = torch.arange(w, device=x.device).expand(b, w)
    columns = moves[:, 1:2] + torch.where(moves[:, 2:] > 0, w - 1 - columns, columns)  # [B, W]
    image = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def random_moves(count: int, rng: np.random.Generator) -> np.ndarray:
    """Crop offsets and flips for `count` images, [count, 3]."""
    moves = rng.integers(0, 2 * CROP_PADDING + 1, size=(count, 3))
    moves[:, 2] = rng.integers(0, 2, size=count)
    return moves


def as_split(split: Any, samples: int) -> list[np.ndarray]:
    """A split as a list of int64 index arrays, checked: every client has data and every index exists."""
    try:
        parts = list(split)
    except Exception:  # whatever an object's own iteration raises
        raise UsageError(f"split must be a list of arrays of sample numbers, one per client, got {shown(split)}") from None
    whole("the number of clients", len(parts))
    return [as_rows(part, samples, f"client {client}") for client, part in enumerate(parts)]


def as_rows(part: Any, samples: int, what: str) -> np.ndarray:
    """Sample numbers as an int64 array, checked."""
    try:
        rows = np.asarray(part)
    except Exception:  # whatever an object's own conversion raises
        raise UsageError(f"{what} must have a list of sample numbers, got {shown(part)}") from None
    if (rows.size and rows.dtype.kind not in "iu") or np.ma.isMaskedArray(part):
        raise UsageError(f"{what} must hold sample numbers, got {rows.dtype} (for a mask use np.flatnonzero)")
    if rows.ndim != 1:
        raise UsageError(f"{what} must have a list of sample numbers, got shape {rows.shape}")
    if rows.size == 0:
        raise UsageError(f"{what} has no data: use fewer clients or another partition")
    if rows.min() < 0 or rows.max() >= samples:
        raise UsageError(f"{what} has a sample number outside the {samples} training samples; was the split made for other data?")
    return rows.astype(np.int64)
