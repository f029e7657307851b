"""What it costs to reach a target, with runs that end before they do."""

import pytest

import mimicfl as mf
from mimicfl.cli.main import main
from mimicfl.metrics.curves import censored_median, first_to_reach


def test_the_median_counts_runs_that_end_before():
    assert censored_median([1.0, 2.0, 9.0], []) == 2.0
    assert censored_median([1.0, 2.0], [5.0, 5.0]) == 2.0
    assert censored_median([1.0], [5.0, 5.0]) is None
    # A run that ends before an event is not at risk in it: 4/5 after 1; of three left, 2/3 after 3 and 1/3 after 4.
    assert censored_median([1.0, 3.0, 4.0], [2.0, 9.0]) == 4.0
    # Runs that reach it at the same time count together: 2 of 4, and 2 of 3 after another run has ended.
    assert censored_median([5.0, 5.0], [8.0, 9.0]) == 5.0
    assert censored_median([5.0, 5.0, 9.0], [1.0, 3.0, 8.0]) == 5.0


def test_the_first_row_to_reach_a_target():
    rows = [{"x": None}, {"x": 3.0}, {"x": 1.0}, {"x": 4.0}]
    assert first_to_reach(rows, 3.5, "x") is rows[3]
    assert first_to_reach(rows, 2.0, "x", rises=False) is rows[2]
    assert first_to_reach(rows, 5.0, "x") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    e = mf.Experiment(num_clients=6, rounds=8, epochs=1, availability="static:0.7", partition="iid", speed="100", engine="plain")
    mf.compare(e, ["fedavg", "mimic"], [0, 1, 2], out=out)
    return out


def test_the_table_agrees_with_the_histories(folder, capsys):
    runs = {name: [run for run in map(mf.read, sorted(folder.glob(f"{name}*/"))) if run.rows] for name in ("fedavg", "mimic")}
    target = sorted(run.rows[3]["test_accuracy"] for run in runs["fedavg"])[1]
    assert main(["report", str(folder), "--target", str(target)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " of 3  " in line]
    assert len(lines) == 2
    for line, histories in zip(lines, runs.values(), strict=True):
        times = [run.time_to("test_accuracy", target, "uploads") for run in histories]
        assert f"{sum(time is not None for time in times)} of 3" in line
        ends = [float(run.rows[-1]["uploads"]) for run in histories]
        median = censored_median([t for t in times if t is not None], [end for t, end in zip(times, ends, strict=True) if t is None])
        assert f"{'> ' + format(max(ends), '.4g') if median is None else format(median, '.4g')}" in line


def test_a_target_that_nobody_reaches_and_one_in_percent(folder, capsys):
    assert main(["report", str(folder), "--target", "0.999"]) == 0
    printed = capsys.readouterr().out
    assert "virtual s" in printed
    assert printed.count("0 of 3") == 2
    assert printed.count("> 8") == 4  # rounds and uploads of both
    assert main(["report", str(folder), "--target", "80"]) == 2
    assert "0.8" in capsys.readouterr().err
