"""The README and the examples give the same results every time, whatever the state of torch's global generator."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from mimicfl.clients.models import MODELS
from mimicfl.data.datasets import DATASETS

ROOT = Path(__file__).parent.parent


def result(source, state):
    """Run a script with torch's global generator seeded with `state`; return its output and its final parameters."""
    torch.manual_seed(state)
    out, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(out):
        exec(compile(source, "shown", "exec"), names)
    return out.getvalue(), names["history"].params


def shortened(source, rounds=5):
    """The same script with fewer rounds."""
    short, count = re.subn(r"\brounds=\d+", f"rounds={rounds}", source)
    assert count
    return short


@pytest.mark.slow
def test_readme_example_repeats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (first, w), (second, v) = (result(shortened(source), state) for state in (1, 2))
    assert re.fullmatch(r"0\.\d+ \d+\n", first)
    assert first == second
    assert torch.equal(w, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["each_round", "own_model_and_data"])
def test_examples_with_their_own_model_repeat(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry in (DATASETS, MODELS):  # undo what the example registers
        monkeypatch.setattr(registry, "factories", dict(registry.factories))
    source = shortened((ROOT / "examples" / f"{name}.py").read_text())
    (first, w), (second, v) = (result(source, state) for state in (1, 2))
    assert "%" in first
    assert first == second
    assert torch.equal(w, v)
