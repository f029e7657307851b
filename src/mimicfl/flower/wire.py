"""Converts models between Flower's ArrayRecords and one vector [d].

A model's record holds arrays of any shape and type. Floating-point arrays are parameters and become one vector. Integer arrays, and
arrays whose name matches `buffers`, are buffers: averaged over the active clients (counters: the maximum), without correction.
"""

import fnmatch
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import SType
from torch import Tensor

from ..errors import UsageError

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
BFLOAT16 = "bfloat16"
LONGEST = 100  # characters of a client's text in messages
HEADER = 128  # bytes of the header of a serialized array of up to a few dimensions
FLOATS = ("float16", BFLOAT16, "float32", "float64")
UPDATE, SENT, MIMICFL, METRICS = "update", "sent", "mimicfl", "metrics"  # record names in the replies of `client_app`


Record = TypeVar("Record", ArrayRecord, MetricRecord)


class Refused(Exception):
    """A reply that must not be aggregated; the message gives the reason."""


@dataclass(frozen=True)
class ArraySpec:
    """Name, shape and type of one array."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """The arrays of a model, in the order in which they lie in the vector."""

    parameters: tuple[ArraySpec, ...]
    buffers: tuple[ArraySpec, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, arrays: ArrayRecord, buffers: Sequence[str] = BUFFERS) -> "Layout":
        if not arrays:
            raise UsageError("the initial arrays are empty; pass a model, for example ArrayRecord(model.state_dict())")
        parameters: list[ArraySpec] = []
        others: list[ArraySpec] = []
        for name, array in arrays.items():
            kind = "f" if is_floating(array.dtype) else _kind(array.dtype)
            if kind not in tuple("fiub"):
                raise UsageError(f"array {name!r} has type {array.dtype}; only floating-point, integer and boolean arrays can be averaged")
            spec = ArraySpec(name, tuple(array.shape), array.dtype)
            matched = any(fnmatch.fnmatchcase(name, pattern) for pattern in buffers)
            (parameters if kind == "f" and not matched else others).append(spec)
        if not parameters:
            raise UsageError("the model has no parameters to train: every array is a buffer or not floating-point; check `buffers`")
        # The server keeps half-precision models in float32: small steps would otherwise be lost in rounding.
        dtype = torch.float64 if any(spec.dtype == "float64" for spec in parameters) else torch.float32
        return cls(tuple(parameters), tuple(others), dtype)

    @property
    def size(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.parameters)

    def read(self, arrays: ArrayRecord) -> tuple[Tensor, dict[str, Tensor]]:
        """The vector and the buffers of a record. Raises `Refused` if its arrays differ from the model's."""
        self.check_names(arrays)
        vector = torch.empty(self.size, dtype=self.dtype)
        for spec, part in zip(self.parameters, self.split(vector.numpy()), strict=True):
            with np.errstate(over="ignore"):
                np.copyto(part, numbers(arrays[spec.name], spec).reshape(-1), casting="same_kind")
            if not np.isfinite(part).all():
                raise Refused(f"array {spec.name!r} holds values that are not finite")
        return vector, {spec.name: checked(arrays[spec.name], spec) for spec in self.buffers}

    def check_names(self, arrays: ArrayRecord) -> None:
        """Raise `Refused` if a record has other arrays than the model."""
        missing = {spec.name for spec in (*self.parameters, *self.buffers)} ^ set(arrays)
        if missing:
            raise Refused(f"its arrays differ from the model's: {min(missing)[:LONGEST]!r} is missing or unknown")

    def split(self, vector: np.ndarray) -> list[np.ndarray]:
        """Views of the parameters in a vector [d]."""
        ends = np.cumsum([math.prod(spec.shape) for spec in self.parameters])
        return np.split(vector, ends[:-1])

    def write(self, w: Tensor, buffers: dict[str, Tensor]) -> ArrayRecord:
        """The model as a record: each array with its original shape and type."""
        parts = w.detach().split([math.prod(spec.shape) for spec in self.parameters])
        arrays = {spec.name: part.view(spec.shape) for spec, part in zip(self.parameters, parts, strict=True)} | buffers
        return ArrayRecord({s.name: _typed(arrays[s.name], s.dtype) for s in (*self.parameters, *self.buffers)})

    def describe(self) -> str:
        """The layout as text; two models are compatible if and only if their texts are equal."""
        return ";".join(f"{s.name}:{s.dtype}{list(s.shape)}" for s in (*self.parameters, *self.buffers))


def decode(array: Array, name: str) -> np.ndarray:
    """The values of an array, read-only and without a copy; never unpickled. Raises `Refused` if they cannot be read."""
    try:
        if array.stype != SType.NUMPY:
            raise Refused(f"array {name!r} has the unknown serialization {array.stype[:40]!r}")
        stream = io.BytesIO(array.data)
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(array.data) - stream.tell():
            raise Refused(f"array {name!r} cannot be read (wrong size or type)")
        value = np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"array {name!r} cannot be read ({type(error).__name__})") from None
    return value


def numbers(array: Array, spec: ArraySpec) -> np.ndarray:
    """The values of an array that must have the shape of `spec`; any floating-point precision is accepted. Raises `Refused`."""
    value = decode(array, spec.name)
    bfloat16 = array.dtype == BFLOAT16 and value.dtype == np.uint16
    dtype = BFLOAT16 if bfloat16 else str(value.dtype)
    if value.shape != spec.shape or (dtype != spec.dtype and not (is_floating(dtype) and is_floating(spec.dtype))):
        raise Refused(f"array {spec.name!r} is {dtype}{list(value.shape)[:8]}, expected {spec.dtype}{list(spec.shape)}")
    if bfloat16:  # the upper half of a float32
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value


def checked(array: Array, spec: ArraySpec) -> Tensor:
    """A buffer from the network as a tensor of the model's type. Raises `Refused` if its shape, type or values are wrong."""
    value = numbers(array, spec)
    if value.dtype.kind == "f":
        value = value.astype(np.float32 if spec.dtype == BFLOAT16 else spec.dtype)
        if not np.isfinite(value).all():
            raise Refused(f"array {spec.name!r} holds values that are not finite")
    if value.dtype.kind == "u" and value.dtype.itemsize > 1:
        value = value.astype(np.int64)
    return torch.from_numpy(np.array(value))


def _typed(value: Tensor, dtype: str) -> Array:
    if dtype == BFLOAT16:
        return as_array(value.to(torch.bfloat16))
    return Array(value.numpy().astype(dtype, copy=False))


def _kind(dtype: str) -> str:
    try:
        return np.dtype(dtype).kind
    except TypeError:
        return "?"


def is_floating(dtype: str) -> bool:
    return dtype in FLOATS


def as_array(value: Tensor) -> Array:
    """A tensor as an array of a message. NumPy has no bfloat16: its bits travel as 16-bit integers, labelled as what they are."""
    value = value.detach().cpu()
    if value.dtype != torch.bfloat16:
        return Array(value.numpy())
    bits = Array(value.contiguous().view(torch.uint16).numpy())
    return Array(BFLOAT16, tuple(value.shape), bits.stype, bits.data)


def vector(name: str, value: Tensor) -> ArrayRecord:
    """One flat vector as a record."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy())})


def tensor(content: RecordDict, record: str, name: str) -> Tensor:
    """A copy of one array of a record, as a tensor."""
    return torch.from_numpy(content.array_records[record][name].numpy().copy())


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """The records of one kind. `content.array_records` and the like are much slower: they check every record again."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def read_config(content: RecordDict, record: str) -> dict[str, Any]:
    """A config record as a dict; empty if the record is missing."""
    return dict(content.config_records.get(record) or {})


def config_record(values: Mapping[str, Any]) -> ConfigRecord:
    return ConfigRecord(dict(values))


def metric_record(values: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord(dict(values))


def vectors(name: str, record: ArrayRecord) -> int:
    """How many model-sized vectors a record of a reply holds: `sent` has one per name, other records hold one model or update."""
    return len(record) if name == SENT else int(name != UPDATE or any(key == "g" or key.startswith("g.") for key in record))


def size(record: ArrayRecord) -> int:
    """Bytes of the numbers in a record, without headers (NumPy pads them to 128 bytes)."""
    return sum(max(0, len(array.data) - HEADER) for array in record.values())
