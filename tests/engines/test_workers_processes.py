"""The processes of the workers engine begin and end as they must: with errors, interrupts, threads and forks of the program."""

import gc
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.workers import crew
from tests.engines.engines import assert_same
from tests.engines.test_workers_crew import engines, pids


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_died_between_rounds_is_replaced():
    engine, plain, asked = engines()
    engine.train(asked)
    victim = pids(engine)[0]
    os.kill(victim, signal.SIGKILL)
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
    assert_same(engine.train(asked), plain.train(asked))
    assert victim not in pids(engine)


def test_after_an_error_the_next_round_has_new_workers(monkeypatch):
    engine, plain, asked = engines()
    engine.train(asked)
    begun, real, parent = pids(engine), PlainEngine.train_one, os.getpid()
    with pytest.raises(RuntimeError, match=r"(?s)worker process failed.*while training client"):
        engine.train([replace(asked[0], eta_L="fast")])
    assert not any(alive(pid) for pid in begun)

    def crash(engine, request, row):
        if os.getpid() != parent:
            os._exit(3)
        return real(engine, request, row)

    with monkeypatch.context() as patch:
        patch.setattr(PlainEngine, "train_one", crash)
        with pytest.raises(RuntimeError, match="exit code 3"):
            engine.train(asked)
        usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            with pytest.raises(RuntimeError, match="a worker process crashed"):
                engine.train(asked)
        finally:
            signal.signal(signal.SIGCHLD, usual)
    assert_same(engine.train(asked), plain.train(asked))


def test_an_interrupted_round_leaves_no_workers(monkeypatch):
    engine, plain, asked = engines()
    engine.train(asked)
    begun = pids(engine)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mimicfl.engines.workers.crew.Process.report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.train(asked)
    assert not any(alive(pid) for pid in begun)
    assert_same(engine.train(asked), plain.train(asked))


def test_a_worker_that_dies_when_it_gets_a_job_is_named(monkeypatch):
    engine, plain, asked = engines()
    engine.train(asked)

    def dying(self):
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    with monkeypatch.context() as patch:
        patch.setattr(crew.Crew, "_replace_ended", dying)
        with pytest.raises(MemoryError, match="killed"):
            engine.train(asked)
    assert_same(engine.train(asked), plain.train(asked))


def test_workers_end_with_their_engine():
    engine, _, asked = engines()
    engine.train(asked)
    begun = pids(engine)
    assert all(alive(pid) for pid in begun)
    child = os.fork()  # a copy of the engine, whose end means nothing
    if not child:
        del engine
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert all(alive(pid) for pid in begun)
    gc.disable()
    try:
        del engine  # it does not refer to itself
        assert not any(alive(pid) for pid in begun)
    finally:
        gc.enable()


def test_every_thread_has_workers_of_its_own():
    """The system ends workers with the thread that began them, shortly after `join` has returned."""
    engine, plain, asked = engines()
    engine.train(asked)
    found, before = [], pids(engine)

    def another():
        found.append((engine.train(asked), pids(engine)))

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    [(ours, begun)] = found
    after = engine.train(asked)
    assert not {*before} & {*begun}
    assert not {*begun} & {*pids(engine)}
    for each in (ours, after):
        assert_same(each, plain.train(asked))


def test_a_forked_copy_of_the_engine_writes_to_memory_of_its_own():
    engine, _, asked = engines()
    before = engine.train(asked)
    shared, expected = engine.crew.inputs, before[0].g.clone()
    child = os.fork()
    if not child:
        status = 1
        try:
            ours = engine.train(asked)
            status = 0 if engine.crew.inputs is not shared and torch.equal(ours[0].g, expected) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(engine.train(asked)[0].g, expected)
