"""Best rates, exported tables, axes and metrics of the user, without a browser."""

import csv
import io
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import mimicfl as mf
from mimicfl.metrics.history import History
from mimicfl.report.curves import axes_of, own_metrics, positions, series
from mimicfl.report.export import latex, results_csv, results_latex
from mimicfl.report.page_data import MOST_POINTS, page_data
from mimicfl.report.rates import at_best_rates, best_rates, rate_setting
from mimicfl.report.report import write_report
from mimicfl.report.summary import group
from mimicfl.report.tables import lines
from tests.cli.conftest import call


def history(accuracies, **config):
    rows = [
        {"round": t, "active": 1, "clients": [t % 2], "uploads": t + 1, "bytes_up": 10**6 * (t + 1), "test_accuracy": a, "seconds": 0.5}
        for t, a in enumerate(accuracies)
    ]
    return History(rows, torch.empty(0), 2, config={"algorithm": "mimic", "seed": 0, **config})


def swept(results, **more):
    return group([history([0.1, end], lr=rate, algorithm=name, seed=s, **more) for (name, rate), end in results.items() for s in (0, 1)])


class TestRates:
    def test_best_and_edge(self):
        groups = swept(
            {
                ("fedavg", 0.01): 0.5,
                ("fedavg", 0.1): 0.7,
                ("fedavg", 1.0): 0.6,
                ("mimic", 0.01): 0.5,
                ("mimic", 0.1): 0.8,
                ("mimic", 1.0): 0.9,
            }
        )
        found = {each.algorithm: each for each in best_rates(groups)}
        assert (found["FedAvg"].rate, found["FedAvg"].edge, found["FedAvg"].advice) == ("0.1", "", "")
        assert (found["MimiC"].rate, found["MimiC"].edge) == ("1.0", "largest")
        assert "larger" in found["MimiC"].advice
        assert found["MimiC"].tried == ["0.01", "0.1", "1.0"]

    def test_groups_at_their_best_rates(self):
        groups = swept({(name, rate): end for name in ("fedavg", "mimic") for rate, end in ((0.1, 0.7), (1.0, 0.6))})
        assert [g.label for g in at_best_rates(groups)] == ["FedAvg, lr 0.1", "MimiC, lr 0.1"]
        assert at_best_rates(groups[:1]) == groups[:1]

    def test_schedules_count_with_their_first_rate(self):
        groups = swept({("mimic", "geometric:0.1,0.99"): 0.5, ("mimic", "geometric:0.01,0.99"): 0.7, ("mimic", 1.0): 0.2})
        [best] = best_rates(groups)
        assert best.rate == "geometric:0.01,0.99"
        assert best.edge == "smallest"

    def test_a_rate_that_diverged_before_its_first_evaluation_was_tried(self):
        groups = swept({("mimic", 0.01): 0.5, ("mimic", 0.1): 0.8, ("mimic", 1.0): None})
        for run in groups[-1].runs:
            run.rows[0]["test_accuracy"] = None
        [best] = best_rates(groups)
        assert (best.rate, best.edge, best.tried) == ("0.1", "", ["0.01", "0.1", "1.0"])
        seeds = [line["seeds"] for line in csv.DictReader(io.StringIO(results_csv(groups)))]
        assert seeds == ["2", "2", "0"]

    def test_nothing_without_a_varied_rate(self):
        assert best_rates(swept({("fedavg", 0.1): 0.5, ("mimic", 0.1): 0.6})) == []
        assert rate_setting(swept({("mimic", "geometric:0.1,0.9"): 0.5, ("mimic", "geometric:0.1,0.99"): 0.6})) == ""


class TestExport:
    def test_csv_has_settings_and_metrics_and_no_formulas(self):
        groups = swept({("fedavg", 0.1): 0.5, ("mimic", 0.2): 0.75}, availability="=cmd|x")
        [first, second] = csv.DictReader(io.StringIO(results_csv(groups)))
        assert (first["algorithm"], first["lr"], first["test_accuracy"]) == ("FedAvg", "0.1", "0.5")
        assert (second["test_accuracy_std"], second["seeds"]) == ("0", "2")
        odd = results_csv(group([history([0.1], algorithm="=1+1", lr=x) for x in (1, 2)]))
        assert "'=1+1" in odd

    def test_latex_is_escaped(self):
        assert (
            latex(r"a_b & 5 % \x {y} ~ ^ # $ ±") == r"a\_b \& 5 \% \textbackslash{}x \{y\} \textasciitilde{} \textasciicircum{} \# \$ $\pm$"
        )
        text = results_latex(swept({("fedavg", 0.1): 0.5, ("mimic", 0.1): 0.75, ("fedavg", 0.2): 0.6, ("mimic", 0.2): 0.5}))
        assert r"\textbf{75.0 $\pm$ 0.0}" in text
        assert "lr 0.1 & lr 0.2" in text

    def test_settings_with_long_names_are_the_rows(self):
        pattern = "label-correlated:classes=[0,1,2],rare=0.05,common=0.4"
        groups = group([history([0.1, 0.5], lr=rate, availability=a) for rate in (0.1, 0.2) for a in (pattern, "static:0.3")])
        table = results_latex(groups)
        assert r"\begin{tabular}{llr}" in table
        assert r"availability & lr & MimiC \\" in table
        assert len(next(line for line in table.splitlines() if pattern in line)) < 90

    @pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
    @pytest.mark.slow
    @pytest.mark.parametrize("short", [True, False])
    def test_latex_compiles(self, tmp_path, short):
        text = results_latex(swept({("fedavg", 0.1): 0.5, ("mimic", 0.2): 0.75}, availability="static:0.1" if short else "x_%&" * 20))
        (tmp_path / "t.tex").write_text(r"\documentclass{article}\usepackage{booktabs}\begin{document}" + text + r"\end{document}")
        subprocess.run(["pdflatex", "-interaction=nonstopmode", "t.tex"], cwd=tmp_path, check=True, capture_output=True)


class TestAxesAndMetrics:
    def test_time(self):
        run = history([0.1, 0.2, 0.3])
        assert positions(run.rows, "seconds") == [0.5, 1.0, 1.5]
        assert positions(run.rows, "megabytes") == [1.0, 2.0, 3.0]
        assert "virtual_seconds" not in axes_of([run])
        for t, row in enumerate(run.rows):
            row["virtual_seconds"] = 10.0 * t
        assert "virtual_seconds" in axes_of([run])
        assert series(run.rows, "test_accuracy", "virtual_seconds") == [(0.0, 0.1), (10.0, 0.2), (20.0, 0.3)]

    def test_own_numbers_are_metrics(self):
        run = history([0.1, 0.2])
        run.rows[1] |= {"worst_client": 0.25, "names": ["a"], "flag": True, "local_lr": 0.1}
        assert own_metrics([run]) == ["worst_client"]
        [line] = lines(group([run]))
        assert line.more == ("0.25",)

    def test_very_long_runs_are_thinned_and_keep_their_end(self):
        data = page_data(group([history([t / 5000 for t in range(5001)])]))
        [run] = data["groups"][0]["runs"]
        assert len(run["x"]["round"]) == len(run["y"]["test_accuracy"]) <= MOST_POINTS + 1
        assert (run["x"]["round"][-1], run["y"]["test_accuracy"][-1]) == (5001, 1.0)


@pytest.mark.slow
def test_the_report_writes_all_files(tmp_path):
    mf.run(mf.Experiment(rounds=2, epochs=1, num_clients=4, availability="always"), tmp_path / "run")
    report = write_report([tmp_path / "run"])
    assert {p.name for p in report.figures} == {"curves.png", "curves.svg", "curves.pdf", "availability.png"}
    assert (tmp_path / "run" / "results.csv").read_text().startswith("algorithm,seeds,test_accuracy")
    assert (tmp_path / "run" / "results.tex").read_text().startswith(r"\begin{tabular}")


class TestLive:
    @pytest.mark.slow
    def test_until_all_runs_are_finished(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        e = mf.Experiment(rounds=3, epochs=1, num_clients=4, availability="always")
        mf.run(e, "runs/a")
        (Path("runs/a") / "final.safetensors").unlink()
        pages = []

        def finish(seconds):
            pages.append(Path("runs/report.html").read_text())
            mf.run(e, "runs/a")

        monkeypatch.setattr("mimicfl.cli.live.time.sleep", finish)
        assert call("report", "--live", "runs") == 0
        [during] = pages
        assert '"live":5' in during
        assert "0 of 1 run finished" in during
        assert '"live":0' in Path("runs/report.html").read_text()
        assert Path("runs/curves.png").is_file()

    @pytest.mark.slow
    def test_waits_for_the_first_round(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("runs").mkdir()

        def begin(seconds):
            mf.run(mf.Experiment(rounds=2, epochs=1, num_clients=4, availability="always"), "runs/a")

        monkeypatch.setattr("mimicfl.cli.live.time.sleep", begin)
        assert call("report", "--live", "runs") == 0
        assert "waiting" in capsys.readouterr().out

    @pytest.mark.parametrize("words", [["--live", "nowhere"], ["--live", "--every", "0", "."], ["--live"]])
    def test_mistakes(self, tmp_path, monkeypatch, capsys, words):
        monkeypatch.chdir(tmp_path)
        assert call("report", *words) == 2


def test_schedules_that_differ_are_shown_apart():
    """A selection or a deadline gives runs with the same availability and seed different schedules; a shorter run has the same one."""
    groups = group(
        [history([0.1] * 6, select="all"), history([0.2] * 4, algorithm="fedavg", select="all"), history([0.3] * 6, select="odd")]
    )
    for row in groups[-1].runs[0].rows:
        row["clients"] = [1]
    for g, accuracy in zip(groups, (0.5, 0.6, 0.7), strict=True):
        g.runs[0].client_accuracy = [accuracy, accuracy]
    found = page_data(groups)
    alternating, odd = found["schedules"]
    assert (alternating["participation"], odd["participation"]) == ([0.5, 0.5], [0.0, 1.0])
    assert ("select all" in alternating["title"], "select odd" in odd["title"]) == (True, True)
    assert [list(g["clients"]) for g in found["groups"]] == [[alternating["key"]], [alternating["key"]], [odd["key"]]]
