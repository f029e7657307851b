"""The memo of a finished sweep: files and settings whose change makes it useless."""

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from mimicfl.cli import finished
from mimicfl.cli.finished import Memo
from mimicfl.cli.plugin_code import Code


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ('data_path = "data"', "data/deep/values.csv"),
        ('availability = "trace:t.csv"', "t.csv"),
        ('availability = "trace: t.csv"', "t.csv"),
        ("availability = 'trace:\"t.csv\"'", "t.csv"),
        ('availability = "trace:file=a=b.csv,mapping=[1,2]"', "a=b.csv"),
        ('availability = "trace:[a,b].csv"', "[a,b].csv"),
        ('availability = "trace:a:b.csv"', "a:b.csv"),
    ],
)
def test_data_is_compared(settings, file):
    def memo():
        return Memo.of(Path("runs"), "grid.toml", {}, Console(width=100))

    Path("data/deep").mkdir(parents=True)
    Path("grid.toml").write_text(f"{settings}\n[grid]\nseed = 2\n")
    Path(file).write_text("1,2,3")
    before = memo()
    assert before == memo()
    Path(file).write_text("1,2,4")
    assert before != memo()
    Path("data/link").symlink_to("/")
    assert memo().certain != file.startswith("data/")


def test_a_text_with_escapes_has_no_memo():
    """A name in JSON may be written as "\\u0074.csv"."""
    Path("t.csv").touch()
    Path("grid.toml").write_text("availability = 'trace:\"\\u0074.csv\"'\n[grid]\nseed = 2\n")
    assert Memo.of(Path("runs"), "grid.toml", {}, Console(width=100)).certain is False


@pytest.mark.parametrize("file", ["report.html", "curves.png", "results.csv", "run/env.json"])
def test_a_missing_file_is_written_again(file):
    memo, run = Memo(Path("memo.json"), "key"), Path("run")
    run.mkdir()
    names = [
        *(run / name for name in ("config.toml", "rows.jsonl", "final.safetensors", "env.json")),
        *map(Path, ("curves.png", "results.csv")),
    ]
    for name in (*names, page := Path("report.html")):
        name.write_text("1")
    memo.keep("shown", [run], [page])
    assert memo.replay(Console(quiet=True))
    Path(file).unlink()
    assert not memo.replay(Console(quiet=True))


def test_an_edited_template_or_kernel_is_noticed(monkeypatch, tmp_path):
    package = tmp_path / "package"
    for name in ("cli/finished.py", "report/page/style.css", "engines/native/kernels.h"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    monkeypatch.setattr(finished, "__file__", str(package / "cli/finished.py"))
    Path("grid.toml").write_text("[grid]\nseed = 2\n")
    for name in ("report/page/style.css", "engines/native/kernels.h"):
        before = Memo.of(Path("runs"), "grid.toml", {}, Console(width=100))
        (package / name).write_text("2")
        assert before != Memo.of(Path("runs"), "grid.toml", {}, Console(width=100))


def test_a_file_with_its_old_time_is_noticed():
    """Same size, and the time of its last change set back: only the time that the system keeps for itself differs."""
    memo = Memo(Path("memo.json"), "key")
    run = Path("run")
    run.mkdir()
    for name in ("config.toml", "rows.jsonl", "final.safetensors", "env.json"):
        (run / name).write_text("1")
    memo.keep("shown", [run], [])
    assert memo.replay(Console(quiet=True))
    before = (run / "rows.jsonl").stat()
    time.sleep(0.02)  # the system's clock for files has steps of some milliseconds
    (run / "rows.jsonl").write_text("2")
    os.utime(run / "rows.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not memo.replay(Console(quiet=True))


def test_another_version_of_pytorch_is_noticed(monkeypatch):
    Path("grid.toml").write_text("[grid]\nseed = 2\n")
    before = Memo.of(Path("runs"), "grid.toml", {}, Console(width=100))
    Path("torch").mkdir()
    Path("torch/__init__.py").touch()
    Path("torch/version.py").write_text("__version__ = '9.9'\n")
    monkeypatch.syspath_prepend(Path.cwd())
    assert before != Memo.of(Path("runs"), "grid.toml", {}, Console(width=100))


def test_a_file_that_was_edited_after_it_was_read_is_noticed():
    Path("a.txt").write_text("1")
    run = Path("runs/run")
    run.mkdir(parents=True)
    for name in finished.FILES:
        (run / name).write_text("1")
    for edited in (False, True):
        memo = Memo(Path("runs/memo.json"), "key", Code(reads=True))
        with memo.recording() as opened:
            Path("a.txt").read_text()
        time.sleep(0.02)  # the system's clock for files has steps of some milliseconds
        Path("a.txt").write_text("2") if edited else None
        memo.keep("shown", [run], [], opened)
        assert memo.replay(Console(quiet=True)) != edited


def test_another_list_of_runs_has_no_memo():
    """Plugins may register further algorithms, which `all` then includes."""
    memo, runs = Memo(Path("memo.json"), "key", certain=False), [Path("a"), Path("b")]
    for run in runs:
        run.mkdir()
        for name in finished.FILES:
            (run / name).write_text("1")
    memo.keep("shown", runs[:1], [])
    assert memo.replay(Console(quiet=True), runs[:1])
    assert not memo.replay(Console(quiet=True), runs)
