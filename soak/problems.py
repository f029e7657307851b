"""Random federated problems as source code: a network, data and clients, a loss, local training and an algorithm."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from . import images, sequences
from .networks import Network, Piece, Shape, grow

assert images  # importing registers the pieces
USUAL = {"classes": "'cross-entropy'", "targets": "'mse'", "binary": "'binary'"}
HEADS = {
    "linear": ("self.head = nn.Linear({i}, {o})", "x = self.head(x)"),
    "no bias": ("self.head = nn.Linear({i}, {o}, bias=False)", "x = self.head(x)"),
    "functional": ("self.head = nn.Parameter(0.3 * torch.randn({o}, {i}))", "x = F.linear(x, self.head)"),
    "weight norm": ("self.head = nn.utils.parametrizations.weight_norm(nn.Linear({i}, {o}))", "x = self.head(x)"),
}


@dataclass(frozen=True)
class Problem:
    """A drawn problem; `text()` returns its program."""

    seed: int
    domain: str
    shape: Shape
    pieces: tuple[Piece, ...]
    labels: str = "classes"  # or "targets", "binary"
    outputs: int = 3
    head: str = "linear"
    tail: str = "return x"
    loss: str = "'cross-entropy'"
    dtype: str = "float32"
    x_dtype: str = "float32"
    test_dtype: str = ""  # dtype of the test samples, if different
    augment: bool = False
    sizes: tuple[int, ...] = (6, 5)
    single_class: bool = False  # clients hold one class each, if possible
    sorted: bool = False  # samples are ordered by class, but every client holds all classes
    overlap: bool = False
    algorithm: str = "fedavg"
    availability: str = "always"
    rounds: int = 2
    local: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "batch_size": 4})
    more: dict[str, Any] = field(default_factory=dict)  # other arguments of simulate

    def network(self) -> Network:
        return grow(self.domain, self.shape, self.pieces)

    def text(self) -> str:
        """Return a program with a function `problem` that creates the arguments of `mf.simulate`."""
        network = self.network()
        init, apply = (line.format(i=network.shape[0], o=self.outputs) for line in HEADS[self.head])
        loss = self.loss.replace(
            "=W", f"=torch.tensor({[round(3.0 ** (1 - k), 3) for k in range(self.outputs)]}, dtype=torch.{self.dtype}, device=DEVICE)"
        )
        loss = loss.replace("=I", f"={self.outputs - 1}")
        words = {"algorithm": self.algorithm, "availability": self.availability, "rounds": self.rounds, "seed": self.seed, **self.more}
        return PROGRAM.format(
            init="\n        ".join([*network.inits, init]),
            forward="\n        ".join([*network.forward, apply, self.tail]),
            loss=loss,
            data=self._data(),
            kind="Local" if self.local.keys() & {"optimizer", "nesterov"} else "LocalSGD",
            local=", ".join(f"{key}={value!r}" for key, value in self.local.items()),
            words=", ".join(f"{key}={value!r}" for key, value in words.items()),
            seed=self.seed,
            dtype=self.dtype,
        )

    def _data(self) -> str:
        samples = f"(n, {', '.join(map(str, self.shape))})"
        if self.domain == "tokens":
            x = f"torch.randint(0, {sequences.WORDS}, {samples}, generator=chance)"
        elif self.x_dtype == "uint8":
            x = f"torch.randint(0, 256, {samples}, generator=chance).to(torch.uint8)"
        else:
            x = f"torch.randn({samples}, generator=chance).to(torch.{self.x_dtype})"
        classes = 2 if self.labels == "binary" else self.outputs
        order = ".sort().values" if self.single_class or self.sorted else ""
        y = (
            f"torch.randn((n, {self.outputs}), generator=chance)"
            if self.labels == "targets"
            else f"(torch.arange(n) * 7 % {classes}){order}"
        )
        test = f".to(torch.{self.test_dtype})" if self.test_dtype else ""
        pixels = ", mean=(0.4,), std=(0.3,)" if self.x_dtype == "uint8" else ""
        lines = [f"n, sizes = {sum(self.sizes)}, {list(self.sizes)}"]
        lines += [f"x, y = {x}, {y}", f"n = {TESTS}", f"x_test, y_test = {x}{test}, {y}"]
        lines += [f"data = mf.Data(x, y, x_test, y_test, augment={self.augment}{pixels})"]
        order = "np.arange(len(x))" if self.single_class else f"np.random.default_rng({self.seed}).permutation(len(x))"
        lines += [f"split = np.split({order}, np.cumsum(sizes)[:-1])"]
        return "\n    ".join([*lines, "split.append(split[0])"] if self.overlap else lines)

    def simpler(self) -> Iterator["Problem"]:
        """Yield simpler problems, each with one simplification, the largest ones first."""
        for k in range(len(self.pieces)):
            yield replace(self, pieces=self.pieces[:k] + self.pieces[k + 1 :])
        plain = {"tail": "return x", "head": "linear", "loss": USUAL[self.labels], "augment": False, "algorithm": "fedavg", "more": {}}
        plain |= {
            "availability": "always",
            "rounds": 1,
            "overlap": False,
            "single_class": False,
            "sorted": False,
            "test_dtype": "",
            "x_dtype": "float32",
        }
        for name, value in plain.items():
            if getattr(self, name) != value and not (name == "x_dtype" and self.domain == "tokens"):
                yield replace(self, **{name: value})
        for key in self.local.keys() - {"lr", "batch_size", "eps", "betas"}:
            needs = {"momentum": ["nesterov"], "optimizer": ["eps", "betas"]}.get(key, [])
            yield replace(self, local={k: v for k, v in self.local.items() if k not in (key, *needs)})
        lists = any(isinstance(value, list) for value in self.local.values())
        if len(self.sizes) > 1 and not lists:
            yield from (replace(self, sizes=self.sizes[:k] + self.sizes[k + 1 :]) for k in range(len(self.sizes)))
        if max(self.sizes) > 4:
            yield replace(self, sizes=tuple(min(size, 4) for size in self.sizes))


TESTS = 14  # test samples
PROGRAM = """\
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


def problem():
    with torch.random.fork_rng():
        torch.manual_seed({seed})
        model = Net().to(torch.{dtype})
    chance = torch.Generator().manual_seed({seed})
    {data}
    loss = {loss}
    local = mf.{kind}({local})
    return dict(model=model, data=data, split=split, local=local, loss=loss, device=DEVICE, {words})
"""
