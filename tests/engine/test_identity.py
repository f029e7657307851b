"""A folder is its run's: whatever the result depends on and is not the same is noticed, and named."""

import dataclasses
import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.engine.identity import told


class Scaled(nn.Module):
    def __init__(self, by, start):
        super().__init__()
        self.by, self.inner = by, start

    def forward(self, x):
        return self.by * self.inner(x)


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
    "the split": ("split", lambda d: ({}, {"split": d["split"][::-1]})),
    "the rate": ("rates", lambda d: ({"global_lr": 0.1}, {"global_lr": lambda t: 0.1 + t})),
    "clipping": ("local work", lambda d: ({}, {"local": mf.LocalSGD(steps=1, clip_norm=1)})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_noticed_and_named(digits, tmp_path, change):
    part, make = CHANGES[change]
    first, second = (begun(digits, **given) for given in make(digits))
    end = mf.simulate(**first, out=tmp_path).params
    assert torch.equal(mf.simulate(**first, out=tmp_path).params, end)
    with pytest.raises(mf.UsageError, match=f"another run, with another .*{part}|holds another run"):
        mf.simulate(**second, out=tmp_path)


def test_a_call_that_failed_at_once_may_be_corrected(digits, tmp_path):
    class Broken(mf.FedAvg):
        def task(self, state, active):
            raise KeyError("a slip")

    with pytest.raises(KeyError):
        mf.simulate(**begun(digits, algorithm=Broken()), out=tmp_path, config={"own": 1})
    mended = mf.simulate(**begun(digits, algorithm="fedavg"), out=tmp_path, config={"own": 1})
    assert torch.equal(mended.params, mf.simulate(**begun(digits, algorithm="fedavg")).params)


def test_a_thing_is_told_alike_in_another_process():
    things = "[nn.CrossEntropyLoss(weight=torch.ones(3)), lambda a: {'x', 'y', a}, {'b': (1, None)}, {'x', 'yy', 'zzz'}]"
    imports = "import torch\nfrom torch import nn\nfrom mimicfl.engine.identity import told\n"
    seen = {
        subprocess.run([sys.executable, "-c", f"{imports}print(told({things}))"], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(seen) == 1


def test_anything_can_be_told():
    @dataclasses.dataclass
    class Loop:
        self: object = None

    loop = Loop()
    loop.self = loop
    things = [loop, np.array([{}], dtype=object), np.float32, torch, len, range(3), object(), torch.tensor(1.0, dtype=torch.bfloat16)]
    assert all(told(thing) for thing in things)
