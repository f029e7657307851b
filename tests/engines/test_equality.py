"""Engines are used only if they match plain."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.engines.capabilities import Unsupported, distances
from mimicfl.engines.equality import Reference, mixed_rows, representative_clients
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from tests.conftest import make_run


def run_of(digits, **change):
    return make_run(**{**digits, **change})


def reference(digits, **change):
    run = run_of(digits, **change)
    return Reference(run, PlainEngine(run.problem.template, run.problem.clients, run.problem.loss))


def by_class(digits):
    """The first two clients hold one class each; the others hold all of them."""
    y = digits["data"].y_train.numpy()
    rest = np.flatnonzero(y > 1)
    return {**digits, "split": [np.flatnonzero(y == 0), np.flatnonzero(y == 1), *np.array_split(rest, 4)]}


def centred(output, target):
    return F.cross_entropy(output - output.mean(dim=0), target)


def hardest_half(output, target):
    return F.cross_entropy(output, target, reduction="none").topk((len(target) + 1) // 2).values.mean()


NOT_MEANS = {
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([1, 1, 9, 0.1, 1, 1, 1, 1, 1, 1])),
    "slight weights": nn.CrossEntropyLoss(weight=torch.tensor([1, 1, 1.01, 1, 1, 1, 1, 1, 1, 1])),
    "ignored": nn.CrossEntropyLoss(ignore_index=9),
    "sum": lambda output, target: F.cross_entropy(output, target, reduction="sum") / 16,
    "centred": centred,
    "hardest": hardest_half,
}
MEANS = {
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.1),
    "focal": lambda o, t: ((1 - F.softmax(o, 1).gather(1, t[:, None])[:, 0]) ** 2 * F.cross_entropy(o, t, reduction="none")).mean(),
    "cross-entropy": "cross-entropy",
}


class TestLosses:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", NOT_MEANS)
    @pytest.mark.parametrize("engine", ["batched", "native"])
    def test_losses_that_are_not_means_over_samples_use_plain(self, digits, name, engine):
        notices, given = [], {**by_class(digits), "loss": NOT_MEANS[name], "rounds": 2, "local": mf.LocalSGD(steps=3, lr=0.01)}
        ours = mf.simulate(**given, engine=engine, notice=notices.append)
        assert len(notices) == 1
        assert "not a mean over samples" in notices[0]
        assert torch.equal(ours.params, mf.simulate(**given, engine="plain").params)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", MEANS)
    def test_losses_that_are_means_over_samples_are_accepted(self, digits, name):
        notices = []
        mf.simulate(**by_class(digits), loss=MEANS[name], rounds=1, local=mf.LocalSGD(steps=2), engine="batched", notice=notices.append)
        assert notices == ["engine batched"]

    @pytest.mark.parametrize("classes", [4, 400])
    def test_rare_ignored_class_is_found(self, classes):
        """Only one of 3,000 samples has the ignored class; with 400 classes, a check cannot try all of them."""
        x, y = torch.randn(3000, 6), torch.arange(3000) % classes
        y[1234] = classes
        data = mf.Data(x, y, x[:5], y[:5])
        given = {"model": nn.Linear(6, classes + 1), "data": data, "split": np.array_split(np.arange(3000), 20)}
        assert not reference(given, loss=nn.CrossEntropyLoss(ignore_index=classes)).loss_is_a_mean
        assert reference(given, loss=nn.CrossEntropyLoss(ignore_index=classes + 3)).loss_is_a_mean

    def test_any_loss_is_a_mean_for_batches_of_one_sample(self, digits):
        assert reference(digits, loss=NOT_MEANS["sum"], local=mf.LocalSGD(batch_size=1)).loss_is_a_mean


class Centred(nn.Module):
    """Subtracts the mean over the batch, without the running statistics that would reveal this."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer(x.flatten(1))
        return x - x.mean(dim=0) if len(x) > 1 else x


class TestSamples:
    @pytest.mark.slow
    @pytest.mark.parametrize("engine", ["batched", "native"])
    def test_samples_that_depend_on_their_batch_use_plain(self, digits, engine):
        """Only batches of two can reveal it here: a batch of one, padded with itself, gives the same result."""
        split = [np.arange(9), np.arange(9, 14), np.arange(14, 16), np.arange(16, 17)]
        given = {**digits, "model": Centred().double(), "split": split, "local": mf.LocalSGD(epochs=1, batch_size=4), "rounds": 2}
        notices = []
        ours = mf.simulate(**given, engine=engine, notice=notices.append).params
        assert notices[0].startswith("engine plain")
        assert torch.equal(ours, mf.simulate(**given, engine="plain").params)

    @pytest.mark.slow
    def test_independent_samples_are_accepted(self, digits):
        notices = []
        mf.simulate(**digits, rounds=1, engine="batched", local=mf.LocalSGD(steps=1), notice=notices.append)
        assert notices == ["engine batched"]


class TestClients:
    def test_compared_clients_cover_classes_and_sizes(self, digits):
        run = run_of({**digits, "split": mf.partition.shards(digits["data"].y_train, 60, 1, seed=0)})
        chosen = representative_clients(run.problem)
        assert {int(run.problem.clients.sizes.argmin()), int(run.problem.clients.sizes.argmax())} <= set(chosen)
        assert (run.problem.class_counts[chosen].sum(axis=0) > 0).sum() >= 8
        assert set(run.problem.clients.y[mixed_rows(run)].tolist()) == set(range(10))

    def test_clients_are_compared_separately(self):
        """A norm over all clients would hide one wrong client, or one whose gradient is almost zero."""
        true = torch.tensor([[1e3, 0.0], [1.0, 0.0], [1e-9, 0.0]])
        assert distances(true, true).tolist() == [0, 0, 0]
        wrong = true + torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
        assert float(distances(wrong, true)[1]) > 0.05
        noise = true + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1e-9]])
        assert float(distances(noise, true)[2]) < 1e-6
        assert not float(distances(torch.full((1, 2), 1e-12), torch.zeros(1, 2))[0]) < 1

    @pytest.mark.parametrize(("row", "what"), [(0, "g"), (-1, "g"), (0, "loss")])
    @pytest.mark.parametrize("factor", [1.001, 1.0003])
    def test_engine_with_one_wrong_client_is_refused(self, digits, row, what, factor):
        """Also if its error is as small as at a kink, where it would not show at all parameters, nor in the loss."""
        ref = reference(digits)

        class Wrong(PlainEngine):
            def train(self, requests):
                [updates] = super().train(requests)
                values = getattr(updates, what).clone()
                values[row] *= factor
                return [dataclasses.replace(updates, **{what: values})]

        run = ref.run
        ref.check_training(PlainEngine(run.problem.template, run.problem.clients, run.problem.loss))
        with pytest.raises(Unsupported, match="differs"):
            ref.check_training(Wrong(run.problem.template, run.problem.clients, run.problem.loss))

    def test_errors_hidden_by_zero_weights_are_found(self, digits):
        """At the initial parameters the gradient of the hidden layer is zero, so an error there shows only at perturbed ones."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
        nn.init.zeros_(model[3].weight)
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        ref = reference({**digits, "model": model})
        hidden = ref.updates(0).g[:, : 64 * 12]
        assert float(hidden.abs().max()) < 1e-4
        with pytest.raises(Unsupported, match="differs"):
            ref.check_training(PlainEngine(other, ref.run.problem.clients, ref.run.problem.loss))

    def test_difference_similar_to_rounding_is_accepted(self, digits, monkeypatch):
        """If plain itself changes when its parameters are perturbed by rounding, a similar difference is accepted."""
        ref = reference(digits)
        near = dataclasses.replace(ref.updates(0), g=ref.updates(0).g * 1.01)
        with pytest.raises(Unsupported, match="differs"):
            ref._compare(near, 0)
        monkeypatch.setitem(ref.truth, (0, True), near)
        ref._compare(near, 0)


class ScaledSoftmax(nn.Module):
    """Computes a different function in evaluation mode, which uses a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)
        self.register_buffer("heat", torch.tensor(3.0))

    def forward(self, x):
        x = self.a(x.flatten(1))
        return x if self.training else F.softmax(x / self.heat, 1)


class Softened(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        x = self.a(torch.flatten(x, 1))
        return x if self.training else F.softmax(x, 1)


class TestEvaluation:
    @pytest.mark.slow
    def test_evaluation_equals_plain(self, digits):
        notices, given = [], {**digits, "model": ScaledSoftmax(), "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**given, engine="batched:3", notice=notices.append)
        assert notices == ["engine batched"]
        plain = mf.simulate(**given, engine="plain")
        assert [row["test_loss"] for row in ours.rows] == pytest.approx([row["test_loss"] for row in plain.rows], rel=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("engine", ["native", "batched:3"])
    def test_evaluation_mode_is_used(self, digits, engine):
        """The native engine must not evaluate the network that it traced in training mode."""
        given = {**digits, "model": Softened(), "rounds": 2, "availability": "static:0.2"}
        ours, plain = (mf.simulate(**given, engine=name) for name in (engine, "plain"))
        assert [row["test_loss"] for row in ours.rows] == pytest.approx([row["test_loss"] for row in plain.rows], rel=1e-5)

    @pytest.mark.slow
    def test_wrong_evaluation_is_refused(self, digits, monkeypatch):
        def in_training_mode(engine, w, buffers, samples):
            inputs = samples.data.inputs(samples.x, samples.dtype)
            return torch.stack([engine.stack.module.train()(inputs).detach() for _ in w])

        monkeypatch.setattr(BatchedEngine, "outputs", in_training_mode)
        notices = []
        mf.simulate(**{**digits, "model": ScaledSoftmax()}, rounds=1, engine="batched:3", notice=notices.append)
        assert len(notices) == 1
        assert notices[0].startswith("engine plain: its test outputs")


@pytest.mark.parametrize(
    ("error", "calls", "accepted"),
    [
        (5e-4, [1], True),  # a value at the kink of a ReLU, at the perturbed parameters
        (5e-4, [0, 2, 3], True),  # by chance also at two of the four nearby ones
        (5e-4, [0, 2, 3, 4], False),
        (5e-4, [*range(10)], False),  # an error of the engine
        (5e-3, [1], False),  # too much for a kink
        (5e-5, [*range(10)], True),  # within the tolerance
    ],
)
@pytest.mark.parametrize("clients", [slice(0, 1), slice(None)], ids=["one client", "all clients"])
def test_a_client_may_differ_as_at_a_kink(digits, error, calls, accepted, clients):
    class Off(PlainEngine):
        trained = 0

        def train(self, requests):
            [updates] = super().train(requests)
            if self.trained in calls:
                updates.g[clients] *= 1 + error
            self.trained += 1
            return [updates]

    found = reference(digits)
    engine = Off(found.run.problem.template, found.run.problem.clients, found.run.problem.loss)
    with contextlib.nullcontext() if accepted else pytest.raises(Unsupported, match="differs"):
        found.check_training(engine)


def test_kinks_change_gradients_only(digits):
    found = reference(digits)
    true = found.updates(0)
    found.truth[0, True] = true  # rounding errors of the parameters change nothing
    with pytest.raises(Unsupported, match="differs from PyTorch"):
        found._compare(dataclasses.replace(true, loss=true.loss * 1.0005), 0)
    assert found._compare(dataclasses.replace(true, g=true.g * 1.0005), 0).all()
