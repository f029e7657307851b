"""The workloads of the suite, the same in every environment; only a model of ours imports mimicfl.

Data are generated from a seed and have the right shape; no measurement depends on what they contain. Dropout is left out of all models,
so that a fast engine can be compared with the plain one. Sizes are scaled down for two CPU cores, for all frameworks alike.
"""

import contextlib
import itertools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions with norms, added to the input; a projection where the width grows."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        first, second = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.body = nn.Sequential(first, norm(outputs), nn.ReLU(), second, norm(outputs))
        self.skip = nn.Sequential(*([nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)] if stride == 2 else []))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class LanguageModel(nn.Module):
    """pfl-research's StackOverflow transformer: PyTorch's encoder with a causal mask, the embedding tied to the output."""

    def __init__(self, vocabulary: int, length: int, width: int = 96, layers: int = 3, heads: int = 8, hidden: int = 1536) -> None:
        super().__init__()
        self.width, self.embed, self.place = width, nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        nn.init.uniform_(self.embed.weight, -0.05, 0.05)
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * math.sqrt(self.width) + self.place
        return self.encoder(x, mask=self.later, is_causal=True) @ self.embed.weight.t()


class Adapted(nn.Module):
    """A frozen linear layer with a trainable product of rank 8 (LoRA); no factor starts at zero, so that every gradient can be compared."""

    RANK = 8

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(self.RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(0.01 * torch.randn(base.out_features, self.RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * (x @ self.a.t()) @ self.b.t()


class AdaptedBlock(nn.Module):
    """A pre-norm transformer block with adapters on its queries and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.query, self.value = Adapted(nn.Linear(width, width)), Adapted(nn.Linear(width, width))
        self.norm, self.hidden = (
            nn.LayerNorm(width),
            nn.Sequential(nn.LayerNorm(width), *linear(width, 4 * width), *linear(4 * width, width)[:1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.hidden(x)


class AdaptedModel(nn.Module):
    """A frozen causal transformer; only its adapters are trained."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks, self.head = nn.Sequential(*[AdaptedBlock(width, width // 32) for _ in range(layers)]), nn.Linear(width, vocabulary)
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith((".a", ".b")))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place))


def linear(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.ReLU()]


def lenet(work: "Workload") -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[*linear(256, 120), *linear(120, 84), nn.Linear(84, 10)],
    )


def cnn(work: "Workload") -> nn.Module:
    """pfl-research's CNN for CIFAR-10."""
    return nn.Sequential(
        *[nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[*linear(64 * 14 * 14, 128), nn.Linear(128, 10)],
    )


def vgg11(work: "Workload") -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for stage in [(64,), (128,), (256, 256), (512, 512), (512, 512)]:
        for outputs in stage:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    net = nn.Sequential(*layers, nn.Flatten(), *linear(512, 512), *linear(512, 512), nn.Linear(512, 10))
    for p in net.parameters():
        nn.init.kaiming_normal_(p, nonlinearity="relu") if p.ndim > 1 else nn.init.zeros_(p)  # the default lets the signal vanish
    return net


def resnet18(work: "Workload") -> nn.Module:
    """ResNet-18 for images of 32x32 pixels, with the workload's norm."""
    norm = nn.BatchNorm2d if work.norm == "batch" else lambda width: nn.GroupNorm(8, width)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(a, b, norm) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), norm(64), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )


@dataclass(frozen=True)
class Workload:
    """One workload: every client takes `epochs` passes over `samples` samples in batches, with SGD."""

    title: str
    make: "Callable[[Workload], nn.Module]"
    shape: tuple[int, ...]  # of a sample
    clients: int
    cohort: int
    samples: int  # per client
    batch: int
    epochs: int = 1
    rate: float = 0.01
    rounds: int = 3
    vocabulary: int = 0  # samples are tokens, and every position has a target
    norm: str = "batch"
    stateful: bool = False  # SCAFFOLD, with clients that participate as a trace says

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.samples // self.batch)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make(self)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs [clients, samples, *shape] and targets: one class per image, two classes per client, or the next token per position."""
        rng = np.random.default_rng(0)
        size = (self.clients, self.samples, *self.shape)
        if self.vocabulary:
            text = torch.from_numpy(rng.integers(0, self.vocabulary, (*size[:-1], size[-1] + 1)))
            return text[..., :-1].contiguous(), text[..., 1:].contiguous()
        y = np.arange(self.samples) % 2 + 2 * (np.arange(self.clients)[:, None] % 5)
        return torch.from_numpy(rng.standard_normal(size, dtype=np.float32)), torch.from_numpy(y)

    def active(self, t: int) -> np.ndarray:
        """The clients of round t: in turn, or as in a trace with a daily rhythm in which some clients are rarely available."""
        if not self.stateful:
            return np.sort((t * self.cohort + np.arange(self.cohort)) % self.clients)
        rng = np.random.default_rng([1, t])
        zone = np.arange(self.clients) % 24
        daily = 0.5 + 0.5 * np.cos(2 * np.pi * (zone - t) / 24)
        weights = daily * np.where(np.arange(self.clients) % 10 == 0, 0.1, 1.0)
        return np.sort(rng.choice(self.clients, self.cohort, replace=False, p=weights / weights.sum()))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over samples, or over samples and positions."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def stackoverflow(work: Workload) -> nn.Module:
    return LanguageModel(work.vocabulary, *work.shape)


def small_transformer(work: Workload) -> nn.Module:
    return LanguageModel(work.vocabulary, *work.shape, heads=4, hidden=384)


def written_out(work: Workload) -> nn.Module:
    """mimicfl's own transformer, whose attention is written out."""
    from mimicfl.clients.models import Transformer

    return Transformer(work.vocabulary, *work.shape)


def lora(work: Workload) -> nn.Module:
    return AdaptedModel(work.vocabulary, *work.shape, width=128, layers=4)


def large_lora(work: Workload) -> nn.Module:
    return AdaptedModel(work.vocabulary, *work.shape, width=512, layers=6)


PROCESSOR_TIME = bool(os.environ.get("SUITE_PROCESSOR_TIME"))
THREADS = 1 if PROCESSOR_TIME else 2
IMAGE = (3, 32, 32)
CNN = Workload("pfl's CIFAR-10 CNN", cnn, IMAGE, 100, 50, 50, 10, rate=0.1)
RESNET = Workload("ResNet-18, BatchNorm, batch 10", resnet18, IMAGE, 4, 4, 20, 10)
LENET = Workload("LeNet, batch 16", lenet, (1, 28, 28), 30, 30, 2000, 16, epochs=5)
TRANSFORMER = Workload("transformer 96x3, 20 tokens", small_transformer, (20,), 20, 20, 256, 16, vocabulary=1000)
STACKOVERFLOW = Workload("transformer 96x3, feed-forward 1,536, 20 tokens", stackoverflow, (20,), 16, 8, 64, 16, vocabulary=10_004)
LORA = Workload("frozen transformer, LoRA rank 8", lora, (32,), 16, 8, 32, 8, vocabulary=2000)
TRACE = Workload("1,000 clients on a trace, SCAFFOLD", lenet, (1, 28, 28), 1000, 50, 40, 10, stateful=True, rounds=6)
SUITE = {
    "lenet-3": replace(LENET, title="LeNet, cohort 3", cohort=3, rounds=5),
    "lenet-30": replace(LENET, title="LeNet, cohort 30"),
    **{"cifar10-cnn": CNN, "resnet18": RESNET, "transformer": TRANSFORMER, "stackoverflow": STACKOVERFLOW, "lora": LORA, "trace": TRACE},
}


def on_gpu(work: Workload, title: str, clients: int, batch: int, steps: int, **other: object) -> Workload:
    return replace(work, title=title, clients=clients, cohort=clients, samples=batch * steps, batch=batch, epochs=1, **other)


VGG, SMALL = replace(CNN, make=vgg11), replace(STACKOVERFLOW, make=small_transformer, vocabulary=1000)
# The engines alone, on a GPU: us per client-step of training, for clients that all participate. Precisions to time come with each.
GPU: dict[str, tuple[Workload, tuple[str, ...]]] = {
    "lenet-120": (on_gpu(LENET, "LeNet batch 16, 120 clients", 120, 16, 64), ("fp32",)),
    "lenet-30": (on_gpu(LENET, "LeNet batch 16, 30 clients", 30, 16, 128), ("fp32",)),
    "lenet-3": (on_gpu(LENET, "LeNet batch 16, 3 clients", 3, 16, 128), ("fp32",)),
    "vgg11": (on_gpu(VGG, "VGG-11 batch 32, 15 clients", 15, 32, 32), ("bf16",)),
    "resnet18-group": (on_gpu(RESNET, "ResNet-18 GroupNorm batch 16, 20 clients", 20, 16, 32, norm="group"), ("bf16",)),
    "resnet18-batch": (on_gpu(RESNET, "ResNet-18 BatchNorm batch 16, 20 clients", 20, 16, 32), ("bf16",)),
    "transformer": (on_gpu(SMALL, "transformer 96x3, 20 tokens, batch 16, 20 clients", 20, 16, 64), ("fp32", "bf16")),
    "transformer-own": (on_gpu(SMALL, "the same, mimicfl's `transformer`", 20, 16, 64, make=written_out), ("fp32", "bf16")),
    "cifar10-cnn": (on_gpu(CNN, "pfl's CIFAR-10 CNN batch 10, 50 clients", 50, 10, 5), ("fp32", "bf16")),
    "resnet18": (on_gpu(RESNET, "ResNet-18 BatchNorm batch 50, 100 clients", 100, 50, 4), ("bf16",)),
    "stackoverflow": (on_gpu(STACKOVERFLOW, "StackOverflow transformer batch 16, 100 clients", 100, 16, 4), ("fp32", "bf16")),
    "lora": (on_gpu(LORA, "frozen transformer 512x6, LoRA rank 8, 100 clients", 100, 8, 4, make=large_lora, shape=(64,)), ("fp32", "bf16")),
}


def arguments() -> tuple[Workload, int]:
    """Return the workload named on the command line, and the number of rounds; processor time needs few clients and steps."""
    work = SUITE[sys.argv[1]]
    if PROCESSOR_TIME:
        cohort = min(work.cohort, 4)
        work = replace(work, clients=cohort, cohort=cohort, samples=min(work.samples, 20 * work.batch), epochs=1)
    return work, int(sys.argv[2])


def processor_time() -> float:
    """Seconds of processor time of this process and of its children, those that have ended and those that live."""
    ended = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return ended + sum(int(fields[11]) + int(fields[12]) for fields in running() if int(fields[1]) == os.getpid()) / os.sysconf(
        "SC_CLK_TCK"
    )


def running() -> Iterator[list[str]]:
    """The fields of all processes from /proc/PID/stat, after number and name: state, parent, ..., user and system time in places 11, 12."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            yield file.read_text().rpartition(")")[2].split()


class Clock:
    """Measures rounds: call `tick` after every round. The first round is a warm-up and is not counted.

    With `$SUITE_PROCESSOR_TIME`, it measures the processor time of the process and its children, which other programs disturb less.
    """

    WARM_UP = 1

    def __init__(self, work: Workload) -> None:
        self.read = processor_time if PROCESSOR_TIME else time.perf_counter
        self.steps, self.ticks = work.cohort * work.steps, [self.read()]

    def tick(self) -> None:
        self.ticks.append(self.read())

    def report(self) -> None:
        rounds = np.diff(self.ticks)[self.WARM_UP :]
        print("RESULT " + json.dumps([1e6 * r / self.steps for r in rounds]), flush=True)
