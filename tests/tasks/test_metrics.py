"""Metrics against naive counts, in whole and in slices, and what each task reads."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.metrics.evaluate import Tally

RNG = np.random.default_rng(0)
N, LENGTH, WORDS = 37, 4, 5
LOGITS = torch.from_numpy(RNG.normal(size=(N, LENGTH, WORDS)))
TOKENS = torch.from_numpy(np.where(RNG.random((N, LENGTH)) < 0.3, -100, RNG.integers(0, WORDS, (N, LENGTH))))
EVERY = ["accuracy", "balanced-accuracy", "macro-f1", "perplexity", "auroc"]


def measured(task, output, target, size=N):
    tally = Tally(task)
    for begin in range(0, len(output), size):
        tally.add(output[begin : begin + size], target[begin : begin + size])
    return tally.score()


def pairs():
    """Every counted position: its scores and its label."""
    for i, k in itertools.product(range(N), range(LENGTH)):
        if int(TOKENS[i, k]) >= 0:
            yield LOGITS[i, k], int(TOKENS[i, k])


def naive():
    """The metrics of token prediction, counted one position after another."""
    counted = list(pairs())
    guesses = [(int(scores.argmax()), label) for scores, label in counted]
    recall = [[g == c for g, label in guesses if label == c] for c in range(WORDS)]
    f1 = []
    for c in range(WORDS):
        right = sum(g == c == label for g, label in guesses)
        f1.append(2 * right / (sum(g == c for g, _ in guesses) + sum(label == c for _, label in guesses)))
    logs = [float(scores[label] - torch.logsumexp(scores, 0)) for scores, label in counted]
    areas = []
    for c in range(WORDS):
        logp = [(float(scores.log_softmax(0)[c]), label == c) for scores, label in counted]
        wins = [(a > b) + 0.5 * (a == b) for (a, x), (b, y) in itertools.product(logp, logp) if x and not y]
        areas.append(sum(wins) / len(wins))
    return {
        "test_accuracy": sum(g == label for g, label in guesses) / len(guesses),
        "test_balanced_accuracy": float(np.mean([np.mean(each) for each in recall])),
        "test_macro_f1": float(np.mean(f1)),
        "test_perplexity": math.exp(-sum(logs) / len(logs)),
        "test_auroc": float(np.mean(areas)),
    }


class TestTokens:
    @pytest.mark.parametrize("words_last", [True, False])
    def test_metrics_equal_a_naive_count(self, words_last):
        output = LOGITS if words_last else LOGITS.transpose(1, 2)
        found = measured(mf.tasks.TokenPrediction(EVERY), output, TOKENS)
        ours = found.metrics | {"test_accuracy": found.accuracy}
        expected = naive()
        for key, value in expected.items():
            assert ours[key] == pytest.approx(value, rel=1e-12), key
        assert found.loss == pytest.approx(math.log(expected["test_perplexity"]), rel=1e-12)

    def test_loss_equals_torch(self):
        loss = mf.tasks.TokenPrediction()(LOGITS, TOKENS)
        assert float(loss) == pytest.approx(float(F.cross_entropy(LOGITS.transpose(1, 2), TOKENS)), rel=1e-12)

    def test_another_ignored_label(self):
        found = mf.tasks.TokenPrediction(ignore_index=2)(LOGITS, TOKENS)
        kept = torch.where(TOKENS == 2, -100, TOKENS)
        assert float(found) == pytest.approx(float(mf.tasks.TokenPrediction()(LOGITS, kept)), rel=1e-12)

    def test_a_batch_without_targets_has_loss_zero_and_a_gradient_of_zero(self):
        output = LOGITS[:2].clone().requires_grad_()
        loss = mf.tasks.TokenPrediction()(output, torch.full((2, LENGTH), -100))
        loss.backward()
        assert loss.item() == 0
        assert not bool(output.grad.any())


@pytest.mark.parametrize("size", [1, 5, 36])
def test_slices_give_the_same_as_the_whole(size):
    real, labels = LOGITS[:, 0, :2], (LOGITS[:, 1] > 0.5).long()
    top = mf.tasks.Metric("top2", lambda o, t: (o.topk(2, dim=1).indices == t[:, None]).any(dim=1).double())
    for task, output, target in [
        (mf.tasks.TokenPrediction(EVERY), LOGITS, TOKENS),
        (mf.tasks.Classification([*EVERY, top]), LOGITS[:, 0], TOKENS[:, 0].clamp_min(0)),
        (mf.tasks.Regression(), real, real * 2 + 1),
        (mf.tasks.MultiLabel(), LOGITS[:, 0], labels),
    ]:
        whole, sliced = (measured(task, output, target, n) for n in (N, size))
        assert sliced.loss == pytest.approx(whole.loss, rel=1e-12)
        assert sliced.metrics == pytest.approx(whole.metrics, rel=1e-12)
        assert (sliced.accuracy, sliced.class_accuracy) == (whole.accuracy, whole.class_accuracy)


class TestOthers:
    def test_classification_equals_the_loss_and_the_columns_without_a_task(self, digits):
        given = {**digits, "rounds": 2, "algorithm": "fedavg", "local": mf.LocalSGD(steps=2)}
        without, task = mf.simulate(**given), mf.simulate(**given, task="classification")
        assert torch.allclose(without.params, task.params, rtol=1e-5, atol=1e-6)
        for a, b in zip(without.rows, task.rows, strict=True):
            assert b["test_loss"] == pytest.approx(a["test_loss"], rel=1e-5)
            assert b["test_accuracy"] == pytest.approx(a["test_accuracy"], abs=0.01)
            assert b["class_accuracy"] == pytest.approx(a["class_accuracy"], abs=0.05)
            assert a.keys() == b.keys()
        assert task.client_accuracy == pytest.approx(without.client_accuracy, abs=0.02)

    def test_one_output_is_the_score_of_the_second_class(self):
        output, target = LOGITS[:, 0, :1], (LOGITS[:, 1, 0] > 0).long()
        found = measured(mf.tasks.Classification(["accuracy", "auroc"]), output, target)
        scores = output[:, 0]
        wins = [float(a > b) + 0.5 * float(a == b) for a, b in itertools.product(scores[target == 1], scores[target == 0])]
        assert found.loss == pytest.approx(float(F.binary_cross_entropy_with_logits(output[:, 0], target.double())), rel=1e-12)
        assert found.accuracy == float(((output[:, 0] > 0).long() == target).double().mean())
        assert found.metrics["test_auroc"] == pytest.approx(np.mean(wins), rel=1e-12)

    def test_regression(self):
        output, target = LOGITS[:, 0, :2], LOGITS[:, 1, :2]
        found = measured(mf.tasks.Regression(), output, target)
        squared = float((output - target).square().mean())
        assert (found.loss, found.metrics["test_rmse"]) == pytest.approx((squared / 2, squared**0.5), rel=1e-12)

    def test_multi_label_equals_a_count_per_label(self):
        output, target = LOGITS[:, 0], (LOGITS[:, 1] + LOGITS[:, 0] > 0.5).long()
        found = measured(mf.tasks.MultiLabel(["macro-f1", "balanced-accuracy", "accuracy"]), output, target)
        f1, balanced = [], []
        for k in range(WORDS):
            guess, truth = (output[:, k] > 0).tolist(), (target[:, k] == 1).tolist()
            right = sum(g and t for g, t in zip(guess, truth, strict=True))
            f1.append(2 * right / (sum(guess) + sum(truth)))
            balanced += [np.mean([g == t for g, t in zip(guess, truth, strict=True) if t is side]) for side in (True, False)]
        assert found.metrics["test_macro_f1"] == pytest.approx(np.mean(f1), rel=1e-12)
        assert found.metrics["test_balanced_accuracy"] == pytest.approx(np.mean(balanced), rel=1e-12)
        assert found.accuracy == pytest.approx(float(((output > 0) == (target == 1)).double().mean()))
        assert found.loss == pytest.approx(float(F.binary_cross_entropy_with_logits(output, target.double())), rel=1e-12)

    def test_custom_loss_and_metric_with_a_value_of_their_sums(self):
        def squares(o, t):
            return torch.stack([(o - t).square().sum(dim=1), t.square().sum(dim=1)], dim=1)

        r2 = mf.tasks.Metric("r2", squares, lambda sums: float(1 - sums[0] / sums[1]))
        huber = mf.tasks.Custom(lambda o, t: F.huber_loss(o, t, reduction="none").mean(dim=1), [r2])
        output, target = LOGITS[:, 0], LOGITS[:, 1]
        found = measured(huber, output, target, 10)
        assert found.loss == pytest.approx(float(F.huber_loss(output, target)), rel=1e-12)
        assert found.metrics["test_r2"] == pytest.approx(1 - float((output - target).square().sum() / target.square().sum()), rel=1e-12)

    def test_custom_task_with_weights_and_metrics_by_name(self):
        weights = torch.linspace(0.1, 2, WORDS, dtype=torch.float64)

        def loss(o, t):
            return F.cross_entropy(o, t, weight=weights, reduction="none"), weights[t]

        task = mf.tasks.Custom(loss, ["accuracy", "macro-f1"], read_as="classification")
        output, target = LOGITS[:, 0], TOKENS[:, 0].clamp_min(0)
        assert float(task(output, target)) == pytest.approx(float(F.cross_entropy(output, target, weight=weights)), rel=1e-12)
        assert measured(task, output, target).accuracy == measured(mf.tasks.Classification(), output, target).accuracy

    def test_evaluation_never_holds_more_than_a_slice(self, monkeypatch):
        seen = []
        monkeypatch.setattr(
            Tally, "add", lambda self, output, target, add=Tally.add: seen.append(output.numel()) or add(self, output, target)
        )
        monkeypatch.setattr("mimicfl.problem.problem.MOST_OUTPUTS", 3 * LENGTH * WORDS)
        model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
        y = TOKENS.clamp_min(-100)
        data = mf.Data(y.clamp_min(0), y, y.clamp_min(0), y, task="token-prediction")
        mf.simulate(model, data, [np.arange(N)], rounds=1)
        assert max(seen) == 3 * LENGTH * WORDS
        assert sum(seen) == 2 * N * LENGTH * WORDS  # the test samples, and the clients' own samples at the end


DATA = {"x_train": LOGITS[:, 0], "x_test": LOGITS[:, 0]}
TWO, FLOATS = torch.arange(N) % 2, LOGITS[:, 0, :2]


@pytest.mark.parametrize(
    ("targets", "outputs", "options", "words"),
    [
        (TWO, 2, {"task": "translation"}, "task 'translation' is unknown"),
        (TWO, 2, {"task": 3}, "task must be a name"),
        (TWO, 2, {"task": "regression"}, "needs real targets"),
        (FLOATS, 2, {"task": "classification"}, "needs classes"),
        (TWO, 2, {"task": "token-prediction"}, r"labels \[samples, positions\]"),
        (TWO * 3, 2, {"task": "classification"}, "the largest label is 3"),
        (FLOATS, 2, {"task": "multi-label"}, "0 or 1"),
        (TWO, 2, {"task": "multi-label"}, r"\[samples, labels\]"),
        (FLOATS, 3, {"task": "regression"}, "one output per target"),
        (TWO, 2, {"task": "classification", "loss": "mse"}, "not both"),
        (TWO, 2, {"metrics": ["accurracy"]}, "did you mean 'accuracy'"),
        (TWO, 2, {"metrics": ["accuracy", "accuracy"]}, "given twice"),
        (TWO, 2, {"metrics": [len]}, "must be a name"),
        (TWO, 2, {"metrics": 7}, "must be a list"),
        (TWO, 2, {"metrics": ["rmse"]}, "for real targets"),
        (FLOATS, 2, {"metrics": ["auroc"]}, "for classes"),
        (TWO, 2, {"metrics": [mf.tasks.Metric("mine", lambda o, t: o.sum())]}, "one number per sample"),
        (TWO, 2, {"metrics": [mf.tasks.Metric("mine", lambda o, t: 1 / 0)]}, "'mine' fails"),
        (FLOATS, 2, {"metrics": [mf.tasks.Metric("mae", lambda o, t: (o - t).abs())]}, "2 numbers per sample"),
        (TWO, 2, {"metrics": [mf.tasks.Metric("a-b", lambda o, t: o[:, 0]), mf.tasks.Metric("a_b", lambda o, t: o[:, 1])]}, "own name"),
        (TWO, 2, {"metrics": [mf.tasks.Metric("balanced_accuracy", lambda o, t: o[:, 0])]}, "built-in metric"),
        (TWO, 2, {"task": mf.tasks.Custom(lambda o, t: (o[:, 0], torch.ones(())))}, "weight of each sample"),
        (TWO, 2, {"metrics": [mf.tasks.Metric("accuracy", lambda o, t: o[:, 0])]}, "built-in metric"),
        (TWO, 2, {"task": mf.tasks.Custom(lambda o, t: o.sum())}, "loss of each sample"),
    ],
)
def test_mistakes_are_named_before_training(targets, outputs, options, words):
    data = mf.Data(**DATA, y_train=targets, y_test=targets)
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(nn.Linear(WORDS, outputs).double(), data, [np.arange(N)], rounds=1, **options)


def test_outputs_that_can_be_read_in_two_ways_are_refused():
    y = TOKENS.clamp(-100, 3)
    data = mf.Data(y.clamp_min(0), y, y.clamp_min(0), y)
    model = nn.Sequential(nn.Embedding(4, LENGTH))
    with pytest.raises(mf.UsageError, match="ambiguous"):
        mf.simulate(model, data, [np.arange(N)], rounds=1, task="token-prediction")
    mf.simulate(model, data, [np.arange(N)], rounds=1, task=mf.tasks.TokenPrediction(classes="last"))


@pytest.mark.parametrize("change", [{"metrics": ["accuracy", "macro-f1"]}, {"task": mf.tasks.Classification(ignore_index=1)}, {}])
def test_task_and_metrics_are_part_of_the_fingerprint(tmp_path, change):
    data = mf.Data(**DATA, y_train=TWO, y_test=TWO)
    given = {"model": nn.Linear(WORDS, 2).double(), "data": data, "split": [np.arange(N)], "rounds": 1, "out": tmp_path / "run"}
    mf.simulate(**given, task="classification")
    with pytest.raises(mf.UsageError, match="different run"):
        mf.simulate(**given, **change)
