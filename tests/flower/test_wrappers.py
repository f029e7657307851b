"""Flower's wrappers and subclasses that change the model: what they return is what training continues from."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as ServerSideDP
from flwr.serverapp.strategy import FedAvg

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from tests.flower.problems import N, app, flat, model_arrays, problem
from tests.flower.toy import Toy, run

PLAIN = {"fraction_evaluate": 0.0}


def noisy(strategy, rounds, toy):
    """Standard deviation of the coordinates after training under Flower's differential privacy."""
    with mff.Federation(toy, 3).running() as grid:
        result = ServerSideDP(strategy, noise_multiplier=0.3, clipping_norm=1.0, num_sampled_clients=3).start(
            grid, toy.initial(), rounds, 10.0
        )
    return result.arrays["w"].numpy()


def test_the_noise_of_differential_privacy_accumulates_as_under_flowers_fedavg():
    """Clients hardly change the model: it is a random walk, whose variance grows with the rounds."""
    toy = Toy(lr=1e-5, dim=4000, offset=1.0)
    ours = noisy(mff.FedAvg(weighting="samples", **PLAIN), 9, toy).std()
    theirs = noisy(FedAvg(**PLAIN), 9, toy).std()
    once = noisy(mff.FedAvg(**PLAIN), 1, toy).std()
    assert ours == pytest.approx(theirs, rel=0.1)
    assert ours == pytest.approx(3 * once, rel=0.1)


def test_under_a_wrapper_client_app_returns_weights_which_are_clipped():
    """A clipping norm near zero leaves the model where it is; clipping the update instead of the weights would not."""
    arrays, _ = model_arrays(problem()[2])
    with mff.Federation(app(), N).running() as grid:
        wrapped = ServerSideDP(mff.FedAvg(lr=0.05, **PLAIN), noise_multiplier=0.0, clipping_norm=1e-6, num_sampled_clients=N)
        result = wrapped.start(grid, arrays, 2, 20.0)
    np.testing.assert_allclose(flat(result.arrays), flat(arrays), atol=1e-5)


class Halving(mff.MimiC):
    """A subclass that changes the aggregated model, as some apps do."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({"w": Array(arrays["w"].numpy() / 2)}), metrics


def test_a_model_changed_by_a_subclass_is_continued_from():
    strategy = Halving(lr=1.0, wait_for=3, **PLAIN)
    result = run(strategy, Toy(lr=1.0), rounds=2)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 0.5, atol=1e-6)  # one full step to the mean 1.0, then halved


def test_secure_rounds_refuse_wrappers_and_overridden_methods():
    form = {"form": mff.SecureForm(), **PLAIN}
    with mff.Federation(Toy(), 3).running() as grid:
        with pytest.raises(UsageError, match="wrapper"):
            ServerSideDP(mff.MimiC(**form), 0.1, 1.0, 3).start(grid, Toy().initial(), 1, 5.0)
        with pytest.raises(UsageError, match="aggregate_train is overridden"):
            Halving(**form).start(grid, Toy().initial(), 1, 5.0)
