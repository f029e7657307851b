"""A finished sweep with plugins is repeated without importing them, unless their result may have changed."""

import importlib
import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from mimicfl.cli import finished
from mimicfl.cli.finished import Memo
from mimicfl.cli.opened import Opened, stamp
from mimicfl.cli.plugin_code import Code, imported_as_found, plugin_code
from tests.cli.conftest import call
from tests.cli.test_everyday import without_torch
from tests.conftest import ROOT

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


@pytest.mark.parametrize(
    "text",
    [
        "x = 'phones.parquet'",
        "import numpy as np\nx = np.fromfile(name)",
        "import os\nx = os.environ['PACE']",
        "from os import getenv",
        "import os as system",
        "import sys\nx = sys.platform",
        "import time",
        "def later():\n    import sklearn",
        "import torch\nx = torch.hub.load(name)",
        "import mimicfl as mf\nx = mf.read('runs/x')",
        "x = __import__(name)",
        "exec(text)",
        "x = 'phones'",
        "import nowhere_to_be_found",
        "import twice",
        "import compiled",
        "import random",
        "from . import rule",
        "from package import doubtful",
        "this is no Python",
        "import numpy as np\nx = np.random.rand(3)",
        "import numpy as np\nx = np.random.default_rng()",
        "import numpy as np\nx = np.random.default_rng(seed=None)",
        "from numpy.random import default_rng as rng\nx = rng()",
        "from numpy.random import rand",
        "import numpy.random as draw",
        "from numpy import random as draw",
        "x = hash('a') % 10",
        "import numpy as np\nx = np.fromregex(name + '.txt', 'a', 'i8')",
        "import mimicfl as mf\nx = mf.availability.Explicit(name + '.csv')",
        "import os.path\nx = os.path.getsize(name)",
        "import torch\nwidth = 8 if torch.cuda.is_available() else 4",
        "import os\nx = getattr(os, 'envi' + 'ron')['PACE']",
        "import torch\nx = torch.os",
        "import sys\nx = dict(system=sys)",
        "import torch\nx = getattr(torch, 'lo' + 'ad')(name)",
        "import torch\nx = list(map(getattr, [torch], [name]))",
        "import numpy as np\nx = np.datetime64('now')",
        "from pathlib import Path\nx = Path(name).readlink()",
        "import torch\nx = torch.cuda.get_device_name()",
        "import mimicfl as mf\nx = mf.availability.Explicit(name)",
        "import mimicfl as mf\nx = mf.availability.schedule('trace: other/phones.csv', 6, 4)",
        "import mimicfl as mf\nx = mf.availability.schedule('trace:phones', 6, 4)",
        "import mimicfl as mf\nx = mf.datasets.load_file(name)",
        "from mimicfl.paper import records",
        "from mimicfl import metrics",
        "import torch\nx = torch.jit.load(name)",  # opens its file outside of Python
        "import torch\nx = torch.export.load(name)",
    ],
)
def test_doubtful_code_has_no_memo(text):
    Path("values.csv").touch()
    Path("phones").touch()
    Path("random.py").touch()  # it may be imported instead of the library
    Path("compiled.so").touch()
    for folder in ("twice", "package"):
        Path(folder).mkdir()
    Path("twice.py").touch()
    Path("package/doubtful.py").write_text("from .more import x")
    Path("package/more.py").write_text("import os\nx = os.getcwd()")
    Path("mine.py").write_text(text)
    assert plugin_code(["mine.py"]) is None


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nx = np.load('x' + '.npy')",
        "from numpy import loadtxt as read_it",
        "x = open(name)",
        "from pathlib import Path\nx = Path(name).read_text()",
        "x = 'values.csv'",
        "import json\nx = json.load(file)",
        "import torch\nx = torch.load(name)",
        "import io\nx = io.FileIO(name)",
        "import io\nx = io.open_code(name)",
    ],
)
def test_files_that_python_opens_are_recorded_when_they_are_read(text):
    Path("mine.py").write_text(text)
    assert plugin_code(["mine.py"]).reads


def test_what_needs_no_doubt():
    Path("package").mkdir()
    Path("package/rule.py").write_text("from .other import *\nfrom . import other")
    Path("package/other.py").write_text("from __future__ import annotations\nimport torch.nn.functional as F")
    Path("mine.py").write_text(
        "import os.path, re\nimport numpy as np\nfrom package.rule import x\nhere = os.path.dirname(__file__)\nre.compile('a').match('b')\n"
        "rng = np.random.default_rng(0)\nx = rng.random(3), np.random.RandomState(seed=1).rand(2)\nfrom mimicfl import FedAvg\n"
        "import mimicfl.algorithms\nname = getattr(FedAvg, 'name', '')\nsize = getattr(F, 'relu')"
    )
    found = plugin_code(["mine.py"])
    assert ({Path(file).name for file in found.files}, found.reads) == ({"mine.py", "rule.py", "other.py"}, False)
    for name in ("own_algorithm", "own_availability", "own_model_and_data"):
        assert len(plugin_code([str(ROOT / f"examples/{name}.py")]).files) == 1
    assert plugin_code([]) == Code()
    assert plugin_code(["nowhere.py"]) is None


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


READS = """
def read(name, mode="r"):
    with open(name, mode) as file:
        return file.read() if mode == "r" else file.write("x")
"""


@pytest.mark.parametrize(
    ("name", "mode", "certain"),
    [("a.txt", "r", True), ("a.txt", "a", False), ("none.txt", "r", False), ("/proc/uptime", "r", False), ("a.csv.gz", "r", False)],
)
def test_what_plugins_open(name, mode, certain):
    for each in ("a.txt", "a.csv.gz"):
        Path(each).write_text("1")
    file = Path("mine.py").resolve()
    space = {}
    exec(compile(READS, str(file), "exec"), space)
    with Opened([str(file)], Path("runs")) as opened:
        try:
            space["read"](name, mode)
        except FileNotFoundError:
            pass
        Path("of_others.txt").write_text("1")
    Path("a.txt").read_text()
    assert opened.files() == ({str(Path("a.txt").resolve()): stamp(Path("a.txt"))} if certain else None)


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


@pytest.mark.slow
def test_a_wrong_tracker_is_refused_after_the_sweep_is_finished(sweep):
    assert sweep()[0] == 0
    assert "all runs are finished" in sweep()[1]
    assert call("sweep", "grid.toml", "--track", "bogus:x") == 2
