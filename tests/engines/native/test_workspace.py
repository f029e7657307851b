"""Compiled gradient steps equal those of PyTorch operations."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.algorithms import Instructions
from mimicfl.clients.losses import criterion_of
from mimicfl.clients.params import Terms, Workspace
from mimicfl.data.clients import Clients
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.workspace import CompiledWorkspace
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.workers import WithLayers, WorkersEngine
from tests.engines.engines import assert_same, request_of


class Odd(nn.Module):
    """Parameters of odd sizes: an unused one, a scalar, an empty one, one with a strided gradient, and a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5, sparse=True)
        self.turned, self.scale = nn.Parameter(torch.randn(5, 37)), nn.Parameter(torch.tensor(1.5))
        self.unused, self.empty = nn.Parameter(torch.randn(19)), nn.Parameter(torch.zeros(0))
        self.last = nn.Linear(37, 10)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        return self.last(torch.tanh(F.linear(x, self.turned.t()))) * self.scale


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.25, "vector", "strided", "double"])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_steps_equal_the_default_workspace(shift, mu):
    torch.manual_seed(0)
    net = Odd()
    spaces = [kind(net, torch.device("cpu")) for kind in (Workspace, CompiledWorkspace)]
    size, start = spaces[0].w.numel(), torch.randn(spaces[0].w.numel())
    vectors = {"vector": torch.randn(size), "strided": torch.randn(2 * size)[::2], "double": torch.randn(size).double()}
    terms = Terms(vectors.get(shift, shift), mu, start)
    found = []
    for space in spaces:
        rng = torch.Generator().manual_seed(1)
        g = torch.zeros(size)
        for _ in range(3):
            space.zero_grad()
            tokens, y = torch.randint(0, 11, (6, 4), generator=rng), torch.randint(0, 10, (6,), generator=rng)
            F.cross_entropy(space.module(tokens), y).backward()
            space.descend(g, 0.1, terms)
        found.append((space.w.clone(), g))
    for true, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-6)


def test_gradients_are_the_same_vector():
    """What clipping, optimizers and extra messages use."""
    torch.manual_seed(0)
    net, tokens = Odd(), torch.randint(0, 11, (6, 4))
    found = []
    for kind in (Workspace, CompiledWorkspace):
        space = kind(net, torch.device("cpu"))
        for rows in (slice(0, 3), slice(3, 6)):  # the second must not add to the first
            space.zero_grad()
            space.module(tokens[rows]).sum().backward()
        found.append(space.gradient().clone())
    assert torch.equal(*found)


class Phase(nn.Module):
    """A scalar in a complex number. In PyTorch, the memory of its gradient holds the negated value."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        turned = torch.complex(torch.ones(()), self.phase).conj()
        return x * (turned * turned).imag


def test_negated_gradients():
    found = []
    for kind in (Workspace, CompiledWorkspace):
        space, g = kind(Phase(), torch.device("cpu")), torch.zeros(1)
        space.zero_grad()
        space.module(torch.ones(2)).sum().backward()
        with torch.no_grad():
            space.descend(g, 0.1, Terms(0.0, 0.0, space.w))
        found.append((g, space.w))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("net", [nn.Linear(2, 2).double(), nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16()])
def test_other_precisions_are_not_compiled(net):
    with pytest.raises(Unsupported):
        CompiledWorkspace(net, torch.device("cpu"))


class Language(nn.Module):
    """A transformer with tied embeddings and enough classes for the compiled loss."""

    def __init__(self, tied, vocabulary=1030, width=24):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(6, width))
        layer = nn.TransformerEncoderLayer(width, 3, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6), persistent=False)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens) + self.place, mask=self.mask, is_causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(
    "local", [mf.LocalSGD(epochs=1, batch_size=5), mf.Local(optimizer="adamw", eps=1e-3, epochs=1, batch_size=5, clip_norm=0.5)]
)
def test_language_models_equal_plain(tied, ignored, local):
    torch.manual_seed(0)
    text = torch.randint(0, 1030, (22, 7))
    x, y = text[:, :-1].contiguous(), text[:, 1:].clone()
    if ignored:
        y[::3, 4:] = -100
    data = mf.Data(x, y, x[:2], y[:2], task="token-prediction")
    clients = Clients(data, np.split(np.arange(22), [9, 15]), torch.device("cpu"), torch.float32)
    net, loss = Language(tied), criterion_of(data, None, None)
    space = Workspace(net, torch.device("cpu"))
    task = Instructions(0.01 * torch.randn(3, space.w.numel()), 0.1)
    requests = [request_of(clients, local, 2, 3, space.w.clone(), space.buffers(), np.arange(3), task, 0.05, 0.05)]
    ours = WorkersEngine(net, clients, loss, workers=2)
    assert isinstance(ours.plain.work, CompiledWorkspace)
    assert isinstance(ours.plain.work.module, WithLayers)
    assert_same(ours.train(requests), PlainEngine(net, clients, loss).train(requests), rtol=2e-5)
