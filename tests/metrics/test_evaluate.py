"""Accuracy over tokens, classes and clients, with ignored targets."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.metrics.evaluate import client_accuracy, score

V, L = 5, 7


class Tagger(nn.Module):
    """One class per token; the classes second, as torch's cross-entropy expects them, or last."""

    def __init__(self, last=False):
        super().__init__()
        self.table, self.last = nn.Embedding(V, V), last
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(V, V, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        out = self.table(x)
        return out if self.last else out.transpose(1, 2)


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    x = rng.integers(0, V, (40, L))
    y = np.where(rng.random((40, L)) < 0.6, x, rng.integers(0, V, (40, L)))
    return x, y


def reference(model, x, y, ignored):
    """Reference implementation: overall accuracy, accuracy by class, and (label, hit, sample) of every target."""
    with torch.no_grad():
        predicted = model(torch.as_tensor(x)).argmax(1).numpy()
    hits = [(label, p == label, i) for i in range(len(y)) for p, label in zip(predicted[i], y[i], strict=True) if label != ignored]
    classes = [[hit for label, hit, _ in hits if label == c] for c in range(V)]
    return np.mean([hit for _, hit, _ in hits]), [float(np.mean(c)) if c else None for c in classes], hits


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        ("cross-entropy", None),
        ("cross-entropy", -100),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
        (functools.partial(F.cross_entropy, ignore_index=3), 3),
    ],
)
def test_token_accuracy_skips_ignored_tokens(tokens, loss, ignored):
    x, y = tokens
    if ignored == -100:
        y = np.where(np.random.default_rng(1).random(y.shape) < 0.4, -100, y)
    split = [np.arange(0, 10), np.arange(10, 40)]
    history = mf.simulate(Tagger(), mf.Data(x, y, x, y), split, rounds=1, loss=loss, local=mf.LocalSGD(lr=0.1))
    accuracy, by_class, hits = reference(history.model(), x, y, ignored)
    last = history.rows[-1]
    assert last["test_accuracy"] == pytest.approx(accuracy)
    assert last["class_accuracy"] == [None if value is None else pytest.approx(value) for value in by_class]
    for client, part in enumerate(split):
        assert history.client_accuracy[client] == pytest.approx(np.mean([hit for _, hit, i in hits if i in part]))


def test_ignored_labels_do_not_count():
    outputs = torch.eye(3)[[0, 1, 1, 2]]
    found = score(outputs, torch.tensor([0, 1, 2, 2]), nn.CrossEntropyLoss(ignore_index=2), 3)
    assert (found.accuracy, found.class_accuracy) == (1.0, [1.0, 1.0, None])
    assert client_accuracy(found, [np.array([0, 1, 2]), np.array([3])]) == [1.0, None]  # client 1 has no score
    assert score(outputs, torch.tensor([0, 1, 2, 2]), as_loss("cross-entropy"), 3).accuracy == 0.75


@pytest.mark.parametrize("loss", ["cross-entropy", lambda output, y: F.cross_entropy(output.transpose(1, 2), y)])
def test_classes_in_the_last_dimension_are_refused(tokens, loss):
    x, y = tokens
    with pytest.raises(mf.UsageError, match=r"second dimension.*transpose\(1, 2\)"):
        mf.simulate(Tagger(last=True), mf.Data(x, y, x, y), [range(40)], rounds=1, loss=loss)


@pytest.mark.parametrize(
    ("outputs", "labels", "loss", "words"),
    [
        (4, np.zeros((6, 4), int) + np.arange(4) % 2, F.multilabel_soft_margin_loss, "as real numbers"),
        (1, np.zeros(6, int), None, "at least two"),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_refused(outputs, labels, loss, words):
    x = np.zeros((6, 3), np.float32)
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(nn.Linear(3, outputs), mf.Data(x, labels, x, labels), [range(6)], rounds=1, loss=loss)
