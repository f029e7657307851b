"""Values of the wrong type raise a `UsageError` with a one-line message in every public function."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.algorithms.client_memory import Budget
from mimicfl.clients.losses import as_loss
from mimicfl.clients.lr import schedule
from mimicfl.clients.params import Workspace, load
from mimicfl.errors import shown
from mimicfl.problem import find_device


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __array__(self, *_, **__):
        raise RuntimeError("no array")


# Invalid for every argument below: not a usable number, name or array.
INVALID = [float("nan"), 10**5000, b"", b"ab", {}, {"a": 1}, object(), Unprintable(), [[1], [1, 2]], 1j, np.array([None])]
INVALID += [torch.zeros(2, device="meta"), torch.zeros(2).to_sparse(), np.datetime64("2020-01-01")]


@functools.cache
def digits():
    return mf.datasets.load("digits")


CALLS = {
    "epochs": lambda wrong: mf.LocalSGD(epochs=wrong),
    "steps": lambda wrong: mf.LocalSGD(steps=wrong),
    "batch_size": lambda wrong: mf.LocalSGD(batch_size=wrong),
    "lr": lambda wrong: mf.LocalSGD(lr=wrong),
    "momentum": lambda wrong: mf.LocalSGD(momentum=wrong),
    "clip_norm": lambda wrong: mf.LocalSGD(clip_norm=wrong),
    "rate": lambda wrong: schedule(lambda t: wrong)(0, 1),
    "decay": lambda wrong: mf.lr.geometric(0.1, wrong),
    "K": lambda wrong: mf.lr.theory(c=1, K=wrong),
    "nu": lambda wrong: mf.lr.theory(c=1, nu=wrong),
    "layer": lambda wrong: mf.models.MLP(wrong, 2),
    "inputs": lambda wrong: mf.models.Logistic(wrong, 2),
    "bias": lambda wrong: mf.models.Logistic(2, 2, bias=wrong),
    "channels": lambda wrong: mf.models.LeNet(channels=wrong),
    "dropout": lambda wrong: mf.models.VGG11(dropout=wrong),
    "model": lambda wrong: mf.models.build(wrong, digits()),
    "data": lambda wrong: mf.models.build("mlp", wrong),
    "seed": lambda wrong: mf.models.build("mlp", digits(), wrong),
    "loss": as_loss,
    "state_budget": Budget.parse,
    "device": find_device,
    "dataset": lambda wrong: mf.datasets.load(wrong),
    "path": lambda wrong: mf.datasets.load("digits", path=wrong),
    "fetch": lambda wrong: mf.datasets.load("digits", fetch=wrong),
    "dim": lambda wrong: mf.datasets.load("synthetic", dim=wrong),
    "subset": lambda wrong: digits().subset(wrong),
    "availability": av.make,
    "rounds": lambda wrong: av.schedule("always", wrong, 3),
    "p": lambda wrong: av.Static(wrong),
    "classes": lambda wrong: av.LabelCorrelated([wrong]),
    "phase": lambda wrong: av.Bounded(phase=wrong),
    "matrix": lambda wrong: av.Explicit(wrong),
    "warm_start": lambda wrong: av.schedule(av.Always(warm_start=wrong), 3, 3),
}


@pytest.mark.parametrize("call", CALLS)
def test_invalid_values_raise_a_one_line_usage_error(call):
    for wrong in INVALID:
        with pytest.raises(mf.UsageError) as raised:
            CALLS[call](wrong)
        assert "\n" not in str(raised.value), shown(wrong)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("rate", [True, np.bool_(True), lambda t: True, lambda t: "0.1"])
def test_bools_and_strings_are_not_learning_rates(rate):
    with pytest.raises(mf.UsageError, match="learning rate"):
        schedule(rate)(0, 1)
    if not callable(rate):
        with pytest.raises(mf.UsageError, match="learning rate"):
            mf.LocalSGD(lr=rate)


@pytest.mark.parametrize("budget", [None, 3, 0.5, True])
def test_state_budget_must_be_a_string(quadratic, budget):
    with pytest.raises(mf.UsageError, match="state_budget must be a string"):
        mf.simulate(**quadratic, rounds=1, state_budget=budget)


def test_models_without_usable_weights_raise_usage_error(quadratic):
    uncopyable = nn.Linear(5, 1)
    uncopyable.extra = uncopyable.weight * 2  # torch cannot deep-copy a tensor that is not a leaf
    for model, words in (
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), "no shape yet.*first"),
        (nn.Linear(5, 1, device="meta"), "meta device"),
        (nn.Linear(5, 1, dtype=torch.complex64), "complex"),
        (uncopyable, "cannot be copied"),
    ):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**{**quadratic, "model": model}, rounds=1)
        with pytest.raises(mf.UsageError, match=words):
            Workspace(model, torch.device("cpu"))


def test_loading_a_vector_of_another_model_raises_usage_error():
    with pytest.raises(mf.UsageError, match="another model"):
        load(nn.Linear(2, 2), torch.zeros(5))


def test_loss_must_be_an_instance():
    with pytest.raises(mf.UsageError, match=r"pass an instance, CrossEntropyLoss\(\)"):
        as_loss(nn.CrossEntropyLoss)


def test_misspelled_dataset_option_raises_usage_error():
    with pytest.raises(mf.UsageError, match="did you mean 'heterogeneity'"):
        mf.datasets.load("synthetic", heterogenity=0.0)
    assert len(mf.datasets.load("digits", num_clients=3, seed=1).x_train) == 1442  # every run passes these two


def test_list_of_epochs_must_not_be_empty():
    with pytest.raises(mf.UsageError, match="epochs must be"):
        mf.LocalSGD(epochs=[])


def test_model_too_large_for_memory_raises_usage_error(monkeypatch):
    monkeypatch.setattr(
        mf.models.MODELS, "factories", {"huge": lambda: torch.empty(10**18), "broken": lambda: nn.Linear(2, 2)(torch.zeros(3))}
    )
    with pytest.raises(mf.UsageError, match="memory"):
        mf.models.build("huge", digits())
    with pytest.raises(RuntimeError, match="shapes"):  # an error in the user's code is raised unchanged
        mf.models.build("broken", digits())
