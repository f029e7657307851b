"""The structure of the package is what docs/design.md says."""

import dataclasses
import importlib
import inspect
import tomllib

import pytest

import mimicfl as mf
from mimicfl.algorithms import ALGORITHMS
from mimicfl.cli.main import main
from mimicfl.experiments.build import build
from mimicfl.metrics.store import find_runs
from mimicfl.settings import NOT_IN_RESULT, SETTINGS, settings_of
from tests.conftest import ROOT

PLUGIN = """
from dataclasses import dataclass

import torch

import mimicfl as mf


@dataclass
class LookAheadState(mf.State):
    m: torch.Tensor


@mf.register("look-ahead")
@dataclass(frozen=True)
class LookAhead(mf.Algorithm[LookAheadState]):
    beta: float = 0.5
    title = "Look-ahead"
    color = "#123456"
    needs_population = False

    def init(self, w, num_clients):
        return LookAheadState(w, torch.zeros_like(w))

    def instructions(self, state, active):
        return mf.Instructions(start=state.w - self.beta * state.m)

    def aggregate(self, state, active, g, step):
        state.m = self.beta * state.m + step.mean(step.change(g))
        state.w = state.w - state.m
"""


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("graph")


@pytest.mark.slow
def test_imports_go_one_way(graph):
    """Between packages and between modules; imports for types only and inside functions count as well."""
    assert graph.cycle(graph.packages()) == []
    assert graph.cycle(graph.imports()) == []


@pytest.mark.slow
def test_the_drawings_are_up_to_date(graph):
    text = graph.DESIGN.read_text()
    assert graph.with_drawings(text) == text, "run: python docs/graph.py"


class TestOneFilePerAlgorithm:
    """An algorithm in a file of the user's is known everywhere once that file is imported."""

    @pytest.fixture
    def plugin(self, tmp_path):
        (tmp_path / "ahead.py").write_text(PLUGIN)
        return tmp_path / "ahead.py"

    @pytest.mark.slow
    def test_command_line_sweep_and_report(self, plugin, tmp_path, capsys):
        (tmp_path / "grid.toml").write_text(
            'rounds = 2\nepochs = 1\nnum_clients = 4\navailability = "always"\nplugins = ["ahead.py"]\n'
            '[grid]\nalgorithm = ["fedavg", "look-ahead:beta=0.9"]\nseed = 1\n'
        )
        assert main(["sweep", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "out")]) == 0
        assert "Look-ahead (beta=0.9)" in capsys.readouterr().out
        page = (tmp_path / "out" / "report.html").read_text()
        assert "Look-ahead" in page
        assert "#123456" in page
        assert len(find_runs([tmp_path / "out"])) == 2

    def test_help(self, tmp_path, capsys):
        (tmp_path / "mine.py").write_text(PLUGIN.replace("look-ahead", "only-in-help"))
        with pytest.raises(SystemExit):
            main(["run", "--plugin", str(tmp_path / "mine.py"), "--help"])
        assert "only-in-help:beta=0.5" in capsys.readouterr().out

    def test_flower(self, plugin):
        flower = pytest.importorskip("mimicfl.flower")
        mf.run(mf.Experiment(rounds=1, epochs=1, num_clients=4, availability="always", algorithm="look-ahead", plugins=[str(plugin)]))
        strategy = flower.LookAhead(beta=0.7)
        assert strategy.algorithm.beta == 0.7
        assert flower.LookAhead(beta=0.8).config["algorithm"] == "look-ahead:beta=0.8"
        assert "look-ahead" in ALGORITHMS.factories


@mf.losses.register("squared-probabilities")
def squared(output, target):
    return (1 - output.softmax(dim=1).gather(1, target[:, None])).square().mean()


class TestSettings:
    """One declaration per setting: everything else follows from it."""

    def test_python_defaults_are_those_of_the_declaration(self):
        given = inspect.signature(mf.simulate).parameters
        same = set(given) & set(SETTINGS) - {
            "model",
            "availability",
            "diagnose",
            "checkpoint_every",
            "loss",
            "task",
            "metrics",
        }  # None or a constant in Python
        assert {name: given[name].default for name in same} == {name: SETTINGS[name].default for name in same}

    def test_flowers_run_config_has_the_same_names_and_defaults(self):
        from mimicfl.flower import Federated
        from mimicfl.flower.app import RUN_CONFIG
        from mimicfl.simulation.setup import make_server

        given = inspect.signature(Federated).parameters
        same = set(given) & set(SETTINGS) - {"lr", "num_clients", "availability"}  # what a real federation may not know
        of_server = {*settings_of(make_server), "weighting", "seed"} - {"state_budget"}
        assert of_server <= same <= set(RUN_CONFIG)
        assert {name: given[name].default for name in same} == {name: SETTINGS[name].default for name in same}

    def test_every_setting_reaches_the_run(self):
        """A setting that nothing takes would be silently ignored, and so would one that `mf.simulate` does not take."""
        from mimicfl.clients.local import Local
        from mimicfl.participation.settings import ParticipationSettings
        from mimicfl.problem import Problem
        from mimicfl.simulation.run import Run
        from mimicfl.simulation.setup import make_participation, make_server

        of_run = {name for f in (ParticipationSettings.of, make_server, make_participation, Run) for name in settings_of(f)}
        assert of_run <= set(inspect.signature(mf.simulate).parameters)
        taken = of_run.union(settings_of(Local), settings_of(Problem.of))
        built = {
            "dataset",
            "data_path",
            "validation",
            "num_clients",
            "partition",
            "model",
            "dtype",
            "preset",
            "engine",
            "diagnose",
            "plugins",
        }
        assert taken | built == set(SETTINGS)

    @pytest.mark.parametrize("name", [name for name in SETTINGS if name not in NOT_IN_RESULT])
    def test_every_setting_of_the_result_is_in_the_fingerprint(self, name):
        """Otherwise a finished run would be returned for another value of the setting."""
        other = {"dataset": "synthetic", "num_clients": 7, "partition": "iid", "model": "linear", "loss": "mse", "algorithm": "fedavg"}
        other |= {"availability": "static:0.5", "rounds": 3, "uploads": 1, "epochs": 2, "steps": 2, "batch_size": 3, "lr": 0.5}
        other |= {
            "global_lr": 0.3,
            "weight_decay": 0.1,
            "momentum": 0.5,
            "clip_norm": 1.0,
            "update": "mean",
            "weighting": "samples",
            "server_optimizer": "adam",
            "average": 9.0,
            "optimizer": "adamw",
            "task": "classification",
            "metrics": "accuracy,macro-f1",
        }
        other |= {
            "validation": 0.2,
            "select": "uniform:2",
            "deadline": 100.0,
            "speed": "lognormal:50",
            "bandwidth": "20",
            "participation_rates": "estimated",
        }
        other |= {"asynchronous": 2, "concurrency": 3}
        other |= {"preset": "authors", "seed": 5, "precision": None, "dtype": "float64", "eval_every": 2}
        assert name in other, f"add a second value of {name} to this test"
        if other[name] is None:
            pytest.skip("only on a GPU")
        base = mf.Experiment(dataset="digits", num_clients=8, availability="always", rounds=2, epochs=None if name == "steps" else 1)
        if name in ("deadline", "asynchronous", "concurrency"):
            base = dataclasses.replace(base, speed="lognormal:50", asynchronous=2 if name == "concurrency" else 0)
        if name == "loss":
            other["loss"] = "squared-probabilities"
        _, changed = build(dataclasses.replace(base, **{name: other[name]}))
        _, run = build(base)
        assert run.fingerprint.run != changed.fingerprint.run

    def test_config_show_prints_what_run_reads(self, tmp_path, capsys):
        assert main(["config", "show", "--rounds", "3", "--clients", "5"]) == 0
        (tmp_path / "full.toml").write_text(capsys.readouterr().out)
        assert main(["config", "show", str(tmp_path / "full.toml")]) == 0
        again = capsys.readouterr().out
        assert tomllib.loads(again) == tomllib.loads((tmp_path / "full.toml").read_text())
        assert tomllib.loads(again)["num_clients"] == 5
