"""Running studies and recording them: no run is repeated or lost, and records match the runs."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mimicfl.errors import UsageError
from mimicfl.metrics.history import read as read_folder
from mimicfl.metrics.store import RunFolder
from mimicfl.paper.records import keep, read, read_all
from mimicfl.paper.reproduce import (
    MOST_SECONDS,
    Cell,
    as_recorded,
    cells,
    compare_with_records,
    missing,
    pieces,
    placed,
    plan_of,
    reproduce,
    seconds,
)
from mimicfl.paper.studies import STUDIES
from mimicfl.settings import from_dict


@pytest.mark.slow
def test_records_match_the_runs(tiny, made, tmp_path):
    found = read_all(tmp_path / "records")
    assert len(found) == len(made) == 12
    for name, e in made.items():
        truth = read_folder(RunFolder(tmp_path / "runs" / name))
        kept = found[e.id]
        assert [row["test_accuracy"] for row in kept.rows] == pytest.approx([row["test_accuracy"] for row in truth.rows], rel=1e-5)
        assert [row["uploads"] for row in kept.rows] == [row["uploads"] for row in truth.rows]
        assert from_dict(kept.config).id == e.id
        assert kept.environment["engine"] == "plain"
        assert kept.environment["torch"]
    assert all(file.stat().st_size < 10_000 for file in (tmp_path / "records").iterdir())


@pytest.mark.slow
def test_recorded_runs_are_not_repeated(tiny, made, tmp_path):
    assert missing(made, read_all(tmp_path / "records")) == {}
    one = next((tmp_path / "records").glob("*mimic*s1*"))
    lost = read(one).config
    one.unlink()
    left = missing(made, read_all(tmp_path / "records"))
    assert [e.id for e in left.values()] == [from_dict(lost).id]
    assert reproduce(left, tmp_path / "runs", tmp_path / "records") == (0, [])  # its run folder exists: it is recorded without training
    assert one.exists()


@pytest.mark.slow
def test_finished_runs_are_recorded_after_an_interrupt(tiny, tmp_path):
    plan = plan_of(list(cells([tiny])), [0], 1.0, {})

    def stop(experiment, row, rounds):
        if experiment.algorithm == "mimic" and row["round"] == 4:  # SCAFFOLD has finished its three rounds by then
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(plan, tmp_path / "runs", tmp_path / "records", progress=stop)
    before = read_all(tmp_path / "records")
    assert {h.config["algorithm"] for h in before.values()} == {"scaffold:uploads=2"}
    assert reproduce(missing(plan, before), tmp_path / "runs", tmp_path / "records") == (0, [])
    alone = plan_of(list(cells([tiny])), [0], 1.0, {})
    reproduce(alone, tmp_path / "other", tmp_path / "other-records")
    after, whole = read_all(tmp_path / "records"), read_all(tmp_path / "other-records")
    assert {k: h.rows for k, h in after.items()} == {k: h.rows for k, h in whole.items()}


@pytest.mark.slow
def test_a_run_stopped_by_the_time_limit_resumes(tiny, tmp_path, monkeypatch):
    plan = plan_of(list(cells([tiny])), [0], 1.0, {"checkpoint_every": 1000})
    reproduce(plan, tmp_path / "whole", tmp_path / "records-of-whole")
    clock = SimpleNamespace(monotonic=lambda: float(len(rows)))  # one second per round, summed over all runs
    for name in ("simulation.round_loop", "experiments.execute", "paper.reproduce"):
        monkeypatch.setattr(f"mimicfl.{name}.time", clock)
    rows, left = [], []
    for minutes in (9 / 60, 9 / 60, 10):
        seen = lambda e, row, total: rows.append((e.id, row["round"]))  # noqa: E731
        left.append(reproduce(plan, tmp_path / "runs", tmp_path / "records", minutes, seen)[0])
    assert left[0] >= left[1] > left[2] == 0
    assert len(rows) == len(set(rows)) == sum(len(run.rows) for run in read_all(tmp_path / "records").values())  # no round is repeated
    ways = [{key: run.rows for key, run in read_all(tmp_path / name).items()} for name in ("records", "records-of-whole")]
    assert ways[0] == ways[1]


@pytest.mark.slow
def test_every_call_makes_progress_under_a_short_time_limit(tiny, tmp_path):
    plan = plan_of(list(cells([tiny], ["10%"], ["mimic"])), [0], 1.0, {})
    for _ in range(6):
        assert list(reproduce(plan, tmp_path / "runs", None, minutes=1e-3))[1] == []
    assert reproduce(plan, tmp_path / "runs", None, minutes=0) == (0, [])


def test_nothing_starts_after_the_time_limit(tiny, tmp_path):
    plan = plan_of(list(cells([tiny])), [0], 1.0, {})
    assert reproduce(plan, tmp_path / "runs", tmp_path / "records", minutes=0) == (len(plan), [])
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_repeated_runs_are_identical(tiny, made, tmp_path):
    known = read_all(tmp_path / "records")
    some = {name: e for name, e in made.items() if e.algorithm == "mimic"}  # fewer runs are trained together than the first time
    some = as_recorded({name: dataclasses.replace(e, engine="native") for name, e in some.items()}, known)
    assert {e.engine for e in some.values()} == {"plain"}  # the engine of the records
    reproduce(some, tmp_path / "again", None)
    pairs = compare_with_records(some, tmp_path / "again", known)
    assert len(pairs) == 4
    assert all(run.same for run in pairs)
    assert not any(run.otherwise for run in pairs)
    assert len(pairs[0].now) == 6


@pytest.mark.slow
def test_comparison_names_the_differences_of_the_environments(tiny, made, tmp_path):
    known = read_all(tmp_path / "records")
    for run in known.values():
        run.environment |= {"torch": "1.0", "gpu": "a GPU", "threads": 99}
        run.rows[-1]["test_accuracy"] = 0.0
    first = next(iter(made))
    (pair,) = compare_with_records({first: made[first]}, tmp_path / "runs", known)
    assert not pair.same
    assert pair.otherwise == f"torch was 1.0 and is {torch.__version__}, gpu was a GPU and is none"
    for run in known.values():
        run.environment |= {"torch": torch.__version__, "gpu": None, "engine": "native"}
    (pair,) = compare_with_records({first: made[first]}, tmp_path / "runs", known)
    assert pair.otherwise == "engine was native and is plain"


def test_cells_are_selected_by_name(tiny):
    chosen = list(cells([tiny], ["50%"], ["mimic"]))
    assert chosen == [Cell(tiny, "50%", "mimic")]
    with pytest.raises(UsageError, match="no column '20%'"):
        list(cells([tiny], ["20%"]))
    with pytest.raises(UsageError, match=r"no algorithm 'mimik'.*mimic"):
        list(cells([tiny], [], ["mimik"]))


@pytest.mark.slow
def test_pieces_of_large_models_hold_one_seed_of_one_column():
    plan = plan_of(list(cells([STUDIES["table-4-cifar10"]])), [0, 1, 2], 1.0, {})
    found = pieces(plan)
    assert [len(piece) for piece in found[:3]] == [5, 5, 5]
    first = [e.availability for piece in found[:3] for e in piece.values()]
    assert set(first) == {"time-varying:0.1,warm_start=true"}  # the first column with all its seeds comes first
    assert {len({(e.availability, e.seed) for e in piece.values()}) for piece in found} == {1}


@pytest.mark.slow
def test_pieces_take_at_most_ten_minutes():
    for dataset in ("fmnist", "cifar10"):
        plan = plan_of(list(cells([s for s in STUDIES.values() if s.dataset == dataset])), [0], 1.0, {})
        found = pieces(plan)
        assert [name for piece in found for name in piece if name not in plan] == []
        assert sum(len(piece) for piece in found) == len(plan)
        works = {tuple(piece): sum(seconds(e) for e in piece.values()) for piece in found}
        assert all(work <= MOST_SECONDS for names, work in works.items() if len(names) > 1)
        assert max(works.values()) < 1.5 * MOST_SECONDS  # runs with all clients in all 400 rounds are longer and stay alone
    small = plan_of(list(cells([STUDIES["table-4-fmnist"]])), [0, 1, 2], 1.0, {})
    assert len(pieces(small)) == 1


def test_lanes_are_fixed_on_a_gpu(monkeypatch):
    e = STUDIES["table-3"].experiment("20", "mimic", 0)
    monkeypatch.setattr("mimicfl.paper.reproduce.find_device", lambda name: torch.device("cuda" if name == "auto" else name))
    for device in ("cuda", "auto"):
        assert placed(e, {"device": device}).engine == "batched:160:compiled"
        assert placed(e, {"device": device}).device == "cuda"
    assert placed(e, {"device": "cuda", "engine": "plain"}).engine == "plain"
    assert placed(e, {}).engine == "auto"
    assert placed(e, {"device": "cuda"}).id == e.id


@pytest.mark.slow
def test_other_runs_are_recorded_if_one_diverges(tiny, tmp_path):
    plan = plan_of(list(cells([tiny], ["50%"])), [0], 1.0, {})
    diverging = next(name for name, e in plan.items() if e.algorithm == "mimic")
    plan[diverging] = dataclasses.replace(plan[diverging], lr="constant:1e30")
    left, failures = reproduce(plan, tmp_path / "runs", tmp_path / "records")
    assert left == 1
    assert "diverged" in failures[0]
    assert len(read_all(tmp_path / "records")) == 2


def test_invalid_arguments_are_refused_before_training(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    plan = plan_of(list(cells([tiny])), [0], 1.0, {})
    with pytest.raises(UsageError, match="is a file"):
        reproduce(plan, tmp_path / "runs", tmp_path / "file")
    with pytest.raises(UsageError, match="--minutes"):
        reproduce(plan, tmp_path / "runs", None, minutes=-1)
    with pytest.raises(UsageError, match="nothing to run"):
        plan_of(list(cells([tiny])), [], 1.0, {})
    assert not (tmp_path / "runs").exists()


def test_an_unavailable_engine_is_an_error(tiny, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr("mimicfl.engines.stacked.batched.engine.Program", broken)
    plan = plan_of(list(cells([tiny])), [0], 1.0, {"engine": "batched:3"})
    with pytest.raises(UsageError, match=r"no luck.*--engine auto"):
        reproduce(plan, tmp_path / "runs", tmp_path / "records")


@pytest.mark.slow
def test_other_runs_are_recorded_if_one_is_damaged(tiny, made, tmp_path):
    damaged = tmp_path / "runs" / next(iter(made))
    (damaged / "final.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="damaged"):
        reproduce(made, tmp_path / "runs", tmp_path / "anew")
    assert len(read_all(tmp_path / "anew")) == len(made) - 1


@pytest.mark.slow
def test_comparison_refuses_damaged_and_different_runs(tiny, made, tmp_path):
    known = read_all(tmp_path / "records")
    first, second = list(made)[:2]
    rows = tmp_path / "runs" / first / "rows.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(UsageError, match=r"rows.jsonl is damaged"):
        compare_with_records({first: made[first]}, tmp_path / "runs", known)
    with pytest.raises(UsageError, match="different run"):
        compare_with_records({second: made[first]}, tmp_path / "runs", known)


@pytest.mark.slow
def test_unfinished_runs_are_not_recorded(tiny, made, tmp_path):
    folder = tmp_path / "runs" / next(iter(made))
    (folder / "final.safetensors").unlink()
    with pytest.raises(UsageError, match="not finished"):
        keep(RunFolder(folder), tmp_path / "records")
