"""`theory check` and `theory show`, from runs made on the spot; and their mistakes."""

import re

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from mimicfl.report.theory import check
from tests.cli.conftest import call

pytestmark = pytest.mark.slow

EXACT = "--dataset synthetic:quadratic --clients 6 --steps 1 --batch-size full --update mean --lr 0.05 --dtype float64 --rounds 30"
CERTIFIED = "theory:L=4.7,N=6,tau_max=12,horizon=30,beta=30"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two diagnosed runs with bounded gaps, a certified one, one with the paper's rate on digits, and one made in Python."""
    folder = tmp_path_factory.mktemp("theory")
    exact = f"{EXACT} --availability bounded:12,warm_start=true"
    for name, more in (("fedavg", "theory:c=0.5,beta=20"), ("mimic", "theory:c=0.5,beta=20"), ("certified", CERTIFIED)):
        algorithm = "fedavg" if name == "fedavg" else "mimic"
        words = f"run {exact} --algorithm {algorithm} --global-lr {more} --diagnose every=1 --out {folder}/{name}"
        assert call(*words.split()) == 0
    for name, pattern in (("paper", "time-varying:0.1"), ("uneven", "bounded:20")):
        assert call(*f"run --lr geometric:0.01,0.95 --rounds 12 --epochs 1 --availability {pattern} --out {folder}/{name}".split()) == 0
    data = mf.datasets.load("synthetic", num_clients=3, dim=2, samples=4)
    model = mf.models.Logistic(2, 1)
    mf.simulate(model, data, mf.partition.by_ids(data.ids), rounds=3, out=folder / "python", local=mf.LocalSGD(lr=0.01))
    return folder


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")  # tables in one piece


def table(text):
    """condition -> (holds in, fails from)."""
    rows = re.findall(r"^(\S.*?) {2,}(Theorem \d|\(the paper\)|Theorem 2, mixing|mixing) +(\d+ of \d+) +(\S+)", text, re.MULTILINE)
    return {row[0]: row[2:] for row in rows}


def test_a_certified_run(runs, capsys):
    assert call("theory", "check", runs / "certified") == 0
    text = capsys.readouterr().out
    assert [fails for _, fails in table(text).values()] == ["never"] * len(table(text)), text
    assert len(table(text)) >= 5
    assert "Theorem 2 is certified for the whole run, 30 rounds" in text
    assert "the mixing bound is certified for the whole run" in text
    assert re.search(r"L = 4\.\d+ \(exact\)", text)


def test_theorems_are_not_applied_to_other_algorithms(runs, tmp_path, capsys):
    assert call(*f"run --algorithm mifa --rounds 3 --epochs 1 --out {tmp_path / 'mifa'}".split()) == 0
    for folder, told in ((tmp_path / "mifa", True), (runs / "certified", False)):
        capsys.readouterr()
        assert call("theory", "check", folder) == 0
        assert ("say nothing about mifa" in capsys.readouterr().out) == told


def test_the_papers_own_rate(runs, capsys):
    """0.01 * 0.95^t: with equally many clients a round rho_t = 1/0.95; with uneven rounds it fails where fewer clients come."""
    assert call("theory", "check", runs / "paper") == 0
    even = table(text := capsys.readouterr().out)
    assert even["rho_t > 1"] == ("11 of 11", "never")
    assert even["all clients active in round 0"] == ("0 of 1", "0")
    assert even["eta_L constant (if K > 1)"] == ("1 of 12", "1")
    assert "estimate: power iteration at 2 points" in text
    assert call("theory", "check", runs / "uneven") == 0
    uneven = table(capsys.readouterr().out)
    active = read(RunFolder(runs / "uneven")).active.sum(axis=1)
    falls = [t for t in range(1, 12) if active[t] < 0.95 * active[t - 1]]
    assert active.min() > 0
    assert uneven["rho_t > 1"][1] == str(falls[0])


def test_what_fails_is_named_with_its_round(runs, capsys):
    assert call("theory", "check", runs / "mimic") == 0
    found = table(text := capsys.readouterr().out)
    [small] = [fails for name, (_, fails) in found.items() if name.startswith("eta_t <= 1/L")]
    assert small == "never"
    assert found["rho_t > 1"][1] == "never"
    assert found["(*) of docs/theory.md, the gaps of this run"][1] == "0"
    assert "Theorem 2 is certified for the first 0 of 30 rounds" in text
    suggested = re.search(r"theory:c=([\d.e-]+),beta=30", text)
    history = read(RunFolder(runs / "mimic"))
    for row in history.rows:  # and with the suggested rate it is certified
        row["global_lr"] = row["active"] and float(suggested[1]) * row["active"] / (row["round"] + 30)
    assert check(history, float(re.search(r"L = ([\d.]+)", text)[1]), 1).certified == 30
    for row in history.rows:
        row["global_lr"] = row["active"] and 100 * row["global_lr"]
    assert check(history, float(re.search(r"L = ([\d.]+)", text)[1]), 1).certified == 0


def test_the_constant_rate_that_mixing_certifies(runs, capsys):
    assert call("theory", "check", runs / "mimic") == 0
    text = capsys.readouterr().out
    suggested = float(re.search(r"on this schedule: --global-lr ([\d.e-]+)", text)[1])
    L, history = float(re.search(r"L = ([\d.]+)", text)[1]), read(RunFolder(runs / "mimic"))
    for factor, rounds in ((0.99, 30), (1.05, 29)):
        for row in history.rows:
            row["global_lr"] = row["active"] and factor * suggested
        assert (check(history, L, 1).mixed >= 30) == (rounds == 30)
    assert call("theory", "check", runs / "paper") == 0
    assert "no mixing bound: the mixing bound needs all clients in round 0" in capsys.readouterr().out


def test_given_constants(runs, capsys):
    assert call("theory", "check", runs / "python", "--L", 2, "--K", 4) == 0
    assert "L = 2 (given)" in capsys.readouterr().out
    assert call("theory", "check", runs / "mimic", "--tau-max", 20) == 0
    assert "any gaps up to 20" in capsys.readouterr().out


def test_clients_that_are_never_active_together_are_named(capsys, tmp_path):
    schedule = np.ones((6, 4), dtype=bool)
    schedule[1::2, :2] = schedule[2::2, 2:] = False
    np.savetxt(tmp_path / "two.csv", schedule.astype(int), fmt="%d", delimiter=",")
    four = EXACT.replace("--clients 6", "--clients 4").replace("--rounds 30", "--rounds 6")
    assert call(*f"run {four} --availability explicit:two.csv --out a".split()) == 0
    assert call("theory", "check", "a") == 0
    assert "2 groups that are never active together" in capsys.readouterr().out


def test_figures_and_the_reports_section(runs, capsys, tmp_path):
    assert call("theory", "show", runs / "fedavg", runs / "mimic", "--out", tmp_path / "p") == 0
    text = capsys.readouterr().out
    drawn = sorted(path.name for path in (tmp_path / "p").glob("*.png"))
    assert drawn == ["theory-certificate.png", "theory-errors.png", "theory-norms.png", "theory-parts.png"]
    assert all((tmp_path / "p" / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    assert "passes" in text
    assert call("report", runs / "fedavg", runs / "mimic", "--out", tmp_path / "r") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Theory and measurements" in page
    assert page.count("data:image/png;base64,") == 4
    assert (tmp_path / "r" / "theory-norms.png").is_file()
    assert call("report", runs / "paper", "--out", tmp_path / "plain") == 0
    assert "Theory and measurements" not in (tmp_path / "plain" / "report.html").read_text()
    assert not list((tmp_path / "plain").glob("theory*"))


def test_bounds_lie_above_what_was_measured(runs):
    from mimicfl.report.theory import bounded

    for name, theorem in (("fedavg", "Theorem 1"), ("mimic", "Theorem 2"), ("certified", "Theorem 2")):
        found = bounded(read(RunFolder(runs / name)))
        assert {theorem, "Lemma 1 with the measured E_t"} <= set(found.bounds)
        assert ("mixing bound" in found.bounds) == (name == "certified")
        assert found.notes == ["no mixing bound: " + found.notes[0].partition(": ")[2]] if name == "mimic" else not found.notes
        for line in found.bounds.values():
            assert np.all(found.measured <= line * (1 + 1e-9)), name
    assert bounded(read(RunFolder(runs / "paper"))) is None


def test_recall_and_notes_of_a_network(capsys, tmp_path):
    words = "run --availability static:0.2 --rounds 6 --epochs 1 --diagnose every=3 --out net"
    assert call(*words.split()) == 0
    assert call("theory", "show", "net") == 0
    text = capsys.readouterr().out
    assert "no bound: L is not known, add power=10 to diagnose" in text
    assert "between diagnosed rounds the last measured values are held" in text
    assert (tmp_path / "net" / "theory-recall.png").is_file()


def test_weighted_runs_are_drawn_without_bounds(capsys):
    weighted = EXACT.replace("--rounds 30", "--rounds 4")
    assert call(*f"run {weighted} --availability always --weighting samples --diagnose every=1 --out w".split()) == 0
    assert call("report", "w") == 0
    assert call("theory", "show", "w") == 0
    assert "no bound: the paper's results are for clients that count equally" in capsys.readouterr().out
    assert call("theory", "check", "w") == 2
    assert "clients that count equally: this run was weighted by samples" in capsys.readouterr().err
    assert call(*f"run {weighted} --availability always --momentum 0.5 --weight-decay 0.1 --out m".split()) == 0
    assert call("theory", "check", "m") == 2
    assert "this run had weight_decay and momentum" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--speed 100 --asynchronous 2", "asynchronous training"),
        ("--server-optimizer adam", "server optimizer adam"),
        ("--optimizer adam", "optimizer adam"),
    ],
)
def test_runs_that_the_theorems_exclude_are_not_certified(capsys, options, words):
    assert call(*f"run {EXACT.replace('--rounds 30', '--rounds 4')} --availability always {options} --out excluded".split()) == 0
    assert call("theory", "check", "excluded", "--L", "2", "--K", "1") == 2
    assert words in capsys.readouterr().err


def test_runs_with_a_server_optimizer_are_drawn_without_bounds(capsys):
    steps = f"run {EXACT.replace('--rounds 30', '--rounds 4')} --algorithm fedavg --server-optimizer adam"
    assert call(*f"{steps} --availability always --diagnose every=1 --out drawn".split()) == 0
    assert call("theory", "show", "drawn") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no bound" in out
    assert "server optimizer adam" in out


def test_with_averaged_models_the_theorems_are_about_the_others(capsys):
    assert call(*f"run {EXACT.replace('--rounds 30', '--rounds 4')} --availability always --average 9 --out averaged".split()) == 0
    assert call("theory", "check", "averaged", "--L", "2", "--K", "1") == 0
    assert "not about their mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("theory show {}/paper", "was not diagnosed: run it in a new folder with --diagnose every=10"),
        ("theory check {}/nowhere", "does not exist"),
        ("theory check {}/python", "made from Python objects, which its folder does not hold"),
        ("theory check {}/mimic --tau-max 2", "tau_max=2 is smaller than the largest gap of the run, 9: give at least that"),
        ("theory check {}/mimic --L -1 --K 1", "the smoothness L must be more than 0, got -1.0"),
        ("theory check {}/mimic --L nan --K 1", "the smoothness L must be a number, got nan"),
        ("theory check {}/mimic --L 2 --K 0", "K must be a whole number of at least 1, got 0"),
        ("theory check {}/mimic --nu 3", "nu must be more than 0 and at most 1, got 3.0"),
        ("theory look {}/mimic", "'look'"),
        ("run --diagnose often", "diagnose 'often': every must be a whole number"),
        ("run --diagnose every=0", "every must be a whole number of at least 1, got 0"),
        ("run --global-lr theory:L=2", "to find c for the theory rate, N is missing"),
        (
            "run --rounds 9 --steps 1 --global-lr theory:L=2,N=30,tau_max=99,horizon=5",
            "computed for horizon=5, but this run has 9",
        ),
    ],
)
def test_mistakes(runs, capsys, words, answer):
    try:
        code = call(*words.format(runs).split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert answer in capsys.readouterr().err
