"""Mistakes in Python calls are told in words, before anything is trained."""

import numpy as np
import pytest
from torch import nn

import mimicfl as mf


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
            ({"rounds": None}, "say how long"),
            ({"uploads": 0}, "uploads"),
            ({"algorithm": "scaffold", "uploads": 1}, "does not pay"),
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
            ({"local": mf.LocalSGD(lr=lambda t: "fast")}, "must give a number"),
            ({"local": mf.LocalSGD(lr=lambda t: -1.0)}, "learning rate of round 0"),
            ({"model": nn.Linear(64, 10)}, "cannot take samples of shape"),
            ({"model": nn.Flatten()}, "no trainable parameters"),
            ({"model": mf.models.MLP(64, 8)}, "8 outputs, the data has 10 classes"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10).double())}, "mixes parameter types"),
            ({"availability": mf.availability.Explicit(np.ones((3, 20), bool))}, "availability has 20 clients, the partition made 30"),
        ],
    )
    def test_told_in_words(self, digits, change, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**({**digits, "rounds": 2} | change))

    def test_nobody_will_ever_come(self, quadratic):
        with pytest.raises(mf.UsageError, match="out of reach"):
            mf.simulate(**quadratic, availability="static:0", uploads=5)

    def test_divergence_stops_with_round_and_client(self, quadratic):
        with pytest.raises(mf.Diverged, match=r"no longer finite in round \d+ at client \d+ .*lower the learning rate"):
            mf.simulate(**quadratic, rounds=500, local=mf.LocalSGD(epochs=5, lr=100.0))

    def test_an_error_inside_a_model_says_whose_training_it_was(self, digits):
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


def test_own_algorithms_are_checked(digits):
    class NoDataclass(mf.FedAvg):
        def init(self, w, num_clients):
            return object()

    class WrongSize(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w[:-1]
            return state

    class Forgets(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w - step.eta * step.mean(g)

    for algorithm, words in (
        (NoDataclass(), "must be a dataclass"),
        (WrongSize(), "state.w must be the model"),
        (Forgets(), "must be a dataclass"),
    ):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**digits, algorithm=algorithm, rounds=2)
