"""What a round of a large population reads: its own clients, not all of them. The results are those of the plain formulas."""

import heapq

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.engines.stacked.jobs import Needs
from mimicfl.participation import asynchronous, run_schedule
from mimicfl.participation.selection import Candidates, by_samples, chosen
from mimicfl.participation.stages import Stages
from mimicfl.participation.traces.intervals import Trace
from mimicfl.participation.traces.pattern import sampled
from mimicfl.seeds import stream
from tests.engines.engines import MODELS, problem, requests_of


def test_rounds_are_listed_before_the_run(monkeypatch):
    available = np.random.default_rng(0).random((40, 30)) < 0.1
    available[[0, 39]] = False  # empty rounds at both ends
    listed, scanned = (run_schedule.Participation(available, available, Stages()) for _ in range(2))
    assert listed._lists is not None
    listed.available = np.zeros((0, 0), dtype=bool)  # no round reads it again
    monkeypatch.setattr(run_schedule, "FEW", 0)
    for t in range(40):
        ours, truth = listed.round(t, lambda _: None), scanned.round(t, lambda _: None)
        assert ours.active.tolist() == truth.active.tolist() == np.flatnonzero(available[t]).tolist()
        ours.active[:] = -1  # a custom selection may do so
        assert listed.round(t, lambda _: None).active.tolist() == truth.active.tolist()
    assert scanned._lists is None


@pytest.mark.parametrize("k", [1, 3, 39, 40, 99])
def test_selection_by_samples_takes_the_first_arrivals_in_order(k):
    sizes = np.random.default_rng(1).integers(1, 4, 80)
    given = Candidates(5, np.arange(0, 80, 2), sizes, 0, lambda _: np.empty(0))
    arrival = given.rng.exponential(size=len(given.available)) / sizes[given.available]
    assert by_samples(given, k).tolist() == given.available[np.argsort(arrival, kind="stable")[:k]].tolist()


@pytest.mark.parametrize("wrong", [0, 5, 99])
def test_a_selection_outside_the_available_clients_is_found(wrong):
    class Strange(av.Selection):
        def choose(self, candidates):
            return np.array([4, wrong, 8])

    given = Candidates(3, np.array([2, 4, 8]), np.ones(100, dtype=int), 0, lambda _: np.empty(0))
    with pytest.raises(mf.UsageError, match=f"client {wrong}"):
        chosen(Strange(), given)


class Naive(asynchronous._Federation):
    """Looks at every client after every event."""

    def _start(self):
        self.tick = max(self.tick, int(self.now // self.length))
        idle = np.flatnonzero(self.available(self.tick) & ~self.busy)
        if len(idle) > self._free():
            key = (self.version, self.tick, len(self.training), int(self.busy.sum()))
            idle = stream(self.seed, "asynchronous", *key).permutation(idle)[: max(self._free(), 0)]
        for client in idle.tolist():
            self.busy[client] = True
            heapq.heappush(self.training, (self.now + float(self.seconds[client]), client, self.version))


@pytest.mark.parametrize("concurrency", [0, 1, 4, 9])
@pytest.mark.parametrize("k", [1, 3])
def test_asynchronous_events_are_those_of_a_look_at_every_client(monkeypatch, concurrency, k):
    rng = np.random.default_rng(2)
    seconds, awake = rng.lognormal(1, 1, 12), rng.random((5000, 12)) < 0.4
    given = (asynchronous.Buffered(k, concurrency), seconds, lambda tick: awake[tick], 1.5, 60, 7)
    ours = asynchronous.arrivals(*given)
    monkeypatch.setattr(asynchronous, "_Federation", Naive)
    truth = asynchronous.arrivals(*given)
    for name in ("clients", "versions"):
        assert [each.tolist() for each in getattr(ours, name)] == [each.tolist() for each in getattr(truth, name)]
    assert ours.times.tolist() == truth.times.tolist()


def test_lanes_are_planned_once_for_a_population(monkeypatch):
    model, clients = problem(MODELS["mlp"]())
    request = requests_of(model, clients, mf.LocalSGD(epochs=[1, 3, 2, 1], batch_size=8))[0]
    first = Needs.of([request])
    assert (first.batch, first.steps) == (8, 12)
    monkeypatch.setattr(mf.LocalSGD, "batch_sizes", lambda *_: pytest.fail("looked at a client"))
    assert Needs.of([request, request]) == first


def test_the_median_client_is_found_once(monkeypatch):
    stages = Stages(seconds=np.array([1.0, 2.0, 9.0]))
    assert stages.idle == 2.0
    monkeypatch.setattr(np, "median", lambda _: pytest.fail("looked at every client"))
    assert stages.round(3, np.empty(0, dtype=np.int64), lambda _: None).seconds == 2.0


def test_devices_are_sampled_without_a_copy_of_the_trace(monkeypatch):
    rng = np.random.default_rng(3)
    device, start = np.repeat(np.arange(9), 4), np.tile(np.arange(4) * 100.0, 9) + rng.random(36) * 50
    trace = Trace.of([str(i) for i in range(9)], device, start, start + 40, np.full(9, 400.0), "test")
    devices = np.array([8, 0, 0, 3, 5])
    monkeypatch.setattr("mimicfl.participation.traces.pattern.AT_ONCE", 2)
    assert np.array_equal(sampled(trace, 30, 25.0, devices=devices), sampled(trace.take(devices), 30, 25.0))
