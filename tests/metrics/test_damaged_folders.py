"""Errors when a run folder is damaged, mixed up or not writable."""

import os
import resource
import subprocess
import sys

import pytest
import torch

import mimicfl as mf
from mimicfl import files
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from tests.conftest import resume


def test_an_incomplete_last_row_is_ignored(finished):
    with (finished / "rows.jsonl").open("a") as file:
        file.write('{"round": 3, "act')
    assert len(RunFolder(finished).rows()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_checkpoint_is_named_in_the_error(finished, harm):
    (finished / "final.safetensors").unlink()
    file = finished / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[-5] ^= 4
    file.write_bytes({"cut": content[:-40], "flip": content, "empty": b"", "foreign": b"PK\x03\x04 not ours" * 50}[harm])
    with pytest.raises(mf.UsageError, match=r"checkpoint.safetensors is damaged.*delete it"):
        resume(finished)
    file.unlink()
    resume(finished)
    assert RunFolder(finished).finished


@pytest.mark.slow
def test_missing_rows_are_an_error(finished):
    (finished / "final.safetensors").unlink()
    (finished / "rows.jsonl").write_text("")
    with pytest.raises(mf.UsageError, match=r"0 valid rows.*round 3"):
        resume(finished)


@pytest.mark.slow
def test_a_checkpoint_of_a_different_run_is_refused(finished, tmp_path):
    mf.run(mf.Experiment(rounds=3, availability="static:0.3", seed=8), tmp_path / "other")
    (finished / "final.safetensors").unlink()
    (finished / "checkpoint.safetensors").write_bytes((tmp_path / "other" / "checkpoint.safetensors").read_bytes())
    with pytest.raises(mf.UsageError, match=r"different run|does not belong"):
        resume(finished)


@pytest.mark.parametrize("content", ["not = [toml", "\x00\xff", "rounds = 3\nalgoritm = 'mimic'\n"])
def test_an_invalid_config_is_refused(tmp_path, content):
    (tmp_path / "config.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(mf.UsageError, match=r"config.toml"):
        resume(tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_run_can_resume(tmp_path, monkeypatch):
    e = mf.Experiment(rounds=6, availability="static:0.3", checkpoint_every=1)
    mf.run(e, tmp_path / "whole")
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) > 9:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(mf.UsageError, match="No space left on device"):
        mf.run(e, tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob(".*.part"))
    assert 0 < len(RunFolder(tmp_path / "run").rows()) <= 6
    history = mf.run(e, tmp_path / "run")
    assert torch.equal(history.params, read(RunFolder(tmp_path / "whole")).params)


@pytest.mark.slow
def test_a_file_size_limit_is_an_error_without_traceback(tmp_path):
    """A limit on the file size simulates a full disk in the operating system."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "-m", "mimicfl", "run", "--rounds", "5", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert "could not write" in done.stderr
    assert "Traceback" not in done.stderr
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_missing_rows_of_a_finished_run_are_an_error(finished):
    lines = (finished / "rows.jsonl").read_text().splitlines(keepends=True)
    (finished / "rows.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(mf.UsageError, match=r"2 valid rows.*round 3"):
        read(RunFolder(finished))


@pytest.mark.slow
@pytest.mark.parametrize("row", ["[1]", "5", '{"round": 3}', '{"round": 3, "clients": "x"}'])
def test_reading_stops_at_an_invalid_row(finished, row):
    with (finished / "rows.jsonl").open("a") as file:
        file.write(row + "\n")
    assert len(RunFolder(finished).rows()) == 3


@pytest.mark.slow
def test_a_folder_in_place_of_a_checkpoint_is_refused(finished):
    (finished / "final.safetensors").unlink()
    (finished / "checkpoint.safetensors").unlink()
    (finished / "checkpoint.safetensors").mkdir()
    with pytest.raises(mf.UsageError, match="damaged"):
        resume(finished)
    assert len(RunFolder(finished).rows()) == 3
