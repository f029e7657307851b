"""Workers train for several rounds: as if every round had processes of its own, which start as copies of the parent."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.workers import WorkersEngine, crew
from mimicfl.engines.workers.memory import Block
from tests.engines.engines import MODELS, assert_same, problem, requests_of


def engines(model=None, loss="cross-entropy", workers=2):
    model, clients = problem(model or MODELS["mlp"]())
    loss = as_loss(loss)
    return WorkersEngine(model, clients, loss, workers=workers), PlainEngine(model, clients, loss), requests_of(model, clients)


def pids(engine):
    return [process.pid for process in engine.crew.processes] if engine.crew else []


def parts(request, *clients):
    """The request for some of its clients."""
    rows = np.isin(request.active, clients)
    given = request.instructions
    shift = given.shift[rows] if isinstance(given.shift, torch.Tensor) else given.shift
    chosen = replace(given, shift=shift)
    return replace(request, active=request.active[rows], share=request.share[rows], instructions=chosen)


def test_the_same_processes_train_round_after_round():
    engine, plain, (first, second) = engines()
    begun, last = [], None
    for t in range(6):
        asked = [replace(first, t=t, w=first.w * (1 + t / 10), eta_L=0.01 * (t + 1)), replace(second, t=t, seed=t)]
        ours, true = engine.train(asked), plain.train(asked)
        for found in (last, (ours, true)):  # the results of the last round are still in use while the next one trains
            if found:
                assert_same(*found)
        last, begun = (ours, true), begun or pids(engine)
    assert pids(engine) == begun
    assert len(begun) == 2


def test_rounds_of_any_size():
    """A larger round needs more memory than the crew has; then a new crew begins."""
    engine, plain, (first, second) = engines(workers=3)
    kept = []
    for asked in ([parts(first, 2)], [parts(first, 0, 1)], [first, second, replace(first, t=9)], [parts(second, 1)], [first, second]):
        kept.append((engine.train(asked), plain.train(asked)))
    for ours, true in kept:
        assert_same(ours, true)


def test_results_that_are_kept_are_not_overwritten():
    engine, _, (first, _) = engines()
    kept = [engine.train([replace(first, t=t)])[0] for t in range(8)]
    for t, updates in enumerate(kept):
        assert torch.equal(updates.g, engine.train([replace(first, t=t)])[0].g)


def test_vectors_and_numbers_as_shift():
    engine, plain, (first, _) = engines()
    vector = torch.linspace(-1, 1, first.w.numel(), dtype=first.w.dtype)
    for shift in (0.25, vector.expand(4, -1), torch.stack([k * vector for k in range(4)])):
        asked = [replace(first, instructions=mf.Instructions(shift, 0.1, send=("first_gradient", "last_gradient")))]
        ours, true = engine.train(asked), plain.train(asked)
        assert_same(ours, true)
        for name, sent in true[0].sent.items():
            torch.testing.assert_close(ours[0].sent[name], sent)


class Counting(nn.Module):
    """Its outputs shrink with every call."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x.flatten(1)) / self.calls


def test_a_model_that_changes_itself_starts_every_round_as_the_parent_has_it():
    engine, _, (_, second) = engines(Counting(), workers=2)
    asked = [parts(second, 1)]
    first, again = engine.train(asked)[0], engine.train(asked)[0]
    assert torch.equal(first.g, again.g)
    changed = pids(engine)
    third = engine.train(asked)[0]
    assert torch.equal(first.g, third.g)
    assert pids(engine) != changed


class Scaled(nn.Module):
    """Its outputs depend on a number of the class, as a schedule of a user may change it."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) * type(self).scale


SMOOTHING = {"is": 0.0}


def smoothed(output, target):
    return F.cross_entropy(output, target, label_smoothing=SMOOTHING["is"])


def test_workers_see_what_changes_between_rounds(monkeypatch):
    engine, plain, asked = engines(Scaled(), smoothed)
    for attribute, value in ((None, None), ("scale", 3.0), ("smoothing", 0.4), ("smoothing", 0.2)):
        if attribute == "scale":
            monkeypatch.setattr(Scaled, "scale", value)
        if attribute == "smoothing":
            monkeypatch.setitem(SMOOTHING, "is", value)
        assert_same(engine.train(asked), plain.train(asked))


class ScaledBySettings(Scaled):
    def forward(self, x):
        return self.layer(x.flatten(1)) * own_settings.times(own_settings.scale)  # noqa: F821


def test_workers_see_values_that_are_set_in_a_module(monkeypatch, tmp_path):
    (tmp_path / "own_settings.py").write_text("scale = 1.0\npower = 1.0\ndef times(x):\n    return x * power\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_settings")
    monkeypatch.setitem(sys.modules, "own_settings", module)  # removed afterwards
    monkeypatch.setitem(globals(), "own_settings", module)
    engine, plain, asked = engines(ScaledBySettings())
    for name in (None, "scale", "power"):
        if name:
            setattr(module, name, 3.0)
        assert_same(engine.train(asked), plain.train(asked))


def test_workers_see_samples_that_are_changed_in_place():
    engine, plain, asked = engines()
    before = engine.train(asked)
    engine.clients.y.copy_(engine.clients.y.flip(0))
    after = engine.train(asked)
    assert not torch.equal(before[0].g, after[0].g)
    assert_same(after, plain.train(asked))


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)

    def forward(self, x):
        return self.layer(x.flatten(1)) + self.frozen(x.flatten(1))


CHANGES = {
    "counted": lambda weight: weight.detach().mul_(3),
    "uncounted": lambda weight: weight.data.mul_(3),
    "one number": lambda weight: weight.data[3, 5].add_(1),
    "assigned": lambda weight: setattr(weight, "data", 3 * weight.data),
}


@pytest.mark.parametrize("how", CHANGES)
def test_workers_see_frozen_weights_that_change(how):
    engine, plain, asked = engines(PartlyFrozen())
    before = engine.train(asked)
    CHANGES[how](engine.model.frozen.weight)
    after = engine.train(asked)
    assert not torch.equal(before[0].g, after[0].g)
    assert_same(after, plain.train(asked))


def test_the_users_own_code_gets_new_workers_in_every_round():
    def loop(work):
        for x, y in work.batches:
            work.loss(work.model(x), y).backward()
            work.add_terms()
        return 0.0

    engine, _, (first, _) = engines()
    engine.train([replace(first, local=mf.Local(loop=loop, epochs=1, batch_size=8))])
    assert pids(engine) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_whole_runs_keep_their_workers_and_equal_plain(digits, monkeypatch):
    """Also with BatchNorm's buffers, SCAFFOLD's shifts, and a cohort that grows."""
    started = []
    real = crew.Crew._start
    monkeypatch.setattr(crew.Crew, "_start", lambda self: started.append(self) or real(self))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    given = {**digits, "model": model, "rounds": 8, "availability": "static:0.5", "local": mf.LocalSGD(epochs=1, batch_size=12)}
    torch.set_num_threads(2)
    found = {name: mf.simulate(**given, algorithm="scaffold", engine=name, notice=lambda _: None) for name in ("workers", "plain")}
    torch.testing.assert_close(found["workers"].params, found["plain"].params)
    for name, value in found["plain"].buffers.items():
        torch.testing.assert_close(found["workers"].buffers[name], value)
    assert len({id(each) for each in started}) < 8


def test_too_much_memory_is_a_memory_error():
    with pytest.raises(MemoryError, match="client updates"):
        Block(1 << 62)
