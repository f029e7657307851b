"""Mistakes in Python calls are told in words, before anything is trained."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from tests.conftest import end_on


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"algorithm": "mimick"}, "did you mean 'mimic'"),
            ({"algorithm": mf.MimiC}, "an object with init"),
            ({"availability": "sometimes"}, "availability 'sometimes' is unknown"),
            ({"availability": 3}, "must be a pattern"),
            ({"rounds": 0}, "rounds must be a whole number of at least 1"),
            ({"rounds": 2.5}, "rounds"),
            ({"rounds": None}, "how long to train"),
            ({"uploads": 0}, "uploads"),
            ({"algorithm": "scaffold:uploads=2", "uploads": 1}, "uploads of one round"),
            ({"update": "median"}, "update"),
            ({"weighting": "size"}, "weighting"),
            ({"device": "cuda:9"}, "device"),
            ({"device": "warp"}, "device 'warp' is unknown"),
            ({"seed": -1}, "seed"),
            ({"loss": "hinge"}, "loss 'hinge' is unknown"),
            ({"global_lr": "locale"}, "learning rate"),
            ({"eval_every": 0}, "eval_every"),
            ({"split": []}, "number of clients"),
            ({"split": [[0, 1], []]}, "client 1 has no data"),
            ({"split": [[0], [5000]]}, "outside the 1442 training samples"),
            ({"split": [[[0]]]}, "list of sample numbers"),
            ({"split": [np.arange(1442) < 10]}, "must hold sample numbers"),
            ({"split": [[0.5, 1.7]]}, "must hold sample numbers"),
            ({"split": None}, "list of arrays"),
            ({"model": "mlp"}, "model must be a torch Module"),
            ({"local": 5}, "local must be a mimicfl LocalSGD"),
            ({"data": None}, "data must be a mimicfl Data"),
            ({"loss": lambda output, target: output}, "the loss does not fit"),
            ({"loss": "mse"}, "the loss does not fit"),
            ({"local": mf.LocalSGD(lr=lambda t: "fast")}, "must return a number"),
            ({"local": mf.LocalSGD(lr=lambda t: -1.0)}, "learning rate of round 0"),
            ({"model": nn.Linear(64, 10)}, "does not accept samples of shape"),
            ({"model": nn.Flatten()}, "no trainable parameters"),
            ({"model": mf.models.MLP(64, 8)}, "8 outputs but the data has 10 classes"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10).double())}, "mixes parameter types"),
            ({"availability": mf.availability.Explicit(np.ones((3, 20), bool))}, "schedule has 20 clients but 30"),
        ],
    )
    def test_mistakes_are_refused(self, digits, change, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**({**digits, "rounds": 2} | change))

    @pytest.mark.slow
    def test_a_schedule_without_participants_is_refused(self, quadratic):
        with pytest.raises(mf.UsageError, match="cannot be reached"):
            mf.simulate(**quadratic, availability="static:0", uploads=5)

    def test_divergence_stops_with_round_and_client(self, quadratic):
        with pytest.raises(mf.Diverged, match=r"no longer finite in round \d+ at client \d+ .*lower the learning rate"):
            mf.simulate(**quadratic, rounds=500, local=mf.LocalSGD(epochs=5, lr=100.0))

    def test_an_error_inside_a_model_names_the_client(self, digits):
        class Moody(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 10)

            def forward(self, x):
                if self.training:
                    raise RuntimeError("no mood")
                return self.layer(x.flatten(1))

        with pytest.raises(RuntimeError, match="no mood") as caught:
            mf.simulate(Moody(), digits["data"], digits["split"], rounds=1)
        assert "client 0 in round 0" in caught.value.__notes__[0]


def test_custom_algorithms_are_checked(digits):
    class NoDataclass(mf.FedAvg):
        def init(self, w, num_clients):
            return object()

    class WrongSize(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w[:-1]
            return state

    class ReturnsAnother(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            return mf.State(state.w - step.eta * step.mean(g))

    for algorithm, words in (
        (NoDataclass(), "must be a dataclass"),
        (WrongSize(), "state.w must be the model"),
        (ReturnsAnother(), "ReturnsAnother.aggregate .* in place"),
    ):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**digits, algorithm=algorithm, rounds=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local": mf.LocalSGD(lr=lambda t: 0.1 * (1 - t / 4))}, "the learning rate of round 4 must be more than 0"),
        ({"global_lr": lambda t: 0.1 * (1 - t / 4)}, "the learning rate of round 4 must be more than 0"),
        ({"loss": torch.nn.CrossEntropyLoss(reduction="none")}, "must return one number: the mean over the batch"),
        ({"global_lr": torch.optim.lr_scheduler.CosineAnnealingLR}, "a function of the round, got <class"),
    ],
)
def test_late_failures_are_found_at_once(digits, given, words):
    def told(row, total):
        raise AssertionError("a round was trained")

    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**digits, **given, rounds=5, progress=told)


def test_built_in_names_cannot_be_registered_again():
    class FedAvg(mf.FedAvg):
        pass

    with pytest.raises(mf.UsageError, match="algorithm 'fedavg' is built in"):
        mf.register("fedavg", FedAvg)
    with pytest.raises(mf.UsageError, match="algorithm 'mimic' is built in"):
        mf.register("mimic", mf.FedAvg)
    for name in ("a:b", " a", "auto"):
        with pytest.raises(mf.UsageError, match="cannot be the name of a loss"):
            mf.losses.register(name, lambda output, target: None)
    with pytest.raises(mf.UsageError, match="model 'mlp' is built in"):
        mf.models.register("mlp", lambda: None)


def test_weight_decay_is_named_where_it_may_be_the_cause(digits):
    with pytest.raises(mf.Diverged, match="lower the learning rate or the weight decay"):
        mf.simulate(**digits, rounds=20, local=mf.LocalSGD(lr=0.1, weight_decay=1e9))


@dataclasses.dataclass(frozen=True)
class Shifted(mf.FedAvg):
    """FedAvg whose clients get whatever instructions `made` makes of the model and the active clients."""

    made: object = None

    def instructions(self, state, active):
        return self.made(state.w, active)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda w, active: None, "must return mimicfl.Instructions, got NoneType"),
        (lambda w, active: mf.Instructions(torch.zeros(3)), r"one row per active client, or \(2410,\) for all.* shape \(3,\)"),
        (
            lambda w, active: mf.Instructions(torch.zeros(30, len(w))),
            r"shape \(30, 2410\); select the rows of `active`",
        ),
        (lambda w, active: mf.Instructions(torch.zeros(len(active), len(w)).double()), "torch.float64"),
        (lambda w, active: mf.Instructions(mu=torch.ones(3)), "mu must be a number"),
        (lambda w, active: mf.Instructions(mu=-1), "mu must be at least 0"),
        (lambda w, active: mf.Instructions("much"), "shift must be a number"),
    ],
)
def test_custom_instructions_are_checked(digits, made, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**digits, algorithm=Shifted(made=made), rounds=1, availability="time-varying:0.1")


def test_the_former_names_are_refused():
    with pytest.raises(mf.UsageError, match="now called instructions"):
        type("Former", (mf.FedAvg,), {"task": lambda self, state, active: None})
    with pytest.raises(AttributeError, match="now called Instructions"):
        _ = mf.Task


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched", "workers"])
def test_a_shift_for_all_clients_equals_one_row_per_client(digits, engine):
    common = 0.01 * torch.randn(2410)
    ways = (
        lambda w, active: mf.Instructions(common),
        lambda w, active: mf.Instructions(common.repeat(len(active), 1)),
        lambda w, active: mf.Instructions(0),
    )
    one, each, none = (end_on(engine, **digits, algorithm=Shifted(made=made), rounds=2, availability="time-varying:0.1") for made in ways)
    assert torch.equal(one, each)
    assert not torch.equal(one, none)


@pytest.mark.slow
def test_a_trace_that_is_too_short_for_the_uploads(digits):
    """SCAFFOLD would get its 8 uploads in 4 rounds, MimiC only 4: no fair comparison."""
    trace = mf.availability.Explicit(np.ones((4, 30), bool))
    assert len(mf.simulate(**digits, algorithm="scaffold:uploads=2", availability=trace, uploads=8).rows) == 4
    with pytest.raises(mf.UsageError, match="the explicit schedule has 4 rounds, 4 of them with a client, and 8 uploads need 8"):
        mf.simulate(**digits, algorithm="mimic", availability=trace, uploads=8)
    assert len(mf.simulate(**digits, algorithm="mimic", availability=trace, uploads=8, rounds=3).rows) == 3


def test_state_that_would_not_be_saved_is_refused(digits):
    class Forgets(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.v = step.mean(g)
            state.w = state.w - step.eta * state.v

    with pytest.raises(mf.UsageError, match=r"state\.v is not a field"):
        mf.simulate(**digits, algorithm=Forgets(), rounds=1, local=mf.LocalSGD(steps=1))


def test_an_error_inside_an_algorithm_names_method_and_round(digits):
    class Broken(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w - g.mean(dim=1)

    with pytest.raises(RuntimeError) as caught:
        mf.simulate(**digits, algorithm=Broken(), rounds=1, local=mf.LocalSGD(steps=1))
    assert "Broken.aggregate, round 0" in "".join(caught.value.__notes__)


def test_an_algorithm_without_aggregate_is_refused(digits):
    class Empty(mf.Algorithm):
        pass

    with pytest.raises(mf.UsageError, match="aggregate"):
        mf.simulate(**digits, algorithm=Empty(), rounds=1)


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
class TestBatchesThatTheModelRefuses:
    """They are found before training, although the first samples are fine."""

    def run(self, model, x, y, split, **given):
        def told(row, total):
            raise AssertionError("a round was trained")

        return mf.simulate(model, mf.Data(x, y, x[:8], y[:8]), split, rounds=2, progress=told, **given)

    @pytest.mark.parametrize("engine", ["plain", "auto"])
    @pytest.mark.parametrize(("sizes", "client"), [((16, 17), 1), ((32, 1), 1)], ids=["last batch", "only sample"])
    def test_a_batch_of_one_sample_for_batch_norm(self, engine, sizes, client):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        x, y = torch.randn(33, 4), torch.arange(33) % 3
        with pytest.raises(mf.UsageError, match=f"batch of one sample, which client {client} has with {sizes[1]} sample"):
            self.run(model, x, y, [np.arange(sizes[0]), np.arange(sizes[0], 33)], engine=engine)

    def test_trying_it_leaves_the_statistics_alone(self):
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3))  # four values per channel
        x, y = torch.randn(33, 4), torch.arange(33) % 3
        split = [np.arange(16), np.arange(16, 33)]
        later, found = mf.availability.Explicit(np.array([[False, False], [True, True]])), []
        mf.simulate(
            model, mf.Data(x, y, x, y), split, availability=later, each_round=lambda info: found.append(dict(info.model().named_buffers()))
        )
        assert found[0]["1.running_mean"] == 0
        once = mf.simulate(model, mf.Data(x, y, x, y), split, rounds=1)
        assert once.buffers["1.num_batches_tracked"] == 2
        alone = mf.availability.Explicit(np.array([[True, False]]))  # a client that never trains needs no batch
        flat = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        assert len(mf.simulate(flat, mf.Data(x, y, x, y), split, availability=alone, rounds=1).rows) == 1

    @pytest.mark.parametrize("part", ["x_train", "x_test"])
    @pytest.mark.parametrize("token", [-1, 10])
    def test_a_token_out_of_range(self, part, token):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
        tokens, y = torch.arange(40).view(20, 2) % 10, torch.arange(20) % 3
        wrong = tokens.clone()
        wrong[17, 1] = token
        x = {"x_train": tokens, "x_test": tokens, part: wrong}
        with pytest.raises(mf.UsageError, match=f"does not accept {part}, whose numbers reach from .*{token}"):
            mf.simulate(model, mf.Data(x["x_train"], y, x["x_test"], y), [np.arange(10), np.arange(10, 20)], rounds=1)
