"""Compressed updates: equal to a plain loop, nothing lost in the long run, MimiC's corrections sum to zero, bytes counted."""

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.compression import BLOCK, Compression
from mimicfl.flower.wire import ArraySpec, Layout, Refused
from mimicfl.participation import Explicit
from tests.flower.problems import LOCAL, N, T, app, federate, flat, model_arrays, participation, problem, schedule

OPTIONS = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}
KINDS = ["8bit", "topk:0.3"]


def quantized(x, kind):
    """What arrives of x: written down from the definition, number by number."""
    if kind == "8bit":
        out = []
        for start in range(0, len(x), BLOCK):
            part = x[start : start + BLOCK]
            scale = np.float32(max(abs(float(v)) for v in part) / 127)
            out += [float(np.rint(np.float32(v) / scale)) * float(scale) if scale else 0.0 for v in part]
        return np.array(out, dtype=np.float32)
    largest = sorted(range(len(x)), key=lambda k: -abs(float(x[k])))[: math.ceil(float(kind.removeprefix("topk:")) * len(x))]
    return np.array([x[k] if k in largest else 0.0 for k in range(len(x))], dtype=np.float32)


def update_of(client, layout, w, t):
    """The update of a client without compression."""
    lr = 0.05 * 0.8**t
    config = ConfigRecord({"server-round": t + 1, "seed": 0, "lr": lr})
    message = Message(RecordDict({"arrays": layout.write(torch.from_numpy(w), {}), "config": config}), 1, "train")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run_id=1, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})
    return app()(message, context).content["update"]["g"].numpy(), lr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_mimic_equals_a_plain_loop(kind, tmp_path):
    """Under dropouts, and with a reply in round 2 that is refused: its residual must not be used."""
    available, honest = schedule(), app(state=tmp_path)

    def client(node, message, context):
        reply = honest(message, context)
        trained = message.metadata.message_type == "train" and message.content["config"]["server-round"] == 3
        if trained and context.node_config["partition-id"] == refused:
            reply.content["metrics"]["num-examples"] = -1
        return reply

    refused = int(np.flatnonzero(available[2])[0])
    strategy = mff.MimiC(compress=kind, availability=Explicit(available), **OPTIONS)
    federate(strategy, T, client)
    assert str(refused) in strategy.rows[2]["failed"]
    arrays, layout = model_arrays(problem()[2])[0], strategy.form.layout
    w = flat(arrays).numpy()
    c, e = np.zeros((2, N, len(w)), dtype=np.float32)
    for t, active in enumerate(np.array(participation(strategy.rows), dtype=bool)):
        received = {}
        for i in np.flatnonzero(active):
            g, eta = update_of(int(i), layout, w, t)
            received[i] = quantized(g + e[i], kind)
            e[i] = g + e[i] - received[i]
        if received:
            v = np.mean([received[i] + c[i] for i in received], axis=0)
            for i, q in received.items():
                c[i] = v - q
            w = w - np.float32(eta) * v
    np.testing.assert_allclose(strategy.form.w.numpy(), w, atol=1e-5)
    rows = strategy.form.server.state.c[:]
    np.testing.assert_allclose(rows.numpy(), c, atol=1e-3)
    torch.testing.assert_close(rows.sum(dim=0), torch.zeros(len(w)), atol=1e-4 * float(rows.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, "topk:0.001"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_feedback_telescopes(kind, dtype):
    """The sum of what arrived is the sum of the updates, up to the last residual."""
    compression, random = Compression.parse(kind), np.random.default_rng(0)
    e = np.zeros(3000, dtype=dtype)
    total, arrived = np.zeros(3000), np.zeros(3000)
    for _ in range(20):
        g = random.normal(size=3000).astype(dtype)
        arrays, e_new = compression.apply(g + e)
        received = np.empty(3000, dtype=dtype)
        compression.read({name: Array(value) for name, value in arrays.items()}, received)
        np.testing.assert_array_equal(e_new, (g + e) - received)
        total, arrived, e = total + g, arrived + received, e_new
    np.testing.assert_allclose(arrived + e, total, atol=1e-4)
    assert np.abs(e).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_vectors_are_counted_and_the_run_resumes_bit_equal(kind, tmp_path):
    client = {"client": app(state=tmp_path / "client")}
    for rounds in (2, 4):
        strategy = mff.MimiC(compress=kind, folder=tmp_path / "run", **OPTIONS)
        federate(strategy, rounds, **client)
    d = strategy.form.layout.size
    sent = d + 4 * math.ceil(d / BLOCK) if kind == "8bit" else 8 * math.ceil(0.3 * d)
    assert strategy.rows[-1]["bytes_up"] == 4 * N * sent
    assert strategy.rows[-1]["vectors_up"] == 4 * N
    whole = mff.MimiC(compress=kind, **OPTIONS)
    federate(whole, 4)  # with the residuals in Flower's memory of the run
    assert torch.equal(strategy.form.w, whole.form.w)
    with pytest.raises(UsageError, match="compress"):
        federate(mff.MimiC(folder=tmp_path / "run", **OPTIONS), 5, **client)


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        ("8bit", {"g.int8": np.ones(9, np.int8)}),
        ("8bit", {"g.int8": np.ones(8, np.int8), "g.scale": np.ones(1, np.float32)}),
        ("8bit", {"g.int8": np.ones(9, np.int16), "g.scale": np.ones(1, np.float32)}),
        ("topk:0.3", {"g.index": np.array([0, 1, 9], np.int32), "g.value": np.ones(3, np.float32)}),
        ("topk:0.3", {"g.index": np.array([-1, 1, 2], np.int32), "g.value": np.ones(3, np.float32)}),
        ("topk:0.3", {"g.index": np.array([1, 1, 2], np.int32), "g.value": np.ones(3, np.float32)}),
        ("topk:0.3", {"g.index": np.array([0.0, 1, 2]), "g.value": np.ones(3, np.float32)}),
        ("topk:0.3", {"g.index": np.array([0, 1, 2], np.int32)}),
    ],
)
def test_malformed_compressed_updates_are_refused(kind, arrays):
    with pytest.raises(Refused):
        Compression.parse(kind).read({name: Array(value) for name, value in arrays.items()}, np.empty(9, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "zip"}, "compress must be"),
        ({"compress": "topk:2"}, "share"),
        ({"compress": "topk:x"}, "compress must be"),
        ({"compress": "8bit", "form": mff.ClientForm()}, "form 'server'"),
    ],
)
def test_wrong_compression_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        mff.MimiC(**options)


def test_secure_rounds_refuse_models_that_no_message_can_hold():
    layout = Layout((ArraySpec("w", (300_000_000,), "float32"),), (), torch.float32)
    with pytest.raises(UsageError, match="2 GiB"):
        mff.SecureForm().begin(layout, ArrayRecord())
