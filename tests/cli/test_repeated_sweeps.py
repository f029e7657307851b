"""A finished sweep with plugins is repeated without importing them, unless their result may have changed."""

import importlib
import sys
from pathlib import Path

import pytest

from mimicfl.cli.plugin_code import imported_as_found, plugin_code
from tests.cli.conftest import call
from tests.cli.test_everyday import without_torch

PLUGIN = """
import sys
from pathlib import Path

import mimicfl as mf

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beside.rule import pace

@mf.register("mine")
class Mine(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        state.w = state.w - pace() * step.eta * step.mean(g)
"""
GRID = """rounds = 1
epochs = 1
num_clients = 4
availability = "always"
plugins = ["mine.py"]
[grid]
algorithm = ["mine"]
seed = 1
"""


@pytest.fixture
def sweep(monkeypatch, capsys):
    """Repeats the sweep as a new process would, with nothing of the user imported; returns its exit status and what it printed."""
    monkeypatch.setenv("COLUMNS", "120")  # tables are kept for one width
    Path("beside").mkdir()
    Path("beside/rule.py").write_text("def pace():\n    return 0.5\n")
    Path("mine.py").write_text(PLUGIN)
    Path("grid.toml").write_text(GRID)

    def repeat():
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            status = call("sweep", "grid.toml")
        for name in [name for name in sys.modules if name.startswith(("beside", "mimicfl_plugin_mine"))]:
            del sys.modules[name]
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return repeat


@pytest.mark.slow
def test_repeats_without_pytorch(sweep):
    status, first = sweep()
    assert (status, "all runs are finished" in first) == (0, False)
    again = without_torch("sweep", "grid.toml").stdout
    assert "all runs are finished" in again
    assert [line for line in again.splitlines() if "%" in line and line in first.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "old"), [("mine.py", "step.eta"), ("beside/rule.py", "0.5")])
def test_changed_code_is_noticed(sweep, file, old):
    assert sweep()[0] == 0
    assert "all runs are finished" in sweep()[1]
    text = Path(file).read_text()
    Path(file).write_text(text.replace(old, f"2 * {old}"))
    status, shown = sweep()
    assert status == 2
    assert "all runs are finished" not in shown
    Path(file).write_text(text)
    assert "all runs are finished" in sweep()[1]


@pytest.mark.slow
def test_a_module_that_was_imported_earlier_is_doubtful(sweep, monkeypatch):
    """Its file may have been edited since: then the code that ran is not the code in the file."""
    monkeypatch.syspath_prepend(Path.cwd())
    code, before = plugin_code(["mine.py"]).files, set(sys.modules)
    assert {Path(file).name for file in code} == {"mine.py", "rule.py"}
    importlib.import_module("beside.rule")
    assert imported_as_found(code, before)
    assert not imported_as_found(code, set(sys.modules))
    assert not imported_as_found(plugin_code([]).files, before)
    assert sweep()[0] == 0
    assert not Path("runs/grid/.finished.json").exists()


DOUBTFUL = """
from pathlib import Path
import mimicfl as mf

NAME = Path("name.txt").read_text() if Path("name.txt").exists() else ""

@mf.register("mine")
class Mine(mf.FedAvg):
    title = NAME

    def aggregate(self, state, active, g, step):
        state.w = state.w - 0.5 * step.eta * step.mean(g)
"""


@pytest.fixture
def made(monkeypatch):
    """Counts the reports that are made."""
    counted = []
    report = importlib.import_module("mimicfl.report.report")
    original = report.write_report
    monkeypatch.setattr(report, "write_report", lambda *args: counted.append(args) or original(*args))
    return counted


@pytest.mark.slow
def test_reports_are_not_made_again_after_an_inspection(sweep, made):
    """Plugins that ask whether a file exists are imported and the runs compared with them, but the reports are those of before."""
    Path("mine.py").write_text(DOUBTFUL)
    Path("name.txt").write_text("Mine")
    assert sweep()[0] == 0
    first = len(made)
    assert "all runs are finished" in sweep()[1]
    assert len(made) == first
    Path("runs/grid/curves.png").unlink()
    assert "all runs are finished" not in sweep()[1]
    assert len(made) > first
    assert Path("runs/grid/curves.png").exists()
    Path("name.txt").write_text("Ours")
    status, shown = sweep()
    assert (status, "all runs are finished" in shown) == (2, False)


READER = DOUBTFUL.replace(' if Path("name.txt").exists() else ""', "")


@pytest.mark.slow
def test_files_that_plugins_read_are_compared(sweep):
    Path("mine.py").write_text(READER)
    Path("name.txt").write_text("Mine")
    assert sweep()[0] == 0
    assert "all runs are finished" in without_torch("sweep", "grid.toml").stdout
    Path("name.txt").write_text("Ours")
    status, shown = sweep()
    assert (status, "all runs are finished" in shown) == (2, False)
    Path("name.txt").write_text("Mine")
    assert sweep()[0] == 0  # with another time stamp: the runs are inspected
    assert "all runs are finished" in without_torch("sweep", "grid.toml").stdout


@pytest.mark.slow
def test_a_wrong_tracker_is_refused_after_the_sweep_is_finished(sweep):
    assert sweep()[0] == 0
    assert "all runs are finished" in sweep()[1]
    assert call("sweep", "grid.toml", "--track", "bogus:x") == 2
