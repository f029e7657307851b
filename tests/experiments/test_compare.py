"""Comparisons from Python: algorithms as names, objects or classes, seeds as a number or a list; mistakes told in a sentence."""

from dataclasses import dataclass, field

import pytest
import torch

import mimicfl as mf
from mimicfl.metrics.store import RunFolder

E = mf.Experiment(rounds=2, epochs=1, num_clients=6, availability="static:0.5")


@dataclass(frozen=True)
class Half(mf.FedAvg):
    pace: float = 0.5
    phases: tuple[float, ...] = (1.0, 1.0)
    seen: list[torch.Tensor] = field(init=False, default_factory=list)

    def aggregate(self, state, active, g, step):
        state.w = state.w - self.pace * self.phases[0] * step.eta * step.mean(g)
        return state


class Plain(mf.FedAvg):
    """No dataclass of its own, and nothing to say."""


class Closed:
    """Like FedAvg, with a setting that no text can name."""

    def __init__(self, pace):
        self.pace = pace

    init, instructions, aggregate = mf.FedAvg.init, mf.FedAvg.instructions, mf.FedAvg.aggregate


def test_a_number_of_seeds_is_the_first_ones():
    by_count, by_list = mf.compare(E, ["fedavg"], seeds=2), mf.compare(E, ["fedavg"], seeds=(0, 1))
    assert len(by_count["fedavg"]) == 2
    for one, other in zip(by_count["fedavg"], by_list["fedavg"], strict=True):
        assert torch.equal(one.params, other.params)
    assert len(mf.compare(E, "fedavg")["fedavg"]) == 3


@pytest.mark.slow
def test_objects_and_classes_are_what_their_texts_are(tmp_path):
    wanted = [mf.FedProx(mu=0.1), mf.SCAFFOLD, mf.MimiC(memory="step"), Half(phases=(0.5, 1.0)), Plain, "mifa"]
    found = mf.compare(E, wanted, 1, tmp_path)
    assert list(found) == ["fedprox:mu=0.1", "scaffold", "mimic:memory=step", "Half:phases=[0.5, 1.0]", "Plain", "mifa"]
    for text, [history] in found.items():
        assert torch.equal(history.params, mf.compare(E, text, 1)[text][0].params)
    assert RunFolder(tmp_path / "fedprox_mu=0.1-s0").config["algorithm"] == "fedprox:mu=0.1"
    again = mf.compare(E, wanted, 1, tmp_path, lambda *_: pytest.fail("trained twice"))
    assert list(again) == list(found)
    assert list(mf.compare(E, mf.MimiC(), 1)) == ["mimic"]


def test_a_custom_algorithm_keeps_its_registered_name():
    mf.register("half", Half)
    assert list(mf.compare(E, [Half, Half(pace=0.1)], 1)) == ["half", "half:pace=0.1"]


def test_a_class_defined_again_replaces_the_first():
    def define(pace):
        class Again(Half):
            def aggregate(self, state, active, g, step):
                state.w = state.w - pace * step.eta * step.mean(g)
                return state

        return Again

    first, second = (mf.compare(E, define(pace), 1)["Again"][0].params for pace in (0.1, 1.0))
    assert not torch.equal(first, second)
    assert torch.equal(second, mf.compare(E, "fedavg", 1)["fedavg"][0].params)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seeds": 0}, "seeds must be a whole number of at least 1"),
        ({"seeds": 2.5}, "seeds takes a count"),
        ({"seeds": ["one"]}, "a seed must be a whole number"),
        ({"seeds": []}, "at least one algorithm and one seed"),
        ({"algorithms": []}, "at least one algorithm and one seed"),
        ({"algorithms": 3}, "algorithms must be a list such as"),
        ({"algorithms": ["fedavg", 3]}, "algorithm must be a name or an object with init, instructions and aggregate, got 3"),
        ({"algorithms": [dict]}, "algorithm must be a name or an object with init, instructions and aggregate"),
        ({"algorithms": ["mimik"]}, "did you mean 'mimic'"),
        ({"algorithms": [Closed(0.5)]}, "make Closed a dataclass"),
        ({"algorithms": [Closed]}, "algorithm 'Closed' needs 'pace'"),
        ({"algorithms": [Half(pace=torch.tensor(0.5))]}, "make Half a dataclass whose fields are numbers, lists and strings"),
        ({"algorithms": [type("mimic", (Plain,), {})]}, "another algorithm has the name 'mimic'"),
        ({"experiment": "mimic"}, "compare takes the settings first"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(mf.UsageError) as error:
        mf.compare(**{"experiment": E, "algorithms": ["fedavg"], "seeds": 1} | arguments)
    assert words in str(error.value)
