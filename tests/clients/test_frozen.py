"""Frozen parameters are shared and never sent; tied weights count once; half precision keeps float32 state."""

import copy
import gc
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import Workspace, flatten
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from tests.conftest import end_on
from tests.engines.engines import DEVICES, assert_same, problem, requests_of

CPU = torch.device("cpu")


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as in LoRA, and a head."""

    def __init__(self, frozen=True, rank=3):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(64, 16)
        self.a, self.b = nn.Parameter(torch.randn(rank, 64) / 8), nn.Parameter(torch.randn(16, rank) / 8)
        self.head = nn.Linear(16, 10)
        if frozen:
            self.base.requires_grad_(False)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.tanh(self.base(x) + x @ self.a.T @ self.b.T))


class Tied(nn.Module):
    """Its first and last layer share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 10), nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.middle(torch.tanh(self.last(torch.tanh(self.first(x.flatten(1))))))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"optimizer": "adamw", "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("algorithm", ["mimic", "fedavg"])
def test_frozen_equals_trained_at_rate_zero(digits, options, algorithm):
    given = {**digits, "algorithm": algorithm, "availability": "static:0.3", "rounds": 3}
    local = mf.Local(steps=4, lr=0.02, **options)
    frozen = mf.simulate(**{**given, "model": Adapted().double()}, local=local)
    still = mf.Local(steps=4, lr=0.02, lr_multipliers={"base.*": 0.0}, **options)
    whole = mf.simulate(**{**given, "model": Adapted(frozen=False).double()}, local=still)
    model = whole.model()
    for name, p in Adapted().double().named_parameters():
        if not p.requires_grad:
            assert torch.equal(model.get_parameter(name), p)
        else:
            torch.testing.assert_close(frozen.model().get_parameter(name), model.get_parameter(name), rtol=1e-9, atol=1e-11)
    assert frozen.params.numel() == whole.params.numel() - 64 * 16 - 16
    assert frozen.rows[0]["bytes_up"] < whole.rows[0]["bytes_up"]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
@pytest.mark.parametrize("model", [Adapted, Tied])
def test_stacked_engines_equal_plain(device, kind, model):
    model, clients = problem(model(), device)
    requests, loss = requests_of(model, clients, mf.Local(epochs=1, batch_size=8, optimizer="adam")), as_loss("cross-entropy")
    plain = PlainEngine(model, clients, loss).train(requests)
    assert plain[0].g.shape[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert_same(kind(model, clients, loss, lanes=3).train(requests), plain, rtol=1e-7)


@pytest.mark.slow
def test_all_copies_share_frozen_parameters():
    model, clients = problem(Adapted())
    loss, weight = as_loss("cross-entropy"), model.base.weight
    before = copy.deepcopy(model.state_dict())
    requests = requests_of(model, clients)[:1]
    engines = [kind(model, clients, loss, lanes=3) for kind in (BatchedEngine, StreamsEngine)]
    for engine in [*engines, PlainEngine(model, clients, loss)]:
        engine.train(requests)
    modules = [engines[0].stack.module, *[clone.module for clone in engines[1].clones], Workspace(model, CPU).module]
    assert len(modules) == 5
    assert all(module.base.weight is weight for module in modules)
    assert all(module.head.weight is not model.head.weight for module in modules)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["plain", "batched:16", "streams:8"])
def test_one_copy_of_the_base_on_the_gpu(engine):
    """With more frozen layers, the memory of a run with lanes grows by one copy of them. What cuBLAS reserves per stream cancels out."""
    width, x, y = 2048, torch.randn(64, 2048), torch.arange(64) % 10

    class Wide(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.base = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).requires_grad_(False)
            self.a, self.head = nn.Parameter(torch.randn(4, width) / 45), nn.Linear(width, 10)

        def forward(self, x):
            return self.head(self.base(x) + x @ self.a.T @ self.a)

    def peak(layers):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        local, split = mf.LocalSGD(steps=2, batch_size=2), np.array_split(np.arange(64), 16)
        mf.simulate(Wide(layers), mf.Data(x, y, x, y), split, rounds=2, local=local, engine=engine, device="cuda")
        return torch.cuda.max_memory_allocated() - start

    peak(2)  # libraries reserve their memory at their first use
    assert peak(10) - peak(2) < 1.5 * 8 * 4 * width * (width + 1)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_equals_a_loop_with_float32_state(kind):
    """The model computes in half precision; parameters, steps and sums are kept in float32."""
    torch.manual_seed(1)
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(kind)
    local = mf.Local(steps=5, batch_size=None, lr=1e-3, optimizer="adam")
    history = mf.simulate(model, mf.Data(x, y, x, y), [range(24)], algorithm="fedavg", rounds=1, local=local)
    master = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam([p.requires_grad_() for p in master], lr=1e-3)
    for _ in range(5):
        for p, w in zip(model.parameters(), master, strict=True):
            p.data.copy_(w)
        model.zero_grad()
        F.cross_entropy(model(x.to(kind)).float(), y).backward()
        for p, w in zip(model.parameters(), master, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
    assert history.params.dtype == torch.float32
    torch.testing.assert_close(history.params, torch.cat([w.detach().reshape(-1) for w in master]), rtol=1e-5, atol=1e-6)
    moved = (history.params - flatten(model)).abs()  # the model is at the rounded end
    assert float(moved.max()) < 0.01


class WithLogits(nn.Module):
    """Returns an object with `logits`, as models of `transformers` do."""

    def __init__(self, inner, as_dict):
        super().__init__()
        self.inner, self.as_dict = inner, as_dict

    def forward(self, x):
        logits = self.inner(x)
        return {"logits": logits} if self.as_dict else types.SimpleNamespace(logits=logits)


@pytest.mark.parametrize("as_dict", [True, False])
def test_losses_of_half_precision_logits_are_computed_in_float32(as_dict):
    torch.manual_seed(1)
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    inner = nn.Linear(6, 3).bfloat16()
    local = mf.LocalSGD(steps=3, batch_size=None, lr=0.5)
    plain, ours = (
        mf.simulate(model, mf.Data(x, y, x, y), [range(24)], rounds=2, local=local) for model in (inner, WithLogits(inner, as_dict))
    )
    assert torch.equal(ours.params, plain.params)
    assert ours.rows[-1]["test_loss"] == plain.rows[-1]["test_loss"]


def test_half_precision_base_with_float32_adapters(digits):
    model = Adapted()
    model.base.to(torch.bfloat16)
    model.base.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(torch.bfloat16),))
    model.base.register_forward_hook(lambda layer, inputs, output: output.float())
    history = mf.simulate(**{**digits, "model": model}, rounds=2, local=mf.LocalSGD(steps=2, lr=0.05))
    assert history.params.dtype == torch.float32
    assert history.model().base.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_half_precision_on_other_engines(digits):
    given = {**digits, "model": mf.models.MLP(64, 8, 10).bfloat16(), "rounds": 2, "local": mf.LocalSGD(steps=2, lr=0.05)}
    notices = []
    found = mf.simulate(**given, engine="batched", notice=notices.append)
    assert "parameters are bfloat16" in notices[0]
    plain = end_on("plain", **given)
    assert torch.equal(found.params, plain)
    torch.testing.assert_close(end_on("workers", **given), plain, rtol=1e-3, atol=1e-3)


def test_mixed_single_and_double_precision_is_refused(digits):
    model = Adapted()
    model.head.double()
    with pytest.raises(mf.UsageError, match="mixes parameter types"):
        mf.simulate(**{**digits, "model": model}, rounds=1)
