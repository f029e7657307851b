"""Tuning, plan and records of the benchmark follow the protocol."""

import dataclasses
import json

import pytest

from mimicfl import UsageError, algorithms
from mimicfl.algorithms import ALGORITHMS
from mimicfl.benchmark.grid import EXTENSIONS, Axis, Grid
from mimicfl.benchmark.progress import progress_of
from mimicfl.benchmark.records import changes, plans, read_cell, register, write_cell
from mimicfl.benchmark.suite import PARTS, TUNING_SEEDS, VALIDATION
from tests.benchmark.conftest import ENVIRONMENT, fill


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_every_algorithm_has_the_same_budget(part):
    assert {len(grid.configs()) for grid in part.grids} == {12}
    assert all(grid.algorithm in ALGORITHMS.factories for grid in part.grids)
    for cell in part.cells():
        first, last = cell.tuning(cell.grid.configs()[0]).values(), cell.final(cell.grid.configs()[-1]).values()
        assert all(e.validation == VALIDATION and e.seed in TUNING_SEEDS for e in first)
        assert [e.seed for e in last] == list(range(part.seeds))
        assert all(e.validation == 0 for e in last)
        for axis in cell.grid.axes:  # every value that an extension can reach is valid
            for value in (axis.values[0] / axis.step**EXTENSIONS, axis.values[-1] * axis.step**EXTENSIONS) if axis.step else ():
                if value >= axis.least:
                    algorithms.make(cell.grid.settings(cell.grid.configs()[-1] | {axis.name: value}, part.rounds)["algorithm"])
    assert not set(TUNING_SEEDS) & set(range(part.seeds))


def test_settings_of_a_configuration():
    grid = Grid("fedprox", (Axis("rate", (0.1,)), Axis("final", (0.5,)), Axis("mu", (0.01,))))
    found = grid.settings({"rate": 0.1, "final": 0.25, "mu": 0.01}, rounds=2)
    assert found == {"algorithm": "fedprox:mu=0.01", "lr": "geometric:0.1,0.5", "global_lr": "local"}
    found = Grid("fedawe", (), "evaluate=mean").settings({"rate": 0.1, "final": 1.0, "clip": 2.0}, rounds=2)
    assert found["algorithm"] == "fedawe:evaluate=mean,clip=2"
    found = Grid("mimic", ()).settings({"rate": 0.1, "final": 1.0, "server": 0.5}, rounds=2)
    assert found == {"algorithm": "mimic", "lr": "constant:0.1", "global_lr": "constant:0.05"}


def test_an_optimum_at_the_edge_extends_the_grid():
    grid = Grid("mimic", (Axis("rate", (0.01, 0.03, 0.09), 3.0), Axis("final", (0.05, 0.5)), Axis("server", (0.5, 1.0), 2.0)))
    tried = grid.configs()
    middle = {"rate": 0.03, "final": 0.5, "server": 1.0}
    assert grid.beyond(middle, tried) == [middle | {"server": 2.0}]  # `final` has no step: its range is complete
    corner = {"rate": 0.09, "final": 0.05, "server": 0.5}
    assert grid.beyond(corner, tried) == [corner | {"rate": 0.27}, corner | {"server": 0.25}]
    bounded = Grid("amplified-fedavg", (Axis("gamma", (1.5, 3.0), 2.0, least=1.0),))
    assert bounded.beyond({"gamma": 1.5}, bounded.configs()) == []
    assert bounded.beyond({"gamma": 3.0}, bounded.configs()) == [{"gamma": 6.0}]
    wider = [*tried, corner | {"rate": 0.27}, corner | {"server": 0.25}]
    assert grid.beyond(corner, wider) == []


def results_of(cell, state, value):
    return {e.id: {"id": e.id, "environment": ENVIRONMENT, "seed": e.seed, "plan": "", "tail": value(e)} for e in state.missing}


def test_a_cell_is_tuned_extended_and_compared(tiny):
    """The best rate is always the largest, so the grid grows as often as it may."""
    cell, results, stages = tiny.cells()[0], {}, []
    while (state := progress_of(cell, results)).missing:
        stages.append((state.stage, len(state.missing)))
        results |= results_of(cell, state, lambda e: float(e.lr.partition(":")[2].split(",")[0]))
    assert stages == [("tuning", 12), *[("tuning", 3)] * EXTENSIONS, ("final", 4)]
    assert state.stage == "complete"
    assert state.chosen["rate"] == 0.1 * 2**EXTENSIONS
    assert state.extended == EXTENSIONS
    assert state.done == state.total == 12 + 3 * EXTENSIONS + 4


def test_tuning_uses_all_seeds_and_diverged_runs_score_zero(tiny):
    cell = tiny.cells()[0]
    state = progress_of(cell, {})
    results = results_of(cell, state, lambda e: 0.9 if e.lr == "constant:0.05" else 0.8)
    bad = next(e for e in state.missing if e.lr == "constant:0.05")
    half = {key: value for key, value in results.items() if key != bad.id}
    assert progress_of(cell, half).missing == [bad]
    results[bad.id] = {k: v for k, v in results[bad.id].items() if k != "tail"} | {"diverged": "in round 1"}
    while (state := progress_of(cell, results)).stage == "tuning":  # 0.9, 0.9 and 0 are worse than three times 0.8
        results |= results_of(cell, state, lambda e: 0.1)
    assert state.chosen != {"rate": 0.05, "final": 1.0}


def test_plan_is_written_once_and_changes_are_refused(tiny, tmp_path):
    first = register(tmp_path, tiny)
    assert register(tmp_path, tiny) == first
    more = dataclasses.replace(tiny, seeds=5)
    with pytest.raises(UsageError, match=r"part\.seeds: 4 -> 5.*--amend"):
        register(tmp_path, more)
    second = register(tmp_path, more, amend="more power")
    assert [version["reason"] for version in plans(tmp_path, tiny)] == ["first plan", "more power"]
    assert second != first


def test_an_edited_plan_is_refused(tiny, tmp_path):
    register(tmp_path, tiny)
    file = tmp_path / "tiny" / "plan.json"
    file.write_text(file.read_text().replace('"seeds": 4', '"seeds": 3'))
    with pytest.raises(UsageError, match="edited"):
        register(tmp_path, tiny)


def test_changes_name_added_algorithms(tiny):
    more = dataclasses.replace(tiny, grids=(*tiny.grids, Grid("mifa", tiny.grids[0].axes)))
    [found] = changes(tiny.plan(), more.plan())
    assert found.startswith("part.grids.mifa: none -> ")


def test_records_read_as_written(tiny, tmp_path):
    fill(tiny, tmp_path, lambda cell, e: 0.5)
    cell = tiny.cells()[0]
    found = read_cell(tmp_path, cell)
    assert len(found) == progress_of(cell, found).done
    assert next(iter(found.values()))["environment"]["processor"] == "some CPU"
    before = (tmp_path / "tiny" / "half-fedavg.json").read_text()
    write_cell(tmp_path, cell, found)
    assert (tmp_path / "tiny" / "half-fedavg.json").read_text() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: text.replace("mimicfl-benchmark-1", "other"),
        lambda text: text.replace('"tail":0.5', '"tail":5', 1),
        lambda text: text.replace('"environment":0', '"environment":9', 1),
        lambda text: json.dumps([1]),
    ],
)
def test_damaged_records_are_refused(tiny, tmp_path, damage):
    fill(tiny, tmp_path, lambda cell, e: 0.5)
    file = tmp_path / "tiny" / "half-fedavg.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(UsageError, match="record of the benchmark"):
        read_cell(tmp_path, tiny.cells()[0])
