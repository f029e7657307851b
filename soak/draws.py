"""Draws random problems from a seed: networks, losses, clients and settings."""

import random
import warnings
from dataclasses import replace
from typing import Any

import mimicfl as mf

from .networks import Shape, draw_chain, draw_pieces
from .problems import HEADS, Problem

SHAPES: dict[str, list[Shape]] = {
    "image": [(1, 8, 8), (3, 6, 6), (2, 7, 5)],
    "vector": [(5,), (12,)],
    "signal": [(2, 9)],
    "sequence": [(4, 3)],
}
SHAPES["tokens"] = [(5,)]
FEW = 32  # the first trials are part of the test suite, so only two chains are compiled for them
CHAINS = 10  # number of chains that are reused, so that each is compiled once

# Losses per type of label. W stands for class weights, I for an ignored class.
MEANS = {
    "classes": [
        "'cross-entropy'",
        "'cross-entropy'",
        "F.cross_entropy",
        "nn.CrossEntropyLoss()",
        "nn.CrossEntropyLoss(label_smoothing=0.1)",
    ],
    "targets": ["'mse'", "'mse'", "F.mse_loss", "nn.MSELoss()", "nn.SmoothL1Loss()"],
    "binary": ["'binary'", "lambda o, t: F.soft_margin_loss(o[:, 0], 2.0 * t - 1)"],
}
OTHERS = {
    "classes": [
        *["nn.CrossEntropyLoss(weight=W)", "nn.CrossEntropyLoss(ignore_index=I)"] * 3,
        "nn.CrossEntropyLoss(reduction='sum')",
        "nn.CrossEntropyLoss(weight=W, label_smoothing=0.2)",
        "nn.MultiMarginLoss()",
        "functools.partial(F.cross_entropy, weight=W)",
        "lambda o, t: F.cross_entropy(o, t) + o.mean(0).square().sum()",
        "lambda o, t: F.cross_entropy(o, t) ** 2",
        "lambda o, t: F.cross_entropy(o, t, reduction='none').amax()",
        "lambda o, t: F.cross_entropy(o, t) * len(o)",
        "lambda o, t: F.nll_loss(F.log_softmax(o, 1), t)",
        "lambda o, t: ((1 - o.softmax(1).gather(1, t[:, None])) ** 2 * F.cross_entropy(o, t, reduction='none')[:, None]).mean()",
        "lambda o, t: F.mse_loss(o.softmax(1), F.one_hot(t, o.shape[1]).to(o.dtype))",
        "lambda o, t: F.cross_entropy(o, t) if len(o) > 1 else 2 * F.cross_entropy(o, t)",
    ],
    "targets": [
        "nn.MSELoss(reduction='sum')",
        "F.huber_loss",
        "nn.L1Loss()",
        "lambda o, t: F.mse_loss(o, t).sqrt()",
        "lambda o, t: (o - t).mean().square() + F.mse_loss(o, t)",
    ],
    "binary": [
        "lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], t.to(o.dtype), pos_weight=o.new_tensor(3.0))",
        "lambda o, t: (t.to(o.dtype) * F.softplus(-o[:, 0])).sum() / (1e-3 + t.sum()) + F.softplus(o[:, 0]).mean()",
    ],
}
TAILS = [
    "return x if self.training else F.softmax(x, 1)",
    "return x if self.training else 2 * x",
    "return x.clamp(-30, 30)",
    "return x * 1.0",
]
DEFINED = ["fedavg", "fedprox:mu=0.3", "scaffold", "mimic"]  # those that soak/definition.py implements
ALGORITHMS = [*mf.algorithms.ALGORITHMS.factories, *DEFINED]
ASYNCHRONOUS = ["fedbuff", "mimic", "fedvarp", "mifa", "fedau", "fedprox:mu=0.3"]  # others may be refused
LAYOUTS = [[1], [6], [16], [4, 4], [1, 1, 1], [9, 1, 5, 2], [7, 3], [3, 8, 1], [2] * 9, [13, 5, 4], [1, 12]]


def draw(seed: int, engine: str) -> Problem:
    """Draw the problem of this seed. Most problems are supported by the engine, because a refusal tests little."""
    r = random.Random(f"problem {seed}")
    while not lively(made := _settings(r, _network(r, seed, engine), engine)):
        pass
    return made if engine == "plain" else sometimes_asynchronous(random.Random(f"asynchronous {seed}"), made)


def sometimes_asynchronous(r: random.Random, problem: Problem, share: float = 0.2) -> Problem:
    """Return the problem with asynchronous training in a share of the cases, drawn apart so that the others do not change."""
    if r.random() >= share:
        return problem
    clients = len(problem.sizes) + problem.overlap
    timed = {"speed": "lognormal:20,1", "asynchronous": r.randrange(1, max(1, clients - 1) + 1), "concurrency": r.choice([0, 0, clients])}
    algorithm = problem.algorithm if r.random() < 0.3 else r.choice(ASYNCHRONOUS)
    return replace(problem, algorithm=algorithm, rounds=problem.rounds + 3, more=problem.more | timed)


def lively(problem: Problem) -> bool:
    """Return whether the outputs depend on the samples. A network whose last ReLU is always zero would agree with any result."""
    names: dict[str, Any] = {"__name__": "soak_problem"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(problem.text(), names)
        try:
            given = names["problem"]()
        except mf.UsageError:  # the trial checks the refusal
            return True
        model, data = given["model"], given["data"]
        output = model(data.inputs(data.x_test, next(model.parameters()).dtype))
    return bool(output.isfinite().all() and (output.amax(0) - output.amin(0)).amin() > 1e-3 and output.abs().amax() < 30)


def _network(r: random.Random, seed: int, engine: str) -> Problem:
    if engine == "native" or (engine in ("workers", "auto") and r.random() < 0.5):
        return _chain(r, seed)
    # Workers compile the convolutions of float32 models. Only a few such models are drawn, to save compile time.
    double = {"plain": 1.0, "workers": 0.85, "auto": 0.85}.get(engine, 0.4)
    return _any(r, seed, "float64" if r.random() < double else "float32")


def _any(r: random.Random, seed: int, dtype: str) -> Problem:
    domain = r.choice(["image", "image", "image", "vector", "tokens", "signal", "sequence"])
    shape = r.choice(SHAPES[domain])
    pieces = tuple(draw_pieces(r, domain, shape, r.randrange(1, 6)))
    labels = r.choice(["classes", "classes", "classes", "targets", "binary"])
    x_dtype = r.choice([dtype, dtype, "uint8", "float32"]) if domain != "tokens" else "int64"
    made = Problem(seed, domain, shape, pieces, labels, outputs=1 if labels == "binary" else r.choice([3, 4]), dtype=dtype, x_dtype=x_dtype)
    return replace(made, head=r.choice([*HEADS, "linear"]))


def _chain(r: random.Random, seed: int) -> Problem:
    """Draw one of a few chains of layers, sometimes a new one, and random settings that need no new compile."""
    number = r.randrange(CHAINS) if r.random() < 0.92 else r.randrange(CHAINS, 10**6)
    number = number % 2 if seed < FEW else number
    fixed = random.Random(f"chain {number}")
    domain = fixed.choice(["image", "image", "image", "vector"])
    shape = fixed.choice(SHAPES[domain])
    labels = fixed.choice(["classes", "classes", "targets"])
    x_dtype = fixed.choice(["float32", "uint8"])
    pieces = draw_chain(fixed, r, shape)
    if r.random() < 0.12:
        trap = r.choice(["unused", "mode", "counter", "no_dropout", "constant", "frozen_shift", "scalar", "linear_frozen", "linear_twice"])
        pieces.insert(r.randrange(len(pieces) + 1), (trap, r.randrange(10**6)))
    head = "weight norm" if r.random() < 0.03 else "no bias" if number % 4 == 3 else "linear"
    return Problem(seed, domain, shape, tuple(pieces), labels, x_dtype=x_dtype, head=head)


def _settings(r: random.Random, made: Problem, engine: str) -> Problem:
    """Draw the loss, the clients, the local training and the algorithm."""
    loss = _loss(r, made.labels, engine)
    sizes = r.choice(LAYOUTS) if r.random() < 0.8 else [r.randrange(1, 12) for _ in range(r.randrange(1, 6))]
    ignores, classes = "ignore_index" in loss, made.labels != "targets"
    apart = classes and r.random() < (0.5 if ignores or "=W" in loss else 0.2)
    if ignores:  # a batch with only ignored samples has no mean; with one class per client, only the last client has ignored samples
        sizes = [6, 6, 12] if apart else [max(size, 6) for size in sizes]
    overlap = r.random() < 0.08
    local = _local(r, len(sizes) + overlap, "sum" in loss or "len(o)" in loss)
    return replace(
        made,
        loss=loss,
        sizes=tuple(sizes),
        overlap=overlap,
        single_class=apart,
        sorted=classes and r.random() < 0.2,
        local=local | ({"batch_size": None if apart else r.choice([6, None])} if ignores else {}),
        augment=made.domain == "image" and engine != "plain" and r.random() < 0.12,
        tail=r.choice(TAILS) if r.random() < 0.1 and made.labels == "classes" else "return x",
        test_dtype="float32" if made.x_dtype == "uint8" and r.random() < 0.06 else "",
        algorithm=r.choice(DEFINED if engine == "plain" else ALGORITHMS),
        availability=r.choice(["always", "always", "always", "time-varying:0.6", "static:0.7"]),
        rounds=r.choice([1, 2, 2, 3]),
        more=_more(r),
    )


def _loss(r: random.Random, labels: str, engine: str) -> str:
    usual = {"native": 0.85, "workers": 0.5, "plain": 0.5}.get(engine, 0.7)
    kinds = MEANS if r.random() < usual else OTHERS
    names = kinds[labels]
    if engine == "native":  # it compiles the first of the means; the first of the others are similar to them
        names = names[: 6 if kinds is OTHERS else 4 if labels == "classes" else 2]
    return r.choice(names)


def _local(r: random.Random, clients: int, long: bool) -> dict[str, Any]:
    local: dict[str, Any] = {
        "lr": r.choice([0.01, 0.03, 0.05]) * (0.1 if long else 1.0),
        "batch_size": r.choice([1, 2, 3, 4, 4, 5, 16, None]),
    }
    work = r.choice(["", "", "epochs", "steps", "epochs list", "steps list"])
    if work:
        name, _, each = work.partition(" ")
        local[name] = [r.randrange(1, 4) for _ in range(clients)] if each else r.randrange(1, 4)
    for name, value in (("momentum", 0.7), ("weight_decay", 0.1), ("clip_norm", r.choice([0.05, 1.0]))):
        if r.random() < 0.25:
            local[name] = value
    return local | _optimizer(random.Random(r.random()), local)


def _optimizer(r: random.Random, local: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer in about a third of the problems. Adam's eps is large: a small one amplifies rounding."""
    if r.random() < 0.65:
        return {}
    if "momentum" in local:
        return {"nesterov": True}
    found = {"optimizer": r.choice(["adam", "adamw"]), "eps": 0.01}
    return found | ({"betas": (0.5, 0.8)} if r.random() < 0.5 else {})


def _more(r: random.Random) -> dict[str, Any]:
    usual = {"update": "mean", "weighting": "samples", "global_lr": 0.05, "eval_every": 2}
    return {name: value for name, value in usual.items() if r.random() < 0.2}
