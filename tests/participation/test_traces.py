"""Traces: schedules, options, the fitted pattern, and the command line."""

import math

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.cli.main import main
from mimicfl.participation.traces.pattern import sampled
from mimicfl.participation.traces.summary import by_hour, sentences
from tests.participation.conftest import HEADER, SMALL


def naive(intervals, period, rounds, seconds, when, wrap, offset):
    """Second by second."""

    def on(t):
        t = t % period if wrap else t
        return any(a <= t < b for a, b in intervals)

    steps = np.arange(0, seconds, 1.0)
    return [on(offset + r * seconds) if when == "start" else all(on(offset + r * seconds + s) for s in steps) for r in range(rounds)]


@pytest.mark.parametrize("when", ["start", "throughout"])
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1234.0])
def test_schedules_agree_with_looking_second_by_second(small, when, wrap, offset):
    trace = av.read_trace(small)
    found = sampled(trace, 40, 50.0, when, wrap, offset)
    for i, intervals in enumerate([[(0, 100), (250, 600)], [(0, 50), (900, 1000)], []]):
        assert found[:, i].tolist() == naive(intervals, 1000, 40, 50.0, when, wrap, offset)


def test_pattern_options(small):
    spec = f"trace:{small},round=50"
    in_order = av.schedule(f"{spec},devices=order", 20, 3)
    assert av.schedule(f'{spec},devices=["b","a"]', 20, 2).T.tolist() == [in_order[:, 1].tolist(), in_order[:, 0].tolist()]
    seeded = [av.make(spec).chosen(3, seed).tolist() for seed in range(20)]
    assert len({tuple(each) for each in seeded}) > 2
    assert all(sorted(each) == [0, 1, 2] for each in seeded)
    assert av.schedule(f"{spec},never=drop,devices=order", 20, 2).any(axis=0).all()
    assert av.schedule(f"{spec},resample=true", 20, 9).shape == (20, 9)
    assert av.make(spec).round_seconds == 50


@pytest.mark.slow
@pytest.mark.parametrize("when", ["start", "throughout"])
@pytest.mark.parametrize(
    ("seconds", "offset"), [(50.0, 0.0), (50.0, 30.0), (270.0, 0.0), (400.0, 10.0), (1000.0, 40.0), (12.5, 3.0), (300.0, 999.0)]
)
def test_rates_are_the_frequencies_of_the_schedule(tmp_path, when, seconds, offset):
    """Not the share of time: a device that is available between two rounds is not available in any."""
    file = tmp_path / "t.csv"
    more = "d,0,300,600\nd,300,600,600\ne,0,10,1000\ne,400,1000,1000\nf,20,700,730.5\n"  # always; around the end; another period
    file.write_text(SMALL + more)
    pattern = av.make(f"trace:{file},round={seconds},when={when},offset={offset},devices=order")
    half = int(2 * seconds)  # after this many rounds everything is repeated:
    rounds = math.lcm(*(period // math.gcd(period, half) for period in (2000, 1200, 1461)))  # in half seconds
    long = av.schedule(pattern, rounds, 6)
    assert pattern.rates(6, 0, None) == pytest.approx(long.mean(axis=0), abs=1e-12)
    assert av.make(f"trace:{file},wrap=false").rates(6, 0, None) is None


@pytest.mark.parametrize("options", ["round=1e300", "offset=1e300", "round=1e10"])
def test_times_in_another_unit_are_refused(small, tmp_path, options):
    with pytest.raises(mf.UsageError, match=r"lower round|in seconds"):
        av.schedule(f"trace:{small},{options}", 5, 3)
    (tmp_path / "hours.csv").write_text(HEADER + "a,0.1,0.2,0.24\n")
    with pytest.raises(mf.UsageError, match="in seconds"):
        av.schedule(f"trace:{tmp_path / 'hours.csv'}", 500, 1)
    assert av.schedule(f"trace:{tmp_path / 'hours.csv'},wrap=false,round=1e300", 500, 1).sum() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "3 devices for 4 clients"),
        (",round=0", "more than 0"),
        (",when=end", "unknown"),
        (",wrap=yes", "true or false"),
        (",never=hide", "unknown"),
        (",offset=-1", "at least 0"),
        (",devices=random", "seeded, order"),
        (",devices=[]", "list of names"),
        (',devices=["a"]', "1 devices for 4 clients"),
        (',devices=["a","b","c","z"]', "no device 'z'"),
        (",rule=sleeping", "unknown"),
    ],
)
def test_bad_options_are_refused(small, options, words):
    with pytest.raises(mf.UsageError, match=words):
        av.schedule(f"trace:{small}{options}", 5, 4)


def test_missing_files_are_refused():
    with pytest.raises(mf.UsageError, match="name a trace"):
        av.make("trace")
    with pytest.raises(mf.UsageError, match="cannot read"):
        av.schedule("trace:nowhere.csv", 5, 4)


@pytest.mark.slow
def test_diurnal_has_the_published_statistics():
    trace = av.Diurnal().trace(7 * 86400, 2000, 0)
    lengths = trace.lengths[trace.lengths > 0]
    assert 0.06 <= trace.duty.mean() <= 0.10
    assert 0.3 <= trace.never.mean() <= 0.37
    assert np.median(lengths) == pytest.approx(140, rel=0.05)
    assert 1200 < lengths.mean() < 2500
    hours = by_hour(trace)
    assert hours[[23, 0, 1, 2, 3, 4]].mean() > 1.8 * hours[11:17].mean()


@pytest.mark.slow
def test_diurnal_clients_have_their_duty_cycles_from_the_first_round():
    pattern = av.Diurnal(never=0.25, mean=0.3, amplitude=0.0, sigma=1.0, median=600)
    duty = pattern.duties(400, 3)
    assert duty.mean() == pytest.approx(0.3, abs=1e-6)
    assert (duty == 0).mean() == 0.25
    available = av.schedule(pattern, 2000, 400, 3)
    assert np.corrcoef(available.mean(axis=0), duty)[0, 1] > 0.97
    assert available[:20].mean() == pytest.approx(0.3, abs=0.04)
    assert available.mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.slow
def test_a_fit_recovers_the_pattern():
    truth = av.Diurnal(mean=0.12, never=0.2, spread=0.1, median=300, sigma=1.2, longest=20000, amplitude=0.6, hour=3.0)
    found = av.fit(truth.trace(20 * 86400, 600, 1))
    assert found.mean == pytest.approx(0.12, abs=0.01)
    assert found.never == pytest.approx(0.2, abs=0.03)
    assert found.spread == pytest.approx(0.1, rel=0.15)
    assert found.median == pytest.approx(300, rel=0.05)
    assert found.sigma == pytest.approx(1.2, rel=0.05)
    assert found.amplitude == pytest.approx(0.6, abs=0.15)
    assert found.hour == pytest.approx(3.0, abs=0.7)
    assert av.make(mf.Experiment(availability=found, rounds=1).availability) == found


def test_a_fit_needs_intervals(small):
    with pytest.raises(mf.UsageError, match="too few"):
        av.fit(av.read_trace(small))


def test_runs_on_a_trace_have_the_trace_s_time(small):
    e = mf.Experiment(availability=f"trace:{small},round=50,devices=order", num_clients=3, rounds=4, epochs=1, engine="plain")
    rows = mf.run(e).rows
    assert [row["virtual_seconds"] for row in rows] == [50, 100, 150, 200]
    assert [row["clients"] for row in rows] == [[0, 1], [0], [], []]
    timed = mf.run(mf.Experiment(**{**e.to_dict(), "speed": "1000"})).rows
    assert 0 < timed[0]["virtual_seconds"] < 50
    assert 50 < timed[1]["virtual_seconds"] < 100


@pytest.mark.slow
def test_command_line(small, tmp_path, capsys):
    assert main(["availability", "convert", str(small), str(tmp_path / "new.csv")]) == 0
    assert (
        main(["availability", "show", f"trace:{tmp_path / 'new.csv'},round=100", "--rounds", "10", "--out", str(tmp_path / "p.png")]) == 0
    )
    assert "1 devices never" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 1000
    av.write_trace(av.Diurnal().trace(86400 * 3, 50, 0), tmp_path / "d.csv")
    assert main(["availability", "fit", str(tmp_path / "d.csv")]) == 0
    spec = capsys.readouterr().out.split()[-1]
    assert isinstance(av.make(spec), av.Diurnal)
    for wrong in (
        ["convert", str(small)],
        ["convert", str(small), "x.txt"],
        ["fit", "nowhere.csv"],
        ["show", f"trace:{small}", "--clients", "9"],
    ):
        assert main(["availability", *wrong]) == 2


def test_sentences_describe_the_small_trace(small):
    text = "\n".join(sentences(av.read_trace(small)))
    assert "3 devices, 4 intervals" in text
    assert "20.0 %" in text


def test_hours_that_a_trace_does_not_cover_do_not_count(tmp_path):
    """The device is available half of the first 30 hours, so half of every hour, although six of them occur twice."""
    start = 1800.0 * np.arange(0, 60, 2)
    trace = av.Trace.of(["a"], np.zeros(30, dtype=int), start, start + 1800, np.array([30 * 3600.0]), "test")
    assert by_hour(trace).tolist() == pytest.approx([0.5] * 24)
    short = av.Trace.of(["a"], np.zeros(1, dtype=int), np.array([0.0]), np.array([900.0]), np.array([1800.0]), "test")
    assert by_hour(short).tolist() == pytest.approx([0.5] + [0.0] * 23)
