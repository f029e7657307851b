"""Averaged models in a federation: the mean is evaluated, returned and saved; clients train from the global model itself."""

import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as ServerSideDP

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.app import make_strategy
from mimicfl.metrics.store import RunFolder
from tests.flower.problems import LOCAL, N, app, federate, flat, participation, problem, schedule, simulated
from tests.flower.toy import Toy, run

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}
TOY = {"fraction_evaluate": 0.0, "lr": 0.3, "num_clients": 8, "wait_for": 8, "seed": 1, "availability": "static:0.3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimic", "fedsteer", "mifa", "fedawe:evaluate=mean"])
@pytest.mark.parametrize("more", [{}, {"server_optimizer": "adam:lr=0.05"}])
def test_results_equal_the_simulator(name, more):
    if "fedawe" in name and more:
        pytest.skip("it has no direction")
    available = schedule()  # with an empty round
    strategy = mff.Federated(name, average=3, availability=mf.availability.Explicit(available), **BASE, **more)
    result, _ = federate(strategy)
    assert torch.equal(flat(result.arrays), simulated(name, available, average=3, **more).params)
    assert torch.equal(strategy.form.w, simulated(name, available, **more).params)


def test_everybody_evaluates_the_mean_and_trains_from_the_model(tmp_path):
    """The server's evaluation, the clients', callbacks, the result and the saved model; what clients train from is w_t."""
    trained, evaluated, scored, seen = [], [], [], []
    honest = app()

    def client(node, message, context):
        kind = message.metadata.message_type
        if kind in ("train", "evaluate") and context.node_config["partition-id"] == 0:
            (trained if kind == "train" else evaluated).append(flat(message.content["arrays"]))
        return honest(message, context)

    def evaluate_fn(server_round, arrays):
        scored.append(flat(arrays))
        return MetricRecord({"loss": 0.0})

    def watch(info):
        seen.append((info.params, torch.cat([p.detach().flatten() for p in info.model().parameters()])))

    strategy = mff.MimiC(**BASE | {"fraction_evaluate": 1.0}, average=3, folder=tmp_path, callbacks=[watch])
    strategy.model = lambda: problem()[2]
    result, _ = federate(strategy, 4, client, evaluate_fn=evaluate_fn)
    models, means = ([simulated("mimic", [[1] * N] * t, average=a).params for t in range(1, 5)] for a in (0, 3))
    initial = flat(mff.client.model_arrays(problem()[2])[0])
    for found, wanted in ((trained, [initial, *models[:-1]]), (evaluated, means), (scored, [initial, *means])):
        assert torch.equal(torch.stack(found), torch.stack(wanted))
    for pair, mean in zip(seen, means, strict=True):
        assert all(torch.equal(each, mean) for each in pair)
    assert torch.equal(flat(result.arrays), means[-1])
    assert torch.equal(mf.read(tmp_path).params, means[-1])
    saved = RunFolder(tmp_path).load("checkpoint")[0]
    assert torch.equal(saved["state.w"], models[-1])
    assert torch.equal(saved["average.w"], means[-1])


@pytest.mark.slow
@pytest.mark.parametrize("form", [mff.ClientForm, lambda **n: mff.SecureForm(threshold=0.51, clip=64.0, **n)], ids=["client", "secure"])
def test_the_other_forms_equal_the_simulator(tmp_path, form):
    strategy = mff.MimiC(form=form(num_clients=N), average=3, **BASE)
    result, _ = federate(strategy, 5, app(state=tmp_path), timeout=10.0)
    available = participation(strategy.rows)
    assert available == [[1] * N] * 5
    for found, average in ((flat(result.arrays), 3), (strategy.form.w, 0)):
        torch.testing.assert_close(found, simulated("mimic", available, average=average).params, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [mff.MimiC, mff.FedAvg])
def test_resumed_federations_equal_uninterrupted_ones(tmp_path, kind):
    whole = kind(average=9, **TOY)
    wanted = run(whole, Toy(dim=50), clients=8, rounds=20)
    for rounds in (5, 13, 20):
        resumed = kind(average=9, folder=tmp_path, save_every=4, **TOY)
        found = run(resumed, Toy(dim=50), clients=8, rounds=rounds)
        assert torch.equal(mf.read(tmp_path).params, flat(found.arrays))
    assert torch.equal(flat(found.arrays), flat(wanted.arrays))
    assert torch.equal(resumed.form.w, whole.form.w)
    assert not torch.equal(flat(found.arrays), resumed.form.w)
    with pytest.raises(UsageError, match="average"):
        run(kind(average=4, folder=tmp_path, **TOY), Toy(dim=50), clients=8, rounds=30)


class Watching(mff.MimiC):
    """A subclass that looks at the aggregated model, as apps do that save it."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.seen = arrays
        return arrays, metrics


class Halving(mff.MimiC):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({"w": Array(arrays["w"].numpy() / 2)}), metrics


def test_a_model_changed_by_a_subclass_is_refused():
    """The mean would hold the unchanged models; a subclass that only looks at them is accepted."""
    strategy = Watching(average=3, fraction_evaluate=0.0, lr=0.5, wait_for=3)
    run(strategy, Toy(), rounds=2)
    assert torch.equal(flat(strategy.seen), strategy.form.w)
    with pytest.raises(UsageError, match=r"changed.*average=0"):
        run(Halving(average=3, fraction_evaluate=0.0, lr=0.5, wait_for=3), Toy(), rounds=1)


def test_wrappers_are_refused():
    """A wrapper hands what `aggregate_train` returns to the clients, and its noise would be missing from the mean."""
    strategy = mff.FedAvg(average=9, fraction_evaluate=0.0)
    with mff.Federation(Toy(), 3).running() as grid, pytest.raises(UsageError, match=r"start\(\)"):
        ServerSideDP(strategy, noise_multiplier=0.3, clipping_norm=1.0, num_sampled_clients=3).start(grid, Toy().initial(), 1, 10.0)


def test_the_run_config_sets_it():
    strategy = make_strategy([], {"average": 9})
    assert strategy.config["average"] == strategy.average == 9
    assert "average" not in make_strategy([], {}).config
    for value in (0.5, -1, float("nan"), "x"):
        with pytest.raises(UsageError, match="average"):
            make_strategy([], {"average": value})
