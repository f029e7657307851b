"""`Data`: training and test samples, as the files hold them, with what turns them into model inputs."""

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, whole

CROP_PADDING = 4  # pixels of black border that a random crop may reach into, as usual for CIFAR-10


@dataclass
class Data:
    """Samples and labels; tensors or arrays, in any shape the model takes.

    uint8 inputs stay uint8 in memory and become `(x / scale - mean) / std` batch by batch on the device; other inputs
    are used as they are. Integer labels are classes, floating ones are regression targets.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    name: str = "custom"
    loss: str | None = None  # the loss these labels call for; None: cross-entropy for classes, mse for real targets
    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)  # per channel
    std: tuple[float, ...] = (1.0,)
    augment: bool = False  # random crop and horizontal flip of training images
    ids: Any = None  # [n_train] the client each training sample belongs to, where the data knows
    optimum: Tensor | None = field(default=None, repr=False)  # [d] the known minimiser, where there is one
    num_classes: int = field(init=False, default=0)
    _scaling: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _resident: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = _tensor(self, f"x_{part}"), _tensor(self, f"y_{part}")
            if len(x) != len(y):
                raise UsageError(f"x_{part} has {len(x)} samples but y_{part} has {len(y)} labels")
            if len(x) == 0:
                raise UsageError(f"x_{part} is empty: give at least one {'training' if part == 'train' else 'test'} sample")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            shapes = f"{tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            raise UsageError(f"training and test samples differ in shape: {shapes}")
        if self.augment and self.x_train.ndim != 4:
            raise UsageError("augment=True crops and flips images: x_train must be [samples, channels, height, width]")
        if self.y_train.is_floating_point() != self.y_test.is_floating_point():
            raise UsageError("y_train and y_test differ in kind: one holds classes (integers), the other real targets")
        for channels in (self.mean, self.std):
            if len(channels) not in (1, self.x_train.shape[1] if self.x_train.ndim > 1 else 1):
                raise UsageError(f"mean and std need one value, or one per channel, got {len(channels)}")
        if not self.scale or not all(self.std):
            raise UsageError("scale and std must not be 0")
        if not self.y_train.is_floating_point():
            if self.y_train.ndim == 2 and self.y_train.shape[1] == 1:
                self.y_train, self.y_test = self.y_train[:, 0], self.y_test.reshape(-1)
            if int(min(self.y_train.min(), self.y_test.min())) < 0:
                raise UsageError("labels must be 0, 1, 2, ...: a negative label was found")
            self.y_train, self.y_test = self.y_train.long(), self.y_test.long()
            self.num_classes = int(max(self.y_train.max(), self.y_test.max())) + 1
            whole("the number of classes (largest label + 1)", self.num_classes, high=1_000_000)
        if self.loss is None:
            self.loss = "cross-entropy" if self.num_classes else "mse"

    def class_counts(self, split: list[np.ndarray]) -> np.ndarray | None:
        """How many samples of each class every client holds, [N, classes]; None for regression."""
        if not self.num_classes:
            return None
        labels = self.y_train.reshape(len(self.y_train), -1)[:, 0].numpy()
        return np.stack([np.bincount(labels[part], minlength=self.num_classes) for part in split])

    def subset(self, part: Any) -> "Data":
        """The same data with these training samples only: what one client holds."""
        rows = torch.as_tensor(np.asarray(part))
        ids = None if self.ids is None else np.asarray(self.ids)[np.asarray(part)]
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

    def checksum(self) -> int:
        """A number for all samples and labels; computed once."""
        if "checksum" not in self._resident:
            crc = 0
            for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
                crc = zlib.crc32(np.ascontiguousarray(tensor.numpy()).data.cast("B"), crc)
            self._resident["checksum"] = crc
        return int(self._resident["checksum"])

    def facts(self) -> list[Any]:
        """What besides the samples decides the model's inputs."""
        return [self.scale, list(self.mean), list(self.std), self.augment]


def _tensor(data: Data, name: str) -> Tensor:
    """Replace the field by a tensor on the CPU (sharing memory where it can) and return it."""
    value = getattr(data, name)
    if not isinstance(value, Tensor):
        value = _from_array(value, name)
    if value.layout != torch.strided or value.is_complex():
        raise UsageError(f"{name} must be a dense tensor of real numbers")
    tensor = value.detach().cpu()
    if tensor.ndim == 0:
        raise UsageError(f"{name} must have one entry a sample, got a single number")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"{name} holds values that are not finite; clean the data first")
    setattr(data, name, tensor)
    return tensor


def _from_array(value: Any, name: str) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError:
        raise UsageError(f"{name} must be a tensor or an array of numbers of one shape") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name} must be a tensor or an array of numbers of one shape, got {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


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
        parts = [np.asarray(part) for part in split]
    except (TypeError, ValueError):
        raise UsageError("split must be a list of arrays of sample numbers, one a client") from None
    whole("the number of clients", len(parts))
    for client, part in enumerate(parts):
        if part.size and part.dtype.kind not in "iu":
            raise UsageError(f"the split of client {client} must hold sample numbers, got {part.dtype} (for a mask use np.flatnonzero)")
        if part.ndim != 1:
            raise UsageError(f"the split of client {client} must be a list of sample numbers, got shape {part.shape}")
        if part.size == 0:
            raise UsageError(f"client {client} has no data: use fewer clients or another partition")
        if part.min() < 0 or part.max() >= samples:
            raise UsageError(f"client {client} points outside the {samples} training samples: the split is of other data")
    return [part.astype(np.int64) for part in parts]
