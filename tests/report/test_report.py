"""Tables, figures and the report page."""

import io
import json
import re

import pytest
from rich.console import Console

import mimicfl as mf
from mimicfl.metrics.history import History
from mimicfl.metrics.lock import lock_folder
from mimicfl.report import figures, html, styles, summary
from mimicfl.report.report import write_report
from mimicfl.report.spread import mean_std
from mimicfl.report.tables import lines, overview, overview_tables, table
from mimicfl.report.verdict import verdict


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    mf.compare(mf.Experiment(rounds=8, availability="static:0.2"), ["fedavg", "mimic"], [0, 1], folder)
    return folder


def history(values, algorithm="fedavg", uploads=1, **config):
    rows = []
    for t, value in enumerate(values):
        row = {"round": t, "clients": [0], "uploads": uploads * (t + 1), "bytes_up": 1e6 * (t + 1), "test_accuracy": value}
        rows.append(row | {"test_loss": 1.0, "train_loss": 1.0})
    return History(rows, None, 1, config={"algorithm": algorithm, **config})


def test_runs_are_grouped_by_algorithm_and_varied_settings():
    same = summary.group([history([0.1], seed=0), history([0.2], seed=1), history([0.3], "fedprox:mu=0.1", seed=0)])
    assert [(g.label, len(g.runs)) for g in same] == [("FedAvg", 2), ("FedProx (mu=0.1)", 1)]
    varied = summary.group([history([0.1], availability="always"), history([0.2], availability="static:0.1")])
    assert [g.label for g in varied] == ["FedAvg, availability always", "FedAvg, availability static:0.1"]
    assert len({g.color for g in varied}) == 2


ALGORITHMS = ["fedavg", "fedprox:mu=0.01", "scaffold", "mimic"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithms", "rates"),
    [(ALGORITHMS, 3), (ALGORITHMS, 6), (ALGORITHMS, 9), (["mimic"], 30), ([f"fedprox:mu={k}" for k in range(20)], 2)],
)
def test_curves_have_distinct_styles(algorithms, rates):
    groups = summary.group([history([0.1, 0.2], name, lr=rate) for name in algorithms for rate in range(rates)])
    assert len({(g.color, g.dash) for g in groups}) == len(groups)
    drawn = figures.curves(groups).axes[0].get_lines()
    assert len({(line.get_color(), str(line._dash_pattern)) for line in drawn}) == len(groups)
    assert len({html._swatch(g) for g in groups}) == len(groups)


def test_many_curves_have_one_colour_per_algorithm_and_one_dash_per_setting():
    groups = summary.group([history([0.1], name, lr=rate) for name in ALGORITHMS for rate in (1, 2, 3)])
    assert [g.color for g in groups[::3]] == [styles.color_of(name.partition(":")[0]) for name in ALGORITHMS]
    assert all(len({g.color for g in groups[k : k + 3]}) == 1 for k in (0, 3, 6, 9))
    first, prox = (groups[k + 1].dash for k in (0, 3))
    assert first[1] == prox[1]
    assert first[0] != prox[0]  # shifted dashes, so that it does not hide FedAvg


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "columns"), [(4, 2), (10**50, 1)])
def test_long_legends_are_below_the_axes(clients, columns):
    groups = summary.group([history([0.1, 0.2], name, num_clients=n) for name in ALGORITHMS for n in range(clients, clients + 8)])
    figure = figures.curves(groups)
    figure.draw_without_rendering()
    [legend], [axes] = figure.legends, figure.axes
    box = legend.get_window_extent()
    assert axes.get_legend() is None
    assert not box.overlaps(axes.get_tightbbox())
    assert axes.get_window_extent().height > 0.6 * figures.HEIGHT * figure.dpi  # the figure grows instead of shrinking the axes
    assert figure.bbox.containsx(box.x0)
    assert figure.bbox.containsx(box.x1)
    assert legend._ncols == columns


def test_lines_of_emphasized_algorithms_are_thicker():
    groups = summary.group([history([0.1, 0.2], name) for name in ("fedavg", "mimic", "mimic:memory=step")])
    assert [g.emphasized for g in groups] == [False, True, True]
    thin, *thick = (line.get_linewidth() for line in figures.curves(groups).axes[0].get_lines())
    assert min(thick) > thin


def test_short_legends_are_inside_the_axes():
    figure = figures.curves(summary.group([history([0.1, 0.2], name) for name in ALGORITHMS]))
    assert figure.axes[0].get_legend() is not None
    assert not figure.legends


def test_mean_and_standard_deviation_over_seeds():
    [group] = summary.group([history([0.1, 0.5], seed=0), history([0.3, 0.9], seed=1)])
    curve = group.curve("test_accuracy")
    assert curve.x == [1, 2]
    assert curve.mean == pytest.approx([0.2, 0.7])
    assert curve.std == pytest.approx([0.1 * 2**0.5, 0.2 * 2**0.5])
    assert mean_std(group.finals("test_accuracy")) == pytest.approx((0.7, 0.2 * 2**0.5))


def test_runs_of_different_length_are_averaged_over_shared_points():
    [group] = summary.group([history([0.1, 0.2, 0.3], seed=0), history([0.3], seed=1)])
    assert group.curve("test_accuracy").x == [1]
    assert group.curve("test_accuracy", "megabytes").mean == pytest.approx([0.2])


def test_chips_show_differing_settings():
    base = {"num_clients": 30, "epochs": 5, "batch_size": 16, "model": "mlp", "update": "sum", "availability": "always"}
    assert html._chips([base | {"lr": 0.1}, base | {"lr": 0.5}])[-3:] == ["rate 0.1", "rate 0.5", "update sum"]
    assert html._chips([base, base | {"momentum": 0.5}])[-2:] == ["momentum 0", "momentum 0.5"]
    many = html._chips([base | {"lr": rate} for rate in range(1, 8)])
    assert many[many.index("rate 1") :][:4] == ["rate 1", "rate 2", "rate 3", "rate and 4 more"]


def ends(by_algorithm, **config):
    """Runs of one round each, one seed per value."""
    return [history([value], name, seed=seed, **config) for name, values in by_algorithm.items() for seed, value in enumerate(values)]


def test_the_best_is_marked_in_each_setting():
    groups = summary.group(ends({"fedavg": [0.9], "mimic": [0.8]}, lr=0.1) + ends({"fedavg": [0.5], "mimic": [0.6]}, lr=0.5))
    assert [line.mark for line in lines(groups)] == ["○", "", "", "○"]


def two_settings():
    """FedAvg leads in one setting. In the other MimiC lacks a seed in which FedAvg is lucky, and SCAFFOLD is missing."""
    first = ends({"fedavg": [0.9, 0.9, 0.9], "scaffold": [0.9, 0.9, 0.9], "mimic": [0.8, 0.8004, 0.8002]}, lr=0.1)
    return summary.group(first + ends({"fedavg": [0.5, 0.9, 0.7], "mimic": [0.6]}, lr=0.5))


def test_overview_of_all_settings():
    found = overview(two_settings())
    assert found.algorithms == ["FedAvg", "SCAFFOLD", "MimiC"]
    assert [column.setting for column in found.columns] == ["lr 0.1", "lr 0.5"]
    assert [str(entry) for entry in found.columns[0].entries] == ["≈ 90.0 ± 0.0 %", "≈ 90.0 ± 0.0 %", "80.0 ± 0.0 %"]
    assert [str(entry) for entry in found.columns[1].entries] == ["70.0 ± 20.0 %", "–", "○ 60.0 % (1 of 3 seeds)"]
    assert overview(summary.group(ends({"fedavg": [0.9], "mimic": [0.8]}))) is None
    assert overview(summary.group(ends({"mimic": [0.8]}, lr=0.1) + ends({"mimic": [0.9]}, lr=0.5))) is None


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("long", [False, True])
def test_narrow_terminals_do_not_cut_numbers(width, long):
    own = ends({"fedavgm:momentum=0.123456789,damped=false": [0.1, 0.2]}, lr=0.1) if long else []
    for k in range(3 if long else 0):  # settings whose names are wider than their numbers
        own += ends({"fedavg": [0.9, 0.91], "mimic": [0.8, 0.81]}, availability=f"markov:0.0{k},0.5", partition="dirichlet:0.3")
    found = overview(summary.group([run for g in two_settings() for run in g.runs] + own))
    console = Console(width=width, record=True, file=io.StringIO())
    for view in overview_tables(found, width):
        console.print(view)
    text = console.export_text()
    assert all(str(entry) in text for column in found.columns for entry in column.entries)


@pytest.mark.slow
def test_page_starts_with_the_overview(tmp_path, runs):
    page = html.write(tmp_path / "page.html", two_settings(), [mf.metrics.store.RunFolder(runs / "mimic-s0")]).read_text()
    assert page.index("All settings") < page.index("Results")
    assert "○ 60.0 % (1 of 3 seeds)" in page
    assert "adjusted for all pairs" in page  # what the marks mean
    assert "All settings" not in write_report([runs]).page.read_text()


def test_swing_is_measured_at_the_end_of_the_curve():
    stable, oscillating = summary.group([history([0.1] * 6 + [0.8] * 2, "mimic"), history([0.8] * 6 + [0.9, 0.5], "fedavg")])
    assert stable.swing("test_accuracy") == 0
    assert oscillating.swing("test_accuracy") == pytest.approx(0.2)


@pytest.mark.slow
def test_page_figures_and_table_are_written(runs):
    report = write_report([runs])
    assert {p.name for p in report.figures} == {"curves.png", "curves.svg", "curves.pdf", "availability.png"}
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (runs / "curves.svg").read_text()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(report.groups))
    text = console.export_text()
    console.file.close()
    for group in report.groups:
        mean, std = mean_std(group.finals("test_accuracy"))
        assert re.search(rf"{group.label}.*{100 * mean:.1f} ± {100 * std:.1f} %", text)


@pytest.mark.slow
def test_page_works_offline_and_holds_the_data(runs):
    text = write_report([runs]).page.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "url(" not in text
    data = json.loads(re.search(r"const DATA = (.*?);\n", text).group(1).replace("<\\/", "</"))
    group = summary.group([h for g in write_report([runs]).groups for h in g.runs])[0]
    shown, run = data["groups"][0]["runs"][0], group.runs[0]
    assert shown["y"]["test_accuracy"] == pytest.approx([row["test_accuracy"] for row in run.rows], rel=1e-5)
    assert shown["x"]["uploads"] == [row["uploads"] for row in run.rows]
    assert len(data["schedules"]) == 2
    assert len(data["groups"][0]["clients"]) == 2


def test_names_cannot_break_the_page(tmp_path, runs):
    nasty = "</script><script>alert(1)</script>"
    groups = summary.group([history([0.5], nasty, dataset=nasty, availability=nasty)])
    page = html.write(tmp_path / "page.html", groups, [mf.metrics.store.RunFolder(runs / "mimic-s0")]).read_text()
    assert nasty not in page


@pytest.mark.slow
def test_page_names_unfinished_runs(tmp_path):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    with pytest.raises(Stop):
        mf.run(mf.Experiment(rounds=5), tmp_path / "run", stop)
    assert "0 of 1 run finished; continue with mimicfl resume" in write_report([tmp_path / "run"]).page.read_text()
    with lock_folder(tmp_path / "run"):  # as a process that trains it does
        said = write_report([tmp_path / "run"]).unfinished
    assert "running" in said
    assert "resume" not in said


def test_report_of_a_run_without_rounds_is_refused(tmp_path):
    from mimicfl.metrics.store import RunFolder

    RunFolder.claim(tmp_path / "run", {"algorithm": "mimic"}).close()
    with pytest.raises(mf.UsageError, match="no finished round yet"):
        write_report([tmp_path / "run"])


@pytest.mark.slow
def test_regression_runs_report_the_distance(tmp_path):
    mf.compare(mf.Experiment(dataset="synthetic", rounds=4), ["fedavg", "mimic"], [0], tmp_path)
    report = write_report([tmp_path])
    text = report.page.read_text()
    assert "distance" in text
    assert "<th>lowest</th>" in text  # for a loss the lowest value counts, not the peak
    assert "<em>Lowest</em> is the lowest value of each run" in text
    assert [column.header for column in table(report.groups).columns][3] == "lowest"
    assert "below" in verdict(report.groups)


def test_long_titles_of_panels_are_folded():
    assert figures.folded("availability label-correlated:classes=[0,1,2],rare=0.02", 34) == [
        "availability",
        "label-correlated:classes=[0,1,2],",
        "rare=0.02",
    ]
    assert figures.folded("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert figures.folded("", 10) == [""]
