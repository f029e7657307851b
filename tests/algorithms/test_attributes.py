"""Attributes that an algorithm changes while it runs are refused: a checkpoint would not hold them."""

import functools

import pytest
import torch

import mimicfl as mf

LOCAL = mf.LocalSGD(steps=1)


class Counter(mf.Algorithm[mf.State]):
    """FedAvg whose server step shrinks by a count that is kept on the object."""

    def init(self, w, num_clients):
        self.k = 0
        return mf.State(w)

    def aggregate(self, state, active, g, step):
        self.k += 1
        state.w = state.w - step.eta / self.k * step.mean(g)


class Begins(Counter):
    """Changes nothing before its fourth round."""

    def aggregate(self, state, active, g, step):
        self.k += step.t > 2


class Draws(mf.FedAvg):
    def init(self, w, num_clients):
        self.noise = torch.Generator().manual_seed(0)
        return mf.State(w)

    def aggregate(self, state, active, g, step):
        state.w = state.w + torch.randn(state.w.shape, generator=self.noise)


class Stashes(mf.Algorithm[mf.State]):
    """Keeps a vector of its instructions on the object: runs of a comparison that share the object would exchange theirs."""

    def instructions(self, state, active):
        self.start = state.w / 2
        return mf.Instructions(start=self.start)

    def aggregate(self, state, active, g, step):
        state.w = self.start - step.mean(g)


class Sizes(mf.Algorithm[mf.State]):
    """What `init` sets and what follows from it may be kept on the object."""

    def init(self, w, num_clients):
        self.num_clients, self.sizes = num_clients, [1, 2]
        return mf.State(w)

    @functools.cached_property
    def scale(self):
        return len(self.sizes) / self.num_clients

    def aggregate(self, state, active, g, step):
        state.w = state.w - self.scale * step.mean(g)


@pytest.mark.parametrize(("algorithm", "name"), [(Counter(), "k"), (Begins(), "k"), (Draws(), "noise"), (Stashes(), "start")])
@pytest.mark.parametrize("kept", [True, False])
def test_a_changed_attribute_is_refused(digits, tmp_path, algorithm, name, kept):
    with pytest.raises(mf.UsageError, match=rf"{type(algorithm).__name__} changed self\.{name} .*in the state"):
        mf.simulate(**digits, algorithm=algorithm, rounds=5, local=LOCAL, out=tmp_path / "run" if kept else None)


def test_attributes_set_in_init_are_accepted(digits, tmp_path):
    whole = mf.simulate(**digits, algorithm=Sizes(), rounds=4, local=LOCAL)
    mf.simulate(**digits, algorithm=Sizes(), rounds=2, local=LOCAL, out=tmp_path / "run")
    extended = mf.simulate(**digits, algorithm=Sizes(), rounds=4, local=LOCAL, out=tmp_path / "run")
    assert torch.equal(whole.params, extended.params)


def test_a_comparison_refuses_it_too():
    with pytest.raises(mf.UsageError, match=r"changed self\.k"):
        mf.compare(mf.Experiment(rounds=2, epochs=1), ["fedavg", Counter()], seeds=2)


def test_a_federation_refuses_it_too():
    pytest.importorskip("flwr")
    import mimicfl.flower as mff
    from tests.flower.problems import LOCAL as OF_CLIENTS
    from tests.flower.problems import N, federate

    strategy = mff.Federated(Counter(), fraction_evaluate=0.0, lr=OF_CLIENTS.lr, num_clients=N, wait_for=N)
    with pytest.raises(mf.UsageError, match=r"changed self\.k"):
        federate(strategy, 2)
