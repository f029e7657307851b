"""Long and large runs that measure their CPU time, memory and open files over time, each in its own process."""

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mimicfl as mf

PAGE = os.sysconf("SC_PAGE_SIZE")
DIM = 4  # features per sample


class Stop(Exception):
    """Interrupts the run."""


def many_rounds(settings: dict[str, Any], out: str) -> dict[str, Any]:
    """Run with 40 measurements: interrupt it shortly before its end, resume it, and call it once more when it is finished."""
    experiment = mf.Experiment(**settings)
    rounds = settings["rounds"]
    stop = rounds - rounds // 20
    marks: list[dict[str, float]] = []

    def watch(_: Any, row: dict[str, Any], total: int) -> None:
        if (row["round"] + 1) % max(1, rounds // 40) == 0:
            marks.append({"round": row["round"] + 1, **usage()})
        if row["round"] == stop and not resumed:
            raise Stop

    resumed: list[float] = []
    try:
        mf.run(experiment, out, watch)
    except Stop:
        resumed.append(time.process_time())
    mf.run(experiment, out, lambda *_: resumed.append(time.process_time()) if len(resumed) == 1 else None)
    again = time.process_time()
    mf.run(experiment, out)
    sizes = [len(line) for line in Path(out, "rows.jsonl").read_bytes().splitlines()]
    return {"marks": marks, "resume": resumed[1] - resumed[0], "again": time.process_time() - again, "sizes": _tenths(sizes)}


def many_clients(num_clients: int, rounds: int, partition: str, availability: str, algorithm: str, seed: int, out: str) -> dict[str, Any]:
    """Run a few rounds with few active clients of a large population; return the CPU seconds per stage and the memory."""
    before, began = usage(), time.process_time()
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, size=4 * num_clients)
    x = rng.normal(size=(len(y), DIM)).astype(np.float32) + y[:, None].astype(np.float32)
    data = mf.Data(x, y, x[:500], y[:500])
    split = getattr(mf.partition, partition)(data.y_train, num_clients, seed=seed)
    cut = time.process_time()
    torch.manual_seed(seed)
    model = torch.nn.Linear(DIM, 10)
    marks: list[float] = []
    how: dict[str, Any] = {"local": mf.LocalSGD(steps=2, batch_size=2, lr=0.01), "seed": seed, "out": out}
    how["progress"] = lambda *_: marks.append(time.process_time())
    history = mf.simulate(model, data, split, algorithm, availability, rounds, **how)
    assert len(history.rows) == rounds
    stages = {
        "partition": cut - began,
        "first round": marks[0] - cut,
        "later rounds": marks[-1] - marks[0],
        "end": time.process_time() - marks[-1],
    }
    return {"stages": stages, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before["memory"]}


def usage() -> dict[str, float]:
    """Return the CPU seconds, the bytes of memory and the open files of this process."""
    memory = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * PAGE
    return {"cpu": time.process_time(), "memory": memory, "files": len(os.listdir("/proc/self/fd"))}


def _tenths(values: list[int]) -> tuple[float, float]:
    """Return the means over the first and the last tenth."""
    count = max(1, len(values) // 10)
    return sum(values[:count]) / count, sum(values[-count:]) / count
