"""Wide convolutions: the layout of their lanes, the norm that keeps it, and on a GPU the kernels on tensor cores."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import flatten
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched import convolution
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.batched.normalization import group_norm
from mimicfl.engines.stacked.batched.pooling import max_pool
from mimicfl.engines.stacked.batched.rewrite import Stackable
from mimicfl.engines.stacked.lanes import SharedStarts
from mimicfl.engines.stacked.layout import Layout
from mimicfl.engines.torch_settings import exact
from mimicfl.experiments.execute import run_plan
from tests.engines.engines import needs_gpu, problem, requests_of

LOCALS = {
    "sgd": mf.LocalSGD(epochs=2, batch_size=8),
    "momentum": mf.LocalSGD(epochs=2, batch_size=8, momentum=0.9),
    "clipped": mf.LocalSGD(epochs=2, batch_size=8, clip_norm=0.1),
    "adamw": mf.Local(optimizer="adamw", epochs=2, batch_size=8, lr=0.01),
}


def residual(width: int = 16, norm: str = "group") -> nn.Module:
    return mf.models.ResNet(1, 10, width, norm)


def distance(ours, plain) -> float:
    return max(float((mine.g - true.g).norm() / true.g.norm()) for mine, true in zip(ours, plain, strict=True))


class TestLayout:
    def test_vectors_come_back_and_windows_are_the_parameters(self):
        model = residual()
        layout, w = Layout(model, torch.device("cpu")), flatten(model)
        rows = layout.arrange(torch.stack([w, -w]))
        assert torch.equal(layout.restore(rows), torch.stack([w, -w]))
        for window, p in zip(layout.windows(rows), model.parameters(), strict=True):
            assert torch.equal(window, torch.stack([p, -p]))

    def test_pieces_of_gradients_are_in_the_order_of_the_lane(self):
        model = residual()
        layout, w = Layout(model, torch.device("cpu")), flatten(model)
        gradients = [torch.stack([p.detach(), 2 * p.detach()]) for p in model.parameters()]
        assert len(layout.pieces(gradients)) > 2
        assert torch.equal(torch.cat(layout.pieces(gradients), dim=1), layout.arrange(torch.stack([w, 2 * w])))


def test_group_norm_equals_pytorch_and_keeps_channels_last():
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 4, 6, 5, 5).double(), torch.randn(3, 6).double(), torch.randn(3, 6).double()
    x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    def gradients(norm):
        return vmap(grad(lambda *given: norm(given[0], 2, *given[1:], 1e-3).sin().sum(), argnums=(0, 1, 2)))(x, w, b)

    for ours, true in zip(gradients(group_norm), gradients(F.group_norm), strict=True):
        torch.testing.assert_close(ours, true)
    assert vmap(lambda x: group_norm(x, 2))(x).stride() == x.stride()


@pytest.mark.parametrize(("shape", "kernel"), [((3, 2, 5, 8, 8), (2, 2)), ((3, 2, 5, 9, 7), (2, 3)), ((2, 1, 4, 6, 6), (3, 3))])
def test_max_pool_equals_pytorch_and_keeps_channels_last(shape, kernel):
    torch.manual_seed(0)
    x = torch.randint(-3, 4, shape).double().permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # with equal entries in a window
    x[0, 0, 0, 0, 0] = torch.nan

    def gradients(pool):
        return vmap(grad(lambda x: (pool(x, kernel).nan_to_num(7.0).sin() * (1 + torch.arange(pool(x, kernel).shape[-1]))).sum()))(x)

    ours = gradients(max_pool)
    torch.testing.assert_close(ours, gradients(F.max_pool2d), rtol=0, atol=0, equal_nan=True)
    assert ours.stride() == x.stride()
    torch.testing.assert_close(vmap(lambda x: max_pool(x, kernel))(x), vmap(lambda x: F.max_pool2d(x, kernel))(x), equal_nan=True)


def test_max_pools_that_overlap_or_cut_stay_pytorchs():
    x = torch.randn(2, 3, 7, 7)
    with Stackable(torch.zeros(()), "tf32", channels_last=True):
        for how in (
            {"kernel_size": 3, "stride": 2},
            {"kernel_size": 2, "ceil_mode": True},
            {"kernel_size": 2, "padding": 1},
            {"kernel_size": 2},
        ):
            ours = F.max_pool2d(x, **how)
            with torch._C.DisableTorchFunction():
                assert torch.equal(ours, F.max_pool2d(x, **how))


def test_lanes_with_the_same_start_share_a_row():
    starts = SharedStarts(3)
    rows, fresh = starts.place(np.array([0, 1, 2]), np.array([5, 5, 8]))
    assert rows.tolist() == [0, 0, 1]
    assert fresh == [(5, 0), (8, 1)]
    rows, fresh = starts.place(np.array([2, 0]), np.array([9, 7]))  # lane 1 still trains request 5; 8 is finished
    assert rows.tolist() == [1, 2]
    assert fresh == [(9, 1), (7, 2)]
    rows, fresh = starts.place(np.array([1]), np.array([9]))
    assert rows.tolist() == [1]
    assert fresh == []


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
def test_lanes_in_a_layout_equal_plain(local, monkeypatch):
    """On a CPU the layout gains nothing, but its updates must be the same."""
    for name in ("is_wide", "by_pieces"):
        monkeypatch.setattr(f"mimicfl.engines.stacked.batched.engine.{name}", lambda *given: True)
    torch.manual_seed(0)
    model, clients = problem(residual(4), "cpu", torch.float64)
    requests = requests_of(model, clients, local)
    loss = as_loss("cross-entropy")
    ours = BatchedEngine(model, clients, loss, lanes=3).train(requests)
    assert distance(ours, PlainEngine(model, clients, loss).train(requests)) < 1e-7


def test_outputs_of_models_in_a_layout(monkeypatch):
    """Lanes have an order of parameters of their own; models that are evaluated come in the order of the module."""
    monkeypatch.setattr("mimicfl.engines.stacked.batched.engine.by_pieces", lambda *given: True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 16))
    model, clients = problem(net, "cpu", torch.float64)
    engine, plain = BatchedEngine(model, clients, as_loss("cross-entropy")), PlainEngine(model, clients, as_loss("cross-entropy"))
    assert engine.layout.to_lane.tolist() != sorted(engine.layout.to_lane.tolist())
    w = torch.randn(2, plain.work.w.numel(), dtype=torch.float64)
    found = engine.stack.outputs(w, {}, clients.x[:6])
    for row in range(2):
        plain.work.load(w[row], {})
        torch.testing.assert_close(found[row], plain.work.module(clients.inputs(slice(6))).detach())


SHAPES = [
    # clients, batch, channels in and out, height, width, kernel, stride, padding, dilation
    (2, 3, 16, 32, 8, 8, 3, 1, 1, 1),
    (2, 2, 16, 16, 9, 7, 3, 2, 1, 1),
    (1, 2, 32, 16, 8, 8, 1, 2, 0, 1),
    (3, 2, 20, 24, 7, 7, 3, 1, 0, 2),
    (2, 5, 64, 100, 6, 6, 5, 3, 2, 1),
    (1, 1, 128, 17, 5, 9, 2, 1, 3, 1),
]


@pytest.mark.gpu
@needs_gpu
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def full_precision(self):
        """As in a run: otherwise plain convolutions use TF32."""
        with exact():
            yield

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        ("dtype", "precision", "close"), [("float32", "tf32x3", 1e-6), ("float32", "tf32", 2e-3), ("bfloat16", "tf32", 4e-3)]
    )
    def test_convolutions_equal_pytorch_in_float64(self, shape, dtype, precision, close):
        m, b, c, o, h, v, k, s, p, d = shape
        torch.manual_seed(0)
        x, w = (torch.randn(*size, device="cuda").to(getattr(torch, dtype)) for size in ((m, b, c, h, v), (m, o, c, k, k)))
        how = ([s, s], [p, p], [d, d])
        y = torch.stack([F.conv2d(x[i].double(), w[i].double(), None, s, p, d) for i in range(m)])
        dy = torch.randn_like(y).to(x.dtype)
        dx = torch.stack([conv2d_input((b, c, h, v), w[i].double(), dy[i].double(), s, p, d) for i in range(m)])
        dw = torch.stack([conv2d_weight(x[i].double(), (o, c, k, k), dy[i].double(), s, p, d) for i in range(m)])
        ours = (
            convolution.conv(x, w, *how, precision),
            convolution.conv_input(dy, w, [h, v], *how, precision),
            convolution.conv_weight(x, dy, [k, k], *how, precision),
        )
        for mine, true in zip(ours, (y, dx, dw), strict=True):
            assert float((mine.double() - true).norm() / true.norm()) < close

    @pytest.mark.parametrize("compiled", [False, True], ids=["traced", "compiled"])
    @pytest.mark.parametrize("norm", ["group", "batch"])
    @pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-3), ("bf16", 0.2)])
    def test_a_residual_network_equals_plain(self, norm, precision, close, compiled):
        torch.manual_seed(0)
        model, clients = problem(residual(norm=norm), "cuda", torch.float32, sizes=(30, 7, 43, 12))
        requests = requests_of(model, clients, mf.LocalSGD(steps=1, batch_size=8))  # more steps amplify rounding errors
        loss = as_loss("cross-entropy")
        ours = BatchedEngine(model, clients, loss, precision, lanes=3, compiled=compiled).train(requests)
        assert distance(ours, PlainEngine(model, clients, loss).train(requests)) < close

    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    def test_every_optimizer_equals_plain(self, local):
        torch.manual_seed(0)
        model, clients = problem(residual(), "cuda", torch.float32)
        requests = requests_of(model, clients, local)
        loss = as_loss("cross-entropy")
        assert (
            distance(BatchedEngine(model, clients, loss, lanes=3).train(requests), PlainEngine(model, clients, loss).train(requests)) < 1e-2
        )

    def test_with_fixed_lanes_other_runs_change_no_bit(self):
        plan = {
            a: mf.Experiment(model="resnet:16", rounds=2, epochs=1, algorithm=a, availability="time-varying:0.2", device="cuda",
                             engine="batched:5:compiled", precision="bf16")
            for a in ("mimic", "scaffold", "fedprox:mu=0.1")
        }  # fmt: skip
        together = run_plan(plan)
        assert torch.equal(together["mimic"].params, run_plan({"mimic": plan["mimic"]})["mimic"].params)
