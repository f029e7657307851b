"""The synthetic twin of a trace: it has the trace's statistics, device by device, and none of its intervals."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.cli.main import main
from mimicfl.participation.traces.intervals import DAY, Trace, around
from mimicfl.participation.traces.pattern import sampled
from mimicfl.participation.traces.summary import by_hour

SOURCES = {
    "phones": av.Diurnal(median=220, sigma=1.8, longest=40_000, amplitude=0.7, hour=2.0),
    "busy": av.Diurnal(mean=0.6, never=0.0, spread=0.25, median=1500, sigma=0.8, amplitude=0.4, hour=14.0),
}


def whole(trace):
    """Device, start and end of the intervals; those that cross the end of the trace are in one piece."""
    return around(trace.device, trace.start, trace.end, trace.period)


def source(name, days=10, devices=300):
    return SOURCES[name].trace(days * DAY, devices, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_it_has_the_statistics_of_the_trace(name):
    trace = source(name)
    twin = av.twin(trace, seed=1)
    assert len(twin) == len(trace)
    assert twin.never.sum() == trace.never.sum()
    np.testing.assert_allclose(np.sort(twin.duty), np.sort(trace.duty), atol=1e-6)
    lengths = [end - start for _, start, end in map(whole, (trace, twin))]
    assert len(lengths[0]) == len(lengths[1])
    assert np.median(lengths[1]) == pytest.approx(np.median(lengths[0]), rel=0.15)
    gaps = [(each.start[1:] - each.end[:-1])[each.device[1:] == each.device[:-1]] for each in (trace, twin)]
    assert np.median(gaps[1]) == pytest.approx(np.median(gaps[0]), rel=0.3)
    hours, wanted = by_hour(twin), by_hour(trace)
    assert np.corrcoef(hours, wanted)[0, 1] > 0.9
    assert np.abs(hours - wanted).max() < 0.25 * wanted.mean()


def test_devices_keep_their_own_interval_lengths():
    """Half of the devices have long intervals, the others short ones, with the same availability."""
    rng = np.random.default_rng(0)
    parts = []
    for device, (count, length) in enumerate([(10, 8640.0), (200, 432.0)] * 20):
        start = (np.arange(count) + rng.random(count) * 0.5) * 10 * DAY / count
        parts.append((np.full(count, device), start, start + length))
    device, start, end = (np.concatenate(part) for part in zip(*parts, strict=True))
    twin = av.twin(Trace.of([str(k) for k in range(40)], device, start, end, np.full(40, 10 * DAY), "test"))
    device, start, end = whole(twin)
    counts = np.bincount(device)
    assert sorted(counts) == [10] * 20 + [200] * 20
    for count, length in ((10, 8640), (200, 432)):
        own = np.isin(device, np.flatnonzero(counts == count))
        assert np.median((end - start)[own]) == pytest.approx(length, rel=0.05)


def test_devices_keep_their_habits():
    """Every device charges for hours at its own time of the night, and for minutes ten times in the afternoon."""
    rng = np.random.default_rng(0)
    parts = []
    for device in range(50):
        for day in range(5):
            night = DAY * day + 3600 * (device % 5) + 300 * rng.random()
            parts.append((device, night, night + 4 * 3600))
            parts += [(device, noon := DAY * day + 13 * 3600 + 1800 * k, noon + 120) for k in range(10)]
    device, start, end = (np.array(part) for part in zip(*parts, strict=True))
    trace = Trace.of([str(k) for k in range(50)], device, start, end, np.full(50, 5 * DAY), "test")
    twin = av.twin(trace, seed=1)
    device, start, end = whole(twin)
    long = end - start > 3600
    assert long.sum() == 250  # one per device and day
    hour = (start[long] / 3600 + 6) % 24 - 6
    assert hour.min() > -5
    assert hour.max() < 9
    per_device = hour.reshape(50, 5)
    spread = per_device.std(axis=1).mean()
    assert 0.5 < spread < 1.5  # a device's nights begin at about the same time, an hour earlier or later
    assert np.std(per_device.mean(axis=1)) > 1.2  # but at another time on another device
    seen = [sampled(each, 320, 270.0)[: 7 * 13].any(axis=0).sum() for each in (trace, twin)]
    assert seen[1] == pytest.approx(seen[0], abs=5)


def test_it_holds_none_of_the_source_and_is_fixed_by_the_seed():
    trace = source("phones", days=4, devices=60)
    one, same, other = (av.twin(trace, seed) for seed in (3, 3, 4))
    assert one.names == same.names
    assert all(np.array_equal(getattr(one, part), getattr(same, part)) for part in ("offsets", "start", "end", "period"))
    assert not np.array_equal(one.start, other.start[: len(one.start)])
    assert not np.array_equal(one.duty, trace.duty)  # shuffled
    pairs = [set(zip(each.start.round().tolist(), each.end.round().tolist(), strict=True)) for each in (trace, one)]
    assert not pairs[0] & pairs[1]
    assert not set(trace.names) & set(one.names)


def test_odd_traces():
    """Devices that are always available, once, or never; a trace of an hour; an interval of length 0."""
    rows = (np.array([0, 1, 2, 2]), np.array([0.0, 10.0, 5.0, 700.0]), np.array([3600.0, 20.0, 5.0, 900.0]))
    twin = av.twin(Trace.of(["always", "once", "twice", "never"], *rows, np.full(4, 3600.0), "test"))
    assert sorted(np.diff(twin.offsets)) == [0, 1, 1, 1]
    np.testing.assert_allclose(np.sort(twin.duty), [0, 10 / 3600, 200 / 3600, 1.0], rtol=1e-9)
    with pytest.raises(mf.UsageError, match="nothing to fit"):
        av.twin(Trace.of(["never"], np.empty(0, dtype=int), np.empty(0), np.empty(0), np.ones(1), "test"))


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    av.write_trace(source("phones", days=3, devices=40), tmp_path / "phones.csv")
    assert main(["availability", "twin", str(tmp_path / "phones.csv"), str(tmp_path / "twin.csv"), "--seed", "2"]) == 0
    assert "its twin, seed 2" in capsys.readouterr().out
    written, twin = av.read_trace(tmp_path / "twin.csv"), av.twin(av.read_trace(tmp_path / "phones.csv"), 2)
    np.testing.assert_allclose(np.sort(written.duty), np.sort(twin.duty), atol=1e-6)
    assert av.schedule(f"trace:{tmp_path / 'twin.csv'}", 20, 40).shape == (20, 40)
    assert main(["availability", "twin", str(tmp_path / "phones.csv")]) == 2
    assert "NEW.csv" in capsys.readouterr().err
