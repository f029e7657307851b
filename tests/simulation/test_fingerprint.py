"""A folder is its run's: whatever the result depends on and is not the same is noticed, and named."""

import copy
import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.fingerprint.values import Values


class Scaled(nn.Module):
    def __init__(self, by, start, act=torch.relu, **more):
        super().__init__()
        self.by, self.inner, self.act = by, start, act
        vars(self).update(more)

    def forward(self, x):
        return self.by * self.act(self.inner(x))


class Learned(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by), requires_grad=False)

    def forward(self, output, target):
        return self.by * F.cross_entropy(output, target)


def frozen(model):
    model = copy.deepcopy(model)
    next(model.parameters()).requires_grad_(False)
    return model


class Weighted(mf.FedAvg):
    def __init__(self, by):
        self.by = by


def factor(by):
    return lambda output, target: by * F.cross_entropy(output, target)


def begun(digits, **given):
    return {"availability": "static:0.3", "rounds": 2, "local": mf.LocalSGD(steps=1), **digits, **given}


CHANGES = {
    "label smoothing": ("loss", lambda d: ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)})),
    "class weights": ("loss", lambda d: [{"loss": nn.CrossEntropyLoss(weight=w)} for w in (torch.ones(10), torch.arange(1.0, 11))]),
    "a partial": ("loss", lambda d: [{"loss": functools.partial(F.cross_entropy, label_smoothing=s)} for s in (0.0, 0.5)]),
    "a closure": ("loss", lambda d: ({"loss": factor(1)}, {"loss": factor(2)})),
    "a lambda": ("loss", lambda d: ({"loss": lambda o, t: F.cross_entropy(o, t) + 1}, {"loss": lambda o, t: F.cross_entropy(o, t) - 1})),
    "a default": ("loss", lambda d: [{"loss": lambda o, t, by=by: by * F.cross_entropy(o, t)} for by in (1, 2)]),
    "an attribute of the model": ("model", lambda d: ({"model": Scaled(1.0, d["model"])}, {"model": Scaled(0.1, d["model"])})),
    "a tensor of the algorithm": ("algorithm", lambda d: [{"algorithm": Weighted(torch.full((3,), x))} for x in (1.0, 2.0)]),
    "a tuple of the algorithm": ("algorithm", lambda d: [{"algorithm": Weighted((0.1, x))} for x in (1, 2)]),
    "a number of NumPy": ("algorithm", lambda d: [{"algorithm": Weighted(np.float32(x))} for x in (1, 2)]),
    "a path": ("algorithm", lambda d: [{"algorithm": Weighted(Path(x))} for x in "ab"]),
    "a built-in function": ("model", lambda d: [{"model": Scaled(1.0, d["model"], f)} for f in (torch.relu, torch.tanh)]),
    "a private number of the model": ("model", lambda d: [{"model": Scaled(1.0, d["model"], _private=x)} for x in (1, 2)]),
    "a frozen layer": ("model", lambda d: ({}, {"model": frozen(d["model"])})),
    "a weight of the loss": ("loss", lambda d: [{"loss": Learned(x)} for x in (1.0, 2.0)]),
    "the split": ("partition|split", lambda d: ({}, {"split": d["split"][::-1]})),
    "the rate": ("global_lr", lambda d: ({"global_lr": 0.1}, {"global_lr": lambda t: 0.1 + t})),
    "clipping": ("clip_norm", lambda d: ({}, {"local": mf.LocalSGD(steps=1, clip_norm=1)})),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_is_found_and_named(digits, tmp_path, change):
    part, make = CHANGES[change]
    first, second = (begun(digits, **given) for given in make(digits))
    end = mf.simulate(**first, out=tmp_path).params
    assert torch.equal(mf.simulate(**first, out=tmp_path).params, end)
    with pytest.raises(mf.UsageError, match=f"different run.*({part})"):
        mf.simulate(**second, out=tmp_path)


def test_a_call_that_failed_at_once_may_be_corrected(digits, tmp_path):
    class Broken(mf.FedAvg):
        def instructions(self, state, active):
            raise KeyError("a slip")

    with pytest.raises(KeyError):
        mf.simulate(**begun(digits, algorithm=Broken()), out=tmp_path, config={"own": 1})
    mended = mf.simulate(**begun(digits, algorithm="fedavg"), out=tmp_path, config={"own": 1})
    assert torch.equal(mended.params, mf.simulate(**begun(digits, algorithm="fedavg")).params)


def test_a_function_as_rate_is_the_same_in_another_process(digits, tmp_path):
    """Its address is not."""

    def rates():
        return {"local": mf.LocalSGD(steps=1, lr=lambda t: 0.1 / (1 + t)), "global_lr": functools.partial(lambda a, t: a / (1 + t), 0.1)}

    first = mf.simulate(**begun(digits, **rates()), out=tmp_path)
    assert "0x" not in (tmp_path / "config.toml").read_text()
    assert torch.equal(mf.simulate(**begun(digits, **rates()), out=tmp_path).params, first.params)


@pytest.mark.slow
def test_fingerprints_are_equal_in_another_process():
    things = "[nn.CrossEntropyLoss(weight=torch.ones(3)), lambda a: a in {'x', 'y', 'z'}, {'b': (1, None), len: 2, frozenset('abc'): 3}, "
    things += "{'x', 'yy', 'zzz'}, nn.GRU(3, 3).requires_grad_(False), object(), print, threading.Lock(), logging.getLogger('a')]"
    imports = "import logging, threading, torch\ntorch.manual_seed(0)\nfrom torch import nn\n"
    imports += "from mimicfl.fingerprint.values import Values\n"
    seen = {
        subprocess.run([sys.executable, "-c", f"{imports}print(Values().of({things}))"], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(seen) == 1


def test_any_object_has_a_fingerprint():
    @dataclasses.dataclass
    class Loop:
        self: object = None

    loop = Loop()
    loop.self = loop
    things = [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), np.array({}), {(0, 1): 2}, iter([]), torch.Generator()]
    things += [loop, np.array([{}], dtype=object), np.float32, torch, len, range(3), object(), torch.tensor(1.0, dtype=torch.bfloat16)]
    assert all(Values().of(thing) for thing in things)
