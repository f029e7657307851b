"""Asynchronous training: the order of events, FedBuff against a naive loop, and resuming."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mimicfl as mf
from mimicfl.engines.interface import train_clients
from mimicfl.engines.plain import PlainEngine
from mimicfl.participation.asynchronous import Buffered, arrivals
from tests.conftest import make_run

BASE = {"num_clients": 8, "epochs": 1, "rounds": 12, "availability": "static:0.8", "engine": "plain", "speed": "lognormal:60,1"}
ALWAYS = np.ones(3, dtype=bool)


def test_events_of_three_clients_by_hand():
    """Clients need 2, 3 and 7 seconds, and the server steps after every two arrivals.

    At 2 and 3 s clients 0 and 1 arrive; both restart from version 1 at 3 s and arrive at 5 and 6 s: version 2. Client 2, which started from
    version 0, arrives at 7 s; client 0 restarts at 6 s and arrives at 8 s.
    """
    found = arrivals(Buffered(2), np.array([2.0, 3.0, 7.0]), lambda tick: ALWAYS, 1.0, 3, seed=0)
    assert [each.tolist() for each in found.clients] == [[0, 1], [0, 1], [0, 2]]
    assert [each.tolist() for each in found.versions] == [[0, 0], [1, 1], [2, 0]]
    assert found.times.tolist() == [3.0, 6.0, 8.0]
    assert found.oldest.tolist() == [0, 0, 2]


def test_unavailable_clients_do_not_start_and_concurrency_is_kept():
    seconds = np.array([1.0, 1.0, 1.0, 1.0])
    awake = np.array([[True, False, False, False], [True, True, False, False]])
    found = arrivals(Buffered(1), seconds, lambda tick: awake[min(tick, 1)], 10.0, 30, seed=0)
    assert {c for each in found.clients for c in each.tolist()} == {0, 1}
    assert all(each.tolist() == [0] for each, time in zip(found.clients, found.times, strict=True) if time <= 10)
    one = arrivals(Buffered(1, concurrency=1), seconds, lambda tick: np.ones(4, dtype=bool), 10.0, 40, seed=0)
    assert one.times.tolist() == list(range(1, 41))  # one after another
    assert all((t - each == 0).all() for t, each in enumerate(one.versions))
    assert {c for each in one.clients for c in each.tolist()} == {0, 1, 2, 3}


def test_fedbuff_equals_a_naive_loop(digits):
    model = digits["model"].double()
    data, split = digits["data"], digits["split"]
    lr = lambda t: 0.2 / (1 + 0.3 * t)  # noqa: E731
    local = mf.LocalSGD(steps=2, batch_size=None, lr=lr)
    found = mf.simulate(
        model, data, split, algorithm=mf.FedBuff(a=0.7), rounds=10, local=local, speed="lognormal:60,1", asynchronous=3, concurrency=7
    )
    assert max(max(row["staleness"]) for row in found.rows) > 1
    shapes = [p.shape for p in model.parameters()]
    versions = [torch.cat([p.detach().reshape(-1) for p in model.parameters()])]
    x, y = data.x_train, data.y_train
    for row in found.rows:
        total = 0
        for client, stale in zip(row["clients"], row["staleness"], strict=True):
            began = row["round"] - stale
            w, rows = versions[began].clone(), torch.from_numpy(split[client])
            for _ in range(2):
                w = w.detach().requires_grad_(True)
                parts = [part.reshape(shape) for part, shape in zip(w.split([s.numel() for s in shapes]), shapes, strict=True)]
                named = dict(zip((name for name, _ in model.named_parameters()), parts, strict=True))
                loss = cross_entropy(torch.func.functional_call(model, named, (data.inputs(x[rows], torch.float64),)), y[rows])
                [step] = torch.autograd.grad(loss, w)
                w = w - lr(began) * step  # the learning rate that the client was given with its model
                total = total + step * (1 + stale) ** -0.7
        versions.append(versions[-1] - lr(row["round"]) * total / len(row["clients"]))
    assert torch.allclose(found.params, versions[-1], rtol=0, atol=1e-9)


class Counting(nn.Module):
    """Counts its training batches in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 1, bias=False, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.inner(x)


@dataclass(frozen=True)
class InPlace(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        state.w -= step.eta * (step.weights @ g)


def test_clients_start_from_the_model_the_buffers_and_the_rate_of_their_version(quadratic, tmp_path):
    """Also if an algorithm changes the model in place, and after a resume."""
    lr = lambda t: 0.1 / (1 + t)  # noqa: E731
    given = {**quadratic, "model": Counting(), "algorithm": InPlace(), "rounds": 8, "speed": "lognormal:60,1", "asynchronous": 2}
    run = make_run(**given, local=mf.LocalSGD(steps=2, lr=lr))
    engine = PlainEngine(run.problem.template, run.problem.clients, run.problem.loss)
    versions = []
    for t in range(8):
        versions.append((run.server.w.clone(), run.server.buffers["seen"].clone()))
        if t == 4:  # as after a checkpoint
            saved = {name: value.clone() for name, value in run.versions.tensors().items()}
            run.versions.held = {}
            run.versions.restore(saved, torch.device("cpu"))
        run.begin_round()
        request = run.request()
        began = [t - stale for stale in request.staleness.tolist()]
        for part in request.by_start():
            for client in part.active:
                version = began[request.active.tolist().index(client)]
                assert torch.equal(part.w, versions[version][0])
                assert part.buffers["seen"] == versions[version][1]
                assert part.eta_L == lr(version)
        [updates] = train_clients(engine, [request])
        run.apply(request, updates)
        run.close_round(request, float(updates.loss.mean()))
    assert max(max(row["staleness"]) for row in run.recorder.rows) > 1
    assert run.example_request().starts is None


@pytest.mark.parametrize("k", [1, 2])
def test_an_example_request_is_possible_in_every_round(quadratic, k):
    """Engines ask for one between two rounds, when the models of the last arrivals may be gone."""
    given = {"rounds": 12, "speed": "lognormal:60,1", "asynchronous": k, "concurrency": k, "local": mf.LocalSGD(steps=1, lr=0.01)}
    run = make_run(**quadratic, algorithm="fedbuff", **given)
    engine = PlainEngine(run.problem.template, run.problem.clients, run.problem.loss)
    while run.t < run.rounds:
        run.begin_round()
        request = run.request()
        [updates] = train_clients(engine, [request])
        run.apply(request, updates)
        run.close_round(request, float(updates.loss.mean()))
        assert run.example_request().active.tolist() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedbuff", "mimic", "fedvarp"])
def test_interrupted_and_extended_runs_end_with_the_same_bits(tmp_path, algorithm):
    e = mf.Experiment(**BASE, algorithm=algorithm, asynchronous=2, concurrency=5, checkpoint_every=3)
    whole = mf.run(e)
    assert any(any(row["staleness"]) for row in whole.rows)

    def stop(settings, row, rounds):
        if row["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.run(e, tmp_path / "broken", stop)
    assert torch.equal(mf.run(e, tmp_path / "broken").params, whole.params)
    mf.run(mf.Experiment(**BASE | {"rounds": 5}, algorithm=algorithm, asynchronous=2, concurrency=5), tmp_path / "short")
    assert torch.equal(mf.run(e, tmp_path / "short").params, whole.params)


def test_with_one_client_at_a_time_nothing_is_stale_and_fedbuff_equals_fedavg():
    given = {**BASE, "asynchronous": 1, "concurrency": 1}
    fedbuff, fedavg = (mf.run(mf.Experiment(**given, algorithm=name)) for name in ("fedbuff", "fedavg"))
    assert torch.equal(fedbuff.params, fedavg.params)
    assert all(row["staleness"] == [0] for row in fedavg.rows)
    assert fedavg.rows[-1]["virtual_seconds"] > fedavg.rows[0]["virtual_seconds"] > 0


@pytest.mark.slow
def test_mimic_converges_to_the_optimum_of_all_clients_where_fedbuff_does_not():
    """Least squares with clients of different optima and different speeds: the fast ones arrive more often."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator, dtype=torch.float64)
    truth = torch.tensor([[1.0, 2, 3], [-3.0, 0, 1], [0.0, -2, 2], [4.0, 1, -1]], dtype=torch.float64)
    y = torch.cat([x[20 * i : 20 * i + 20] @ truth[i] for i in range(4)])[:, None]
    data = mf.Data(x, y, x, y, loss="mse")
    split = [np.arange(20 * i, 20 * i + 20) for i in range(4)]
    model = torch.nn.Linear(3, 1, bias=False).double()
    best = torch.linalg.lstsq(x, y).solution[:, 0]  # equal sizes: the sum of the clients' losses
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.05)
    speeds = [100.0, 60.0, 37.0, 11.0]

    class Speeds(mf.availability.Distribution):
        def draw(self, rng, num_clients):
            return np.array(speeds)

    given = {"rounds": 600, "local": local, "speed": Speeds(), "asynchronous": 2, "engine": "plain", "eval_every": 600}
    far = {
        name: float((mf.simulate(model, data, split, algorithm=name, **given).params - best).norm())
        for name in ("fedbuff", "mimic", "fedvarp")
    }
    assert far["fedbuff"] > 0.3
    assert far["mimic"] < 0.02
    assert far["fedvarp"] < 0.02


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"asynchronous": 9}, "more arrivals than"),
        ({"asynchronous": 2, "speed": "none"}, "take time"),
        ({"asynchronous": 2, "deadline": 50.0}, "no deadline"),
        ({"asynchronous": 2, "deadline": 0.001}, "no deadline"),
        ({"asynchronous": 2, "select": "uniform:3"}, "no selection"),
        ({"concurrency": 2}, "asynchronous=10"),
        ({"asynchronous": 2, "algorithm": "scaffold"}, "cannot train asynchronously"),
        ({"asynchronous": 2, "diagnose": "every=2"}, "synchronous"),
        ({"asynchronous": 2, "algorithm": "known-p"}, "participation_rates=estimated"),
        ({"algorithm": "fedbuff:a=-1"}, "at least 0"),
    ],
)
def test_mistakes_raise_usage_error(given, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.run(mf.Experiment(**BASE | given))


@pytest.mark.parametrize("algorithm", ["scaffold", "fedawe"])
def test_algorithms_that_cannot_train_asynchronously_leave_no_folder(digits, tmp_path, algorithm):
    with pytest.raises(mf.UsageError, match="cannot train asynchronously"):
        mf.simulate(**digits, algorithm=algorithm, rounds=2, speed=50, asynchronous=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
