"""How a model and an update travel: Flower's ArrayRecords as one vector [d] and back, and the checks on what comes in.

A model's record holds arrays of any shape and type. Floating ones are parameters and become one vector; integers, and arrays
whose name matches `buffers`, are carried beside it: averaged over the active clients, counters by their largest, no correction.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..errors import UsageError

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
UPDATE, OURS, METRICS = "update", "mimicfl", "metrics"  # the records of our own client's reply


class Refused(Exception):
    """An answer that must not touch the model; the text says why."""


@dataclass(frozen=True)
class Spot:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Update:
    """What one client's answer comes to."""

    g: Tensor  # [d] sum of the local steps, in gradient units
    K: float = math.nan  # local steps, or with momentum how many gradients' worth they are; not a number where the client does not tell
    samples: float = 1.0
    loss: float | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Where each array of a model lies in the vector."""

    parameters: tuple[Spot, ...]
    buffers: tuple[Spot, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, arrays: ArrayRecord, buffers: Sequence[str] = BUFFERS) -> "Layout":
        if not arrays:
            raise UsageError("the initial arrays are empty: pass the model, as in ArrayRecord(model.state_dict())")
        parameters: list[Spot] = []
        beside: list[Spot] = []
        for name, array in arrays.items():
            kind = np.dtype(array.dtype).kind
            if kind not in "fiub":
                raise UsageError(f"array {name!r} is of type {array.dtype}: only real numbers, integers and booleans can be averaged")
            spot = Spot(name, tuple(array.shape), array.dtype)
            matched = any(fnmatch.fnmatchcase(name, pattern) for pattern in buffers)
            (parameters if kind == "f" and not matched else beside).append(spot)
        if not parameters:
            raise UsageError("the model has no floating-point array that is not a buffer: nothing can be learned")
        # Half-precision models keep a full-precision original on the server, or small steps would be lost in rounding.
        dtype = torch.float64 if any(spot.dtype == "float64" for spot in parameters) else torch.float32
        return cls(tuple(parameters), tuple(beside), dtype)

    @property
    def size(self) -> int:
        return sum(math.prod(spot.shape) for spot in self.parameters)

    def read(self, arrays: ArrayRecord) -> tuple[Tensor, dict[str, Tensor]]:
        """The vector and the buffers of a record that must look like the model, else `Refused`."""
        missing = {spot.name for spot in (*self.parameters, *self.buffers)} ^ set(arrays)
        if missing:
            raise Refused(f"its arrays are not the model's: {min(missing)!r} is missing or unknown")
        found = {spot.name: checked(arrays[spot.name], spot) for spot in (*self.parameters, *self.buffers)}
        vector = torch.cat([found[spot.name].reshape(-1).to(self.dtype) for spot in self.parameters])
        return vector, {spot.name: found[spot.name] for spot in self.buffers}

    def write(self, w: Tensor, buffers: dict[str, Tensor]) -> ArrayRecord:
        """The model as a record again, each array in its own shape and type."""
        parts = w.detach().split([math.prod(spot.shape) for spot in self.parameters])
        arrays = {spot.name: part.numpy().reshape(spot.shape) for spot, part in zip(self.parameters, parts, strict=True)}
        arrays |= {name: value.numpy() for name, value in buffers.items()}
        return ArrayRecord({s.name: Array(arrays[s.name].astype(s.dtype)) for s in (*self.parameters, *self.buffers)})

    def describe(self) -> str:
        """One text for the whole layout; two models with the same text fit each other."""
        return ";".join(f"{s.name}:{s.dtype}{list(s.shape)}" for s in (*self.parameters, *self.buffers))


def checked(array: Array, spot: Spot) -> Tensor:
    """An array from the network as a tensor, if it is what it should be. Nothing is unpickled."""
    try:
        value = array.numpy()
    except Exception as error:
        raise Refused(f"array {spot.name!r} cannot be read ({type(error).__name__})") from None
    if value.shape != spot.shape or str(value.dtype) != spot.dtype:
        raise Refused(f"array {spot.name!r} is {value.dtype}{list(value.shape)}, expected {spot.dtype}{list(spot.shape)}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise Refused(f"array {spot.name!r} holds values that are not finite")
    if value.dtype.kind == "u" and value.dtype.itemsize > 1:
        value = value.astype(np.int64)
    return torch.from_numpy(np.require(value, requirements=["C", "W"]))


def vector(name: str, value: Tensor) -> ArrayRecord:
    """One flat vector as a record."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy())})


def tensor(content: RecordDict, record: str, name: str) -> Tensor:
    """One array of a record, as a tensor of its own."""
    return torch.from_numpy(content.array_records[record][name].numpy().copy())


def words(content: RecordDict, record: str) -> dict[str, Any]:
    """A config record as a plain dict; empty where there is none."""
    return dict(content.config_records.get(record) or {})


def config(told: Mapping[str, Any]) -> ConfigRecord:
    return ConfigRecord(dict(told))


def metrics(told: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord(dict(told))


def size(record: ArrayRecord) -> int:
    """Bytes of the numbers in a record, headers aside."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in record.values())


def read_update(
    content: RecordDict, layout: Layout, w: Tensor, eta_L: float, max_norm: float | None = None, needs_steps: bool = False
) -> Update:
    """An answer as an update: sent as g by our own client, or formed here from the trained weights of any other.

    Weights give g = (w_t - w_i) / eta_L, in double. What rounding the weights carried returns to the model multiplied by
    eta_t, that is at the size of a rounding of the weights, however small the rate.
    """
    records = content.array_records
    if UPDATE in records:
        kind = str(layout.dtype).removeprefix("torch.")
        arrays = dict(records[UPDATE])
        if "g" not in arrays:
            raise Refused("its update is missing")
        g = checked(arrays.pop("g"), Spot("g", (layout.size,), kind))
        if arrays.keys() != {spot.name for spot in layout.buffers}:
            raise Refused("its buffers are not the model's")
        buffers = {spot.name: checked(arrays[spot.name], spot) for spot in layout.buffers}
    elif len(records) == 1:
        trained, buffers = layout.read(next(iter(records.values())))
        g = ((w.double() - trained.double()) / eta_L).to(layout.dtype)
    else:
        raise Refused(f"it has {len(records)} array records, expected one with the trained weights")
    if not bool(torch.isfinite(g).all()):
        raise Refused("its update is not finite")
    moved = eta_L * float(g.double().norm())
    if max_norm is not None and moved > max_norm:
        raise Refused(f"it moves the model by {moved:.3g}, allowed is {max_norm:.3g}")
    return Update(g, *_metrics(content, needs_steps), buffers)


def _metrics(content: RecordDict, needs_steps: bool) -> tuple[float, float, float | None]:
    """K, the samples and the training loss, where they are told."""
    told: dict[str, Any] = {}
    for record in content.metric_records.values():
        told |= dict(record)
    if needs_steps and "steps" not in told:
        raise Refused("it does not tell its number of local steps, which is needed here: use mimicfl.flower.client_app")
    untold = "steps" not in told
    steps, samples, loss = told.get("steps", 1), told.get("num-examples", 1), told.get("train-loss", told.get("train_loss"))
    if isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 1 <= steps < math.inf:
        raise Refused(f"it claims {steps!r} local steps")
    if not isinstance(samples, (int, float)) or not math.isfinite(samples) or samples <= 0:
        raise Refused(f"it claims {samples!r} samples")
    return math.nan if untold else steps, float(samples), float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None
