"""Engines are used only if they match plain; any error they raise while being prepared means that they cannot run the model."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import mimicfl as mf
from mimicfl.engine.batched.cohort import BatchedCohort
from mimicfl.engine.cohort import PlainCohort
from mimicfl.engine.equality import Reference, mixed_rows, telling_clients
from mimicfl.engine.run import Run
from mimicfl.engine.support import Unsupported, distances

from .cohorts import Residual


def run_of(digits, **change):
    settings = {"algorithm": "mimic", "availability": "always", "rounds": 1, "uploads": None, "local": mf.LocalSGD(epochs=1), "loss": None}
    settings |= {"global_lr": "local", "update": "sum", "weighting": "uniform", "seed": 0, "device": "cpu", "eval_every": 1}
    return Run(**{**digits, **settings, **change})


def reference(digits, **change):
    run = run_of(digits, **change)
    return Reference(run, PlainCohort(run.template, run.clients, run.loss))


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
    @pytest.mark.parametrize("name", NOT_MEANS)
    @pytest.mark.parametrize("engine", ["batched", "native"])
    def test_that_are_no_means_over_samples_are_left_to_plain(self, digits, name, engine):
        said, given = [], {**by_class(digits), "loss": NOT_MEANS[name], "rounds": 2, "local": mf.LocalSGD(steps=3, lr=0.01)}
        ours = mf.simulate(**given, engine=engine, notice=said.append)
        assert len(said) == 1
        assert "not a mean over samples" in said[0]
        assert torch.equal(ours.params, mf.simulate(**given, engine="plain").params)

    @pytest.mark.parametrize("name", MEANS)
    def test_that_are_means_are_taken(self, digits, name):
        said = []
        mf.simulate(**by_class(digits), loss=MEANS[name], rounds=1, local=mf.LocalSGD(steps=2), engine="batched", notice=said.append)
        assert said == ["engine batched"]

    def test_one_class_among_many_is_found(self):
        """The sample of the ignored class is the only one of 3,000."""
        x, y = torch.randn(3000, 6), torch.arange(3000) % 4
        y[1234] = 4
        data = mf.Data(x, y, x[:5], y[:5])
        given = {"model": nn.Linear(6, 5), "data": data, "split": np.array_split(np.arange(3000), 20)}
        assert not reference(given, loss=nn.CrossEntropyLoss(ignore_index=4)).loss_is_a_mean
        assert reference(given, loss=nn.CrossEntropyLoss(ignore_index=7)).loss_is_a_mean

    def test_batches_of_one_sample_have_nothing_to_average(self, digits):
        assert reference(digits, loss=NOT_MEANS["sum"], local=mf.LocalSGD(batch_size=1)).loss_is_a_mean


class Centred(nn.Module):
    """Subtracts the mean over the batch; it has no running statistics that would reveal it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer(x.flatten(1))
        return x - x.mean(dim=0) if len(x) > 1 else x


class TestSamples:
    @pytest.mark.parametrize("engine", ["batched", "native"])
    def test_that_depend_on_their_batch_are_left_to_plain(self, digits, engine):
        """Also if only batches of two are not full: a batch of one, padded with itself, reveals nothing."""
        split = [np.arange(9), np.arange(9, 14), np.arange(14, 16), np.arange(16, 17)]
        given = {**digits, "model": Centred().double(), "split": split, "local": mf.LocalSGD(epochs=1, batch_size=4), "rounds": 2}
        told = []
        ours = mf.simulate(**given, engine=engine, notice=told.append).params
        assert told[0].startswith("engine plain")
        assert torch.equal(ours, mf.simulate(**given, engine="plain").params)

    def test_that_do_not_are_taken(self, digits):
        told = []
        mf.simulate(**digits, rounds=1, engine="batched", local=mf.LocalSGD(steps=1), notice=told.append)
        assert told == ["engine batched"]


class TestClients:
    def test_cover_classes_and_sizes(self, digits):
        run = run_of({**digits, "split": mf.partition.shards(digits["data"].y_train, 60, 1, seed=0)})
        chosen = telling_clients(run)
        assert {int(run.clients.sizes.argmin()), int(run.clients.sizes.argmax())} <= set(chosen)
        assert (run.class_counts[chosen].sum(axis=0) > 0).sum() >= 8
        assert set(run.clients.y[mixed_rows(run)].tolist()) == set(range(10))

    def test_are_compared_one_by_one(self):
        """One wrong client among many, or one whose gradient is almost zero, does not change the norm over all of them."""
        true = torch.tensor([[1e3, 0.0], [1.0, 0.0], [1e-9, 0.0]])
        assert distances(true, true).tolist() == [0, 0, 0]
        wrong = true + torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
        assert float(distances(wrong, true)[1]) > 0.05
        noise = true + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1e-9]])
        assert float(distances(noise, true)[2]) < 1e-6
        assert not float(distances(torch.full((1, 2), 1e-12), torch.zeros(1, 2))[0]) < 1

    @pytest.mark.parametrize("row", [0, -1])
    def test_a_wrong_one_is_refused(self, digits, row):
        ref = reference(digits)

        class Wrong(PlainCohort):
            def train(self, asks):
                [answers] = super().train(asks)
                g = answers.g.clone()
                g[row] *= 1.001
                return [dataclasses.replace(answers, g=g)]

        run = ref.run
        ref.check_training(PlainCohort(run.template, run.clients, run.loss))
        with pytest.raises(Unsupported, match="disagrees"):
            ref.check_training(Wrong(run.template, run.clients, run.loss))

    def test_layers_behind_zero_weights_are_seen(self, digits):
        """At the initial parameters the gradient of the hidden layer is zero, whatever the engine does there."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
        nn.init.zeros_(model[3].weight)
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        ref = reference({**digits, "model": model})
        hidden = ref.answers(0).g[:, : 64 * 12]
        assert float(hidden.abs().max()) < 1e-4
        with pytest.raises(Unsupported, match="disagrees"):
            ref.check_training(PlainCohort(other, ref.run.clients, ref.run.loss))

    def test_what_plain_cannot_tell_apart_is_not_refused(self, digits, monkeypatch):
        """Plain changes when its parameters are perturbed by rounding: an engine with a similar difference is no worse."""
        ref = reference(digits)
        near = dataclasses.replace(ref.answers(0), g=ref.answers(0).g * 1.01)
        with pytest.raises(Unsupported, match="disagrees"):
            ref._compare(near, 0)
        monkeypatch.setitem(ref.truth, (0, True), near)
        ref._compare(near, 0)


class Exam(nn.Module):
    """In evaluation mode it is a different function, which uses a buffer."""

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
    def test_equals_plain(self, digits):
        said, given = [], {**digits, "model": Exam(), "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**given, engine="batched:3", notice=said.append)
        assert said == ["engine batched"]
        plain = mf.simulate(**given, engine="plain")
        assert [row["test_loss"] for row in ours.rows] == pytest.approx([row["test_loss"] for row in plain.rows], rel=1e-5)

    @pytest.mark.parametrize("engine", ["native", "batched:3"])
    def test_is_in_evaluation_mode(self, digits, engine):
        """Whichever engine trains it: the native one traces the network as it trains."""
        given = {**digits, "model": Softened(), "rounds": 2, "availability": "static:0.2"}
        ours, plain = (mf.simulate(**given, engine=name) for name in (engine, "plain"))
        assert [row["test_loss"] for row in ours.rows] == pytest.approx([row["test_loss"] for row in plain.rows], rel=1e-5)

    def test_that_is_wrong_is_refused(self, digits, monkeypatch):
        def in_training_mode(cohort, w, buffers, samples):
            inputs = samples.data.inputs(samples.x, samples.dtype)
            return torch.stack([cohort.stack.module.train()(inputs).detach() for _ in w])

        monkeypatch.setattr(BatchedCohort, "outputs", in_training_mode)
        said = []
        mf.simulate(**{**digits, "model": Exam()}, rounds=1, engine="batched:3", notice=said.append)
        assert len(said) == 1
        assert said[0].startswith("engine plain: its test outputs")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.reads, self.says = kind(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        return self.says(self.reads(x[:, 0])[0][:, -1])


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x.flatten(1))


ODD = {
    "unused": Unused,
    "residual": Residual,
    "weight_norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 10))),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


class TestCannot:
    @pytest.mark.parametrize("engine", ["auto", "native", "batched"])
    @pytest.mark.parametrize("name", ODD)
    def test_any_model_trains_with_one_notice(self, digits, monkeypatch, name, engine):
        monkeypatch.delenv("MIMICFL_ENGINE")
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        said, given = [], {**digits, "model": ODD[name](), "rounds": 2, "availability": "static:0.1", "local": mf.LocalSGD(steps=2)}
        ours = mf.simulate(**given, engine=engine, notice=said.append)
        assert len(said) == 1
        assert said[0].startswith("engine ")
        torch.testing.assert_close(ours.params, mf.simulate(**given, engine="plain").params, rtol=1e-4, atol=1e-5)

    def test_unused_parameters_stay_as_they_are(self, digits):
        model = Unused()
        ours = mf.simulate(**{**digits, "model": model}, rounds=1, engine="plain")
        spare = torch.cat([p.detach().flatten() for p in model.spare.parameters()])
        assert torch.equal(ours.params[-len(spare) :], spare)

    @pytest.mark.parametrize("where", ["__init__", "train", "outputs"])
    def test_whatever_it_raises(self, digits, monkeypatch, where):
        def odd(*given, **named):
            raise KeyError("an odd one")

        monkeypatch.setattr(BatchedCohort, where, odd)
        said = []
        mf.simulate(**digits, rounds=1, engine="batched", notice=said.append)
        assert len(said) == 1
        assert said[0].startswith("engine plain: ")
        assert "an odd one" in said[0]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
    def test_but_not_an_interrupt_or_want_of_memory(self, digits, monkeypatch, error):
        def stop(*given, **named):
            raise error("stop")

        monkeypatch.setattr(BatchedCohort, "train", stop)
        with pytest.raises(error):
            mf.simulate(**digits, rounds=1, engine="batched")
