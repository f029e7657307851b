"""Models and data with several inputs per sample, and with a label per position, that the tests of all engines share."""

import numpy as np
import torch
from torch import nn

import mimicfl as mf
from mimicfl.data.clients import Clients
from tests.engines.engines import SIZES

WORDS, LENGTH = 7, 5
SAMPLES = sum(SIZES)


class Masked(nn.Module):
    """Means of embeddings over the positions that a mask keeps; takes keywords."""

    def __init__(self, classes=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, classes)

    def forward(self, *, tokens, mask):
        kept = mask.unsqueeze(-1).to(self.head.weight.dtype)
        return self.head((self.embed(tokens) * kept).sum(1) / kept.sum(1))


class TwoInputs(nn.Module):
    """Takes two positional inputs and returns an object with `logits`, as models of `transformers` do."""

    def __init__(self, classes=3):
        super().__init__()
        self.a, self.b = nn.Linear(4, classes), nn.Linear(2, classes)

    def forward(self, a, b):
        return {"logits": torch.tanh(self.a(a)) + self.b(b.flatten(1))}


class Tokens(nn.Module):
    """One output per position and word, [batch, positions, words], or [batch, words, positions]."""

    def __init__(self, words_last=True):
        super().__init__()
        self.words_last = words_last
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, tokens):
        out = self.head(torch.tanh(self.mix(self.embed(tokens).cumsum(1))))
        return out if self.words_last else out.transpose(1, 2)


def masked_data(samples=SAMPLES, seed=1, **options):
    rng = np.random.default_rng(seed)
    tokens, mask = rng.integers(0, WORDS, (samples, LENGTH)), np.arange(LENGTH) <= rng.integers(0, LENGTH, (samples, 1))
    x, y = {"tokens": tokens, "mask": mask}, (tokens * mask).sum(1) % 3
    return mf.Data(x, y, {key: value[:20] for key, value in x.items()}, y[:20], **options)


def two_inputs_data(samples=SAMPLES, seed=2, **options):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(samples, 4)), rng.integers(0, 256, (samples, 1, 2)).astype(np.uint8)
    y = (a[:, 0] > 0).astype(int) + (b[:, 0, 0] > 100)
    return mf.Data((a, b), y, (a[:20], b[:20]), y[:20], **options)


def token_data(samples=SAMPLES, seed=3, ignored=0.3, **options):
    """Next-token targets of which some are ignored, in some samples all."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, WORDS, (samples, LENGTH + 1))
    y = np.where(rng.random((samples, LENGTH)) < ignored, -100, text[:, 1:])
    y[3] = -100
    return mf.Data(text[:, :-1], y, text[:20, :-1], y[:20], **{"task": "token-prediction"} | options)


CASES = {"dict": (Masked, masked_data), "tuple": (TwoInputs, two_inputs_data)}


def clients_of(data, device="cpu", dtype=torch.float64):
    split = np.split(np.random.default_rng(0).permutation(data.num_train), np.cumsum(SIZES)[:-1])
    return Clients(data, split, torch.device(device), dtype)
