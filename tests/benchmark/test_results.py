"""Metrics, tests, page and advice of the benchmark follow from its records."""

import dataclasses

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl import UsageError
from mimicfl.benchmark.analysis import analyse, deviations, pairwise, ranking
from mimicfl.benchmark.grid import Grid
from mimicfl.benchmark.measure import measure
from mimicfl.benchmark.recommend import advise, profile, shipped, write_findings
from mimicfl.benchmark.records import register
from mimicfl.benchmark.suite import LOCAL_STEPS, PARTS, PatternCase
from mimicfl.cli.main import main
from mimicfl.experiments.build import build_problem
from mimicfl.metrics.curves import area, swing, tail_mean
from mimicfl.metrics.history import History
from mimicfl.report.benchmark import cost_text, findings, memory_text, metric_text, use, write_benchmark_report
from mimicfl.settings import Experiment
from tests.benchmark.conftest import fill


def rows(accuracies, clients=()):
    each = {"uploads": 1, "bytes_up": 10}
    found = []
    for t, a in enumerate(accuracies):
        totals = {key: step * (t + 1) for key, step in each.items()}
        active = clients[t] if t < len(clients) else [0]
        row = {"round": t, "clients": active, "test_accuracy": a, **totals}
        found.append(row | {"class_accuracy": None if a is None else [a, a / 2]})
    return found


def test_tail_mean_averages_the_last_tenth_of_the_rounds_that_count():
    curve = rows([0.1] * 18 + [0.4, 0.6] + [0.9] * 20)
    assert tail_mean(curve) == pytest.approx(0.9)
    assert tail_mean(curve, rounds=20) == pytest.approx(0.5)
    assert tail_mean(rows([0.2, 0.3])) == 0.3
    assert tail_mean(rows([0.2, 0.3, None, None, None])) == 0.3  # nothing evaluated in the last tenth
    assert tail_mean(rows([None])) is None
    assert area(rows([0.2, None, 0.4])) == pytest.approx(0.3)
    assert swing(rows([0.0] * 6 + [0.4, 0.6])) == pytest.approx(0.1)


def test_metrics_of_a_run():
    """Client 1 participates least and holds only class 1, which is half as accurate."""
    schedule = [[0, 2]] * 9 + [[0, 1, 2]]
    counts = np.array([[5, 5], [0, 4], [6, 2]])
    run = History(rows([0.2] * 4 + [0.6] * 5 + [0.8], schedule), torch.empty(0), 3, class_counts=counts)
    found = measure(run, target=0.6)
    assert (found["tail"], found["rare"], found["worst_class"]) == (0.8, 0.4, 0.4)
    assert (found["round_to_target"], found["uploads_to_target"], found["bytes_up_to_target"]) == (4, 5, 50)
    assert found["curve"][-2:] == [600, 800]
    assert "round_to_target" not in measure(run, target=0.9)  # never reached


def test_classes_without_test_samples_do_not_count():
    counts = np.array([[4, 4, 8], [0, 0, 5]])
    curve = rows([0.8] * 4, [[0]] * 4)
    for row in curve:
        row["class_accuracy"].append(None)
    run = History(curve, torch.empty(0), 2, class_counts=counts)
    found = measure(run, target=0.9)
    assert found["worst_class"] == 0.4
    assert "rare" not in found  # client 1 holds only the class that is not tested
    run.class_counts = counts[:, [2, 0, 1]]
    assert measure(run, target=0.9)["rare"] == 0.8


def test_pairs_are_compared_over_shared_seeds_and_adjusted():
    values = {"a": {0: 5.0, 1: 6.0, 2: 7.0, 3: 1.0}, "b": {0: 4.0, 1: 5.1, 2: 6.0}, "c": {0: 3.0, 1: 6.0, 2: 5.0}}
    found = pairwise(values, [("a", "b"), ("a", "c")])
    assert found["a", "b"].difference.pairs == 3
    assert found["a", "b"].flips == 0.25
    assert found["a", "c"].adjusted == pytest.approx(found["a", "c"].difference.p)  # the largest p value is not increased
    assert found["a", "b"].adjusted == pytest.approx(2 * found["a", "b"].difference.p)


def noisy(better):
    """MimiC is better by this much, with noise that differs by seed."""
    return lambda cell, e: 0.8 + better * (cell.grid.algorithm == "mimic") + 0.01 * ((7 * e.seed + len(cell.grid.algorithm)) % 4)


def test_a_clear_winner_is_recommended_alone_and_a_tie_is_not_broken(tiny, tmp_path):
    fill(tiny, tmp_path / "clear", noisy(0.1))
    [table] = analyse(tiny, tmp_path / "clear")
    assert table.best == ["mimic"]
    assert use(table)[0] == "MimiC"
    assert "over FedAvg" in use(table)[1]
    fill(tiny, tmp_path / "tie", noisy(0.0))
    [table] = analyse(tiny, tmp_path / "tie")
    assert sorted(table.best) == ["fedavg", "mimic"]
    assert "no significant difference" in use(table)[2]


def test_an_algorithm_far_behind_is_not_recommended_because_its_mean_is_uncertain(tiny, tmp_path):
    fill(tiny, tmp_path, lambda cell, e: 0.9 if cell.grid.algorithm == "mimic" or e.seed == 1 else 0.5)
    [table] = analyse(tiny, tmp_path)
    assert table.tests["mimic", "fedavg"].adjusted > 0.05
    assert table.best == ["mimic"]


def test_nothing_is_recommended_before_all_algorithms_are_complete(tiny, tmp_path):
    part = dataclasses.replace(tiny, grids=(*tiny.grids, Grid("mifa", tiny.grids[0].axes), Grid("known-p", tiny.grids[0].axes)))
    fill(tiny, tmp_path, noisy(0.1))
    [table] = analyse(part, tmp_path)
    assert table.best == []
    assert use(table) == ("–", "–", "2 of 3 algorithms complete")


def test_oracles_are_shown_but_do_not_compete(tiny, tmp_path):
    part = dataclasses.replace(tiny, grids=(*tiny.grids, Grid("known-p", tiny.grids[0].axes)))
    fill(part, tmp_path, lambda cell, e: 0.99 if cell.grid.algorithm == "known-p" else noisy(0.1)(cell, e))
    [table] = analyse(part, tmp_path)
    assert table.order[0] == "known-p"
    assert table.best == ["mimic"]
    assert use(table)[0] == "MimiC"
    assert not any("known-p" in pair for pair in table.tests)
    assert "known-p" not in ranking([table, table]).ranks


def test_incomplete_algorithms_do_not_compete(tiny, tmp_path):
    fill(tiny, tmp_path, noisy(0.1), stages=("tuning",))
    [table] = analyse(tiny, tmp_path)
    assert table.order == []
    assert use(table)[2] == "0 of 2 algorithms complete"
    assert ranking([table]) is None
    assert any("2 of 2 cells are not complete" in line for line in deviations(tiny, tmp_path, [table]))


def test_a_grid_that_suits_no_configuration_is_named(tiny, tmp_path):
    fill(tiny, tmp_path, lambda cell, e: None if cell.grid.algorithm == "mimic" else 0.9)
    tables = analyse(tiny, tmp_path)
    said = [line for line in deviations(tiny, tmp_path, tables) if "first grid" in line]
    assert len(said) == 1
    assert "of mimic diverged" in said[0]


def test_diverged_runs_count_and_are_reported(tiny, tmp_path):
    fill(tiny, tmp_path, lambda cell, e: None if e.seed == 2 else 0.9)
    [table] = analyse(tiny, tmp_path)
    assert table.entries["mimic"].by_seed()[2] == 100 * tiny.chance
    assert table.entries["mimic"].diverged == 1
    assert any("2 of 8 compared runs diverged" in line for line in deviations(tiny, tmp_path, [table]))


def test_costs_and_metrics_of_an_entry_as_text(tiny, tmp_path):
    """Rounds are numbered from 0, so a target reached in round 4 took five; a mean that lacks diverged runs says so."""
    fill(tiny, tmp_path, lambda cell, e: None if e.seed == 2 else 0.9)
    [table] = analyse(tiny, tmp_path)
    entry = table.entries["mimic"]
    reached = {"round_to_target": 4, "uploads_to_target": 5, "worst_class": 0.5}
    runs = [run if "diverged" in run else run | reached for run in entry.runs]
    entry = dataclasses.replace(entry, runs=runs)
    assert cost_text(entry, "round") == cost_text(entry, "uploads") == "5 (3 of 4)"
    assert metric_text(entry, "worst_class") == "50.0 (3 of 4)"
    whole = dataclasses.replace(entry, runs=[run for run in runs if "diverged" not in run])
    assert (cost_text(whole, "round"), metric_text(whole, "worst_class")) == ("5", "50.0")


def test_deviations_show_amendments_and_earlier_plans(tiny, tmp_path):
    fill(tiny, tmp_path, noisy(0.1))
    assert deviations(tiny, tmp_path, analyse(tiny, tmp_path)) == []
    moved = dataclasses.replace(tiny, target=0.5)
    assert any("changed since the plan: part.target" in line for line in deviations(moved, tmp_path, analyse(moved, tmp_path)))
    register(tmp_path, moved, amend="an easier target")
    found = " ".join(deviations(moved, tmp_path, analyse(moved, tmp_path)))
    assert "an easier target" in found
    assert "8 of 8 compared runs were made under an earlier plan" in found


@pytest.mark.slow
def test_page_and_document(tiny, tmp_path):
    fill(tiny, tmp_path, noisy(0.1))
    write_benchmark_report(tmp_path, tmp_path / "page" / "report.html", tmp_path / "docs" / "benchmark.md", tmp_path / "docs" / "pictures")
    page, document = (tmp_path / "page" / "report.html").read_text(), (tmp_path / "docs" / "benchmark.md").read_text()
    for text in (page, document):
        assert "half of the clients" in text
        assert "over FedAvg" in text
        assert "mimicfl benchmark run tiny" in text
        assert "A filled point is the best mean" in text
    assert "(pictures/benchmark-tiny-means.png)" in document
    assert (tmp_path / "docs" / "pictures" / "benchmark-tiny-curves.png").stat().st_size > 5_000
    assert "://" not in page.replace("http://www.w3.org", "")  # a single file without external resources


def test_memory_of_the_server():
    plain, averaged = PARTS["digits"], PARTS["digits-averaged"]
    assert memory_text(plain, "fedavg") == "0"
    assert memory_text(plain, "mimic").startswith("N")
    assert memory_text(plain, "fedavgm") == "1"
    assert memory_text(averaged, "fedavg") == "1"  # the mean itself


@pytest.mark.slow
def test_every_pattern_resembles_itself_most(tiny, tmp_path):
    part = dataclasses.replace(tiny, patterns=PARTS["digits"].patterns, settings=tiny.settings | {"num_clients": 30})
    fill(part, tmp_path, noisy(0.1))
    known = findings(part, tmp_path)
    assert len(known) == len(part.patterns)
    for pattern in part.patterns:
        asked = Experiment(dataset="digits", partition="shards:2", num_clients=30, availability=pattern.availability).resolved()
        assert advise(asked, known)[0].finding.pattern == pattern.name


@pytest.mark.slow
def test_profiles_tell_what_differs(tmp_path):
    def of(availability):
        return profile(Experiment(dataset="digits", partition="shards:2", availability=availability).resolved())

    even, often = of("static:0.1"), of("static:0.4")
    assert often.rate - even.rate == pytest.approx(2, abs=0.2)
    assert of("dirichlet:0.3,mean=0.1,least=0.01").spread > even.spread + 0.5
    assert of("label-correlated:classes=[0,1,2],rare=0.02,common=0.15").labels > even.labels + 0.3
    assert of("markov:0.02,0.18").persistence > even.persistence + 1
    turns, day = of("circles:5,on=2,p=0.5"), of("interleaved-sine:0.3,gamma=0.5,cutoff=0.15")
    assert min(turns.groups, day.groups) > even.groups + 0.2
    assert day.together > max(turns.together, even.together) + 0.2  # groups that take turns do not come and go together
    assert of("time-varying:0.1").distance(even) < 0.3  # a fixed number per round is hardly different
    np.save(tmp_path / "schedule.npy", np.random.default_rng(0).random((60, 30)) < 0.1)
    assert of(f"explicit:{tmp_path / 'schedule.npy'}").distance(even) < 0.5  # shorter than the schedules that are drawn


@pytest.mark.parametrize(("given", "words"), [({"num_clients": 1}, "only one"), ({"availability": "static:0"}, "no client is available")])
def test_schedules_that_resemble_no_pattern_are_refused(given, words):
    """One client has no correlations with others: the distance to every pattern would be nan, and the first one the nearest."""
    with pytest.raises(mf.UsageError, match=words):
        profile(Experiment(**{"dataset": "digits", "partition": "shards:2", "availability": "static:0.5"} | given).resolved())


@pytest.mark.slow
def test_commands(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", "list"]) == 0
    assert "tiny" in (out := capsys.readouterr().out)
    assert "static:0.5" not in out
    assert main(["benchmark", "list", "tiny"]) == 0
    assert "static:0.5" in capsys.readouterr().out
    assert main(["benchmark", "status"]) == 0
    assert "not written yet" in capsys.readouterr().out
    assert main(["benchmark", "status", "tiny"]) == 0
    assert "no plan has been written yet" in capsys.readouterr().out
    assert main(["recommend", "--part", "tiny", "--availability", "static:0.4"]) == 2
    assert "mimicfl compare --availability static:0.4" in capsys.readouterr().err
    assert main(["recommend", "--availability", "static:0.1"]) == 2  # `digits` is not a part here
    assert main(["benchmark", "page"]) == 2
    assert main(["benchmark", "run"]) == 2
    assert main(["benchmark", "run", "tinny"]) == 2
    assert main(["benchmark", "run", "tiny", "--patterns", "full"]) == 2
    capsys.readouterr()
    fill(tiny, tmp_path / "records/benchmark", noisy(0.1))
    assert main(["recommend", "--part", "tiny", "--availability", "static:0.4"]) == 0
    out = capsys.readouterr().out
    assert "use MimiC" in out
    assert "'half'" in out
    assert main(["benchmark", "status", "tiny"]) == 0
    assert "done" in capsys.readouterr().out
    assert main(["benchmark", "page", "--out", "there"]) == 0
    assert (tmp_path / "there" / "benchmark.md").exists()


def test_findings_come_with_the_package(tiny, tmp_path):
    """An installed package answers without a folder of records."""
    fill(tiny, tmp_path, noisy(0.1))
    known = findings(tiny, tmp_path)
    write_findings(known, tmp_path / "findings.json")
    assert [finding.use for finding in known] == ["MimiC"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mimicfl.benchmark.recommend.SHIPPED", tmp_path / "findings.json")
        assert shipped(tiny) == known
    assert {finding.pattern for finding in shipped(PARTS["digits"])} == {pattern.name for pattern in PARTS["digits"].patterns}


def test_unknown_part_is_refused():
    from mimicfl.benchmark.suite import find_part

    with pytest.raises(UsageError, match="digits"):
        find_part("digit")


def test_patterns_are_distinct():
    names = [p.name for p in PARTS["digits"].patterns]
    assert len(set(names)) == len(names)
    assert all(isinstance(p, PatternCase) and p.about for p in PARTS["digits"].patterns)


@pytest.mark.parametrize("name", ["digits", "digits-warm", "digits-averaged"])
def test_local_steps_are_those_of_the_part(name):
    part = PARTS[name]
    cell = part.cells()[0]
    problem = build_problem(next(iter(cell.final(cell.grid.configs()[0]).values())))
    assert {len(problem.local.batch_sizes(int(size))) for size in problem.clients.sizes} == {LOCAL_STEPS[name]}
