"""Settings given as objects: kept as the text that makes them again."""

import numpy as np
import pytest
import torch

import mimicfl as mf


class TestObjects:
    """What settings name may be given as objects; what is kept is the text that makes them again."""

    def test_objects_become_specs(self):
        e = mf.Experiment(
            algorithm=mf.FedProx(0.5),
            availability=mf.availability.Bounded(50),
            lr=mf.lr.geometric(0.1, 0.99),
            global_lr=mf.lr.constant(0.2),
        )
        assert (e.algorithm, e.availability) == ("fedprox:mu=0.5", "bounded:tau_max=50")
        assert (e.lr, e.global_lr) == ("geometric:rate=0.1,decay=0.99", "constant:rate=0.2")
        assert mf.Experiment(algorithm=mf.MimiC, availability=mf.availability.Always()).algorithm == "mimic"

    @pytest.mark.slow
    def test_objects_and_specs_are_equivalent(self):
        common = {"rounds": 3, "num_clients": 6}
        named = mf.run(mf.Experiment(**common, algorithm="fedau:cutoff=2", availability="bounded:3", lr="geometric:0.1,0.9"))
        made = {"algorithm": mf.FedAU(2), "availability": mf.availability.Bounded(3), "lr": mf.lr.geometric(0.1, 0.9)}
        assert torch.equal(mf.run(mf.Experiment(**common, **made)).params, named.params)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"availability": mf.availability.Explicit([[1, 0], [0, 1]])}, "settings name a schedule by its file"),
            ({"availability": [[1, 0]]}, "availability must be a pattern such as"),
            ({"availability": mf.MimiC()}, "availability must be a pattern such as"),
            ({"lr": lambda t: 0.1}, "simulate takes a function of the round as well"),
            ({"algorithm": [mf.MimiC()]}, "algorithm must be a name or an object with init, instructions and aggregate"),
            ({"algorithm": 5}, "algorithm must be a string"),
        ],
    )
    def test_objects_without_a_spec_are_refused(self, given, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.Experiment(**given)


def test_numbers_of_numpy_are_numbers():
    given = {"seed": np.int64(3), "rounds": np.int32(7), "batch_size": np.uint8(4), "lr": np.float32(0.5), "average": np.int64(9)}
    e = mf.Experiment(**given)
    assert e == mf.Experiment(**{name: value.item() for name, value in given.items()})
    assert type(e.seed) is int
    assert e.id == mf.Experiment(seed=3, rounds=7, batch_size=4, lr=0.5, average=9).id
    for value in (np.bool_(True), np.float64(2.5), np.array([1, 2])):
        with pytest.raises(mf.UsageError, match="rounds"):
            mf.Experiment(rounds=value)
