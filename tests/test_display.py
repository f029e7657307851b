"""What notebooks show of histories, comparisons and patterns, and the progress bar."""

import io
import sys
import types

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import display
from mimicfl.experiments.comparison import Comparison


def history(accuracies, algorithm="fedavg"):
    rows = [
        {"round": t, "clients": [t % 3], "uploads": t + 1, "bytes_up": 1000 * (t + 1), "test_accuracy": value, "test_loss": 1.0}
        for t, value in enumerate(accuracies)
    ]
    return mf.History(rows, mf.datasets.load("digits").x_train[0].flatten(), 3, config={"algorithm": algorithm})


def test_history_shows_its_last_values_and_its_schedule():
    text = history([0.25, None, 0.75])._repr_html_()
    assert "0.75" in text
    assert "3 clients (rows), 3 rounds (columns)" in text
    assert text.count("<polyline") == 1


def test_names_are_escaped():
    text = history([0.2, 0.4], "<script>x</script>")._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in Comparison({"<script>": [history([0.2, 0.4])]})._repr_html_()


def test_comparison_shows_mean_and_spread():
    shown = Comparison({"fedavg": [history([0.1, 0.5]), history([0.1, 0.7])], "mimic": [history([0.1, 0.9])]})._repr_html_()
    assert "0.6000" in shown  # the mean of 0.5 and 0.7
    assert "0.1414" in shown  # their standard deviation
    assert shown.count("<polyline") == 2
    assert mf.MimiC.color in shown


def test_an_empty_history_is_shown():
    assert mf.History([], mf.datasets.load("digits").x_train[0], 0)._repr_html_()


def test_patterns_show_an_example_unless_they_need_labels():
    assert "tau_max" in mf.availability.Bounded(5)._repr_html_()
    assert mf.availability.LabelCorrelated([0], 0.1, 0.5)._repr_html_() is None
    given = mf.availability.Explicit(np.eye(4, 2, dtype=bool))
    assert "2 clients (rows), 4 rounds (columns); dark: available" in given._repr_html_()


@pytest.mark.slow
def test_large_schedules_stay_small():
    assert len(display.schedule_image(np.ones((5000, 3000), dtype=bool), "active")) < 200_000


ROWS = [{"round": t, "test_accuracy": 0.5} for t in range(3)]


class TestProgressBar:
    def test_a_terminal_gets_one_line(self, monkeypatch):
        out = io.StringIO()
        out.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", out)
        bar = mf.ProgressBar()
        for row in ROWS:
            bar(row, 3)
        assert out.getvalue().count("\n") == 1
        assert "3/3 rounds, test accuracy 50.0 %" in out.getvalue()

    @pytest.mark.parametrize(
        ("experiment", "row", "shown"),
        [
            ([], {"test_loss": 0.3, "test_accuracy": None, "test_rmse": 1.25}, "test RMSE 1.25"),
            ([mf.Experiment(metrics="macro-f1,accuracy")], {"test_accuracy": 0.9, "test_macro_f1": 0.75}, "test macro F1 75.0 %"),
            ([], {"test_loss": None, "test_accuracy": None}, ""),
        ],
    )
    def test_the_main_metric_of_the_task(self, experiment, row, shown):
        assert mf.ProgressBar()._words(experiment, row).rpartition(": ")[2] == shown

    def test_a_log_file_gets_nothing(self, monkeypatch):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stderr", out)
        mf.ProgressBar()(ROWS[0], 1)
        assert out.getvalue() == ""

    def test_a_notebook_gets_one_output_that_is_updated(self, monkeypatch):
        shown = []
        handle = types.SimpleNamespace(update=lambda page: shown.append(("update", page)))

        def show(page, display_id):
            shown.append(("display", page))
            return handle

        kernel = type("ZMQInteractiveShell", (), {})()
        page = types.SimpleNamespace(HTML=lambda text: text, display=show)
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel, display=page))
        bar = mf.ProgressBar()
        bar(ROWS[0], 3)
        bar(ROWS[2], 3)
        assert [kind for kind, _ in shown] == ["display", "update"]
        assert 'value="3" max="3"' in shown[-1][1]

    def test_runs_of_a_comparison_are_added_up(self, monkeypatch):
        shown = []
        bar = mf.ProgressBar()
        monkeypatch.setattr(bar, "_show", lambda rounds, of, words: shown.append((rounds, of, words)))
        for seed in (0, 1):
            bar(mf.Experiment(seed=seed, algorithm="fedavg"), ROWS[2], 3)
        assert shown[-1] == (6, 6, "fedavg, seed 1: test accuracy 50.0 %")


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5], [float("nan"), 0.5, 0.7]])
def test_charts_of_odd_values(values):
    text = display.curves([("a", "", range(len(values)), values)], "x", "y")
    assert "nan" not in text
    assert ("<polyline" in text) == (sum(value == value for value in values) >= 2)
