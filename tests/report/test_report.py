"""Tables, pictures and the page, from run folders."""

import io
import json
import re

import pytest
from rich.console import Console

import mimicfl as mf
from mimicfl.metrics.history import History
from mimicfl.report import figures, html, styles, summary
from mimicfl.report.report import build
from mimicfl.report.tables import lines, overview, overview_tables, table


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


def test_groups_differ_by_algorithm_and_by_what_was_varied():
    same = summary.group([history([0.1], seed=0), history([0.2], seed=1), history([0.3], "fedprox:mu=0.1", seed=0)])
    assert [(g.label, len(g.runs)) for g in same] == [("FedAvg", 2), ("FedProx (mu=0.1)", 1)]
    varied = summary.group([history([0.1], availability="always"), history([0.2], availability="static:0.1")])
    assert [g.label for g in varied] == ["FedAvg, availability always", "FedAvg, availability static:0.1"]
    assert len({g.color for g in varied}) == 2


ALGORITHMS = ["fedavg", "fedprox:mu=0.01", "scaffold", "mimic"]


@pytest.mark.parametrize(
    ("algorithms", "rates"),
    [(ALGORITHMS, 3), (ALGORITHMS, 6), (ALGORITHMS, 9), (["mimic"], 30), ([f"fedprox:mu={k}" for k in range(20)], 2)],
)
def test_no_two_curves_look_the_same(algorithms, rates):
    groups = summary.group([history([0.1, 0.2], name, lr=rate) for name in algorithms for rate in range(rates)])
    assert len({(g.color, g.dash) for g in groups}) == len(groups)
    drawn = figures.curves(groups).axes[0].get_lines()
    assert len({(line.get_color(), str(line._dash_pattern)) for line in drawn}) == len(groups)
    assert len({html._swatch(g) for g in groups}) == len(groups)


def test_too_many_curves_for_colours_have_a_colour_an_algorithm_and_dashes_a_setting():
    groups = summary.group([history([0.1], name, lr=rate) for name in ALGORITHMS for rate in (1, 2, 3)])
    assert [g.color for g in groups[::3]] == [styles.COLORS[name.partition(":")[0]] for name in ALGORITHMS]
    assert all(len({g.color for g in groups[k : k + 3]}) == 1 for k in (0, 3, 6, 9))
    first, prox = (groups[k + 1].dash for k in (0, 3))
    assert first[1] == prox[1]
    assert first[0] != prox[0]  # its gaps lie elsewhere, since it would hide FedAvg


@pytest.mark.parametrize(("clients", "columns"), [(4, 2), (10**50, 1)])
def test_many_names_stand_below_the_curves(clients, columns):
    groups = summary.group([history([0.1, 0.2], name, num_clients=n) for name in ALGORITHMS for n in range(clients, clients + 8)])
    figure = figures.curves(groups)
    figure.draw_without_rendering()
    [legend], [axes] = figure.legends, figure.axes
    box = legend.get_window_extent()
    assert axes.get_legend() is None
    assert not box.overlaps(axes.get_tightbbox())
    assert axes.get_window_extent().height > 0.6 * figures.HEIGHT * figure.dpi  # the picture has grown instead
    assert figure.bbox.containsx(box.x0)
    assert figure.bbox.containsx(box.x1)
    assert legend._ncols == columns


def test_few_names_stand_beside_their_curves():
    figure = figures.curves(summary.group([history([0.1, 0.2], name) for name in ALGORITHMS]))
    assert figure.axes[0].get_legend() is not None
    assert not figure.legends


def test_mean_and_spread_are_those_of_the_seeds():
    [group] = summary.group([history([0.1, 0.5], seed=0), history([0.3, 0.9], seed=1)])
    curve = group.curve("test_accuracy")
    assert curve.x == [1, 2]
    assert curve.mean == pytest.approx([0.2, 0.7])
    assert curve.std == pytest.approx([0.1 * 2**0.5, 0.2 * 2**0.5])
    assert summary.mean_std(group.finals("test_accuracy")) == pytest.approx((0.7, 0.2 * 2**0.5))


def test_runs_of_different_length_are_averaged_where_they_meet():
    [group] = summary.group([history([0.1, 0.2, 0.3], seed=0), history([0.3], seed=1)])
    assert group.curve("test_accuracy").x == [1]
    assert group.curve("test_accuracy", "megabytes").mean == pytest.approx([0.2])


def test_algorithms_are_judged_in_each_setting_alone():
    runs = []
    for rate, pairs in ((0.1, {"fedavg": 0.9, "mimic": 0.8}), (0.5, {"fedavg": 0.5, "mimic": 0.6})):
        for name, end in pairs.items():
            runs += [history([end + 0.01 * seed], name, seed=seed, lr=rate) for seed in (0, 1)]
    first, second = summary.verdict(summary.group(runs)).splitlines()
    assert first.startswith("lr 0.1: FedAvg ends best at 90.5")
    assert "10.0 points above MimiC, ahead" in first
    assert second.startswith("lr 0.5: MimiC ends best at 60.5")
    tuned = [run for run in runs if run.config["algorithm"] == "mimic"]  # one algorithm: then the settings are compared
    assert summary.verdict(summary.group(tuned)).startswith("MimiC, lr 0.1 ends best at 80.5 ± 0.7 %, 20.0 points above MimiC, lr 0.5")


def test_chips_show_what_differs():
    base = {"num_clients": 30, "epochs": 5, "batch_size": 16, "model": "mlp", "update": "sum", "availability": "always"}
    assert html._chips([base | {"lr": 0.1}, base | {"lr": 0.5}])[-3:] == ["rate 0.1", "rate 0.5", "update sum"]
    assert html._chips([base, base | {"momentum": 0.5}])[-2:] == ["momentum 0", "momentum 0.5"]
    many = html._chips([base | {"lr": rate} for rate in range(1, 8)])
    assert many[many.index("rate 1") :][:4] == ["rate 1", "rate 2", "rate 3", "rate and 4 more"]


def test_the_verdict_is_computed_and_honest():
    def say(*pairs):
        return summary.verdict(summary.group([history([v], a, seed=s) for a, values in pairs for s, v in enumerate(values)]))

    assert say(("fedavg", [0.90, 0.91]), ("mimic", [0.70, 0.71])).startswith("FedAvg ends best at 90.5 ± 0.7 %, 20.0 points above MimiC")
    assert "ahead in 2 of 2 seeds" in say(("fedavg", [0.90, 0.91]), ("mimic", [0.70, 0.71]))
    assert "one seed" in say(("fedavg", [0.9]), ("mimic", [0.7]))
    assert "call it a tie" in say(("fedavg", [0.80, 0.60]), ("mimic", [0.79, 0.65]))
    assert "ahead in 2 of 2 seeds" in say(("fedavg", [0.80, 0.60]), ("mimic", [0.79, 0.58]))  # seeds differ by more than algorithms do
    assert say(("fedavg", [0.70, 0.60, 0.95]), ("mimic", [0.73, 0.62])) == (
        "MimiC ends best at 67.5 ± 7.8 %, 2.5 points above FedAvg in the 2 seeds that all have, ahead in 2 of 2 seeds."
    )
    assert say(("mimic", [0.5])) == "MimiC ends at 50.0 %."


def test_without_a_seed_in_common_chance_is_not_known():
    groups = summary.group([history([0.9], "fedavg", seed=0), history([0.8], "fedavg", seed=1), history([0.7], "mimic", seed=2)])
    assert "no seed in common" in summary.verdict(groups)


def test_the_best_is_marked_and_only_the_best():
    groups = summary.group([history([0.9], "fedavg"), history([0.8], "mimic")])
    assert [line.mark for line in lines(groups)] == ["★", ""]


def ends(by_algorithm, **config):
    """Runs of one round each, a seed for each value."""
    return [history([value], name, seed=seed, **config) for name, values in by_algorithm.items() for seed, value in enumerate(values)]


def test_a_tie_has_no_winner():
    def marked(**values):
        return [line.mark for line in lines(summary.group(ends(values)))]

    assert marked(fedavg=[0.9], fedprox=[0.9 + 1e-9], mimic=[0.8]) == ["≈", "≈", ""]  # equal up to rounding
    assert marked(fedavg=[0.80, 0.60], mimic=[0.79, 0.65], mifa=[0.1, 0.1]) == ["≈", "≈", ""]  # as the verdict says
    assert marked(fedavg=[0.70, 0.60, 0.95], mimic=[0.73, 0.62]) == ["", "★"]  # by the seeds that both have
    assert marked(mimic=[0.5]) == [""]
    assert marked(fedavg=[0.942, 0.953], mimic=[0.945, 0.953]) == ["≈", "≈"]  # level in one of two seeds: the lead is its own error


def test_the_verdict_names_all_who_are_level():
    assert summary.verdict(summary.group(ends({"fedavg": [0.9], "fedprox": [0.9], "mifa": [0.9 + 1e-9], "mimic": [0.8]}))) == (
        "FedAvg, FedProx and MIFA end level at 90.0 %: nobody ends better."
    )
    noisy = summary.verdict(summary.group(ends({"fedavg": [0.8, 0.8], "mimic": [0.7, 0.7], "mifa": [0.9, 0.3]})))
    three = summary.verdict(
        summary.group(ends({"fedavg": [0.80, 0.60], "mimic": [0.79, 0.65], "mifa": [0.76, 0.66], "scaffold": [0.1, 0.1]}))
    )
    assert "points above MIFA, which is within" in three
    assert three.endswith("seed by seed, as is that to FedAvg: call it a tie.")
    assert noisy.endswith("ahead in 2 of 2 seeds; the difference to MIFA is within one standard error: call that a tie.")


def test_the_best_is_marked_in_each_setting():
    groups = summary.group(ends({"fedavg": [0.9], "mimic": [0.8]}, lr=0.1) + ends({"fedavg": [0.5], "mimic": [0.6]}, lr=0.5))
    assert [line.mark for line in lines(groups)] == ["★", "", "", "★"]


def two_settings():
    """FedAvg ahead in one; in the other MimiC has a seed less, SCAFFOLD is not there, and one lucky seed is FedAvg's alone."""
    first = ends({"fedavg": [0.9, 0.9], "scaffold": [0.9, 0.9], "mimic": [0.8, 0.8]}, lr=0.1)
    return summary.group(first + ends({"fedavg": [0.5, 0.9], "mimic": [0.6]}, lr=0.5))


def test_all_settings_at_a_glance():
    found = overview(two_settings())
    assert found.algorithms == ["FedAvg", "SCAFFOLD", "MimiC"]
    assert [column.setting for column in found.columns] == ["lr 0.1", "lr 0.5"]
    assert [str(entry) for entry in found.columns[0].entries] == ["≈ 90.0 ± 0.0 %", "≈ 90.0 ± 0.0 %", "80.0 ± 0.0 %"]
    assert [str(entry) for entry in found.columns[1].entries] == ["70.0 ± 28.3 %", "–", "★ 60.0 % (1 of 2 seeds)"]
    assert overview(summary.group(ends({"fedavg": [0.9], "mimic": [0.8]}))) is None
    assert overview(summary.group(ends({"mimic": [0.8]}, lr=0.1) + ends({"mimic": [0.9]}, lr=0.5))) is None


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("long", [False, True])
def test_a_narrow_terminal_cuts_no_number(width, long):
    own = ends({"fedavgm:momentum=0.123456789,damped=false": [0.1, 0.2]}, lr=0.1) if long else []
    for k in range(3 if long else 0):  # settings whose names want more room than their numbers
        own += ends({"fedavg": [0.9, 0.91], "mimic": [0.8, 0.81]}, availability=f"markov:0.0{k},0.5", partition="dirichlet:0.3")
    found = overview(summary.group([run for g in two_settings() for run in g.runs] + own))
    console = Console(width=width, record=True, file=io.StringIO())
    for view in overview_tables(found, width):
        console.print(view)
    text = console.export_text()
    assert all(str(entry) in text for column in found.columns for entry in column.entries)


def test_the_page_begins_with_all_settings(tmp_path, runs):
    page = html.write(tmp_path / "page.html", two_settings(), [mf.metrics.store.RunFolder(runs / "mimic-s0")]).read_text()
    assert page.index("All settings") < page.index("Result")
    assert "★ 60.0 % (1 of 2 seeds)" in page
    assert "All settings" not in build([runs]).page.read_text()


def test_swing_measures_the_end_of_the_curve():
    calm, wild = summary.group([history([0.1] * 6 + [0.8] * 2, "mimic"), history([0.8] * 6 + [0.9, 0.5], "fedavg")])
    assert calm.swing("test_accuracy") == 0
    assert wild.swing("test_accuracy") == pytest.approx(0.2)


def test_everything_is_written(runs):
    report = build([runs])
    assert {p.name for p in report.pictures} == {"curves.png", "curves.svg", "availability.png"}
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (runs / "curves.svg").read_text()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(report.groups))
    text = console.export_text()
    console.file.close()
    for group in report.groups:
        mean, std = summary.mean_std(group.finals("test_accuracy"))
        assert re.search(rf"{group.label}.*{100 * mean:.1f} ± {100 * std:.1f} %", text)


def test_the_page_needs_no_network_and_holds_the_numbers(runs):
    text = build([runs]).page.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "url(" not in text
    data = json.loads(re.search(r"const DATA = (.*?);\n", text).group(1).replace("<\\/", "</"))
    group = summary.group([h for g in build([runs]).groups for h in g.runs])[0]
    assert data["groups"][0]["curves"]["test_accuracy"]["uploads"]["mean"] == pytest.approx(group.curve("test_accuracy").mean, rel=1e-5)
    assert len(data["schedules"]) == 2
    assert len(data["groups"][0]["clients"]) == 2


def test_names_cannot_break_the_page(tmp_path, runs):
    nasty = "</script><script>alert(1)</script>"
    groups = summary.group([history([0.5], nasty, dataset=nasty, availability=nasty)])
    page = html.write(tmp_path / "page.html", groups, [mf.metrics.store.RunFolder(runs / "mimic-s0")]).read_text()
    assert nasty not in page


def test_unfinished_runs_are_said_to_be(tmp_path):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    with pytest.raises(Stop):
        mf.run(mf.Experiment(rounds=5), tmp_path / "run", stop)
    assert "1 of 1 runs not finished yet" in build([tmp_path / "run"]).page.read_text()


def test_nothing_to_report(tmp_path):
    from mimicfl.metrics.store import RunFolder

    RunFolder.claim(tmp_path / "run", {"algorithm": "mimic"}).close()
    with pytest.raises(mf.UsageError, match="no finished round yet"):
        build([tmp_path / "run"])


def test_regression_runs_report_the_distance(tmp_path):
    mf.compare(mf.Experiment(dataset="synthetic", rounds=4), ["fedavg", "mimic"], [0], tmp_path)
    report = build([tmp_path])
    text = report.page.read_text()
    assert "distance" in text
    assert "<th>lowest</th>" in text  # a loss has no peak to be proud of
    assert "<em>Lowest</em> is the lowest point of each run" in text
    assert [column.header for column in table(report.groups).columns][3] == "lowest"
    assert "below" in summary.verdict(report.groups)
