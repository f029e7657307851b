"""The notebooks run, and their stored outputs are those of their code."""

import importlib
import json

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_three():
    assert [file.stem for file in NOTEBOOKS] == ["comparing_algorithms", "first_steps", "own_algorithm"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_outputs_are_stored(file):
    """The site and code hosts show them; errors and warnings must not be among them."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert all(cell["execution_count"] for cell in cells), "run: python docs/notebooks.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the Jupyter packages
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setenv("MIMICFL_ENGINE", "plain")
    notebook = importlib.import_module("notebooks").executed(file, tmp_path)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("text/html" in output.get("data", {}) for output in shown)
    bars = [output for output in shown if "<progress" in "".join(output.get("data", {}).get("text/html", ""))]
    assert len(bars) == 1  # updated in place, not printed round by round
