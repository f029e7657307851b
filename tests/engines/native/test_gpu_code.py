"""The native engine's GPU code equals the plain engine: computed by one CPU thread, item by item, and on a GPU where there is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.data.clients import Clients
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.gpu import generate as generate_module
from mimicfl.engines.native.gpu.engine import NativeGpuEngine
from mimicfl.engines.native.gpu.plan import ConvShape, plan_conv, plan_linear
from mimicfl.engines.native.gpu.program import DeviceProgram
from mimicfl.engines.plain import PlainEngine
from tests.conftest import run_on
from tests.engines.engines import DEVICES, MODELS, needs_gpu, requests_of
from tests.engines.native.problems import needs_compiler

pytestmark = needs_compiler
SIZES = (30, 7, 43, 1)


def clients_of(shape, device="cpu", uint8=True, loss="cross-entropy", outputs=10):
    n = sum(SIZES)
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8) if uint8 else torch.randn(n, *shape)
    y = torch.arange(n) % outputs if loss == "cross-entropy" else torch.randn(n, outputs)
    split = np.split(np.random.default_rng(0).permutation(n), np.cumsum(SIZES)[:-1])
    return Clients(mf.Data(x, y, x[:20], y[:20]), split, torch.device(device), torch.float32)


def assert_equals_plain(model, clients, local, loss="cross-entropy", terms=True, close=1e-5):
    """Compare the updates of two requests, one of them with a shift and a proximal term, and the test outputs."""
    model = model.to(clients.device)
    requests = requests_of(model, clients, local, terms)
    engine = NativeGpuEngine(model, clients, as_loss(loss))
    plain = PlainEngine(model, clients, as_loss(loss))
    for ours, true in zip(engine.train(requests), plain.train(requests), strict=True):
        assert float(((ours.g - true.g).norm(dim=1) / true.g.norm(dim=1)).max()) < close
        torch.testing.assert_close(ours.loss, true.loss, rtol=1e-5, atol=1e-5)
        assert ours.K.tolist() == true.K.tolist()
    return engine, requests


MORE = {
    "mlp": (MODELS["mlp"], (1, 8, 8)),
    "no bias": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 10, bias=False)), (9,)),
    "logistic": (lambda: mf.models.Logistic(64, 10), (1, 8, 8)),
    "lenet": (lambda: mf.models.LeNet(1, 16), (1, 16, 16)),
    "channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, stride=(2, 1)), nn.ReLU(), nn.Conv2d(5, 2, 2), nn.Flatten(), nn.Linear(20, 10)),
        (3, 8, 8),
    ),
    "padding": (
        lambda: nn.Sequential(
            *[nn.Conv2d(1, 3, 5, padding=2), nn.ReLU(), nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(3), nn.ReLU()],
            *[nn.Conv2d(6, 4, 2), nn.Flatten(), nn.Linear(16, 10)],
        ),
        (1, 9, 9),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [5, 16, 40])  # with 8 and 16 lanes, and in several parts
@pytest.mark.parametrize("name", ["mlp", "padding"])
def test_every_batch_size_equals_plain(name, batch, device):
    make, shape = MORE[name]
    assert_equals_plain(make(), clients_of(shape, device), mf.LocalSGD(epochs=2, batch_size=batch))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in MORE if name not in ("mlp", "padding")])
def test_networks_equal_plain(name, device):
    make, shape = MORE[name]
    assert_equals_plain(make(), clients_of(shape, device, uint8=name != "no bias"), mf.LocalSGD(epochs=1, batch_size=16, momentum=0.9))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [8, 40])
def test_gradients_that_are_sent_equal_plain(device, batch):
    clients = clients_of((1, 8, 8), device)
    model = MODELS["mlp"]().to(device)
    local = mf.LocalSGD(epochs=2, batch_size=batch, weight_decay=0.1)
    first, second = requests_of(model, clients, local)
    asked = [replace(first, instructions=replace(first.instructions, send=("last_gradient", "first_gradient"))), second]
    ours = NativeGpuEngine(model, clients, as_loss("cross-entropy")).train(asked)
    plain = PlainEngine(model, clients, as_loss("cross-entropy")).train(asked)
    assert ours[1].sent == {}
    for name in ("first_gradient", "last_gradient"):
        torch.testing.assert_close(ours[0].sent[name], plain[0].sent[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_mse_equals_plain(device):
    clients = clients_of((6,), device, uint8=False, loss="mse", outputs=3)
    assert_equals_plain(mf.models.MLP(6, 11, 3), clients, mf.LocalSGD(epochs=2, batch_size=16), loss="mse")


@st.composite
def networks(draw):
    """A chain of convolutions, pooling and activations, then linear layers, with an input shape that fits."""
    channels, height, width = draw(st.integers(1, 3)), draw(st.integers(6, 13)), draw(st.integers(6, 13))
    shape, layers = (channels, height, width), []
    for _ in range(draw(st.integers(0, 2))):
        kernel = draw(st.integers(1, min(4, height, width))), draw(st.integers(1, min(4, height, width)))
        padding, out = draw(st.integers(0, 2)), draw(st.integers(1, 9))
        stride = draw(st.integers(1, 2)) if not layers else 1
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding, bias=draw(st.booleans())))
        channels, height, width = out, (height + 2 * padding - kernel[0]) // stride + 1, (width + 2 * padding - kernel[1]) // stride + 1
        if min(height, width) >= 3 and draw(st.booleans()):
            pool = draw(st.integers(2, 3))
            layers.append(nn.MaxPool2d(pool))
            height, width = height // pool, width // pool
        layers += draw(st.sampled_from([[], [nn.ReLU()], [nn.Tanh()]]))
    hidden = draw(st.integers(1, 40))
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers), shape


@pytest.mark.slow
@given(networks(), st.integers(1, 20), st.integers(0, 2**31))
@settings(max_examples=6)
def test_generated_networks_equal_plain(found, batch, seed):
    torch.manual_seed(seed)
    model, shape = found
    assert_equals_plain(model, clients_of(shape), mf.LocalSGD(steps=2, batch_size=batch))


@pytest.mark.gpu
@needs_gpu
@given(networks(), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=8)
def test_generated_networks_equal_plain_on_a_gpu(found, batch, seed):
    torch.manual_seed(seed)
    model, shape = found
    assert_equals_plain(model, clients_of(shape, "cuda"), mf.LocalSGD(steps=2, batch_size=batch), close=2e-3)  # a pooling may pick another


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_other_clients_change_no_bit(device):
    clients = clients_of((1, 8, 8), device)
    engine, requests = assert_equals_plain(MODELS["mlp"](), clients, mf.LocalSGD(epochs=2, batch_size=8))
    together = engine.train(requests)
    for request, beside in zip(requests, together, strict=True):
        alone = engine.train([request])[0]
        assert torch.equal(alone.g, beside.g)
        assert torch.equal(alone.loss, beside.loss)


@pytest.mark.slow
def test_clients_with_equal_batches_share_them(monkeypatch):
    clients = clients_of((1, 8, 8))
    engine, requests = assert_equals_plain(MODELS["mlp"](), clients, mf.LocalSGD(epochs=2, batch_size=8))
    trained = []
    real = DeviceProgram.train
    monkeypatch.setattr(DeviceProgram, "train", lambda program, batches: trained.append(batches) or real(program, batches))
    engine.train([requests[1], requests[1]])
    assert len(trained[0].rows) == 2 * sum(SIZES[client] for client in requests[1].active)  # two epochs
    assert trained[0].begin.tolist() == 2 * trained[0].begin[:2].tolist()


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ([nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3, stride=2), nn.Flatten(), nn.Linear(8, 10)], "stride"),
        ([nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 10)], "kernel"),
        ([nn.Conv2d(1, 2, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 10)], "avg_pool"),
        ([nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(8, 10)], "max_pool"),
        ([nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)], "dropout"),
    ],
)
def test_what_is_not_supported_is_named(layers, word):
    with pytest.raises(Unsupported, match=word):
        NativeGpuEngine(nn.Sequential(*layers), clients_of((1, 8, 8)), as_loss("cross-entropy"))


@pytest.mark.slow
def test_gradient_clipping_is_refused():
    clients = clients_of((1, 8, 8))
    engine = NativeGpuEngine(MODELS["mlp"](), clients, as_loss("cross-entropy"))
    with pytest.raises(Unsupported, match="clip"):
        engine.train(requests_of(MODELS["mlp"](), clients, mf.LocalSGD(epochs=1, batch_size=8, clip_norm=1.0)))


@pytest.mark.slow
def test_activations_that_do_not_fit_are_stored_in_global_memory(monkeypatch):
    monkeypatch.setattr("mimicfl.engines.native.gpu.program.EMULATED", 24 * 1024)
    made = []
    real = generate_module.generate
    monkeypatch.setattr("mimicfl.engines.native.gpu.program.generate", lambda *given: made.append(real(*given)) or made[-1])
    make, shape = MORE["lenet"]
    assert_equals_plain(make(), clients_of(shape), mf.LocalSGD(epochs=1, batch_size=16))
    assert "FAR = 0," not in made[0].code


@given(st.data())
def test_plans_use_no_more_registers_than_there_are(data):
    """A plan leaves no thread without work of its own: channels, parts and tiles are at least one and at most all."""
    kernel = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    pool = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    above = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    below = tuple(a * p + k - 1 for a, p, k in zip(above, pool, kernel, strict=True))
    shape = ConvShape(data.draw(st.integers(1, 64)), data.draw(st.integers(1, 64)), kernel, (1, 1), pool, below, above)
    plan = plan_conv(shape, data.draw(st.sampled_from([8, 16, 32])), needs_input=True)
    assert 1 <= plan.forward <= shape.outputs
    assert 1 <= plan.weights <= shape.outputs
    assert 1 <= plan.inputs <= shape.channels
    assert 1 <= plan.split <= shape.tiles
    assert plan.tile[0] % pool[0] == 0
    assert plan.tile[1] % pool[1] == 0


@given(st.integers(1, 2000), st.integers(1, 2000), st.sampled_from([8, 16, 32]))
def test_parts_of_a_linear_layer_are_not_empty(inputs, outputs, lanes):
    plan = plan_linear(inputs, outputs, lanes, inputs % 4 == 0)
    assert 1 <= plan.split <= max(1, inputs // 16)
    assert 1 <= plan.split_input <= max(1, outputs // 8)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("algorithm", ["mimic", "scaffold", "fedprox:mu=0.1"])
def test_resumed_runs_are_bit_equal_on_a_gpu(tmp_path, algorithm, digits):
    given = {**digits, "algorithm": algorithm, "availability": "static:0.5", "rounds": 4, "device": "cuda", "engine": "native"}
    told = []
    whole = mf.simulate(**given, notice=told.append)
    assert told[0].startswith("engine native")  # no fallback

    def stop(row, total):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**given, out=tmp_path, checkpoint_every=1, progress=stop)
    resumed = mf.simulate(**{**given, "engine": "auto"}, out=tmp_path)
    assert torch.equal(whole.params, resumed.params)
    plain = run_on("plain", **{key: value for key, value in given.items() if key != "engine"})
    torch.testing.assert_close(whole.params, plain.params, rtol=1e-3, atol=1e-4)
