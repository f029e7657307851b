"""The table of all pairs: on the page, and in pairs.csv."""

import csv
import io

import pytest

import mimicfl as mf
from mimicfl.report import summary
from mimicfl.report.pairs import pair_lines, pairs_csv
from mimicfl.report.report import write_report
from mimicfl.report.verdict import verdict
from mimicfl.significance import Paired, holm
from tests.report.test_report import ends
from tests.report.test_verdict import CLEAR


def read(groups):
    return list(csv.DictReader(io.StringIO(pairs_csv(groups))))


def test_every_pair_with_difference_interval_and_adjusted_p():
    lines = read(summary.group(ends(CLEAR)))
    assert [(line["better"], line["other"], line["verdict"]) for line in lines] == [
        ("FedAvg", "MimiC", "significant"),
        ("FedAvg", "MIFA", "significant"),
        ("MimiC", "MIFA", "significant"),
    ]
    found = [Paired.of([x - y for x, y in zip(CLEAR[a], CLEAR[b], strict=True)]) for a, b in (("fedavg", "mimic"), ("fedavg", "mifa"))]
    third = Paired.of([x - y for x, y in zip(CLEAR["mimic"], CLEAR["mifa"], strict=True)])
    adjusted = holm({k: each.p for k, each in enumerate([*found, third])})
    for k, (line, each) in enumerate(zip(lines, [*found, third], strict=True)):
        assert float(line["difference"]) == pytest.approx(each.mean, rel=1e-4)
        assert (float(line["low"]), float(line["high"])) == pytest.approx(each.interval(), rel=1e-4)
        assert (float(line["p"]), float(line["p_holm"])) == pytest.approx((each.p, adjusted[k]), rel=1e-4)
        assert (line["metric"], line["seeds"], line["ahead"]) == ("test_accuracy", "4", "4")


def test_lines_of_the_page():
    [first, *_] = pair_lines(summary.group(ends({"fedavg": [0.9, 0.8, 0.7], "mimic": [0.89, 0.83, 0.65]})))
    assert (first.better, first.other, first.difference, first.ahead, first.verdict) == ("FedAvg", "MimiC", "+1.0", "2 of 3", "undecided")
    assert first.interval == "−8.9 to +10.9"
    assert first.p == "0.71"


def test_settings_are_tested_apart():
    groups = summary.group(ends(CLEAR, lr=0.1) + ends({"fedavg": [0.5], "mimic": [0.6]}, lr=0.5))
    assert [(line["lr"], line["better"], line["verdict"]) for line in read(groups)][2:] == [
        ("0.1", "MimiC", "significant"),
        ("0.5", "MimiC", "one seed"),
    ]
    last = pair_lines(groups)[-1]
    assert (last.setting, last.difference, last.interval, last.p) == ("lr 0.5", "+10.0", "–", "–")


def test_two_seeds_are_too_few():
    groups = summary.group(ends({"fedavg": [0.8001, 0.7002], "mimic": [0.6, 0.5]}))
    assert "undecided against MimiC (2 seeds are too few to decide)" in verdict(groups)
    assert [line["verdict"] for line in read(groups)] == ["undecided"]
    assert "too few" not in verdict(summary.group(ends(CLEAR)))


def test_the_report_writes_them(tmp_path):
    mf.compare(mf.Experiment(rounds=2, epochs=1), ["fedavg", "mimic"], [0, 1], tmp_path / "runs")
    page = write_report([tmp_path / "runs"]).page
    [pair] = csv.DictReader(io.StringIO((tmp_path / "runs" / "pairs.csv").read_text()))
    assert {pair["better"], pair["other"]} == {"FedAvg", "MimiC"}
    assert "Every pair, tested" in page.read_text()
    mf.run(mf.Experiment(rounds=2, epochs=1), tmp_path / "one")
    assert "Every pair, tested" not in write_report([tmp_path / "one"]).page.read_text()
