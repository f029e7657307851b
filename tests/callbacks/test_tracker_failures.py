"""Trackers that cannot be reached or fail do not stop a run, and what they miss is sent later."""

import dataclasses
import sys
from pathlib import Path

import pytest

import mimicfl as mf
from mimicfl.callbacks import tracker as trackers
from mimicfl.callbacks.interface import RunInfo
from tests.callbacks.test_trackers import E
from tests.cli.conftest import call

pytestmark = pytest.mark.usefixtures("at_once")


@dataclasses.dataclass
class Unreachable(trackers.Tracker):
    """Connects, then fails at a round."""

    fails_at: int = 0
    got: list = dataclasses.field(default_factory=list)
    attempts: list = dataclasses.field(default_factory=list)
    spec = "nowhere:x"

    def connect(self, run, run_id):
        self.attempts.append("connect")
        if self.fails_at < 0:
            raise ConnectionError("no route to host")
        return len(self.got)

    def log(self, rows):
        for row in rows:
            if row["round"] == self.fails_at:
                raise TimeoutError("timed out\nsecond line")
            self.got.append(row["round"])


class TestUnreachable:
    @pytest.mark.parametrize(("at", "reason"), [(-1, "no route"), (3, "timed out")])
    def test_one_notice_the_run_continues_and_the_rest_is_sent_later(self, at, reason):
        tracker = Unreachable(at)
        with pytest.warns(UserWarning, match=f"{reason}.*track send run --track nowhere:x") as told:
            history = mf.run(E, "run", callbacks=[tracker])
        assert sum("track send" in str(each.message) for each in told) == 1
        assert len(history.rows) == 6
        assert trackers.unsent(Path("run"))
        working = Unreachable(99, tracker.got)
        assert trackers.send("run", working) == (1, 6 - max(at, 0))
        assert working.got == [0, 1, 2, 3, 4, 5]
        assert not trackers.unsent(Path("run"))

    def test_one_notice_and_one_attempt_for_a_whole_comparison(self):
        tracker = Unreachable(-1)
        with pytest.warns(UserWarning, match="track send c --track nowhere:x") as told:
            mf.compare(E, ["fedavg", "mimic"], 2, "c", callbacks=[tracker])
        assert sum("track send" in str(each.message) for each in told) == 1
        assert tracker.attempts == ["connect"]
        assert all(trackers.unsent(folder.parent) for folder in Path("c").glob("*/config.toml"))
        with pytest.warns(UserWarning, match="track send d"):  # another comparison tries again
            mf.compare(E, ["fedavg"], 2, "d", callbacks=[tracker])
        assert tracker.attempts == ["connect", "connect"]

    def test_a_server_that_goes_down_during_a_comparison(self):
        with pytest.warns(UserWarning, match="timed out") as told:
            mf.compare(E, ["fedavg", "mimic"], 1, "c", callbacks=[Unreachable(3)])
        assert sum("track send" in str(each.message) for each in told) == 1
        assert all(trackers.unsent(folder.parent) for folder in Path("c").glob("*/config.toml"))

    def test_sending_to_it_is_an_error(self):
        mf.run(E, "run")
        with pytest.raises(mf.UsageError, match="no route"):
            trackers.send("run", Unreachable(-1))

    def test_a_folder_that_cannot_be_written(self):
        Path("logs").write_text("a file")
        with pytest.warns(UserWarning, match="tables|logs"):
            assert len(mf.run(E, callbacks=[mf.callbacks.CSV("logs")]).rows) == 6


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["run", "--track", "tensorbord:x"], "did you mean 'tensorboard'"),
        (["run", "--track", "wandb:p,offline=maybe"], "offline"),
        (["track", "send", "nowhere", "--track", "csv:x"], "does not exist"),
        (["track", "send", "nowhere"], "--track"),
    ],
)
def test_mistakes(capsys, words, answer):
    assert call(*words) == 2
    assert answer in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_missing_library_is_said_before_training(monkeypatch):

    for name, made in (("wandb", mf.callbacks.WandB), ("mlflow", mf.callbacks.MLflow)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(mf.UsageError, match=f"mimicfl.{name}"):
            made()


def test_a_damaged_state_file_is_ignored(tmp_path):
    for text in ("", "[1]", '{"id": "../x"}', "{" * 100_000):
        (tmp_path / trackers.STATE).write_text(text)
        assert trackers._run_id(RunInfo(folder=tmp_path)).isalnum()


class Failing(mf.callbacks.Tracker):
    def connect(self, run, run_id):
        return 0

    def log(self, rows):
        raise ConnectionError("no route to host")


def test_a_custom_tracker_that_fails_does_not_stop_the_run(tmp_path):
    with pytest.warns(UserWarning, match="no route to host.*callbacks.send"):
        history = mf.run(dataclasses.replace(E, rounds=2), tmp_path / "run", callbacks=[Failing()])
    assert len(history.rows) == 2
