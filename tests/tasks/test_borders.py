"""Metrics and tasks where they are easy to get wrong: ties, ignored labels, half precision, shapes that only seem to fit."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.tasks import ranking
from tests.tasks.test_metrics import measured


def area(scores, positive):
    """The share of pairs of a positive and a negative target that are ranked correctly; None without such a pair."""
    pairs = list(itertools.product(scores[positive].tolist(), scores[~positive].tolist()))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else None


class TestAUROC:
    @pytest.mark.parametrize("seed", range(6))
    def test_equals_a_count_of_pairs(self, seed):
        """With ties, scores of a narrow range, ignored targets and classes that never occur."""
        rng = np.random.default_rng(seed)
        n, classes = int(rng.integers(1, 30)), int(rng.integers(3, 6))
        output = torch.from_numpy((4 + 1e-3 * rng.integers(-3, 4, (n, classes, 2))).astype(np.float32))
        target = torch.from_numpy(rng.integers(0, classes - 1, (n, 2)))
        target[torch.from_numpy(rng.random((n, 2)) < 0.2)] = -100
        kept, logp = target >= 0, output.double().log_softmax(dim=1).movedim(1, 2)
        areas = [area(logp[kept][:, c], target[kept] == c) for c in range(classes)]
        known = [each for each in areas if each is not None]
        for size in (1, 7, n):
            found = measured(mf.tasks.Classification(["auroc"]), output, target, size).metrics["test_auroc"]
            assert found == (pytest.approx(np.mean(known), rel=1e-12) if known else None)

    def test_both_zeros_are_one_score(self):
        output, target = torch.tensor([[0.0], [-0.0]]), torch.tensor([1, 0])
        assert measured(mf.tasks.Classification(["auroc"]), output, target).metrics["test_auroc"] == 0.5

    def test_confident_predictions_differ(self):
        """The probabilities of class 0 are 1 in float32, but not equal."""
        output = torch.tensor([[30.0, 0, 0], [29.0, 0, 0], [28.0, 0, 0]])
        found = measured(mf.tasks.Classification(["auroc"]), output, torch.tensor([0, 0, 1])).metrics["test_auroc"]
        assert found == 1.0

    @pytest.mark.parametrize("size", [1, 10, 64])
    def test_many_scores_are_counted_in_bins_whatever_the_batches(self, monkeypatch, size):
        torch.manual_seed(0)
        output, target = torch.randn(64, 3), torch.randint(0, 3, (64,))
        task = mf.tasks.Classification(["auroc"])
        exact = measured(task, output, target).metrics["test_auroc"]
        monkeypatch.setattr(ranking, "MOST_SCORES", 100)
        halves = measured(task, output, target, 32).metrics["test_auroc"]
        found = measured(task, output, target, size).metrics["test_auroc"]
        assert found == pytest.approx(exact if size == 64 else halves, rel=1e-12)
        assert halves == pytest.approx(exact, abs=0.01)


def run(model, x, y, **options):
    local = mf.LocalSGD(steps=1, batch_size=None, lr=1e-6)
    options = {"split": [range(len(x))], "rounds": 1, "local": local, "engine": "plain"} | options
    y_test = options.pop("y_test", y)
    return mf.simulate(model, mf.Data(x, y, x, y_test), **options)


class TestHalfPrecision:
    @pytest.mark.parametrize("task", ["regression", None])
    def test_real_targets_are_not_rounded(self, task):
        torch.manual_seed(0)
        x, y, model = torch.randn(30, 3), 1000 + torch.randn(30, 1), nn.Linear(3, 1).bfloat16()
        nn.init.constant_(model.bias, 1000.0)
        history = run(model, x, y, task=task)
        exact = 0.5 * float((history.model()(x.bfloat16()).detach().double() - y.double()).square().mean())
        assert history.rows[-1]["test_loss"] == pytest.approx(exact, rel=1e-5)

    @pytest.mark.parametrize("task", ["classification", None])
    def test_outputs_of_any_model_are_read_in_float32(self, task):
        class Rounded(nn.Linear):
            def forward(self, x):
                return 10 * super().forward(x).bfloat16()

        torch.manual_seed(0)
        x, y, model = torch.randn(30, 3), torch.arange(30) % 4, Rounded(3, 4)
        history = run(model, x, y, task=task)
        with torch.no_grad():
            exact = float(F.cross_entropy(history.model()(x).double(), y))
        assert history.rows[-1]["test_loss"] == pytest.approx(exact, rel=1e-6)


class Shaped(nn.Linear):
    """Six outputs as [B, 2, 3]."""

    def forward(self, x):
        return super().forward(x).view(-1, 2, 3)


@pytest.mark.parametrize(
    ("y", "options"),
    [
        (torch.randn(20, 3, 2), {"task": "regression"}),
        (torch.randn(20, 3, 2), {"loss": "mse"}),
        ((torch.randn(20, 3, 2) > 0).long(), {"task": "classification"}),
    ],
)
def test_targets_in_another_order_are_refused(y, options):
    x = torch.randn(20, 6)
    with pytest.raises(mf.UsageError, match="one output per"):
        run(Shaped(6, 6), x, y, **options)
    run(Shaped(6, 6), x, y.reshape(20, 6), **options)


SEGMENTS = mf.tasks.Classification(["accuracy", "perplexity"], ignore_index=255)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "options",
    [
        {"loss": nn.MSELoss()},
        {"loss": lambda o, t: (o - t).abs().mean()},
        {"task": mf.tasks.Custom(lambda o, t: (o - t).square().reshape(len(o), -1).mean(1))},
    ],
)
def test_a_loss_that_broadcasts_is_refused(options):
    """[B, 1] minus [B] is [B, B]."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20)
    with pytest.raises(mf.UsageError, match="every output with every target"):
        run(nn.Linear(3, 1), x, y, **options)
    run(nn.Linear(3, 1), x, y[:, None], **options)
    run(nn.Linear(3, 1), x, y, loss="mse")


class TestIgnored:
    @pytest.mark.parametrize("options", [{"task": SEGMENTS}, {"loss": nn.CrossEntropyLoss(ignore_index=255)}])
    def test_an_ignored_label_needs_no_output(self, options):
        """As in segmentation, where 255 marks pixels without a class."""
        torch.manual_seed(0)
        x, y = torch.randn(20, 3, 4, 4), torch.randint(0, 2, (20, 4, 4))
        y[:, 0] = 255
        history = run(nn.Conv2d(3, 2, 1), x, y, **options)
        with torch.no_grad():
            output = history.model()(x)
        last, kept = history.rows[-1], y != 255
        loss = float(F.cross_entropy(output, y, ignore_index=255))
        assert last["test_loss"] == pytest.approx(loss, rel=1e-5)
        assert last["test_accuracy"] == pytest.approx(float((output.argmax(1) == y)[kept].double().mean()))
        if "task" in options:
            assert last["test_perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)

    @pytest.mark.parametrize("task", ["classification", None])
    def test_without_any_test_target_that_counts_nothing_is_measured(self, task):
        x, y = torch.randn(20, 3, 4), torch.randint(0, 2, (20, 4))
        with pytest.raises(mf.UsageError, match="no test target counts"):
            run(nn.Conv1d(3, 2, 1), x, y, y_test=torch.full((20, 4), -100), task=task)

    @pytest.mark.parametrize("task", ["classification", None])
    def test_the_first_samples_may_have_no_targets(self, task):
        x, y = torch.randn(20, 3, 4), torch.randint(0, 2, (20, 4))
        y[:5] = -100
        assert run(nn.Conv1d(3, 2, 1), x, y, task=task).rows[-1]["test_loss"] > 0

    def test_a_client_without_targets_has_no_accuracy(self, tmp_path):
        x, y = torch.randn(20, 3, 4), torch.randint(0, 2, (20, 4))
        y[10:] = -100
        history = run(nn.Conv1d(3, 2, 1), x, y, task="classification", split=[range(10), range(10, 20)], out=tmp_path / "run")
        assert history.client_accuracy[0] is not None
        assert history.client_accuracy[1] is None
        assert mf.read(tmp_path / "run").client_accuracy == history.client_accuracy
