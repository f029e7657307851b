"""Server optimizers: equal to their formulas, composed with every algorithm, saved in checkpoints."""

import math

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms import make, trait
from mimicfl.algorithms import server_optimizers as so
from mimicfl.algorithms.server import Server
from mimicfl.algorithms.updates import ClientUpdates
from tests.conftest import BUILT_IN, make_run, random_schedule

DIRECTED = [name for name in BUILT_IN if trait(make(name), "has_direction")]
SPECS = ["momentum:0.8", "momentum:0.8,lr=0.5,damped=false", "adam:lr=0.05", "yogi:lr=0.05", "adagrad:lr=0.05"]


def naive(name, deltas, lr, beta1=0.9, beta2=0.99, tau=1e-3):
    """Algorithm 2 of the FedOpt paper, one coordinate after another."""
    d = len(deltas[0])
    m, u, w = [0.0] * d, [tau**2] * d, [0.0] * d
    for delta in deltas:
        for j, x in enumerate(delta):
            m[j] = beta1 * m[j] + (1 - beta1) * x
            if name == "adagrad":
                u[j] = u[j] + x * x
            elif name == "adam":
                u[j] = beta2 * u[j] + (1 - beta2) * x * x
            else:
                u[j] = u[j] - (1 - beta2) * x * x * math.copysign(1.0, u[j] - x * x)
            w[j] -= lr * m[j] / (math.sqrt(u[j]) + tau)
    return w


@pytest.mark.parametrize(("name", "beta1"), [("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)])
def test_equals_the_formulas_of_the_paper(name, beta1):
    deltas = np.random.default_rng(0).normal(size=(20, 5)) * np.array([1.0, 0.1, 0.01, 1e-3, 10.0])
    optimizer = so.make(f"{name}:lr=0.05")
    w = torch.zeros(5, dtype=torch.float64)
    moments = optimizer.init(w)
    for delta in deltas:
        w = w - optimizer.step(moments, torch.from_numpy(delta))
    np.testing.assert_allclose(w.numpy(), naive(name, deltas, 0.05, beta1), rtol=1e-12)


def given(quadratic, **more):
    schedule = mf.availability.Explicit(random_schedule(15, 6, seed=3))
    return {**quadratic, "availability": schedule, "local": mf.LocalSGD(epochs=1, batch_size=4, lr=0.05), **more}


@pytest.mark.parametrize("damped", [True, False])
def test_fedavgm_is_fedavg_with_momentum(quadratic, damped):
    alone = mf.simulate(**given(quadratic), algorithm=mf.FedAvgM(0.8, damped)).params
    composed = mf.simulate(**given(quadratic), algorithm="fedavg", server_optimizer=so.Momentum(0.8, damped=damped)).params
    torch.testing.assert_close(composed, alone, rtol=1e-12, atol=1e-13)


def test_only_algorithms_that_place_the_model_themselves_have_no_direction():
    assert set(BUILT_IN) - set(DIRECTED) == {"fedawe", "amplified-fedavg", "amplified-scaffold"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", DIRECTED)
def test_composes_with_every_direction(quadratic, algorithm):
    """Momentum 0 takes the proposed step; momentum 0.8 sums the proposed changes with weights 0.2 * 0.8^k."""
    plain = mf.simulate(**given(quadratic), algorithm=algorithm).params
    same = mf.simulate(**given(quadratic), algorithm=algorithm, server_optimizer="momentum:0").params
    other = mf.simulate(**given(quadratic), algorithm=algorithm, server_optimizer="momentum:0.8").params
    torch.testing.assert_close(same, plain, rtol=1e-11, atol=1e-12)
    assert (other - plain).norm() > 1e-3


class InPlace(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        state.w -= step.eta * (step.weights @ g)


def test_sees_the_change_of_an_algorithm_that_works_in_place(quadratic):
    ours, usual = (mf.simulate(**given(quadratic), algorithm=a, server_optimizer="momentum:0.8").params for a in (InPlace(), "fedavg"))
    torch.testing.assert_close(ours, usual, rtol=1e-11, atol=1e-12)
    assert ours.norm() > 0.1  # the model starts at zero


def test_the_algorithms_memory_is_not_affected(quadratic):
    """After one round, MimiC's corrections are those of the plain step: the optimizer moves the model, not the memory."""
    servers = {optimizer: after_a_round(quadratic, optimizer) for optimizer in ("none", "adam")}
    assert torch.equal(servers["none"].state.c[:], servers["adam"].state.c[:])
    assert not torch.equal(servers["none"].w, servers["adam"].w)


def after_a_round(quadratic, optimizer):
    run = make_run(**quadratic, server_optimizer=optimizer)
    g = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 5)))
    run.begin_round()
    run.apply(run.request(), ClientUpdates(g, torch.ones(6), torch.zeros(6)))
    return run.server


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "spec"), [*(("mimic", spec) for spec in SPECS), *((name, "adam:lr=0.05") for name in DIRECTED)])
def test_interrupted_runs_resume_to_the_same_bits(quadratic, tmp_path, algorithm, spec):
    arguments = given(quadratic, algorithm=algorithm, server_optimizer=spec)
    end = mf.simulate(**arguments).params

    def stop(row, total):
        if row["round"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**arguments, out=tmp_path / "run", checkpoint_every=1, progress=stop)
    assert torch.equal(mf.simulate(**arguments, out=tmp_path / "run").params, end)
    with pytest.raises(mf.UsageError, match=r"different run.*server_optimizer"):
        mf.simulate(**arguments | {"server_optimizer": "momentum:0.1"}, out=tmp_path / "run")


@pytest.mark.slow
def test_settings_name_it():
    base = mf.Experiment(rounds=2, num_clients=4, availability="always")
    with_adam = mf.Experiment(rounds=2, num_clients=4, availability="always", server_optimizer=so.Adam(0.5))
    assert with_adam.server_optimizer == "adam:lr=0.5"
    assert "server_optimizer" not in base.to_dict()
    assert base.id != with_adam.id
    assert not torch.equal(mf.run(base).params, mf.run(with_adam).params)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("adma", "adam"),
        ("adam:lr=0", "lr must be"),
        ("adam:beta1=1", "beta1"),
        ("yogi:beta2=-1", "beta2"),
        ("adagrad:tau=0", "tau"),
        ("momentum:1", "less than 1"),
        (5, "server_optimizer must be"),
    ],
)
def test_bad_options_are_refused(quadratic, spec, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**given(quadratic), algorithm="mimic", server_optimizer=spec)


def test_algorithms_without_a_direction_refuse_them():
    class Placed(mf.FedAvg):
        has_direction = False

    rates = {"local_lr": lambda t, m: 0.1, "global_lr": lambda t, m: 0.1}
    with pytest.raises(mf.UsageError, match="direction"):
        Server(Placed(), torch.zeros(3), {}, torch.ones(1), optimizer=so.Adam(), **rates)
