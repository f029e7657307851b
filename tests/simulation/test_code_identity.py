"""Custom and built-in code is part of what identifies a run; reading a run executes none of it."""

import dataclasses
import importlib
import subprocess
import sys

import pytest
import torch

import mimicfl as mf
from mimicfl.fingerprint import source
from mimicfl.plugins import load_plugins

NET = """
import torch
from torch import nn
import own_values

class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) * own_values.scale

class Indirect(Direct):
    def forward(self, x):
        return own_values.scaled(self.layer(x.flatten(1)))
"""
SHORT = mf.Experiment(rounds=2, num_clients=6, epochs=1)


PLUGIN = """
import mimicfl as mf

def factor():
    return {factor}

@mf.register("mine")
class Mine(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        super().aggregate(state, active, factor() * g, step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one process", "two processes"])
def test_edited_code_does_not_return_the_old_result(names, tmp_path, where):
    file, out = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(PLUGIN.format(factor="1.0"))
    e = dataclasses.replace(SHORT, algorithm="mine", plugins=[str(file)])
    if where == "one process":
        load_plugins(e.plugins)
        mf.run(e, out)
    else:
        command = [sys.executable, "-m", "mimicfl", "run", "--rounds", "2", "--num-clients", "6", "--epochs", "1"]
        command += ["--algorithm", "mine", "--plugin", str(file), "--out", str(out)]
        assert subprocess.run(command, capture_output=True).returncode == 0
    file.write_text("# a comment changes nothing\n" + PLUGIN.format(factor="1.0"))
    mf.run(e, out)
    file.write_text(PLUGIN.format(factor="0.5"))
    with pytest.raises(mf.UsageError, match=r"algorithm differs.*code.*choose another folder, or delete"):
        mf.run(e, out)


def test_code_edited_after_its_import_is_identified_by_what_runs(tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text("def loss(output, target):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_loss

    before = source.of_code(own_loss.loss.__code__)
    (tmp_path / "own_loss.py").write_text("def loss(output, target):\n    return 2000\n")
    source.of_code.cache_clear()
    stale = source.of_code(own_loss.loss.__code__)
    monkeypatch.delitem(sys.modules, "own_loss")
    import own_loss

    assert len({before, stale, source.of_code(own_loss.loss.__code__)}) == 3


def test_a_function_without_source_code_gives_a_notice(digits, tmp_path):
    space = {"F": torch.nn.functional, "__name__": "__main__"}
    exec("def loss(output, target):\n    return F.cross_entropy(output, target)", space)
    with pytest.warns(UserWarning, match="source of loss cannot be read"):
        mf.simulate(**digits, loss=space["loss"], rounds=1, local=mf.LocalSGD(steps=1), out=tmp_path)


def test_reading_a_run_executes_nothing_of_its_folder(names, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import mimicfl as mf\nmf.models.register('own', lambda data: mf.models.MLP(64, 8, 10))\n")
    e = dataclasses.replace(SHORT, model="own", plugins=[str(file)])
    trained = mf.run(e, tmp_path / "run").params
    mf.models.MODELS.factories.pop("own")
    sys.modules.pop("mimicfl_plugin_mine")
    marker = tmp_path / "executed"
    file.write_text(f"open({str(marker)!r}, 'w').close()\n" + file.read_text())
    with pytest.raises(mf.UsageError, match="does not execute its plugins"):
        mf.read(tmp_path / "run").model()
    assert not marker.exists()
    model = mf.read(tmp_path / "run", plugins=[str(file)]).model()
    assert torch.equal(torch.cat([p.reshape(-1) for p in model.parameters()]), trained)


def test_another_version_of_a_built_in_algorithm_is_a_different_run(tmp_path, monkeypatch):
    e = mf.Experiment(rounds=2, num_clients=4, steps=1, algorithm="mimic", availability="always")
    mf.run(e, tmp_path)
    mf.run(e, tmp_path)  # unchanged: read back

    def aggregate(self, state, active, g, step):
        state.w = state.w - step.eta * step.mean(g) / 2

    monkeypatch.setattr(mf.MimiC, "aggregate", aggregate)
    with pytest.raises(mf.UsageError, match="algorithm"):
        mf.run(e, tmp_path)


def test_the_authors_preset_does_not_depend_on_what_is_imported(tmp_path):
    """It changes the algorithms of the paper only, so a plugin's variant of one has the same settings before and after its import."""
    name = "variant-of-mimic"
    (tmp_path / "variant.py").write_text(f"import mimicfl as mf\n@mf.register({name!r})\nclass Variant(mf.MimiC):\n    pass\n")
    e = mf.Experiment(algorithm=name, preset="authors", rounds=1, steps=1, plugins=[str(tmp_path / "variant.py")])
    before = e.id
    mf.run(e, tmp_path / "run")
    assert e.id == before
    mf.run(e, tmp_path / "run")
    assert mf.Experiment(algorithm="mimic", preset="authors").resolved().algorithm == "mimic:memory=step"


def test_a_value_that_a_program_sets_in_its_module_does_not_return_the_old_result(digits, tmp_path, monkeypatch):
    """The source of the module is the same; so is that of a module which the model reads it through."""
    (tmp_path / "own_values.py").write_text("scale = 1.0\ndef scaled(x):\n    return x * scale\n")
    (tmp_path / "own_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    net, values = (importlib.import_module(name) for name in ("own_net", "own_values"))
    for name in ("own_net", "own_values"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    given = {**digits, "rounds": 1, "local": mf.LocalSGD(steps=1)}
    for kind in (net.Direct, net.Indirect):
        values.scale = 1.0
        mf.simulate(**given | {"model": kind()}, out=tmp_path / kind.__name__)
        mf.simulate(**given | {"model": kind()}, out=tmp_path / kind.__name__)  # unchanged: read back
        values.scale = 2.0
        with pytest.raises(mf.UsageError, match="model differs"):
            mf.simulate(**given | {"model": kind()}, out=tmp_path / kind.__name__)
