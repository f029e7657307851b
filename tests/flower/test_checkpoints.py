"""Checkpoints: their size follows the clients that changed, the last few are kept, and a federation can be rolled back."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

import mimicfl.flower as mff
from mimicfl.cli.main import main
from mimicfl.errors import UsageError
from mimicfl.flower.checkpoints import CheckpointStore, rollback
from mimicfl.metrics.store import RunFolder
from tests.flower.toy import Toy, run

OPTIONS = {"fraction_evaluate": 0.0, "lr": 0.3, "num_clients": 8, "wait_for": 8, "seed": 1}
SPARSE = {"availability": "static:0.3"}


def federation(folder, rounds, kind=mff.MimiC, **options):
    strategy = kind(folder=folder, **(OPTIONS | options))
    run(strategy, Toy(dim=5000), clients=8, rounds=rounds)
    return strategy


def values(tensor):
    return tensor if isinstance(tensor, torch.Tensor) else tensor[:]


def segments(folder):
    return json.loads(RunFolder(folder).load("checkpoint")[1]["segments"])


def test_a_checkpoint_holds_only_the_rows_that_changed(tmp_path):
    strategy = federation(tmp_path, 6, **SPARSE, keep_checkpoints=1)
    listed = segments(tmp_path)
    active = [row["active"] for row in strategy.rows]
    assert [each["rows"] for each in listed] == [count for count in active if count][-len(listed) :]
    assert {file.name for file in (tmp_path / "state").iterdir()} == {each["file"] for each in listed}  # the others are removed
    rows = sum(file.stat().st_size for file in (tmp_path / "state").iterdir()) / (4 * 5000)
    assert rows < sum(each["rows"] for each in listed) + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [mff.MimiC, mff.MIFA, mff.SCAFFOLD, mff.FedSteer, mff.FedAvg])
@pytest.mark.parametrize(
    ("every", "more"), [(1, {}), (4, {"server_optimizer": "yogi"}), ("0.0001s", {})], ids=["always", "optimizer", "by time"]
)
def test_runs_resumed_from_segments_equal_uninterrupted_ones(tmp_path, kind, every, more):
    toy = Toy(dim=50, metrics=lambda number: {"num-examples": 1, "steps": 1})
    options = OPTIONS | SPARSE | more
    whole = kind(**options)
    run(whole, toy, clients=8, rounds=30)
    for rounds in (5, 17, 30):
        resumed = kind(folder=tmp_path, save_every=every, **options)
        run(resumed, toy, clients=8, rounds=rounds)
    assert torch.equal(resumed.form.w, whole.form.w)
    for name, value in vars(whole.form.server.state).items():
        assert torch.equal(values(getattr(resumed.form.server.state, name)), values(value))
    for name, value in whole.form.server.moments.items():
        assert torch.equal(resumed.form.server.moments[name], value)


@pytest.mark.slow
def test_segments_are_compacted(tmp_path):
    federation(tmp_path, 60, availability="static:0.5", keep_checkpoints=2)
    total = sum(each["rows"] for each in segments(tmp_path))
    assert total <= 2 * 8 + 16
    assert len(CheckpointStore(RunFolder(tmp_path)).rounds()) == 2


class Half(Toy):
    def initial(self):
        return ArrayRecord({"w": Array(np.zeros(self.dim, dtype=np.float16))})


def test_resuming_does_not_round_a_half_precision_model(tmp_path):
    """The server keeps it in float32; only the record that clients receive is rounded."""
    whole = mff.FedAvg(**OPTIONS, **SPARSE)
    run(whole, Half(dim=50), clients=8, rounds=12)
    for rounds in (5, 12):
        resumed = mff.FedAvg(folder=tmp_path, **OPTIONS, **SPARSE)
        run(resumed, Half(dim=50), clients=8, rounds=rounds)
    assert torch.equal(resumed.form.w, whole.form.w)
    assert resumed.form.w.abs().min() > 1


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_run_killed_between_checkpoints_repeats_the_rounds_after_the_last(tmp_path, monkeypatch):
    whole = mff.MimiC(**OPTIONS, **SPARSE)
    run(whole, Toy(dim=50), clients=8, rounds=12)
    killed = mff.MimiC(folder=tmp_path, save_every=5, **OPTIONS, **SPARSE)
    apply = type(killed).apply

    def fails(self, t, *rest):
        if t == 8:
            raise Killed
        return apply(self, t, *rest)

    monkeypatch.setattr(type(killed), "apply", fails)
    with pytest.raises(Killed):
        run(killed, Toy(dim=50), clients=8, rounds=12)
    monkeypatch.undo()
    assert RunFolder(tmp_path).load("checkpoint")[1]["round"] == "5"
    resumed = mff.MimiC(folder=tmp_path, save_every=5, **OPTIONS, **SPARSE)
    run(resumed, Toy(dim=50), clients=8, rounds=12)
    assert len(resumed.rows) == 12
    assert torch.equal(resumed.form.w, whole.form.w)


def test_checkpoints_every_so_many_seconds(tmp_path, monkeypatch):
    """Each round takes ten seconds here, so that every third one is saved."""
    now, saved = [0.0], []
    monkeypatch.setattr("mimicfl.flower.loop.time.monotonic", lambda: now[0])

    def watch(info):
        saved.append(int(RunFolder(tmp_path).load("checkpoint")[1]["round"]))
        now[0] += 10.0

    run(mff.MimiC(folder=tmp_path, save_every="25s", callbacks=[watch], **OPTIONS), Toy(dim=50), clients=8, rounds=8)
    assert saved == [0, 0, 0, 3, 3, 3, 6, 6]
    assert RunFolder(tmp_path).load("checkpoint")[1]["round"] == "8"


@pytest.mark.parametrize("moment", ["segment", "head"])
def test_a_process_killed_while_writing_leaves_a_complete_checkpoint(tmp_path, monkeypatch, moment):
    whole = federation(None, 6, **SPARSE)
    target = (CheckpointStore, "_write_segment") if moment == "segment" else (RunFolder, "save")
    original, count = getattr(*target), []

    def dies(self, *values, **named):
        count.append(1)
        if len(count) == 4:
            raise Killed
        return original(self, *values, **named)

    monkeypatch.setattr(*target, dies)
    with pytest.raises(Killed):
        federation(tmp_path, 6, **SPARSE)
    monkeypatch.undo()
    assert torch.equal(federation(tmp_path, 6, **SPARSE).form.w, whole.form.w)


def test_rollback_returns_to_a_kept_checkpoint(tmp_path, capsys):
    whole = federation(tmp_path, 8)
    assert (tmp_path / "final.safetensors").exists()
    assert main(["flower", "rollback", str(tmp_path), "--to", "5"]) == 0
    assert "round 5" in capsys.readouterr().out
    assert not (tmp_path / "final.safetensors").exists()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 5
    assert CheckpointStore(RunFolder(tmp_path)).rounds() == [4, 5]
    again = federation(tmp_path, 8)
    assert torch.equal(again.form.w, whole.form.w)
    assert rollback(tmp_path) == 7
    assert main(["flower", "rollback", str(tmp_path), "--to", "1"]) == 2
    assert "are kept: 4, 5, 6, 7" in " ".join(capsys.readouterr().err.split())


def test_rollback_to_a_damaged_checkpoint_changes_nothing(tmp_path):
    federation(tmp_path, 6)
    listed = json.loads(RunFolder(tmp_path).load("history/3")[1]["segments"])
    file = tmp_path / "state" / listed[-1]["file"]
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    before = {name: (tmp_path / name).read_bytes() for name in ("checkpoint.safetensors", "rows.jsonl", "final.safetensors")}
    with pytest.raises(UsageError, match="damaged"):
        rollback(tmp_path, 3)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert CheckpointStore(RunFolder(tmp_path)).rounds()[-1] == 6


def test_rollback_refuses_other_folders(tmp_path, capsys):
    assert main(["flower", "rollback", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err


def test_a_damaged_segment_is_named(tmp_path):
    federation(tmp_path, 3)
    file = next((tmp_path / "state").iterdir())
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match="rollback"):
        federation(tmp_path, 5)


def test_a_checkpoint_of_version_0_2_is_continued(tmp_path):
    """Version 0.2 wrote all rows into the checkpoint, without a format version."""
    whole = federation(tmp_path / "whole", 9, **SPARSE)
    old = federation(tmp_path / "old", 4, **SPARSE)
    log_facts = RunFolder(tmp_path / "old").load("checkpoint")[1]
    tensors, facts = old.form.save()
    folder = RunFolder.claim(tmp_path / "old", {})
    folder.keep_rows(folder.rows())
    folder.save("checkpoint", tensors, round="4", experiment=log_facts["experiment"], layout=log_facts["layout"], **facts)
    folder.close()
    for leftover in ("state", "history"):
        for file in (tmp_path / "old" / leftover).iterdir():
            file.unlink()
        (tmp_path / "old" / leftover).rmdir()
    migrated = federation(tmp_path / "old", 9, **SPARSE)
    assert torch.equal(migrated.form.w, whole.form.w)
    assert RunFolder(tmp_path / "old").load("checkpoint")[1]["store"] == "2"


def test_a_newer_format_is_refused(tmp_path):
    federation(tmp_path, 2)
    folder = RunFolder.claim(tmp_path, {})
    tensors, facts = folder.load("checkpoint")
    folder.keep_rows(folder.rows())
    known = {key: value for key, value in facts.items() if key not in ("format", "crc32", "rows", "config", "lengths")}
    folder.save("checkpoint", tensors, **(known | {"store": "3"}))
    folder.close()
    with pytest.raises(UsageError, match="newer version"):
        federation(tmp_path, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": "often"}, "save_every must be"),
        ({"save_every": 0}, "save_every must be"),
        ({"save_every": 5, "form": mff.ClientForm()}, "every round"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
    ],
)
def test_wrong_intervals_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        mff.MimiC(**options)
