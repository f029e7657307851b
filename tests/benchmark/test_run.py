"""The benchmark trains what is missing, records it, and can be stopped at any time."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import mimicfl as mf
from mimicfl.benchmark import processes as processes_module
from mimicfl.benchmark import run as module
from mimicfl.benchmark.processes import Worker
from mimicfl.benchmark.progress import progress_of
from mimicfl.benchmark.queue import Queue, plan_of
from mimicfl.benchmark.records import plans, read_cell, register
from mimicfl.benchmark.run import run_part
from mimicfl.benchmark.suite import PARTS
from mimicfl.callbacks import send
from mimicfl.data.holdout import held_out
from mimicfl.experiments.build import load_data
from mimicfl.metrics.lock import is_locked
from tests.benchmark.conftest import ENVIRONMENT
from tests.cli.conftest import call
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def texts(folder):
    return {file.name: file.read_text() for file in (folder / "tiny").iterdir() if file.name != "plan.json"}


def test_interrupted_benchmark_gives_the_same_records(tiny, tmp_path, monkeypatch):
    """Stopped after every batch, then resumed: the records equal those of one run. Nothing is trained twice."""
    monkeypatch.setattr(module, "BATCH", 11)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_part(tiny, whole, tmp_path / "runs", tiny.cells(), {})
    assert not list((tmp_path / "runs").iterdir())  # folders of recorded runs are removed
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "monotonic", lambda: 30.0 * next(clock))
    calls = 0
    while not run_part(tiny, parts, tmp_path / "runs", tiny.cells(), {}, minutes=1.0):
        calls += 1
        assert calls < 50
    assert calls > 3
    assert len(plans(parts, tiny)) == 1
    strip = [{name: text.replace(plans(folder, tiny)[0]["hash"], "") for name, text in texts(folder).items()} for folder in (whole, parts)]
    assert strip[0] == strip[1]


def test_two_commands_lose_none_of_each_others_records(tiny, tmp_path):
    """They train the same part in different folders: what one records in the meantime is kept, and the other does not train it again."""
    [cell, _], records = tiny.cells(), tmp_path / "records"
    plan = register(records, tiny)
    first, second = (Queue(tiny, records, [cell], plan, 2, 1, 1) for _ in range(2))
    batches = []
    for queue in (first, first, second, second):
        batches.append(queue.take(2))
        queue.give_back(batches[-1], {e.name: result(e) for _, e in batches[-1]})
    trained = [{e.id for _, e in batch} for batch in batches]
    assert trained[2] == trained[0]  # both began without records
    assert not trained[3] & (trained[0] | trained[1])
    assert set(read_cell(records, cell)) == set().union(*trained)


def result(e):
    return {"stage": "tuning", "seed": e.seed, "environment": ENVIRONMENT, "tail": 0.5, "curve": [100, 500]}


def test_a_diverging_run_is_recorded_as_diverged(tiny, tmp_path):
    """Rates of 1e30 diverge, the others of the batch finish."""
    grid = tiny.grids[0]
    axes = (dataclasses.replace(grid.axes[0], values=(0.1, 1e30), step=0.0), grid.axes[1])
    part = dataclasses.replace(tiny, grids=(dataclasses.replace(grid, axes=axes),), seeds=2)
    assert run_part(part, tmp_path / "records", tmp_path / "runs", part.cells(), {})
    [cell] = part.cells()
    found = read_cell(tmp_path / "records", cell)
    assert sum("diverged" in run for run in found.values()) == 6
    assert not any(str(tmp_path) in run.get("diverged", "") for run in found.values())  # the checkpoints are removed
    assert progress_of(cell, found).chosen["rate"] == 0.1


def test_callbacks_watch_every_run(tiny, tmp_path):
    part = dataclasses.replace(tiny, grids=tiny.grids[:1], seeds=1)
    assert run_part(part, tmp_path / "records", tmp_path / "runs", part.cells(), {}, callbacks=[mf.callbacks.CSV(tmp_path / "csv")])
    [cell] = part.cells()
    assert len(list((tmp_path / "csv").iterdir())) == len(read_cell(tmp_path / "records", cell))
    assert not list((tmp_path / "runs").iterdir())


def test_runs_that_a_tracker_misses_are_kept(tiny, tmp_path):
    part = dataclasses.replace(tiny, grids=tiny.grids[:1], seeds=1)
    (tmp_path / "csv").write_text("a file")
    with pytest.warns(UserWarning, match="track send"):
        run_part(part, tmp_path / "records", tmp_path / "runs", part.cells(), {}, callbacks=[mf.callbacks.CSV(tmp_path / "csv")])
    (tmp_path / "csv").unlink()
    runs = len(list((tmp_path / "runs").iterdir()))
    assert send(tmp_path / "runs", mf.callbacks.CSV(tmp_path / "csv")).runs == runs == len(list((tmp_path / "csv").iterdir()))


@pytest.mark.parametrize("callback", [mf.callbacks.EarlyStopping(), lambda now: None])
def test_callbacks_that_could_change_results_are_refused(tiny, tmp_path, callback):
    with pytest.raises(mf.UsageError, match="only observe"):
        run_part(tiny, tmp_path / "records", tmp_path / "runs", tiny.cells(), {}, callbacks=[callback])
    assert not (tmp_path / "records").exists()


def test_held_out_samples_are_disjoint_and_stratified():
    data = mf.datasets.load("digits")
    found = held_out(data, 0.2)
    assert len(found.x_train) + len(found.x_test) == len(data.x_train)
    shares = found.y_test.bincount() / data.y_train.bincount()
    assert shares.min() > 0.19
    assert shares.max() < 0.21
    rows = {bytes(x.numpy().tobytes()) for x in found.x_train} & {bytes(x.numpy().tobytes()) for x in found.x_test}
    assert len(rows) <= 2  # the digits hold few identical images
    with pytest.raises(mf.UsageError, match="validation"):
        held_out(data, 0.0001)


def test_validation_is_part_of_the_result_and_absent_by_default():
    plain, held = mf.Experiment(rounds=2), mf.Experiment(rounds=2, validation=0.2)
    assert "validation" not in plain.to_dict()
    assert plain.id != held.id
    assert load_data(held.resolved()) is load_data(held.resolved())
    scores = [mf.run(dataclasses.replace(e, epochs=1, num_clients=4, availability="always")) for e in (plain, held)]
    assert scores[0].fingerprint != scores[1].fingerprint


def contents(folder):
    """The recorded runs by id, without what differs between two starts."""
    found = {name: json.loads(text)["runs"] for name, text in texts(folder).items()}
    kept = {name: [{key: run[key] for key in run if key not in ("plan", "environment")} for run in runs] for name, runs in found.items()}
    return {name: sorted(runs, key=lambda run: run["id"]) for name, runs in kept.items()}


def test_two_processes_write_the_records_of_one(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 7)  # several batches for each
    for processes in (1, 2):
        assert run_part(tiny, tmp_path / str(processes), tmp_path / "runs", tiny.cells(), {}, processes=processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert not list((tmp_path / "runs").iterdir())


def test_the_runs_of_a_killed_process_are_trained_by_the_other(tiny, tmp_path, monkeypatch):
    said, killed = [], []
    train = Worker.train

    def shot(self, job):
        if self.number == 1 and not killed:
            killed.append(self)
            threading.Timer(0.5, self.process.kill).start()  # it is importing, or training its first batch
        return train(self, job)

    monkeypatch.setattr(Worker, "train", shot)
    part = dataclasses.replace(tiny, settings=tiny.settings | {"rounds": 6})
    assert run_part(part, tmp_path / "records", tmp_path / "runs", part.cells(), {}, say=said.append, processes=2)
    assert any("process 2 ended unexpectedly (signal SIGKILL)" in line for line in said)
    assert all(progress_of(cell, read_cell(tmp_path / "records", cell)).stage == "complete" for cell in part.cells())


def test_all_processes_killed_is_an_error(tiny, tmp_path, monkeypatch):
    train = Worker.train

    def shot(self, job):
        self.process.kill()
        return train(self, job)

    monkeypatch.setattr(Worker, "train", shot)
    with pytest.raises(mf.UsageError, match="all processes ended"):
        run_part(tiny, tmp_path / "records", tmp_path / "runs", tiny.cells(), {}, processes=2)


def test_processes_stop_when_the_time_is_up(tiny, tmp_path, monkeypatch):
    """Runs far too long for the time are saved, recorded by nobody, and resumed."""
    part, now, given = dataclasses.replace(tiny, settings=tiny.settings | {"rounds": 100_000}), [0.0], []
    train = Worker.train

    def timed(self, job):
        """The time stands still until the first worker has used what was left, which it counts itself."""
        given.append(job["seconds"])
        results = train(self, job)
        now[0] += job["seconds"]
        return results

    monkeypatch.setattr(Worker, "train", timed)
    for place in (module, processes_module):
        monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert not run_part(part, tmp_path / "records", tmp_path / "runs", part.cells(), {}, minutes=1 / 60, processes=2)
    assert set(given) == {1.0}
    assert not any(read_cell(tmp_path / "records", cell) for cell in part.cells())
    assert list((tmp_path / "runs").glob("*/checkpoint.safetensors"))


def test_a_mistake_is_reported_once_by_processes(tiny, tmp_path):
    with pytest.raises(mf.UsageError, match="streams needs a GPU"):
        run_part(tiny, tmp_path / "records", tmp_path / "runs", tiny.cells(), {"engine": "streams"}, processes=2)


def test_engines_on_a_gpu():
    """Compiled code trains small networks."""

    def engine(part, algorithm, **settings):
        cell = next(cell for cell in PARTS[part].cells() if cell.grid.algorithm == algorithm)
        [e] = plan_of([(cell, next(iter(cell.tuning(cell.grid.configs()[0]).values())))], settings).values()
        return e.engine

    assert engine("fmnist", "mimic", device="cuda") == "native"
    assert engine("fmnist", "focus", device="cuda") == "native"
    assert engine("cifar10", "mimic", device="cuda").startswith("batched:")
    assert engine("fmnist", "mimic", device="cuda", engine="streams") == "streams"
    assert engine("fmnist", "mimic", device="cpu") == "auto"


def test_processes_and_trackers_are_refused(tiny, tmp_path):
    with pytest.raises(mf.UsageError, match="trackers follow"):
        run_part(tiny, tmp_path / "r", tmp_path / "o", tiny.cells(), {}, callbacks=[mf.callbacks.CSV(tmp_path / "csv")], processes=2)


@pytest.mark.parametrize("processes", [0, -1, 65, 1000, 1.5, True, "2", None])
def test_a_number_of_processes_that_makes_no_sense_is_refused(tiny, tmp_path, processes, monkeypatch):
    monkeypatch.setattr(module, "Workers", lambda *_: pytest.fail("started"))
    with pytest.raises(mf.UsageError, match="processes must be"):
        run_part(tiny, tmp_path / "r", tmp_path / "o", tiny.cells(), {}, processes=processes)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("text", ["0", "-1", "1000", "two", "1.5", ""])
def test_processes_on_the_command_line(tiny, text, capsys):
    try:
        code = call("benchmark", "run", "tiny", "--processes", text)
    except SystemExit as error:  # of the parser, which refuses what is not an integer
        code = error.code
    assert code == 2
    assert "processes" in capsys.readouterr().err


def test_no_more_processes_than_runs(tiny, tmp_path, monkeypatch):
    """Two cells with 8 runs of the tuning and 4 final runs each."""
    started = []
    monkeypatch.setattr(module, "Workers", lambda count, gpu: started.append(count) or pytest.exit("enough"))
    with pytest.raises(pytest.exit.Exception):
        run_part(tiny, tmp_path / "r", tmp_path / "o", tiny.cells(), {}, processes=60)
    assert started == [sum(progress_of(cell, {}).total for cell in tiny.cells())]
    assert started[0] < 60


def test_a_process_that_cannot_be_started_is_an_error(tiny, tmp_path, monkeypatch):
    started, start = [], subprocess.Popen

    def limited(*arguments, **options):
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(processes_module.subprocess, "Popen", limited)
    with pytest.raises(mf.UsageError, match=r"process 2 cannot be started .*fewer"):
        run_part(tiny, tmp_path / "r", tmp_path / "o", tiny.cells(), {}, processes=2)
    assert started[0].poll() is not None


def train_for_ever(records, out):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background, where Ctrl-C is ignored
    digits = PARTS["digits"]
    module.BATCH = module.LEAST = 1
    part = dataclasses.replace(digits, settings=digits.settings | {"rounds": 5000}, grids=digits.grids[:1], patterns=digits.patterns[:1])
    run_part(part, Path(records), Path(out), part.cells(), {"engine": "plain"}, processes=2, say=print)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and locks")
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_command(tmp_path, kind):
    """Killed, or stopped by Ctrl-C, which reaches all processes: nobody writes to the runs any more, and nobody is said to have failed."""
    code = f"from tests.benchmark.test_run import train_for_ever; train_for_ever({str(tmp_path / 'r')!r}, {str(tmp_path / 'o')!r})"
    with (tmp_path / "log").open("w") as log:
        command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            until(lambda: any(map(is_locked, (tmp_path / "o").glob("*"))))
            command.kill() if kind == signal.SIGKILL else os.killpg(command.pid, kind)
            command.wait(120)
            until(lambda: not any(map(is_locked, (tmp_path / "o").glob("*"))))
        finally:
            command.kill()
            command.wait()
    assert "unexpectedly" not in (tmp_path / "log").read_text()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
