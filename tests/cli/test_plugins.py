"""Own algorithms on the command line, from a file given with --plugin."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms import ALGORITHMS
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from tests.cli.conftest import call

PLUGIN = """
import mimicfl as mf
from dataclasses import dataclass

@mf.register("lazy")
@dataclass(frozen=True)
class Lazy(mf.FedAvg):
    pace: float = 0.5

    def aggregate(self, state, active, g, step):
        state.w = state.w - self.pace * step.eta * step.mean(g)
        return state
"""


@pytest.mark.slow
def test_a_custom_algorithm_on_the_command_line(capsys):
    Path("lazy.py").write_text(PLUGIN)
    assert call("run", "--plugin", "lazy.py", "--algorithm", "lazy:pace=0.1", "--rounds", 3, "--out", "r") == 0
    assert call("compare", "--plugin", "lazy.py", "--algorithms", "lazy:pace=1", "fedavg", "--seeds", 1, "--rounds", 3, "--out", "c") == 0
    lazy, fedavg = (read(RunFolder(f"c/{name}")).params for name in ("lazy_pace=1-s0", "fedavg-s0"))
    assert torch.equal(lazy, fedavg)
    Path("r/final.safetensors").unlink()
    os.chdir("/")
    assert call("resume", Path(capsys.readouterr().out and RunFolder(Path(lazy_home()) / "r").path)) == 0


@pytest.mark.parametrize("folder", ["c/plugin", "c/imported", "c"])
def test_a_run_with_a_custom_algorithm_resumes_with_its_plugin(capsys, monkeypatch, folder):
    """Begun with a file that has moved, or in Python, or both side by side."""
    Path("lazy.py").write_text(PLUGIN)
    assert call("run", "--plugin", "lazy.py", "--algorithm", "lazy", "--rounds", 2, "--out", "c/plugin") == 0
    mf.run(mf.Experiment(algorithm="lazy", rounds=2), "c/imported")
    expected = read(RunFolder("c/plugin")).params
    finals = list(Path(folder).glob("**/final.safetensors"))
    assert finals
    for final in finals:
        final.unlink()
    Path("lazy.py").rename("moved.py")
    monkeypatch.delitem(ALGORITHMS.factories, "lazy")  # as in a new process
    monkeypatch.delitem(sys.modules, "mimicfl_plugin_lazy")
    capsys.readouterr()
    assert call("resume", folder) == 2
    captured = capsys.readouterr()
    assert re.search(r"mimicfl resume c/(plugin|imported) --plugin FILE", captured.err)
    assert captured.out == ""
    assert call("resume", folder, "--plugin", "moved.py") == 0
    assert all(torch.equal(read(RunFolder(final.parent)).params, expected) for final in finals)


def test_a_file_that_moved_is_named_beside_those_that_did_not(capsys):
    """Runs of one folder may have files of their own."""
    for name in ("lazy", "slow"):
        Path(f"{name}.py").write_text(PLUGIN.replace('"lazy"', f'"{name}"'))
        assert call("run", "--plugin", f"{name}.py", "--algorithm", name, "--rounds", 2, "--out", f"c/{name}") == 0
        Path(f"c/{name}/final.safetensors").unlink()
    Path("lazy.py").rename("moved.py")
    for name in ("lazy", "slow"):
        del ALGORITHMS.factories[name], sys.modules[f"mimicfl_plugin_{name}"]
    assert call("resume", "c", "--plugin", "moved.py") == 0
    assert all(Path(f"c/{name}/final.safetensors").exists() for name in ("lazy", "slow"))


def lazy_home():
    return Path(sys.modules["mimicfl_plugin_lazy"].__file__).parent
