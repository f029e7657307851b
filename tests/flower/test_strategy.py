"""Drop-in strategies on Flower's in-memory grid end where the simulator ends, to the bit."""

import dataclasses

import pytest
import torch
from flwr.serverapp.strategy import Strategy

import mimicfl.flower as mff

from . import problems
from .problems import LOCAL, N, app, federate, flat, model_arrays, problem, schedule, simulated

OPTIONS = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N, "poll": 0.005}
ALL = {
    "fedavg": mff.FedAvg,
    "fedprox": mff.FedProx,
    "scaffold": mff.SCAFFOLD,
    "mifa": mff.MIFA,
    "mimic": mff.MimiC,
    "fedvarp": mff.FedVARP,
    "fedavgm": mff.FedAvgM,
    "fedau": mff.FedAU,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bit_equal_to_the_simulator_under_dropouts(name, dtype):
    available = schedule()
    strategy = ALL[name](availability=pattern(available), **OPTIONS)
    result, _ = federate(strategy, dtype=dtype)
    expected = simulated(name, available, dtype).params
    assert torch.equal(flat(result.arrays), expected)
    assert strategy.form.w.dtype == dtype


def pattern(available):
    from mimicfl.availability import Explicit

    return Explicit(available)


@pytest.mark.parametrize("name", ALL)
def test_bit_equal_in_flowers_own_loop(name):
    strategy = ALL[name](**OPTIONS)
    arrays, _ = model_arrays(problem()[2])
    federation = mff.Federation(app(), N)
    with federation.running() as grid:
        result = Strategy.start(strategy, grid, arrays, 3, 20.0)
    assert torch.equal(flat(result.arrays), simulated(name, [[1] * N] * 3).params)


@pytest.mark.parametrize("update", ["sum", "mean"])
@pytest.mark.parametrize("name", ["mimic", "scaffold"])
def test_clients_with_weight_decay_momentum_and_clipping_equal_the_simulator(monkeypatch, name, update):
    monkeypatch.setattr(problems, "LOCAL", dataclasses.replace(LOCAL, weight_decay=0.3, momentum=0.7, clip_norm=0.5))
    available = schedule()
    result, _ = federate(ALL[name](availability=pattern(available), update=update, **OPTIONS))
    assert torch.equal(flat(result.arrays), simulated(name, available, update=update).params)
