"""Hostile replies of a client: functions that change the content of a reply in place."""

import io

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord


def record_of(content):
    return next(iter(content.array_records.values()))


def first_array(content):
    """The name and values of the first array of a reply."""
    record = record_of(content)
    name = next(iter(record))
    return record, name, record[name].numpy().copy()


def change(function):
    """An attack that changes the values of the first array."""

    def attack(content):
        record, name, value = first_array(content)
        record[name] = Array(np.asarray(function(value)))

    return attack


def raw(dtype="float32", stype="numpy.ndarray", data=b"\x93NUMPY but not really", shape=(3,)):
    def attack(content):
        record, name, _ = first_array(content)
        record[name] = Array(dtype, shape, stype, data)

    return attack


def put(**records):
    """An attack that adds or replaces records."""

    def attack(content):
        for name, value in records.items():
            content[name] = value

    return attack


def metric(**values):
    def attack(content):
        kept = dict(next(iter(content.metric_records.values())))
        for name in list(content.metric_records):
            del content[name]
        content["metrics"] = MetricRecord(kept | {key.replace("_", "-"): value for key, value in values.items()})

    return attack


def drop(kind):
    def attack(content):
        for name in list(getattr(content, f"{kind}_records")):
            del content[name]

    return attack


def control(**values):
    def attack(content):
        kept = dict(content.config_records.get("mimicfl") or {})
        content["mimicfl"] = ConfigRecord({k: v for k, v in (kept | values).items() if v is not None})

    return attack


def pickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def header(shape):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(64)


def rename_array(content):
    record, name, value = first_array(content)
    del record[name]
    record["another"] = Array(value)


def many_arrays(content):
    record, _, value = first_array(content)
    for k in range(50):
        record[f"extra-{k}"] = Array(value)


ATTACKS = {
    "nan": change(lambda v: np.where(np.arange(v.size).reshape(v.shape) == 1, np.nan, v).astype(v.dtype)),
    "inf": change(lambda v: v / np.zeros((), v.dtype)),
    "minus inf": change(lambda v: np.full_like(v, -np.inf)),
    "1e30": change(lambda v: np.full_like(v, 1e30)),
    "largest float": change(lambda v: np.full_like(v, np.finfo(v.dtype).max)),
    "1e6 times": change(lambda v: v * v.dtype.type(1e6)),
    "float64 above float32": change(lambda v: np.full(v.shape, 1e300)),
    "shape": change(lambda v: v.reshape(-1)[:-1]),
    "more values": change(lambda v: np.concatenate([v.reshape(-1), v.reshape(-1)])),
    "one more dimension": change(lambda v: v[None]),
    "no values": change(lambda v: np.empty((0,), v.dtype)),
    "scalar": change(lambda v: v.dtype.type(1.0)),
    "integers": change(lambda v: v.astype(np.int64)),
    "booleans": change(lambda v: v > 0),
    "complex": change(lambda v: v.astype(np.complex64)),
    "text": change(lambda v: np.array(["x"] * 3)),
    "dates": change(lambda v: np.array([0, 1], dtype="datetime64[s]")),
    "structured": change(lambda v: np.zeros(3, dtype=[("a", "f4"), ("b", "i8")])),
    "garbage": raw(),
    "no bytes": raw(data=b""),
    "pickle": raw(data=pickled()),
    "pickle labelled as an object": raw(dtype="object", data=pickled()),
    "unknown type": raw(dtype="nonsense"),
    "unknown serialization": raw(stype="pickle", data=pickled()),
    "announces 1e12 values": raw(data=header((10**12,))),
    "negative shape": raw(data=header((-1,))),
    "wrong label": raw(dtype="bfloat16", data=header((3,))),
    "another name": rename_array,
    "many arrays": many_arrays,
    "no arrays": drop("array"),
    "empty arrays": lambda content: record_of(content).clear(),
    "second record": put(more=ArrayRecord({"w": Array(np.ones(3, np.float32))})),
    "no metrics": drop("metric"),
    "samples are a list": metric(num_examples=[1, 2]),
    "no samples": metric(num_examples=0),
    "negative samples": metric(num_examples=-5),
    "samples are nan": metric(num_examples=float("nan")),
    "infinite samples": metric(num_examples=float("inf")),
    "1e18 samples": metric(num_examples=10**18),
    "huge integer": metric(num_examples=2**63 - 1, loss=2**63 - 1),
    "steps are a list": metric(steps=[3.0]),
    "no steps": metric(steps=0),
    "loss is a list": metric(train_loss=[1.0, 2.0]),
    "loss is nan": metric(train_loss=float("nan")),
    "other metrics": metric(accuracy=1.0, other=2.0),
    "a thousand metrics": metric(**{f"m{k}": 1.0 for k in range(1200)}),
    "control characters in a metric": lambda content: content.metric_records[next(iter(content.metric_records))].__setitem__(
        "a\x1b[2J", 1.0
    ),
    "no control record": drop("config"),
    "control record of other types": control(ticket=3, committed=[1, 2], **{"client-id": 7}),
    "no committed": control(committed=None),
    "very long ticket": control(ticket="x" * 100_000),
    "claims to have lost its correction": control(lost=1),
    "lost is a text": control(lost="yes"),
    "claims another id": control(**{"client-id": "1"}),
    "id with control characters": control(**{"client-id": "\x1b]0;x\x07"}),
    "id is a superscript": control(**{"client-id": "²"}),
    "empty reply": lambda content: content.clear(),
}

# Answers that are valid: the client is aggregated, with other metrics.
HARMLESS = {
    "loss is nan",
    "second record",
    "other metrics",
    "loss is a list",
    "no metrics",
    "no control record",
    "lost is a text",
    "claims another id",
} | {key for key in ATTACKS if key.startswith(("id ", "control record", "no committed", "very long ticket", "steps", "no steps"))}
