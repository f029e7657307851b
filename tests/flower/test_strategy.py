"""Drop-in strategies on Flower's in-memory grid end where the simulator ends, to the bit."""

import dataclasses

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl import UsageError

from . import problems
from .problems import LOCAL, N, app, federate, flat, model_arrays, problem, schedule, simulated

OPTIONS = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}
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


@pytest.mark.parametrize(
    ("make", "attribute", "value"),
    [
        (lambda: mff.FedAU(7, num_clients=N), "cutoff", 7),
        (lambda: mff.FedAvgM(0.5), "momentum", 0.5),
        (lambda: mff.FedAvgM(damped=False), "damped", False),
        (lambda: mff.FedProx(0.3), "mu", 0.3),
    ],
)
def test_options_reach_the_algorithm(make, attribute, value):
    assert getattr(make().algorithm, attribute) == value


@pytest.mark.parametrize("kind", [mff.FedAU, mff.FedVARP, mff.MIFA, mff.SCAFFOLD])
def test_who_must_know_all_clients_says_so(kind):
    with pytest.raises(UsageError, match="must know how many there are: pass num_clients=N"):
        kind()


class ByMeanGradients(mf.FedAvg):
    """An own algorithm that needs the number of local steps."""

    def aggregate(self, state, active, g, step):
        state.w = state.w - step.eta * step.mean(step.per_step(g))
        return state


def test_an_own_algorithm_that_needs_the_steps_says_who_does_not_tell_them():
    plain = ClientApp()

    @plain.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    with pytest.raises(UsageError, match="ByMeanGradients uses the number of local steps, which client 0 does not tell"):
        federate(mff.Federated(ByMeanGradients(), **OPTIONS), 1, client=plain)
    federate(mff.Federated(ByMeanGradients(), **OPTIONS), 1)  # our own clients do


@pytest.mark.parametrize("answers", [False, True])
def test_clients_who_do_not_say_who_they_are_come_back_as_themselves_in_one_process(tmp_path, answers):
    """Node ids are new in every call; a client's place in the federation is not."""
    plain = ClientApp()
    if answers:  # to any question, but not to that one
        plain.query()(lambda message, context: Message(RecordDict(), reply_to=message))

    @plain.train()
    def train(message, context):
        arrays = {
            name: Array(a.numpy() * (0.9 + 0.01 * context.node_config["partition-id"])) for name, a in message.content["arrays"].items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    given = {**OPTIONS, "availability": pattern(schedule())}
    whole, _ = federate(mff.MimiC(**given), 6, client=plain)
    for rounds in (3, 6):
        part, _ = federate(mff.MimiC(**given, folder=tmp_path), rounds, client=plain)
    assert torch.equal(flat(part.arrays), flat(whole.arrays))
