"""Runs that train together end as the same runs do alone, keep their own folders, and leave when they are through."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.clients import models
from mimicfl.errors import Paused
from mimicfl.experiments.build import build
from mimicfl.experiments.execute import groups, run_plan
from mimicfl.metrics.store import RunFolder
from mimicfl.settings import Experiment
from mimicfl.simulation.round_loop import fitting
from tests.engines.native.problems import needs_compiler


class Stop(Exception):
    pass


def plan(dtype="float64", **settings):
    """Runs of different length, rates, availability and local work."""
    base = mf.Experiment(rounds=6, dtype=dtype, num_clients=8, epochs=2, **settings)
    return {
        "a": dataclasses.replace(base, algorithm="mimic", availability="static:0.5"),
        "b": dataclasses.replace(base, algorithm="scaffold", rounds=3, seed=1),
        "c": dataclasses.replace(base, algorithm="fedprox:mu=0.1", lr=0.02, epochs=1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched"])
def test_fused_runs_end_as_they_do_alone(engine):
    wanted = plan(engine=engine)
    said = []
    together = run_plan(wanted, notice=said.append)
    assert said == [f"engine {engine}"]  # one cohort for all
    for name, e in wanted.items():
        alone = mf.run(dataclasses.replace(e, engine="plain"))
        torch.testing.assert_close(together[name].params, alone.params, rtol=1e-9, atol=1e-11)
        assert [row["test_accuracy"] for row in together[name].rows] == [row["test_accuracy"] for row in alone.rows]
        assert [row["clients"] for row in together[name].rows] == [row["clients"] for row in alone.rows]


@pytest.mark.slow
@needs_compiler
def test_native_runs_end_as_they_do_alone_to_the_bit():
    wanted = {name: dataclasses.replace(e, engine="native", dtype="float32") for name, e in plan().items()}
    said = []
    together = run_plan(wanted, notice=said.append)
    assert said == ["engine native"]
    for name, e in wanted.items():
        alone = []
        assert torch.equal(together[name].params, mf.run(e, notice=alone.append).params), alone
        assert alone == ["engine native"]


@pytest.mark.slow
def test_a_stopped_sweep_resumes_and_keeps_finished_runs(tmp_path):
    wanted = plan(checkpoint_every=1)

    def stop(e, row, total):
        if row["round"] == 4:
            raise Stop

    with pytest.raises(Stop):
        run_plan(wanted, tmp_path, stop)
    assert RunFolder(tmp_path / "b").finished  # it left the others when it was through
    assert not RunFolder(tmp_path / "a").finished
    made = (tmp_path / "b" / "final.safetensors").stat().st_mtime_ns
    seen = []
    found = run_plan(wanted, tmp_path, lambda e, row, total: seen.append((e.algorithm, row["round"])))
    assert min(r for _, r in seen) >= 4
    assert "scaffold" not in {a for a, _ in seen}
    assert (tmp_path / "b" / "final.safetensors").stat().st_mtime_ns == made
    for name, e in wanted.items():
        assert torch.equal(found[name].params, mf.run(e).params)


def test_a_finished_run_with_another_initial_model_is_refused(tmp_path, monkeypatch):
    """The settings are the same, but what they stand for has changed: other first weights."""
    wanted = {"c": plan()["c"]}
    run_plan(wanted, tmp_path)
    real = models.build
    monkeypatch.setattr(models, "build", lambda spec, data, seed: real(spec, data, seed + 1))
    with pytest.raises(mf.UsageError, match=r"holds a different run"):
        run_plan(wanted, tmp_path)


@pytest.mark.slow
def test_divergence_is_reported_when_the_time_is_up(tmp_path, monkeypatch):
    for name in ("simulation.round_loop", "experiments.execute"):
        monkeypatch.setattr(f"mimicfl.{name}.time", SimpleNamespace(monotonic=itertools.count().__next__))  # a round, a second
    good = plan(dtype="float32")
    with pytest.raises(mf.Diverged, match=r"1 of 4 runs diverged, the others are finished or saved: bad: "):
        run_plan({**good, "bad": dataclasses.replace(good["a"], lr=1e30, seed=3)}, tmp_path, until=2)
    assert [len(RunFolder(tmp_path / name).rows()) for name in good] == [3] * 3
    with pytest.raises(Paused):
        run_plan(good, tmp_path, until=2)


@pytest.mark.slow
def test_divergence_does_not_affect_the_other_runs(tmp_path):
    wanted = plan(dtype="float32")
    wanted["bad"] = dataclasses.replace(wanted["a"], lr=1e30, seed=3)
    with pytest.raises(
        mf.Diverged, match=r"1 of 4 runs diverged, the others are finished: bad: .*lower the learning rate.*last good checkpoint"
    ):
        run_plan(wanted, tmp_path)
    assert all(RunFolder(tmp_path / name).finished for name in plan())
    assert not RunFolder(tmp_path / "bad").finished


def test_a_mistake_in_the_last_run_is_found_before_the_first_begins(tmp_path):
    wanted = plan()
    wanted["bad"] = dataclasses.replace(wanted["a"], model="lenet")
    with pytest.raises(mf.UsageError, match="LeNet needs images"):
        run_plan(wanted, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_that_cannot_train_together_are_separated(monkeypatch):
    wanted = plan()
    wanted["other model"] = dataclasses.replace(wanted["a"], model="mlp:5")
    wanted["other batch"] = dataclasses.replace(wanted["a"], batch_size=7)
    wanted["other data"] = dataclasses.replace(wanted["a"], dataset="synthetic:logistic")
    wanted["large batch"] = dataclasses.replace(wanted["a"], batch_size=200)
    wanted["cut short"] = dataclasses.replace(wanted["large batch"], num_clients=20)  # no client has 200 samples
    wanted["sends more"] = dataclasses.replace(wanted["a"], algorithm="focus")
    built = {name: build(e) for name, e in wanted.items()}
    assert groups(built) == [
        ["a", "b", "c"],
        ["other model"],
        ["other batch"],
        ["other data"],
        ["large batch"],
        ["cut short"],
        ["sends more"],
    ]
    monkeypatch.setattr("mimicfl.experiments.execute.free_memory", lambda: 2 * 2 * built["a"][1].problem.workspace.w.numel() * 8 * 16)
    assert groups({k: built[k] for k in "abc"}) == [["a", "b"], ["c"]]


@pytest.mark.slow
def test_an_algorithm_that_an_engine_cannot_run_leaves_it_to_the_others():
    """Clients of FOCUS send their last gradient, which native does not compute."""
    settings = mf.Experiment(num_clients=4, rounds=2, epochs=1, availability="always", engine="native")
    notices = []
    found = mf.compare(settings, ["fedavg", "focus", "mimic"], seeds=[0], notice=notices.append)
    assert [notice.split(":")[0] for notice in notices if notice.startswith("engine")] == ["engine native", "engine plain"]
    assert all(len(runs[0].rows) == 2 for runs in found.values())


@pytest.mark.slow
def test_diagnosed_runs_give_the_same_values_beside_others():
    wanted = {name: dataclasses.replace(e, diagnose="every=2") for name, e in plan().items()}
    found = run_plan(wanted)
    alone = mf.run(wanted["a"])
    for ours, theirs in zip(found["a"].rows, alone.rows, strict=True):
        assert ("diagnosis" in ours) == ("diagnosis" in theirs)
        if "diagnosis" in ours:
            assert [ours["diagnosis"][key] for key in ("E", "grad2", "gamma")] == [
                theirs["diagnosis"][key] for key in ("E", "grad2", "gamma")
            ]
    assert any("diagnosis" in row for row in found["a"].rows)


class Waiting:
    """As much of a run as the choice of who advances looks at."""

    def __init__(self, clients, left):
        self.participation = SimpleNamespace(active_per_round=np.full(left, clients))
        self.t, self.rounds = 0, left


def test_runs_that_fill_the_lanes_advance():
    runs = [Waiting(clients, left) for clients, left in ((3, 9), (9, 9), (3, 5), (15, 9), (3, 9))]
    assert fitting(runs, None) == runs
    assert fitting(runs, 33) == runs  # all fit
    chosen = fitting(runs, 30)  # 33 clients would need two turns, the second for three of them
    assert sum(int(run.participation.active_per_round[0]) for run in chosen) == 30
    assert runs[2] not in chosen  # the one with the fewest rounds left can wait
    assert len(fitting([Waiting(20, 5)], 15)) == 1  # a run too large for one turn takes two
    assert len(fitting([Waiting(9, 5) for _ in range(5)], 15)) == 5  # 45 clients are three full turns: better than nine of fifteen


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 5])
def test_runs_with_fixed_lanes_end_as_they_do_alone_to_the_bit(lanes):
    """Which runs advance together follows from the lanes; the numbers do not."""
    plan = {
        f"{a}-{s}-{p}": Experiment(rounds=4, epochs=1, algorithm=a, seed=s, availability=f"time-varying:{p}", engine=f"batched:{lanes}")
        for a, s, p in (("mimic", 0, 0.1), ("mimic", 1, 0.2), ("scaffold", 0, 0.2), ("scaffold", 1, 0.1))
    }
    said = []
    together = run_plan(plan, notice=said.append)
    assert said == ["engine batched"]
    for name, e in plan.items():
        assert torch.equal(together[name].params, run_plan({name: e})[name].params)


@pytest.mark.slow
def test_odd_shapes_in_lanes_end_as_they_do_alone_to_the_bit():
    """The memory of the lanes is aligned differently then, and sums on a CPU depend on that."""
    base = Experiment(
        rounds=3, steps=3, batch_size=7, model="mlp:13", num_clients=6, availability="always", engine="batched:8", eval_every=1
    )
    plan = {name: dataclasses.replace(base, algorithm=name) for name in ("mifa", "mimic")}
    together = run_plan(plan)
    for name, e in plan.items():
        alone = run_plan({name: e})[name]
        assert torch.equal(together[name].params, alone.params)
        assert [row["test_loss"] for row in together[name].rows] == [row["test_loss"] for row in alone.rows]
