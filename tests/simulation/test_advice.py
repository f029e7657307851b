"""Messages say what is wrong and what to do about it."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf

LOCAL = mf.LocalSGD(steps=1, lr=1e-9)


class Picky(nn.Linear):
    """Gives no number for samples without any value, as attention over an empty mask does."""

    def forward(self, x):
        return super().forward(x / x.abs().sum(dim=1, keepdim=True))


def test_a_loss_that_is_not_finite_with_the_initial_model():
    x, y = torch.rand(40, 4), torch.arange(40) % 2
    x[25] = 0
    split = [np.arange(20), np.arange(20, 40)]
    with pytest.raises(mf.Diverged, match=r"client 1 .*the loss on this client's samples is nan with the initial model") as caught:
        mf.simulate(Picky(4, 2), mf.Data(x, y, x[:20], y[:20]), split, rounds=2, local=mf.LocalSGD(epochs=1, lr=1e-9))
    assert "learning rate" not in str(caught.value)


def test_a_rate_that_is_too_large_is_still_named(digits):
    with pytest.raises(mf.Diverged, match="lower the learning rate"):
        mf.simulate(**digits, rounds=3, local=mf.LocalSGD(epochs=2, lr=1e30))


def test_a_rate_that_is_too_large_is_named_where_it_took_several_rounds():
    """The model has then grown so much that the loss is not finite before a step, either."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    split, data = [np.arange(20), np.arange(20, 40)], mf.Data(x, x[:, :1], x, x[:, :1])
    with pytest.raises(mf.Diverged, match=r"in round [1-9].*: lower the learning rate") as caught:
        mf.simulate(nn.Linear(3, 1), data, split, rounds=100, eval_every=100, loss=nn.MSELoss(), local=mf.LocalSGD(steps=1, lr=1e3))
    assert "samples" not in str(caught.value)


def test_the_optimizer_is_named(digits):
    with pytest.warns(UserWarning, match="which they are not with adamw; use SGD"):
        mf.simulate(**digits, algorithm="scaffold", rounds=1, local=mf.Local(optimizer="adamw", lr=1e-3, steps=1))


def test_objects_instead_of_names():
    with pytest.raises(mf.UsageError, match=r"model must be a string, .*register it under a name, or pass the object to mf\.simulate"):
        mf.compare(mf.Experiment(model=nn.Linear(2, 2)), ["fedavg"])


def test_a_matrix_instead_of_a_pattern(digits):
    for matrix in ([[1] * 30], np.ones((1, 30), dtype=bool)):
        with pytest.raises(mf.UsageError, match=r"mf\.availability\.Explicit\(matrix\)"):
            mf.simulate(**digits, availability=matrix, rounds=1, local=LOCAL)


def test_a_warning_shows_the_line_of_the_caller():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mf.run(mf.Experiment(rounds=1, epochs=1, engine="plain"))
        mf.partition.shards(mf.datasets.load("digits").y_train, 30, 2)
    assert {warning.filename for warning in found if "samples" in str(warning.message)} == {__file__}
    assert len(found) == 2
