"""Random small networks as source code, as a user could write them, drawn from a seed.

A network is a list of pieces; each has a name and a seed for its details. A piece generates source code for its input shape. The code is
run on zeros to find the output shape, and a piece that does not fit is left out. Any piece can therefore be removed, and the rest is
still a network.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Piece = tuple[str, int]  # name in PIECES, seed of the details
Shape = tuple[int, ...]
Text = tuple[list[str], list[str]]  # lines of __init__, lines of forward
MOST_NUMBERS = 400  # maximum number of outputs of a piece per sample, to limit the time


@dataclass(frozen=True)
class Kind:
    """A kind of piece: its input domains ("" for all), its output domain ("" for the same), and the function that writes its code."""

    takes: str
    gives: str
    write: Callable[[random.Random, Shape, str], Text]


PIECES: dict[str, Kind] = {}


def piece(takes: str = "", gives: str = "") -> Callable[[Callable[[random.Random, Shape, str], Text]], Any]:
    def add(write: Callable[[random.Random, Shape, str], Text]) -> Any:
        PIECES[write.__name__] = Kind(takes, gives, write)
        return write

    return add


@dataclass
class Network:
    """The source code of a growing network, and its current output shape."""

    domain: str  # "image", "signal", "sequence", "vector" or "tokens"
    shape: Shape
    inits: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> bool:
        """Append a piece; return False if it does not fit."""
        kind = PIECES[piece[0]]
        if kind.takes and self.domain not in kind.takes.split():
            return False
        inits, lines = kind.write(random.Random(piece[1]), self.shape, f"{piece[0]}{len(self.used)}")
        shape = shape_after(inits, lines, self.shape, self.domain)
        domain = kind.gives or self.domain
        if shape is None or len(shape) != {"image": 3, "vector": 1}.get(domain, 2 if domain != "tokens" else 1):
            return False
        self.inits += inits
        self.forward += lines
        self.used.append(piece[0])
        self.shape, self.domain = shape, domain
        return True


def shape_after(inits: Sequence[str], lines: Sequence[str], shape: Shape, domain: str) -> Shape | None:
    """Return the output shape of these lines in training mode (where BatchNorm refuses a single value); None if they do not fit."""
    module = nn.Module()
    x = torch.zeros(1, *shape, dtype=torch.long if domain == "tokens" else torch.float32)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": module, "x": x}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec("\n".join([*inits, *lines]), names)
        except (RuntimeError, ValueError, AssertionError):
            return None
    x = names["x"]
    fits = isinstance(x, Tensor) and x.is_floating_point() and len(x) == 1 and 0 < x.numel() <= MOST_NUMBERS
    return tuple(x.shape[1:]) if fits else None


def grow(domain: str, shape: Shape, pieces: Sequence[Piece]) -> Network:
    """Build the network of these pieces, which ends with one vector per sample."""
    network = Network(domain, shape)
    for each in pieces:
        network.add(each)
    if network.domain != "vector":
        network.add(("to_vector", 0))
    return network


def draw_pieces(r: random.Random, domain: str, shape: Shape, count: int) -> list[Piece]:
    """Draw `count` random pieces that fit one after another."""
    network, pieces = Network(domain, shape), []
    for _ in range(10 * count):
        fitting = [
            n for n, kind in sorted(PIECES.items(), key=lambda item: item[0]) if not kind.takes or network.domain in kind.takes.split()
        ]
        if network.domain == "tokens":
            fitting = [name for name in fitting if PIECES[name].takes == "tokens"]
        each = (r.choice(fitting), r.randrange(10**6))
        if network.add(each):
            pieces.append(each)
        if len(pieces) == count:
            break
    return pieces


def draw_chain(r: random.Random, variant: random.Random, shape: Shape) -> list[Piece]:
    """Draw a chain of layers that the native engine supports: the layers from `r`, the way each one is written from `variant`."""
    names = ["plain_linear"] * r.randrange(3)
    if len(shape) == 3:
        body = r.choice([["plain_conv"], ["plain_conv", "plain_pool"], ["plain_conv", "plain_pool", "plain_conv"]])
        names = [*body, "flat", *names]
    spelled = ("relu", "tanh", "flat")
    chain = [name for each in names for name in ([each, r.choice(["relu", "tanh"])] if each != "flat" else [each])]
    return [(name, (variant if name in spelled else r).randrange(10**6)) for name in chain]


def one(r: random.Random, *lines: str) -> list[str]:
    return [r.choice(lines)]


# --- pieces for every domain


@piece()
def relu(r: random.Random, shape: Shape, n: str) -> Text:
    line = r.choice(["F.relu(x)", "torch.relu(x)", "x.relu()", "F.relu(input=x)", f"self.{n}(x)"])
    return ([f"self.{n} = nn.ReLU()"] if n in line else []), [f"x = {line}"]


@piece()
def tanh(r: random.Random, shape: Shape, n: str) -> Text:
    line = r.choice(["torch.tanh(x)", "x.tanh()", f"self.{n}(x)"])
    return ([f"self.{n} = nn.Tanh()"] if n in line else []), [f"x = {line}"]


@piece()
def activation(r: random.Random, shape: Shape, n: str) -> Text:
    made = r.choice(["GELU()", "GELU(approximate='tanh')", "SiLU()", "ELU()", "Softplus()", "LeakyReLU(0.1)", "PReLU()", "Hardtanh(-1, 1)"])
    line = r.choice(
        [f"self.{n}(x)", f"self.{n}(x)", "torch.sigmoid(x)", "F.gelu(x)", "F.softplus(x)", "x.sigmoid()", "x.sin()", "F.relu_(x * 1.0)"]
    )
    return ([f"self.{n} = nn.{made}"] if n in line else []), [f"x = {line}"]


@piece()
def scalar(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Parameter(torch.tensor(1.3))"], one(r, f"x = self.{n} * x", f"x = x + self.{n}", f"x = x * self.{n}.exp()")


@piece()
def unused(r: random.Random, shape: Shape, n: str) -> Text:
    return one(r, f"self.{n} = nn.Parameter(torch.ones(3))", f"self.{n} = nn.Linear(2, 2)"), []


@piece()
def constant(r: random.Random, shape: Shape, n: str) -> Text:
    keep = r.choice(["", ", persistent=False"])
    return [f"self.register_buffer('{n}', torch.tensor(0.7){keep})"], [f"x = x * self.{n}"]


@piece()
def counter(r: random.Random, shape: Shape, n: str) -> Text:
    lines = ["if self.training:", f"    self.{n} += 1"]
    return [f"self.register_buffer('{n}', torch.tensor(0))"], lines


@piece()
def mode(r: random.Random, shape: Shape, n: str) -> Text:
    return [], one(
        r, "x = x if self.training else 0.5 * x", "x = x * 1.5 if self.training else x", "x = x.tanh() if not self.training else x"
    )


@piece()
def no_dropout(r: random.Random, shape: Shape, n: str) -> Text:
    made = ([f"self.{n} = nn.Dropout(0.0)"], [f"x = self.{n}(x)"])
    return r.choice([made, ([], ["x = F.dropout(x, 0.0, self.training)"])])


@piece()
def frozen_shift(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Parameter(torch.full({shape}, 0.1), requires_grad=False)"], [f"x = x + self.{n}"]


@piece("image signal sequence vector")
def offset(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Parameter(0.1 * torch.randn{shape})"], one(r, f"x = x + self.{n}", f"x = x * (1 + self.{n})")


@piece("image signal sequence vector")
def layer_norm(r: random.Random, shape: Shape, n: str) -> Text:
    over = shape if r.random() < 0.5 else shape[-1:]
    return [f"self.{n} = nn.LayerNorm({over}, elementwise_affine={r.random() < 0.7})"], [f"x = self.{n}(x)"]
