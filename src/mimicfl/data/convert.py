"""Unify the types of training and test samples and labels, and count the classes."""

import torch
from torch import Tensor

from ..errors import UsageError, integer

IGNORED = -100  # torch's label for positions without a target


def _kind(x: Tensor) -> str:
    if x.dtype in (torch.uint8, torch.bool):
        return str(x.dtype).removeprefix("torch.")
    return "real" if x.is_floating_point() else "integer"


def one_type(name: str, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to the wider of their two types. Different kinds are refused, since only uint8 is scaled."""
    if _kind(train) != _kind(test):
        scaled = "; uint8 samples are scaled by scale, mean and std and others are not" if torch.uint8 in (train.dtype, test.dtype) else ""
        here, there = (name.replace("x", f"x_{part}", 1) for part in ("train", "test"))
        raise UsageError(f"{here} is {train.dtype} but {there} is {test.dtype}: convert one to the type of the other{scaled}")
    wider = torch.promote_types(train.dtype, test.dtype)
    return train.to(wider), test.to(wider)


def one_label_type(name: str, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Real targets in the wider of their two types, classes as int64."""
    if train.is_floating_point() != test.is_floating_point():
        here, there = (name.replace("y", f"y_{part}", 1) for part in ("train", "test"))
        raise UsageError(f"{here} and {there} differ in kind: one holds classes (integers), the other real targets")
    if not train.is_floating_point():
        return train.long(), test.long()
    wider = torch.promote_types(train.dtype, test.dtype)
    return train.to(wider), test.to(wider)


def flat(y: Tensor) -> Tensor:
    """Reshape class labels from [n, 1] to [n]."""
    return y[:, 0].contiguous() if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point() else y


def number_of_classes(*labels: Tensor) -> int:
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
    return integer("the number of classes (largest label + 1)", most + 1, high=1_000_000)


def classes_without(ignored: int, *labels: Tensor) -> int:
    """The number of classes that the model must have outputs for: one more than the largest label that is not ignored."""
    return 1 + max(int(torch.where(y == ignored, -1, y).max()) for y in labels)


def check_counted(y_test: Tensor, ignored: int) -> None:
    """Raise a `UsageError` if no test target counts: every metric would be undefined."""
    if not bool(((y_test >= 0) & (y_test != ignored)).any()):
        raise UsageError(f"no test target counts: all are {ignored} or negative, which is ignored; give test samples with targets")


def same_shape(output: Tensor, target: Tensor) -> bool:
    """Whether there is one output per target, in the same order: equal shapes, up to dimensions of size 1, or one of them is flat."""
    ours, theirs = ([n for n in x.shape[1:] if n != 1] for x in (output, target))
    return output.numel() == target.numel() and (ours == theirs or len(ours) < 2 or len(theirs) < 2)
