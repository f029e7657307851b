"""Averaged models: what a run evaluates and returns is a running mean of its global models; clients train from w_t as without it."""

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class RunningMean:
    """mean += s (w - mean) with s = average / (k + average) after server step k = 0, 1, ... (polynomial decay, Shamir and Zhang, 2013).

    The model of step k gets a weight of about k^(average - 1), so that the mean reaches back over about the last k / average steps; 1 is
    the mean of all models. The first step replaces the initial model. A round without updates is no step and changes nothing: otherwise
    the mean would approach the last model before an outage, whose clients then count for all. Floating-point buffers are averaged in the
    same way, those in half precision as float32: their own steps are larger than what a late round adds to the mean. Counters are those
    of the last model.
    """

    def __init__(self, average: float, w: Tensor, buffers: Tensors) -> None:
        self.average, self.steps = average, 0
        self.w, self._means = w, {name: at_least_float32(value) for name, value in buffers.items()}
        self._dtypes = {name: value.dtype for name, value in buffers.items()}

    @property
    def buffers(self) -> Tensors:
        """The mean of the buffers, in their own types."""
        return {name: value.to(self._dtypes[name]) for name, value in self._means.items()}

    def add(self, w: Tensor, buffers: Tensors) -> None:
        """The model after a server step."""
        s = self.average / (self.steps + self.average)
        self.w, self.steps = self.w.lerp(w, s), self.steps + 1
        self._means = {name: _mean(self._means[name], at_least_float32(value), s) for name, value in buffers.items()}

    def tensors(self) -> Tensors:
        """Everything that a checkpoint must hold, by the names that it has there."""
        kept = {"average.w": self.w, "average.steps": torch.tensor(self.steps)}
        return kept | {f"average.buffer.{name}": value for name, value in self._means.items()}

    def restore(self, tensors: Tensors) -> None:
        """Continue from what `tensors` returned."""
        self.w, self.steps = tensors["average.w"], int(tensors["average.steps"])
        self._means = {name: tensors[f"average.buffer.{name}"] for name in self._means}


def at_least_float32(value: Tensor) -> Tensor:
    """Half precision as float32; everything else unchanged."""
    return value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value


def _mean(mean: Tensor, newest: Tensor, s: float) -> Tensor:
    if not newest.is_floating_point():
        return newest
    return torch.where(mean == newest, mean, mean.lerp(newest, s))  # constants stay bit-equal, infinite ones too
