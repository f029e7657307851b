"""The hash of a value depends on everything that can change a result, and is the same in every process."""

import argparse
import copy
import functools
import importlib.util
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.fingerprint.values import Values
from mimicfl.report.summary import group
from mimicfl.simulation.fingerprint import fingerprint
from tests.conftest import make_run

HEAD = "import argparse, functools, types\nimport mimicfl as mf\n"
METHOD = "class A:\n    def value(self):\n        return {used}\n"
CODE = {  # VALUE becomes a 1 or a 2
    "a property": METHOD.format(used="self.k") + "    @property\n    def k(self): return VALUE\n",
    "a static method": METHOD.format(used="self.k()") + "    @staticmethod\n    def k(): return VALUE\n",
    "a class method": METHOD.format(used="self.k()") + "    @classmethod\n    def k(cls): return VALUE\n",
    "a metaclass": "class M(type):\n    def k(cls): return VALUE\nclass A(metaclass=M):\n    pass\n",
    "nested settings": METHOD.format(used="K['a']['b'][0]") + "K = {'a': {'b': [VALUE]}}\n",
    "parsed arguments": METHOD.format(used="K.a") + "K = argparse.Namespace(a=VALUE)\n",
    "a namespace": METHOD.format(used="K.a") + "K = types.SimpleNamespace(a=VALUE)\n",
    "a custom object": METHOD.format(used="K.a") + "class C:\n    def __init__(self, a): self.a = a\nK = C(VALUE)\n",
    "functions in a dict": METHOD.format(used="K['a']()") + "def f(): return VALUE\nK = {'a': f}\n",
    "a global partial": METHOD.format(used="K()") + "def f(a): return a\nK = functools.partial(f, VALUE)\n",
    "a cached function": METHOD.format(used="K()") + "@functools.cache\ndef K(): return VALUE\n",
    "an attribute of a function": METHOD.format(used="f.k") + "def f(): pass\nf.k = VALUE\n",
    "a long chain of calls": METHOD.format(used="f0()")
    + "".join(f"def f{k}(): return f{k + 1}()\n" for k in range(12))
    + "def f12(): return VALUE\n",
}


def loaded(folder, text):
    file = folder / "users_code.py"
    file.write_text(HEAD + text)
    spec = importlib.util.spec_from_file_location("users_code", file)
    module = sys.modules["users_code"] = importlib.util.module_from_spec(spec)
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), vars(module))
    return module


@pytest.fixture
def users(tmp_path):
    def make(text, name):
        folder = tmp_path / name
        folder.mkdir()
        return loaded(folder, text)

    yield make
    sys.modules.pop("users_code", None)


@pytest.mark.parametrize("what", CODE)
def test_an_edit_of_the_users_code_changes_the_hash(users, what):
    texts = [CODE[what].replace("VALUE", number) for number in "112"]
    first, again, edited = (Values().of(users(text, str(k)).A()) for k, text in enumerate(texts))
    assert first == again
    assert first != edited


def test_attribute_names_are_not_mistaken_for_globals(users):
    text = METHOD.format(used="self.model.data") + "model, data = {}, []\n"
    first, second = (Values().of(users(text.replace("{}", str({"a": k})), f"{k}").A()) for k in (1, 2))
    assert first == second


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState, lambda s: torch.Generator().manual_seed(s)])
def test_generators_are_hashed_by_their_state(make):
    assert Values().of([make(1)]) == Values().of([make(1)])
    assert Values().of([make(1)]) != Values().of([make(2)])


def test_cached_properties_do_not_change_the_hash():
    class Cached:
        @functools.cached_property
        def value(self):
            return [1, 2]

    fresh, used = Cached(), Cached()
    assert used.value
    assert Values().of(fresh) == Values().of(used)


class CustomLSTM(nn.LSTM):
    """A deep copy has its attributes in another order."""


def test_a_deep_copy_has_the_same_hash():
    layer = CustomLSTM(3, 3)
    assert Values().of(copy.deepcopy(layer)) == Values().of(layer)


@pytest.mark.slow
def test_cyclic_references_are_hashed_in_linear_time(users):
    """Following every path would describe forty functions 2**39 times."""
    calls = "".join(f"def f{k}(): return [{', '.join(f'f{j}' for j in range(40) if j != k)}]\n" for k in range(40))
    assert Values().of(users(calls, "one").f0) == Values().of(users(calls, "two").f0)
    ring = [argparse.Namespace() for _ in range(40)]
    for each in ring:
        each.others = ring
    assert Values().of(ring[0])


class Net(nn.Module):
    def __init__(self, **held):
        super().__init__()
        self.last = nn.Linear(64, 10)
        vars(self).update(held)

    def forward(self, x):
        return self.last(x.flatten(1))


def filled(value):
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, value)
    return layer


def hooked(value):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
    net[2].register_full_backward_hook(lambda module, given, got: (value * given[0],))
    return net


MODELS = {
    "a private list": lambda x: Net(_a=[x]),
    "a private dict": lambda x: Net(_a={"a": x}),
    "a private tensor": lambda x: Net(_a=torch.tensor(x)),
    "a private object": lambda x: Net(_a=argparse.Namespace(a=x)),
    "a module in a list": lambda x: Net(teacher=[filled(x)]),
    "a module that is not registered": lambda x: Net(teacher=filled(x)),
    "a hook of the backward pass": hooked,
}


def run_of(digits, model, seed=0, algorithm="fedavg"):
    return make_run(model, digits["data"], digits["split"], algorithm=algorithm, local=mf.LocalSGD(steps=1), rounds=2, seed=seed)


@pytest.mark.parametrize("what", MODELS)
def test_models_that_differ_outside_their_parameters_have_different_programs(digits, what):
    programs = []
    for value in (1.0, 1.0, 2.0):
        torch.manual_seed(0)
        programs.append(run_of(digits, MODELS[what](value)).fingerprint.program)
    assert programs[0] == programs[1]
    assert programs[0] != programs[2]


def test_a_list_of_a_models_parameters_does_not_distinguish_seeds(digits):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = Net()
        net.all = [net.last.weight, net.last.bias]
        found.append(run_of(digits, net, seed).fingerprint)
    assert found[0].program == found[1].program
    assert found[0].experiment == found[1].experiment
    assert found[0].run != found[1].run


class Cached(mf.FedAvg):
    @functools.cached_property
    def factor(self):
        return torch.ones(1)

    def aggregate(self, state, active, g, step):
        super().aggregate(state, active, self.factor * g, step)


def test_fingerprint_is_computed_before_the_first_round(digits):
    given = {"model": digits["model"], "data": digits["data"], "split": digits["split"], "local": mf.LocalSGD(steps=1), "rounds": 2}
    end = mf.simulate(**given, algorithm=Cached())
    fresh = run_of(digits, digits["model"], algorithm=Cached())
    assert end.fingerprint.run["algorithm"] == fingerprint(fresh, 2).run["algorithm"]


def test_callbacks_with_different_arguments_differ(digits, tmp_path):
    given = {"model": digits["model"], "data": digits["data"], "split": digits["split"], "local": mf.LocalSGD(steps=1), "rounds": 2}

    def callback(number, info):
        return {"number": number}

    mf.simulate(**given, out=tmp_path, each_round=functools.partial(callback, 1))
    assert mf.simulate(**given, out=tmp_path, each_round=functools.partial(callback, 1)).rows[-1]["number"] == 1
    with pytest.raises(mf.UsageError, match="callback"):
        mf.simulate(**given, out=tmp_path, each_round=functools.partial(callback, 2))


def test_runs_on_data_that_depends_on_the_seed_are_grouped():
    def drawn(seed: int = 0):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(40, 4)).astype("float32"), np.arange(40) % 2
        return mf.Data(x, y, x[:10], y[:10], ids=np.sort(rng.integers(0, 5, size=40)))

    mf.datasets.register("drawn", drawn)
    try:
        e = {"dataset": "drawn", "partition": "natural", "availability": "always", "model": "logistic", "rounds": 1, "steps": 1}
        [found] = group([mf.run(mf.Experiment(**e, seed=seed)) for seed in (0, 1)])
    finally:
        del mf.datasets.DATASETS.factories["drawn"]
    assert len(found.runs) == 2
