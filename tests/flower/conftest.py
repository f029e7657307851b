"""Keeps tests offline (no telemetry), away from the user's Flower settings, and independent of each other."""

import logging
import os
import re
import tempfile

import pytest

HOME = tempfile.TemporaryDirectory(prefix="mimicfl-flwr-")  # removed when the tests end
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_HOME"] = HOME.name


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """Flower makes messages only in a process with an identity; otherwise a test would depend on federations of earlier tests."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Log(logging.Handler):
    """Collects the lines of Flower's logger, without numbers that differ from run to run."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        line = re.sub(r"finished in [0-9.]+s", "finished", line)
        self.lines.append(re.sub(r"node -?\d+", "node", line))

    def count(self, *words):
        """The number of lines with all these words."""
        return sum(all(word in line for word in words) for line in self.lines)


@pytest.fixture
def flower_log():
    logger, handler = logging.getLogger("flwr"), Log()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def network(tmp_path):
    """A SuperLink and SuperNodes as real processes, all stopped at the end."""
    from tests.flower.network import Network

    with Network(tmp_path / "net") as network:
        yield network
    assert all(process.poll() is not None for process in network.processes)
