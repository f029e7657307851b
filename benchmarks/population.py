"""Measures whether the cost of a round depends on the population: 10 active clients per round, one process per population size.

python benchmarks/population.py                 processor time per round with 1,000, 10,000 and 100,000 clients, and the ratios
python benchmarks/population.py load 25000000   time and memory to load a trace of 100,000 devices with so many intervals,
                                                from a file sorted by device and from one sorted by time
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas
import torch

import mimicfl as mf

POPULATIONS = (1_000, 10_000, 100_000)
ROUNDS, ACTIVE, SAMPLES, DIM, SECONDS = 30, 10, 4, 20, 270.0
CASES = {
    "trace, FedAvg": {"algorithm": "fedavg"},
    "trace, MimiC, checkpoints": {"algorithm": "mimic", "checkpoint_every": 1},
    "half available, by-samples:10": {"availability": "static:0.5", "select": "by-samples:10", "speed": "lognormal:100,1"},
    "asynchronous, 20 at once": {"algorithm": "fedbuff", "availability": "static:0.5", "speed": "lognormal:100,1"}
    | {"asynchronous": ACTIVE, "concurrency": 20},
}


def peak() -> float:
    """The most memory of this process so far, in MiB (Linux); getrusage would include the parent's."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")) / 1024


def sparse_trace(devices: int, intervals: int, period: float) -> mf.availability.Trace:
    """Intervals of a round or less, equally many per device, or one for some of the devices."""
    random = np.random.default_rng(0)
    each = max(1, intervals // devices)
    device = np.repeat(random.permutation(devices)[:intervals], each)
    length = min(SECONDS, 0.5 * period / each)
    slot = np.arange(len(device)) % each  # of its device's time
    start = slot * period / each + random.random(len(device)) * (period / each - length)
    end = np.minimum(start + length, period)
    return mf.availability.Trace.of([str(i) for i in range(devices)], device, start, end, np.full(devices, period), "sparse")


def write_by_time(trace: mf.availability.Trace, file: str) -> None:
    order = np.argsort(trace.start)
    columns = {"client": trace.device, "start": trace.start, "end": trace.end, "period": trace.period[trace.device]}
    pandas.DataFrame({name: values[order] for name, values in columns.items()}).to_csv(file, index=False, float_format="%.10g")


def rounds_of(clients: int) -> None:
    """Print the processor time of a round in every case, as JSON."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(SAMPLES * clients, DIM)).astype(np.float32))
    y = (x[:, 0] > 0).long()
    data, split = mf.Data(x, y, x[:1000], y[:1000]), np.arange(SAMPLES * clients).reshape(clients, SAMPLES)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        mf.availability.write_trace(sparse_trace(clients, ACTIVE * ROUNDS, ROUNDS * SECONDS), f"{folder}/trace.csv")
        for number, (name, given) in enumerate(CASES.items()):
            ends: list[float] = []
            mf.simulate(
                mf.models.MLP(DIM, 200, 2),
                data,
                split,
                **{"algorithm": "fedavg", "availability": f"trace:{folder}/trace.csv,devices=order", "rounds": ROUNDS} | given,
                local=mf.LocalSGD(lr=0.1, epochs=2),
                engine="plain",
                out=f"{folder}/{number}" if "checkpoint_every" in given else None,
                each_round=lambda _, ends=ends: ends.append(time.process_time()),
            )
            found[name] = 1000 * statistics.median(np.diff(ends[2:]))
    print(json.dumps({"ms": found, "peak": peak()}))


def load(file: str) -> None:
    base, start = peak(), time.process_time()
    trace = mf.availability.read_trace(file)
    print(f"{len(trace.start):,} intervals of {len(trace):,} devices: {time.process_time() - start:.1f} s of processor time", end="")
    pattern = mf.availability.FromTrace(file)
    del trace
    mf.availability.schedule(pattern, 320, 100_000)
    print(f", with a day of rounds {time.process_time() - start:.1f} s; {peak():.0f} MiB peak ({base:.0f} before)", flush=True)


def again(*arguments: str) -> str:
    """The output of this program with these arguments, in a process of its own."""
    return subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def compare() -> None:
    found = [json.loads(again("rounds", str(clients))) for clients in POPULATIONS]
    print(f"{'ms of processor time per round':32}" + "".join(f"{clients:>10,}" for clients in POPULATIONS) + "    ratio")
    for name in CASES:
        ms = [each["ms"][name] for each in found]
        print(f"{name:32}" + "".join(f"{each:10.2f}" for each in ms) + f"{ms[-1] / ms[0]:9.2f}")
    print(f"{'MiB peak':32}" + "".join(f"{each['peak']:10.0f}" for each in found))


if sys.argv[1:2] == ["rounds"]:
    torch.set_num_threads(1)
    rounds_of(int(sys.argv[2]))
elif sys.argv[1:2] == ["read"]:
    load(sys.argv[2])
elif sys.argv[1:2] == ["load"]:
    with tempfile.TemporaryDirectory() as folder:
        made = sparse_trace(100_000, int(sys.argv[2]), 10 * 86400.0)
        mf.availability.write_trace(made, f"{folder}/by_device.csv")
        write_by_time(made, f"{folder}/by_time.csv")
        del made
        for order in ("by_device", "by_time"):
            print(f"{order}: {again('read', f'{folder}/{order}.csv')}", end="", flush=True)
else:
    compare()
