"""Times mimicfl's engines and a bare loop on workloads of the suite, in this process: `suite.py` calls it.

    python benchmarks/engine_times.py cuda lenet-30/fp32:bare,plain,batched resnet18/bf16:streams

An engine is compared with plain on the first clients before it is timed. Each timing is printed as a line of JSON; an engine that cannot
run the workload, or differs from plain, gets a line with the reason. A case that takes too long ends the process.
"""

import json
import signal
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from peers.workload import GPU, Workload

import mimicfl as mf
from mimicfl.algorithms import Instructions
from mimicfl.clients.losses import criterion_of
from mimicfl.clients.params import Workspace
from mimicfl.data.clients import Clients
from mimicfl.engines.bench import RATE, Bare, makers, seconds
from mimicfl.engines.capabilities import TOLERANCE, errors
from mimicfl.engines.interface import TrainRequest
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.torch_settings import exact

COMPARED, REPEATS, ENOUGH_S, LIMIT_S = 4, 7, 4.0, 150


@dataclass
class Case:
    """The engines' common input: the model, the clients and one request for all of them."""

    net: torch.nn.Module
    clients: Clients
    loss: Any
    request: TrainRequest
    precision: str

    @classmethod
    def of(cls, work: Workload, precision: str, device: torch.device) -> "Case":
        x, y = (part.flatten(0, 1) for part in work.data())
        data = mf.Data(x, y, x[:10], y[:10], **({"task": "token-prediction"} if work.vocabulary else {}))
        split = list(np.arange(len(x)).reshape(work.clients, work.samples))
        net, dtype = work.model(), torch.float32
        clients, shares = Clients(data, split, device, dtype), torch.full((work.clients,), 1 / work.clients, device=device)
        space, local = Workspace(net, device), mf.LocalSGD(epochs=1, batch_size=work.batch)
        active = np.arange(work.clients)
        request = TrainRequest(0, active, shares, space.w.clone(), space.buffers(), Instructions(), RATE, RATE, clients, local, seed=0)
        return cls(net, clients, criterion_of(data, None, None), request, precision)

    def few(self) -> TrainRequest:
        """The request to the first clients only: plain takes them one by one, so a few are enough to time it and to compare with it."""
        few = slice(min(COMPARED, len(self.request.active)))
        return replace(self.request, active=self.request.active[few], share=self.request.share[few])

    def engine(self, name: str) -> tuple[Any, TrainRequest]:
        """An engine and the request to time it with."""
        given = (self.net, self.clients, self.loss)
        if name in ("bare", "plain"):
            return (Bare if name == "bare" else PlainEngine)(*given), self.few()
        return makers(*given, self.precision, len(self.request.active))[name](), self.request


def prepare(case: Case, name: str, truth: Any) -> dict[str, Any]:
    """Prepare an engine and compare it with plain; returns what to time, or the reason why there is nothing."""
    begun = time.perf_counter()
    try:
        engine, request = case.engine(name)
        updates = engine.train([request])
        off = 0.0
        if name not in ("bare", "plain"):
            off = max(float(each.max()) for each in errors(first(updates[0], len(truth.g)), truth).values())
        if not off <= TOLERANCE[case.precision]:
            return {"error": f"differs from plain by {100 * off:.2g} %"}
        return {"engine": engine, "request": request, "off": off, "ready": time.perf_counter() - begun, "times": []}
    except Exception as error:
        traceback.print_exc()
        if "CUDA error" in str(error):  # nothing works in this process after that
            raise
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def first(updates: Any, clients: int) -> Any:
    """The updates of the first clients."""
    buffers = {name: rows[:clients] for name, rows in updates.buffers.items()}
    return replace(updates, g=updates.g[:clients], K=updates.K[:clients], loss=updates.loss[:clients], buffers=buffers)


def measure(title: str, work: Workload, precision: str, names: list[str], device: torch.device) -> None:
    case = Case.of(work, precision, device)
    with exact(precision):
        truth = PlainEngine(case.net, case.clients, case.loss).train([case.few()])[0]
        prepared = {name: prepare(case, name, truth) for name in names}
        ready = {name: each for name, each in prepared.items() if "engine" in each}
        for name, each in prepared.items():
            if "error" in each:
                show(case=title, precision=precision, engine=name, error=each["error"])
        for _ in range(REPEATS):  # interleaved, so that a disturbance meets all engines alike
            for each in ready.values():
                if sum(each["times"]) < ENOUGH_S:
                    each["times"].append(seconds(each["engine"], each["request"]))
        for name, each in ready.items():
            us = sorted(1e6 * took / (len(each["request"].active) * work.steps) for took in each["times"])
            found = {"us": statistics.median(us), "low": us[0], "high": us[-1], "repeats": len(us)}
            show(case=title, precision=precision, engine=name, **found, off=each["off"], ready_s=each["ready"])


def show(**found: Any) -> None:
    print("RESULT " + json.dumps(found), flush=True)


def main() -> None:
    device = torch.device(sys.argv[1])
    for word in sys.argv[2:]:
        signal.alarm(LIMIT_S)  # ends the process; suite.py continues with the next case in another one
        case, names = word.split(":")
        title, precision = case.split("/")
        print(f"BEGIN {word}", flush=True)
        try:
            measure(title, GPU[title][0], precision, names.split(","), device)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            for name in names.split(","):
                show(case=title, precision=precision, engine=name, error=reason)
            if "CUDA" in reason:
                raise
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
