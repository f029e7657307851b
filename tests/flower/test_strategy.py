"""Drop-in strategies on Flower's in-memory grid give the simulator's results, bit for bit."""

import dataclasses

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl import UsageError
from mimicfl.flower.failed_rounds import NothingLearned
from tests.algorithms.test_send import LastGradient
from tests.algorithms.test_start import HalfwayBack
from tests.conftest import BUILT_IN
from tests.flower import problems
from tests.flower.problems import LOCAL, N, app, federate, flat, model_arrays, problem, schedule, simulated
from tests.flower.toy import Toy, run

OPTIONS = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}
NOT_THERE = ("known-p",)  # nobody knows the clients' participation rates
ALL = {name: getattr(mff, kind.__name__) for name, kind in BUILT_IN.items() if name not in NOT_THERE}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_equal_the_simulator_under_dropouts(name, dtype):
    available = schedule()
    strategy = ALL[name](availability=pattern(available), **OPTIONS)
    result, _ = federate(strategy, dtype=dtype)
    expected = simulated(name, available, dtype).params
    assert torch.equal(flat(result.arrays), expected)
    assert strategy.form.w.dtype == dtype


def pattern(available):
    from mimicfl.participation import Explicit

    return Explicit(available)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_results_equal_the_simulator_in_flowers_own_loop(name):
    strategy = ALL[name](**OPTIONS)
    arrays, _ = model_arrays(problem()[2])
    federation = mff.Federation(app(), N)
    with federation.running() as grid:
        result = Strategy.start(strategy, grid, arrays, 3, 20.0)
    torch.testing.assert_close(flat(result.arrays), simulated(name, [[1] * N] * 3).params, atol=3e-6, rtol=0)  # from weights


@pytest.mark.parametrize("name", ["mimic", "fedsteer", "mifa"])
@pytest.mark.parametrize("optimizer", ["momentum:0.5", "adam:lr=0.05", "yogi:lr=0.05", "adagrad"])
def test_server_optimizers_equal_the_simulator(name, optimizer):
    available = schedule()
    result, _ = federate(ALL[name](server_optimizer=optimizer, availability=pattern(available), **OPTIONS))
    assert torch.equal(flat(result.arrays), simulated(name, available, server_optimizer=optimizer).params)


@pytest.mark.slow
def test_clients_start_where_the_algorithm_says():
    available = schedule()
    result, _ = federate(mff.Federated(HalfwayBack(), availability=pattern(available), **OPTIONS))
    expected = simulated(HalfwayBack(), available).params
    assert not torch.allclose(expected, simulated("fedprox:mu=0.2", available).params, atol=1e-3)  # the start matters here
    assert torch.equal(flat(result.arrays), expected)


@pytest.mark.slow
def test_clients_send_what_the_algorithm_asks_for():
    available = schedule()
    strategy = mff.Federated(LastGradient(), availability=pattern(available), **OPTIONS)
    result, _ = federate(strategy)
    assert torch.equal(flat(result.arrays), simulated(LastGradient(), available).params)
    up, plain = (each.rows[-1]["bytes_up"] for each in (strategy, federated_rows(available)))
    assert up > 1.9 * plain


def federated_rows(available):
    strategy = mff.FedAvg(availability=pattern(available), **OPTIONS)
    federate(strategy)
    return strategy


def test_focus_sends_one_vector_as_in_the_simulator():
    strategy = mff.FOCUS(**OPTIONS)
    federate(strategy, 2)
    last, expected = strategy.rows[-1], simulated("focus", [[1] * N] * 2).rows[-1]
    assert [last[key] for key in ("vectors_up", "bytes_up")] == [expected[key] for key in ("vectors_up", "bytes_up")]


def test_algorithms_that_need_true_participation_rates_are_refused():
    with pytest.raises(UsageError, match="participation rates"):
        mff.KnownP(num_clients=N)


@pytest.mark.parametrize("max_norm", ["30x", 50.0, None])
def test_vectors_besides_the_update_have_a_norm_bound(max_norm):
    honest = app()

    def client(node, message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 2:
            record = reply.content["sent"]
            record["last_gradient"] = Array(record["last_gradient"].numpy() * 1e6)
        return reply

    strategy = mff.FOCUS(max_norm=max_norm, **OPTIONS)
    federate(strategy, 1, client)
    assert ("last_gradient" in strategy.rows[0]["failed"].get("2", "")) == (max_norm is not None)


@pytest.mark.parametrize("kind", [mff.FOCUS, lambda **options: mff.Federated(LastGradient(), **options)])
def test_clients_that_cannot_send_it_are_refused(kind):
    with pytest.raises(NothingLearned, match="does not send last_gradient"):
        run(kind(**OPTIONS), Toy(), clients=N, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": torch.optim.RMSprop}], ids=["adamw", "factory"]
)
def test_clients_with_other_optimizers_equal_the_simulator(monkeypatch, options):
    local = mf.Local(epochs=LOCAL.epochs, steps=LOCAL.steps, batch_size=LOCAL.batch_size, lr=LOCAL.lr, **options)
    monkeypatch.setattr(problems, "LOCAL", local)
    available = schedule()
    result, _ = federate(mff.MimiC(availability=pattern(available), **OPTIONS))
    assert torch.equal(flat(result.arrays), simulated("mimic", available).params)


@pytest.mark.slow
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
        (lambda: mff.FedAU(cutoff=7, num_clients=N), "cutoff", 7),
        (lambda: mff.FedAvgM(momentum=0.5), "momentum", 0.5),
        (lambda: mff.FedAvgM(damped=False), "damped", False),
        (lambda: mff.FedProx(mu=0.3), "mu", 0.3),
    ],
)
def test_options_reach_the_algorithm(make, attribute, value):
    assert getattr(make().algorithm, attribute) == value


@pytest.mark.parametrize("kind", [mff.FedAU, mff.FedVARP, mff.MIFA, mff.SCAFFOLD])
def test_algorithms_that_need_the_population_require_num_clients(kind):
    with pytest.raises(UsageError, match="num_clients=N"):
        kind()


class ByMeanGradients(mf.FedAvg):
    """A custom algorithm that needs the number of local steps."""

    def aggregate(self, state, active, g, step):
        state.w = state.w - step.eta * step.mean(step.per_step(g))
        return state


def test_custom_algorithm_that_needs_local_steps_names_the_client_that_does_not_report_them():
    plain = ClientApp()

    @plain.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    with pytest.raises(UsageError, match=r"ByMeanGradients .*local steps.* client 0 "):
        federate(mff.Federated(ByMeanGradients(), **OPTIONS), 1, client=plain)
    federate(mff.Federated(ByMeanGradients(), **OPTIONS), 1)  # client_app reports them


@pytest.mark.parametrize("handles_queries", [False, True])
def test_in_process_clients_without_ids_keep_their_rows_after_a_restart(tmp_path, handles_queries):
    """Node ids are new in every call; partition ids are not."""
    plain = ClientApp()
    if handles_queries:  # but does not report an id
        plain.query()(lambda message, context: Message(RecordDict(), reply_to=message))

    @plain.train()
    def train(message, context):
        arrays = {
            name: Array(a.numpy() * (0.9 + 0.01 * context.node_config["partition-id"])) for name, a in message.content["arrays"].items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    options = {**OPTIONS, "availability": pattern(schedule())}
    uninterrupted, _ = federate(mff.MimiC(**options), 6, client=plain)
    for rounds in (3, 6):
        resumed, _ = federate(mff.MimiC(**options, folder=tmp_path), rounds, client=plain)
    assert torch.equal(flat(resumed.arrays), flat(uninterrupted.arrays))


class Pulled(mf.FedAvg):
    """FedAvg with the same shift in every coordinate."""

    def instructions(self, state, active):
        return mf.Instructions(shift=0.25)


def test_one_number_as_shift_reaches_the_clients():
    result, _ = federate(mff.Federated(Pulled(), **OPTIONS), 2)
    assert torch.equal(flat(result.arrays), simulated(Pulled(), [[1] * N] * 2).params)


def test_all_public_names_can_be_imported():
    names = {}
    exec("from mimicfl.flower import *", names)
    assert names["MimiC"] is mff.MimiC
    assert {kind.__name__ for kind in BUILT_IN.values()} <= set(names)
    with pytest.raises(AttributeError):
        _ = mff.np
