"""A report shows the title and the colour of a plugin's algorithm without loading the plugin."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.algorithms import ALGORITHMS
from mimicfl.report import styles, summary
from mimicfl.report.report import write_report


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A finished run of a custom algorithm, which is not registered any more."""
    with monkeypatch.context() as patch:
        patch.setattr(ALGORITHMS, "factories", dict(ALGORITHMS.factories))

        @mf.register("mixed-start")
        class MixedStart(mf.FedAvg):
            title, color, dashed = "Mixed start", "#00798c", True

        mf.run(mf.Experiment(algorithm="mixed-start", rounds=2, epochs=1), tmp_path / "run")
    monkeypatch.setattr(styles, "_REMEMBERED", {})
    return tmp_path / "run"


def test_title_and_line_are_kept_with_the_run(mixed):
    [group] = write_report([mixed]).groups
    assert (group.label, group.color) == ("Mixed start", "#00798c")
    assert group.dash[1]
    assert "Mixed start ends at" in (mixed / "report.html").read_text()


def test_a_colour_that_is_none_is_not_used():
    history = mf.History([], None, 1, config={"algorithm": "odd"}, shown_as={"title": "Odd\u202e", "color": '#fff"><script>', "dashed": 0})
    [group] = summary.group([history])
    assert (group.label, group.color) == ("Odd\\u202e", styles.SPARE[0])


def test_what_is_declared_need_not_be_json(tmp_path, monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "factories", dict(ALGORITHMS.factories))

    @mf.register("of-numpy")
    class OfNumpy(mf.FedAvg):
        dashed, color = np.bool_(True), None

    mf.run(mf.Experiment(algorithm="of-numpy", rounds=1, epochs=1), tmp_path / "run")
    assert mf.read(tmp_path / "run").shown_as == {"title": "OfNumpy", "color": "", "dashed": True, "emphasized": False}


def test_a_title_that_is_missing_is_the_name(monkeypatch):
    monkeypatch.setattr(styles, "_REMEMBERED", {})
    [group] = summary.group([mf.History([], None, 1, config={"algorithm": "odd"}, shown_as={"color": "#00798c"})])
    assert (group.label, group.color) == ("odd", "#00798c")
