"""Checks that two runs of the same problem agree up to rounding.

Two engines sum the same numbers in different orders, so they differ by rounding, which training amplifies. The difference of the final
parameters is compared with how far these moved: 1e-9 of it in float64, 3e-4 in float32, 1e-3 on a GPU. Typical differences are a hundred
times smaller, and those of a wrong term a hundred times larger. Some networks amplify rounding far more (a norm over values that are
almost equal, or a maximum of such values), so a difference counts only if it also exceeds 20 times the change of plain itself when the
initial parameters are perturbed by rounding. Accuracies may differ by as many samples as have almost tied outputs.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

import mimicfl as mf
from mimicfl.engines import select

from . import definition

Arguments = dict[str, Any]  # of mf.simulate
Make = Callable[[], Arguments]
RELATIVE = {torch.float64: 1e-9, torch.float32: 3e-4}
ON_GPU = 1e-3
SENSITIVE = 20.0
HANGS = 900.0  # seconds after which a run counts as hung; long, since the machine may be busy
LOSSES = ("train_loss", "test_loss")
NOT_EXACT = (*LOSSES, "test_accuracy", "class_accuracy", "seconds")  # everything else in a row is bit-equal


class Hang(Exception):
    """A run did not end within the time limit."""


def simulate(arguments: Arguments, engine: str) -> tuple[mf.History, list[str]]:
    """Train; return the history and the notices. Workers get two threads; "auto" tries other engines even for short runs."""
    notices: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if engine in ("workers", "native", "auto") else 1)
    try:
        with mock.patch.object(select, "WORTH_IT", 0.0), deadline(HANGS):
            return mf.simulate(**arguments, engine=engine, notice=notices.append), notices
    finally:
        torch.set_num_threads(threads)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Hang` after this time. Only the main thread can set an alarm; in other threads there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def differences(arguments: Arguments, truth: mf.History, ours: mf.History) -> tuple[list[str], float]:
    """Describe what differs by more than rounding; also return the largest relative difference of parameters and losses."""
    w_0 = definition.vector(arguments["model"])
    allowed = ON_GPU if arguments["device"] == "cuda" else RELATIVE[w_0.dtype]
    if len(truth.rows) != len(ours.rows):
        return [f"{len(ours.rows)} rounds, not {len(truth.rows)}"], math.inf
    amount = parameters_off(w_0, truth.params, ours.params)
    wrong = [f"final parameters differ by {amount:.1e} of their movement"] if not amount <= allowed else []
    for t, (true, mine) in enumerate(zip(truth.rows, ours.rows, strict=True)):
        for name in LOSSES:
            off = number_off(true[name], mine[name])
            wrong += [f"round {t}: {name} is {mine[name]}, not {true[name]}"] if not off <= allowed else []
            amount = max(amount, off)
    if not (off := buffers_off(truth, ours)) <= allowed:
        wrong.append(f"final buffers differ by {off:.1e}")
    amount = max(amount, off)
    exact = exact_off(truth, ours) or ([] if wrong else accuracy_off(arguments, truth, ours, allowed))
    return wrong + exact, math.inf if exact else amount


def parameters_off(w_0: torch.Tensor, true: torch.Tensor, mine: torch.Tensor) -> float:
    """Return |difference| / |movement|, minus the part that rounding of the parameters explains."""
    if true.shape != mine.shape or true.dtype != mine.dtype:
        return math.inf
    rounding = 16 * torch.finfo(true.dtype).eps * float(true.norm())
    return max(0.0, float((true - mine).norm()) - rounding) / max(float((true - w_0).norm()), rounding)


def buffers_off(truth: mf.History, ours: mf.History) -> float:
    """Return the largest relative difference of a buffer, such as a running mean; for values near zero, relative to 0.01."""
    if truth.buffers.keys() != ours.buffers.keys():
        return math.inf
    pairs = [(true.double(), ours.buffers[name].double()) for name, true in truth.buffers.items() if true.numel()]
    return max([0.0, *(float((true - mine).abs().max() / true.abs().max().clamp_min(1e-2)) for true, mine in pairs)])


def number_off(true: float | None, mine: float | None) -> float:
    """Return the relative difference; for losses near zero, relative to 0.01."""
    if true is None or mine is None:
        return 0.0 if true is mine else math.inf
    return abs(true - mine) / max(abs(true), 1e-2)


def exact_off(truth: mf.History, ours: mf.History) -> list[str]:
    """Describe differences of counts, rates and clients, which rounding must not change."""
    wrong = []
    for t, (true, mine) in enumerate(zip(truth.rows, ours.rows, strict=True)):
        names = sorted((true.keys() | mine.keys()) - {*NOT_EXACT})
        wrong += [f"round {t}: {name} is {mine.get(name)}, not {true.get(name)}" for name in names if true.get(name) != mine.get(name)]
    return wrong


def accuracy_off(arguments: Arguments, truth: mf.History, ours: mf.History, allowed: float) -> list[str]:
    """Describe accuracies that differ by more samples than are tied."""
    wrong = []
    classes = np.bincount(arguments["data"].y_test) if arguments["data"].num_classes else []
    for t, (true, mine) in enumerate(zip(truth.rows, ours.rows, strict=True)):
        whole = [([true["test_accuracy"]], [mine["test_accuracy"]], [len(arguments["data"].y_test)])]
        for a, b, sizes in [*whole, (true["class_accuracy"], mine["class_accuracy"], classes)]:
            if a != b and not flips(a, b, sizes) <= tied(arguments, t + 1, "test", allowed):
                wrong.append(f"round {t}: accuracy is {b}, not {a}, which tied samples do not explain")
    a, b, sizes = truth.client_accuracy, ours.client_accuracy, [len(part) for part in arguments["split"]]
    if a != b and not flips(a, b, sizes) <= tied(arguments, len(truth.rows), "train", allowed):
        wrong.append(f"client_accuracy is {b}, not {a}, which tied samples do not explain")
    return wrong


def flips(true: Sequence[float | None] | None, mine: Sequence[float | None] | None, sizes: Sequence[int]) -> float:
    """Return the minimum number of samples that are classified differently."""
    if true is None or mine is None or len(true) != len(mine) or [a is None for a in true] != [b is None for b in mine]:
        return math.inf
    return sum(round(abs(a - b) * n) for a, b, n in zip(true, mine, sizes, strict=True) if a is not None and b is not None)


def tied(arguments: Arguments, rounds: int, part: str, allowed: float) -> int:
    """Return how many samples are tied with another class up to rounding, after this many rounds of plain training."""
    model = simulate(arguments | {"rounds": rounds}, "plain")[0].model().eval()
    data = arguments["data"]
    with torch.no_grad():
        output = model(data.inputs(getattr(data, f"x_{part}"), definition.vector(model).dtype))
    top = output.topk(2, dim=1).values if output.shape[1] > 1 else torch.cat([output, torch.zeros_like(output)], 1)
    return int(((top[:, 0] - top[:, 1]).abs() <= 10 * allowed * output.abs().amax().clamp_min(1.0)).sum())


def sensitivity(make: Make, truth: mf.History) -> float:
    """Return how much plain's result changes when its initial parameters are perturbed in the last digits."""
    worst = 0.0
    for k in range(3):
        arguments = make()
        w_0 = definition.vector(arguments["model"])
        noise = torch.randn(w_0.shape, generator=torch.Generator().manual_seed(k), dtype=w_0.dtype)
        definition.set_vector(arguments["model"], w_0 + 4 * torch.finfo(w_0.dtype).eps * noise * w_0.abs().clamp_min(1e-3))
        try:
            moved, _ = simulate(arguments, "plain")
        except mf.Diverged:
            return math.inf
        losses = [number_off(a[name], b[name]) for a, b in zip(truth.rows, moved.rows, strict=True) for name in LOSSES]
        worst = max([worst, parameters_off(w_0, truth.params, moved.params), buffers_off(truth, moved), *losses])
    return worst
