"""Checks what clients send, before anything of it is stored: updates, metrics, control records, client ids.

A reply may hold anything. Whatever is wrong with it raises `Refused`, so that only its sender misses the round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from .compression import Compression
from .wire import MIMICFL, SENT, UPDATE, ArraySpec, Layout, Refused, checked, numbers, read_config, records_of

LONGEST_ID = 100  # characters of a client id
BLOCK = 1 << 15  # numbers that are processed at once
MOST_METRICS = 1000  # numbers in the metrics of one reply
ID_KEYS = ("client-id", "client_id", "partition-id", "partition_id")  # where an app may report which client it is


@dataclass(frozen=True)
class Update:
    """The update in one client's reply, checked."""

    g: Tensor  # [d] sum of the local steps, in gradient units
    K: float = math.nan  # local steps, with momentum `LocalSGD.worth` of them; nan if the client does not report them
    samples: float = 1.0
    loss: float | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0  # |g|
    sent: dict[str, Tensor] = field(default_factory=dict)  # [d] each, what the algorithm's instructions ask for besides g
    ticket: str = ""  # of the request that it answers


def read_update(
    content: RecordDict,
    layout: Layout,
    w: Tensor,
    eta_L: float,
    needs_steps: bool,
    weight_key: str,
    send: Sequence[str] = (),
    out: Tensor | None = None,
    needs_g: bool = True,
    compression: Compression | None = None,
) -> Update:
    """The update in a reply: g as sent by `client_app`, or computed from the trained weights that any other app returns.

    For weights, g = (w_t - w_i) / eta_L. The server step multiplies the weights' rounding error by eta_t again, so it stays at the
    precision of the weights for any learning rate. Raises `Refused` if the reply is malformed. `out` is where to write g. An algorithm
    that does not need g gets zeros if it is not sent.
    """
    g = torch.empty(layout.size, dtype=layout.dtype) if out is None else out
    try:
        metrics = _metrics(content, needs_steps, weight_key)
        records = records_of(content, ArrayRecord)
        sent = _sent_vectors(records.pop(SENT, None), layout, send)
        if UPDATE in records:
            buffers, square = _sent_update(records[UPDATE], layout, g, needs_g, compression), None
        elif len(records) == 1:
            buffers, square = _from_weights(next(iter(records.values())), layout, w, eta_L, g)
        elif not records and not needs_g and not layout.buffers:
            buffers, square = _sent_update(ArrayRecord(), layout, g, needs_g), None
        else:
            raise Refused(f"its reply has {len(records)} array records, expected one with the trained weights")
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"its reply cannot be read ({type(error).__name__})") from None
    norm = _norm(g, square)
    if not math.isfinite(norm):  # the norm is finite if and only if all numbers are, up to 1e154
        raise Refused("its update is not finite")
    _check_variances(buffers)
    return Update(g, *metrics, buffers, norm, sent)


def _sent_vectors(record: ArrayRecord | None, layout: Layout, send: Sequence[str]) -> dict[str, Tensor]:
    """The vectors that the algorithm asks for besides g."""
    arrays = {} if record is None else dict(record)
    if missing := [name for name in send if name not in arrays]:
        raise Refused(f"it does not send {missing[0]}, which the algorithm needs; use client_app")
    return {name: checked(arrays[name], ArraySpec(name, (layout.size,), str(layout.dtype).removeprefix("torch."))) for name in send}


def _norm(g: Tensor, square: float | None) -> float:
    """The norm of g, from its square if that is known; infinite or nan if a number of g is."""
    if square is None:
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(g.numpy(), g.numpy()))  # one fast pass; exact enough to compare with a bound
    return math.sqrt(square) if square < 1e30 else float(torch.linalg.vector_norm(g, dtype=torch.float64))


def _sent_update(
    record: ArrayRecord, layout: Layout, g: Tensor, needs_g: bool, compression: Compression | None = None
) -> dict[str, Tensor]:
    arrays = dict(record)
    compressed = compression is not None and any(name.startswith("g.") for name in arrays)
    if "g" not in arrays and needs_g and not compressed:
        raise Refused("its update is missing from the reply")
    if compression is not None and compressed:
        compression.read(arrays, g.numpy())
    else:
        spec = ArraySpec("g", (layout.size,), str(layout.dtype).removeprefix("torch."))
        value = numbers(arrays.pop("g"), spec) if "g" in arrays else np.zeros(1, dtype=g.numpy().dtype)
        with np.errstate(over="ignore"):
            np.copyto(g.numpy(), value, casting="same_kind")
    if arrays.keys() != {spec.name for spec in layout.buffers}:
        raise Refused("its buffers differ from the model's")
    return {spec.name: checked(arrays[spec.name], spec) for spec in layout.buffers}


def _from_weights(arrays: ArrayRecord, layout: Layout, w: Tensor, eta_L: float, g: Tensor) -> tuple[dict[str, Tensor], float]:
    """Write g; returns the buffers and the square of g's norm."""
    layout.check_names(arrays)
    square = 0.0
    for spec, sent, out in zip(layout.parameters, layout.split(w.numpy()), layout.split(g.numpy()), strict=True):
        trained = numbers(arrays[spec.name], spec).reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            for a in range(0, len(out), BLOCK):  # in pieces that stay in the cache
                part = np.subtract(sent[a : a + BLOCK], trained[a : a + BLOCK], out=out[a : a + BLOCK], casting="same_kind")
                if eta_L != 1.0:
                    part /= part.dtype.type(eta_L)
                square += float(np.dot(part, part))
    return {spec.name: checked(arrays[spec.name], spec) for spec in layout.buffers}, square


def _check_variances(buffers: Mapping[str, Tensor]) -> None:
    """Running variances below zero, and counters below zero, would stay in the model forever."""
    for name, value in buffers.items():
        if name.endswith(("running_var", "num_batches_tracked")) and bool((value < 0).any()):
            raise Refused(f"array {name!r} holds negative values")


def _metrics(content: RecordDict, needs_steps: bool, weight_key: str) -> tuple[float, float, float | None]:
    """Local steps, weight and training loss, as reported in the reply's metrics."""
    reported: dict[str, Any] = {}
    for record in records_of(content, MetricRecord).values():
        check_metrics(record)
        reported |= dict(record)
    has_steps = "steps" in reported
    if needs_steps and not has_steps:
        raise Refused("it does not report its number of local steps, which the algorithm needs; send the metric 'steps' or use client_app")
    steps, samples = reported.get("steps", 1), reported.get(weight_key, 1)
    loss = reported.get("train-loss", reported.get("train_loss"))
    if not isinstance(steps, (int, float)) or not 1 <= steps < 1e12:
        raise Refused(f"it reports {str(steps)[:40]} local steps, expected a number of at least 1")
    if not isinstance(samples, (int, float)) or not 0 < samples < 1e15:
        raise Refused(f"it reports {str(samples)[:40]} samples ({weight_key}), expected a positive number")
    finite = float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None
    return float(steps) if has_steps else math.nan, float(samples), finite


def check_metrics(record: MetricRecord) -> None:
    """Raise `Refused` if a metric record is too large for the log or holds numbers that no float can."""
    count = 0
    for key, value in record.items():
        values = value if isinstance(value, list) else [value]
        count += len(values)
        if len(key) > LONGEST_ID or not key.isprintable():
            raise Refused(f"the name of its metric {key[:20]!r} is too long or not printable")
        if any(isinstance(number, bool) or abs(number) > 1e300 for number in values if number == number):
            raise Refused(f"its metric {key!r} is too large")
    if count > MOST_METRICS:
        raise Refused(f"its metrics hold {count} numbers, more than {MOST_METRICS}")


def same_metrics(contents: list[RecordDict], weight_key: str) -> list[RecordDict]:
    """The replies whose metrics can be averaged together: one record each, with a weight, and the metrics that most of them report.

    One client with other metrics would otherwise make the average impossible for all of them.
    """

    def signature(content: RecordDict) -> tuple[Any, ...] | None:
        records = list(records_of(content, MetricRecord).values())
        if len(records) != 1 or not _is_weight(records[0].get(weight_key)):
            return None
        try:
            check_metrics(records[0])
        except Refused:
            return None
        return tuple((key, len(value) if isinstance(value, list) else -1) for key, value in sorted(records[0].items()))

    found = [(signature(content), content) for content in contents]
    usual = [each for each, _ in found if each is not None]
    common = max(usual, key=lambda each: (usual.count(each), len(each)), default=None)
    alike = [content for each, content in found if each is not None and each == common]
    return [content for content in alike if _finite(content)] or alike  # one nan would be the average of all


def _finite(content: RecordDict) -> bool:
    values = [value for record in records_of(content, MetricRecord).values() for value in record.values()]
    return all(math.isfinite(number) for value in values for number in (value if isinstance(value, list) else [value]))


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15


def client_id(value: Any) -> str | None:
    """A client id as reported by a client, if it is usable: printable, and not too long for logs and rows."""
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    return text if 0 < len(text) <= LONGEST_ID and text.isprintable() and not text.startswith("node-") else None


def reported_id(content: RecordDict) -> str | None:
    """The id that a reply reports: in the record of `client_app`, or under one of `ID_KEYS` in the app's own records."""
    try:
        if MIMICFL in content.config_records:
            return client_id(read_config(content, MIMICFL).get("client-id"))
        records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
        for record in records:
            for key in ID_KEYS:
                if key in record and (found := client_id(record[key])) is not None:
                    return found
    except Exception:
        return None
    return None


def printable(text: str, limit: int = 200) -> str:
    """Text of a client for the log and the rows: one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:limit]
