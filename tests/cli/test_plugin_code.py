"""Whether the result of a plugin depends only on its code and on files that it opens."""

from pathlib import Path

import pytest

from mimicfl.cli.opened import Opened, stamp
from mimicfl.cli.plugin_code import Code, plugin_code
from tests.conftest import ROOT


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
