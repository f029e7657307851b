"""Files of traces: CSV, Parquet, FLASH and FedScale; conversions, and files that are refused."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.participation.traces.intervals import Trace
from mimicfl.participation.traces.plain_data import read_plain_pickle
from mimicfl.participation.traces.summary import by_hour
from tests.participation.conftest import HEADER

FLASH = {
    "7": {
        "guid": "7",
        "model": "x",
        # ready (locked, Wi-Fi, charging) from 00:10 to 00:40; with the screen off as well until 00:50
        "messages": "2020-01-29 00:00:00\tscreen_off\n2020-01-29 00:05:00\tbattery_charged_on\n2020-01-29 00:06:00\tscreen_lock\n"
        "2020-01-29 00:10:00\twifi\n2020-01-29 00:20:00\t80.0%\n2020-01-29 00:40:00\tscreen_unlock\n2020-01-29 00:50:00\t4G\n"
        "2020-01-30 00:00:00\tscreen_on",
    },
    "8": {"guid": "8", "model": "y", "messages": "2020-01-29 06:00:00\tscreen_on\n2020-01-31 06:00:00\tscreen_off\n"},
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_conversion_keeps_every_interval(small, tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    trace = av.read_trace(small)
    kept(trace, tmp_path / f"new.{kind}")
    kept(trace.take(np.arange(len(trace))[::-1]), tmp_path / f"new.{kind}")


def kept(trace, file):
    """A trace is written and read without a change, also of the order of its devices, by which a run draws them."""
    av.write_trace(trace, file)
    again = av.read_trace(file)
    assert again.names == trace.names
    for name in ("start", "end", "period", "offsets"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))


NAMES = ["NA", "null", "None", "nan", "", "1e5", "007", "#1", "a#b", "a,1", "b,1", 'say "x"', '"', " s", "s ", "s", "two\nlines", "ä"]


@pytest.mark.parametrize("pandas", [True, False])
def test_devices_keep_their_names(tmp_path, monkeypatch, pandas):
    """Names that a table reader takes for missing values, comments or several columns; and times with many digits."""
    n = len(NAMES)
    start = np.arange(n) + 86_400 / 7
    trace = Trace.of(NAMES, np.arange(n), start, start + 1 / 3, np.full(n, 1e6 / 3), "here")
    if not pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    kept(trace, tmp_path / "t.csv")


@pytest.mark.parametrize("pandas", [True, False])
@pytest.mark.parametrize("line", ["a,1,0,100,1000\n", "a,1,2,0,100,1000\n", "b,0,100,1000\na,1,0,100,1000\n"])
def test_lines_with_more_columns_are_refused(tmp_path, monkeypatch, line, pandas):
    (tmp_path / "t.csv").write_text(HEADER + 3 * line)
    if not pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(mf.UsageError, match="every line must be"):
        av.read_trace(tmp_path / "t.csv")


def test_files_may_begin_with_a_byte_order_mark(small, tmp_path):
    """As spreadsheets write them."""
    (tmp_path / "t.csv").write_text("\ufeff" + Path(small).read_text(encoding="utf-8"), encoding="utf-8")
    assert av.read_trace(tmp_path / "t.csv").names == av.read_trace(small).names
    (tmp_path / "schedule.csv").write_text("\ufeff1,0\n0,1\n", encoding="utf-8")
    assert av.schedule(f"explicit:{tmp_path / 'schedule.csv'}", 2, 2).tolist() == [[True, False], [False, True]]


def test_csv_without_pandas(small, monkeypatch):
    with_it = av.read_trace(small)
    monkeypatch.setitem(sys.modules, "pandas", None)
    without = av.read_trace(small)
    np.testing.assert_array_equal(with_it.start, without.start)
    assert with_it.names == without.names


def test_flash_raw_and_its_rules(tmp_path):
    file = tmp_path / "flash.txt"
    file.write_text(json.dumps(FLASH))
    locked = av.read_trace(file)
    assert locked.names == ["7", "8"]
    assert locked.period.tolist() == [86400, 2 * 86400]
    assert (locked.start.tolist(), locked.end.tolist()) == ([600], [2400])
    idle = av.read_trace(file, rule="idle")
    assert (idle.start.tolist(), idle.end.tolist()) == ([600], [3000])
    assert av.read_trace(file, rule="charging").start.tolist() == [300]
    assert locked.never.tolist() == [False, True]


def test_times_of_day_are_kept_when_traces_start_at_different_hours(tmp_path):
    late = {"1": {"messages": "2020-01-29 23:00:00\tscreen_lock\n2020-01-29 23:00:00\twifi\n2020-01-29 23:30:00\tbattery_charged_on\n"
                  "2020-01-30 00:30:00\tbattery_charged_off\n2020-01-30 23:00:00\tscreen_on"}}  # fmt: skip
    (tmp_path / "f.json").write_text(json.dumps(late))
    trace = av.read_trace(tmp_path / "f.json")
    assert trace.start.tolist() == [0, 84600]  # cut at midnight
    assert trace.end.tolist() == [1800, 86400]
    hours = by_hour(trace)
    assert hours[[0, 23]].tolist() == pytest.approx([0.5, 0.5])
    assert hours.mean() == pytest.approx(trace.duty.mean())


def test_flash_processed(tmp_path):
    data = {"0": {"isSuccess": True, "trace_start": 86400.0, "trace_end": 259200.0, "ready_time": [[86500.0, 86600.0]]},
            "1": {"isSuccess": False, "trace_start": None, "trace_end": None, "ready_time": []}}  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(data))
    trace = av.read_trace(tmp_path / "p.json")
    assert trace.names == ["0"]
    assert (trace.start.tolist(), trace.end.tolist(), trace.period.tolist()) == ([100], [200], [172800])


@pytest.mark.parametrize("protocol", range(6))
def test_fedscale_pickles_are_read_without_unpickling(tmp_path, protocol):
    data = {1: {"inactive": [65881, 133574, 211625], "finish_time": 518400, "active": [12788, 100044, 188992], "model": "CPH1801"},
            2: {"duration": 10, "inactive": [2.5], "finish_time": 300000000000, "active": [0], "model": None}}  # fmt: skip
    (tmp_path / "t").write_bytes(pickle.dumps(data, protocol=protocol))
    trace = av.read_trace(tmp_path / "t", "fedscale")
    assert trace.names == ["1", "2"]
    assert trace.start.tolist() == [12788, 100044, 188992, 0]
    assert trace.end.tolist() == [65881, 133574, 211625, 2.5]
    assert trace.period.tolist() == [518400, 300000000000]
    assert read_plain_pickle(pickle.dumps([True, False, -5, 2**70, "é", (1, (2, 3)), {}], protocol), "") == [
        True, False, -5, 2**70, "é", (1, (2, 3)), {}]  # fmt: skip


class Evil:
    def __reduce__(self):
        return (open, ("broken", "w"))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_anything_but_plain_data_is_refused(tmp_path, protocol, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.pkl").write_bytes(pickle.dumps({1: Evil()}, protocol=protocol))
    with pytest.raises(mf.UsageError, match="more than plain data"):
        av.read_trace(tmp_path / "t.pkl")
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    "data", [b"\x80", b"\x80\x04K", b"\x80\x04(K\x01.", b"\x80\x04]K\x01K\x02u.", b"\x80\x04X\xff\xff\xff\xffabc.", b"\x80\x04e.", b"."]
)
def test_damaged_pickles_are_refused(data):
    with pytest.raises(mf.UsageError, match="plain data"):
        read_plain_pickle(data, "the file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with the line"),
        ("start,end\n", "must begin with the line"),
        (HEADER, "empty"),
        (HEADER + "a,0,100,1000\na,50,200,1000\n", "overlaps"),
        (HEADER + "a,100,50,1000\n", "ends before it starts"),
        (HEADER + "a,-5,50,1000\n", "before the start"),
        (HEADER + "a,0,2000,1000\n", "after the trace's period"),
        (HEADER + "a,0,10,1000\na,20,30,2000\n", "the same in all rows"),
        (HEADER + "a,0,10,\n", "period"),
        (HEADER + "a,0,10,0\n", "above 0"),
        (HEADER + "a,0,10,1e13\n", "at most 1e\\+12 seconds"),
        (HEADER + "a,0,,1000\n", "numbers of seconds"),
        (HEADER + "a,x,10,1000\n", "times in seconds"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(mf.UsageError, match=words):
        av.read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("{}", "empty"),
        ("[1]", "one entry per device"),
        ('{"0": {"guid": 1}}', "messages"),
        ('{"0": {"messages": "yesterday\\tscreen_on"}}', "begin with a time"),
        ('{"0": {"ready_time": [[1]], "trace_start": 0, "trace_end": 5}}', "must have numbers"),
        ('{"0": {"ready_time": [[3, 1]], "trace_start": 0, "trace_end": 5}}', "ends before it starts"),
        (f'{{"0": {{"ready_time": [[1, 3]], "trace_start": 0, "trace_end": {10**400}}}}}', "must have numbers"),
    ],
)
def test_bad_json_is_refused(tmp_path, text, words):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(mf.UsageError, match=words):
        av.read_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "per device"),
        ({1: {"active": [1]}}, "lists of numbers"),
        ({1: {"active": [1], "inactive": [], "finish_time": 5}}, "as many of both"),
        ({1: {"active": [1], "inactive": [2], "finish_time": 10**400}}, "lists of numbers"),
        ({1: {"active": [6], "inactive": [8], "finish_time": 5}}, "from 6 to 8, which ends after the trace's period"),
    ],
)
def test_bad_fedscale_traces_are_refused(tmp_path, data, words):
    (tmp_path / "t.pkl").write_bytes(pickle.dumps(data))
    with pytest.raises(mf.UsageError, match=words):
        av.read_trace(tmp_path / "t.pkl")
