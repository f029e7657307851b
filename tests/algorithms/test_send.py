"""Vectors that clients send besides g: an algorithm's task asks for them by name, and `aggregate` gets them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from tests.conftest import end_on
from tests.engines.engines import DEVICES, MODELS, assert_same, problem, request_of

BOTH = ("first_gradient", "last_gradient")


@dataclass
class Kept(mf.State):
    last: Tensor  # [d] mean of the last gradients


class LastGradient(mf.Algorithm):
    """Steps along the mean of the last gradients, with a shift and a proximal term that they must not contain."""

    uploads = 2

    def init(self, w, num_clients):
        return Kept(w, torch.zeros_like(w))

    def instructions(self, state, active):
        return mf.Instructions(shift=0.1 * state.last, mu=0.3, send=("last_gradient",))

    def aggregate(self, state, active, g, step):
        state.last = step.mean(step.sent["last_gradient"])
        state.w = state.w - step.eta * (state.last + step.mean(g))


def naive(x, y, split, rounds, steps, lr, decay):
    """Least squares in float64, with full batches."""
    w, last = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for _ in range(rounds):
        sums, lasts = [], []
        for part in split:
            v, g = w.copy(), np.zeros_like(w)
            for _ in range(steps):
                gradient = x[part].T @ (x[part] @ v - y[part]) / len(part) + decay * v
                h = gradient + 0.1 * last + 0.3 * (v - w)
                v, g = v - lr * h, g + h
            sums.append(g)
            lasts.append(gradient)
        last = np.mean(lasts, axis=0)
        w = w - lr * (last + np.mean(sums, axis=0))
    return w


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_last_gradient_equals_the_naive_loop(quadratic, decay):
    local = mf.LocalSGD(steps=3, batch_size=None, lr=0.05, weight_decay=decay)
    history = mf.simulate(**quadratic, algorithm=LastGradient(), rounds=4, local=local)
    data = quadratic["data"]
    wanted = naive(data.x_train.numpy(), data.y_train.numpy()[:, 0], quadratic["split"], 4, 3, 0.05, decay)
    np.testing.assert_allclose(history.params.numpy(), wanted, rtol=1e-10, atol=1e-12)
    sent = 2 * history.params.numel() * history.params.element_size() * len(quadratic["split"])
    assert [row["bytes_up"] for row in history.rows] == [sent * (t + 1) for t in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
def test_stacked_engines_send_what_plain_sends(device, kind):
    model, clients = problem(MODELS["mlp"](), device)
    local = mf.LocalSGD(epochs=2, batch_size=8, momentum=0.5, clip_norm=0.4, weight_decay=0.1)
    w = torch.nn.utils.parameters_to_vector(model.parameters()).detach().to(device)
    requests = [
        request_of(
            clients, local, 3, 5, w, {}, np.arange(4), mf.Instructions(0.01 * torch.ones(4, len(w)).to(w), 0.1, send=BOTH), 0.05, 0.05
        ),
        request_of(clients, local, 1, 6, 1.1 * w, {}, np.array([0, 1]), mf.Instructions(), 0.02, 0.05),
    ]
    loss = as_loss("cross-entropy")
    plain, ours = (engine.train(requests) for engine in (PlainEngine(model, clients, loss), kind(model, clients, loss, lanes=2)))
    assert_same(ours, plain)
    assert plain[1].sent == ours[1].sent == {}
    for name in BOTH:
        torch.testing.assert_close(ours[0].sent[name], plain[0].sent[name], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain[0].sent["first_gradient"][0], plain[0].sent["last_gradient"][0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["workers", "batched"])
def test_runs_agree(digits, engine):
    given = {**digits, "algorithm": LastGradient(), "availability": "static:0.3", "rounds": 3, "local": mf.LocalSGD(steps=3, lr=0.05)}
    torch.testing.assert_close(end_on(engine, **given), end_on("plain", **given), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_native_leaves_it_to_plain(digits):
    notices = []
    given = {**digits, "algorithm": LastGradient(), "rounds": 1, "local": mf.LocalSGD(steps=1)}
    mf.simulate(**given, engine="native", notice=notices.append)
    assert "send last_gradient" in notices[0]
    assert notices[0].startswith("engine plain")


@pytest.mark.parametrize(
    ("send", "uploads", "words"),
    [
        (("last_gradient",), 1, "uploads must be at least 2"),
        (("hessian",), 2, "cannot send 'hessian'"),
        ("last_gradient", 2, "tuple of different names"),
        (("last_gradient", "last_gradient"), 3, "different"),
    ],
)
def test_wrong_requests_are_refused(quadratic, send, uploads, words):
    class Wrong(mf.FedAvg):
        def instructions(self, state, active):
            return mf.Instructions(send=send)

    Wrong.uploads = uploads
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**quadratic, algorithm=Wrong(), rounds=1)


def test_the_names_stay_the_same(quadratic):
    class Changing(mf.FedAvg):
        uploads = 2

        def aggregate(self, state, active, g, step):
            state.w = state.w - 10.0

        def instructions(self, state, active):
            return mf.Instructions(send=("last_gradient",) if float(state.w[0]) < -1 else ())

    with pytest.raises(mf.UsageError, match="the same in every round"):
        mf.simulate(**quadratic, algorithm=Changing(), rounds=3)
