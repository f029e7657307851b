"""Does a round depend on the population? 100 active clients a round out of ever more; each size in a process of its own.

python benchmarks/population.py
"""

import resource
import statistics
import subprocess
import sys

import numpy as np
import torch

import mimicfl as mf

ROUNDS, ACTIVE, SAMPLES, DIM = 30, 100, 4, 20


def one(clients: int, algorithm: str) -> None:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(SAMPLES * clients, DIM)).astype(np.float32))
    y = (x[:, 0] > 0).long()
    data = mf.Data(x, y, x[:1000], y[:1000])
    there = np.zeros((ROUNDS, clients), bool)
    for row in there:
        row[random.choice(clients, ACTIVE, replace=False)] = True
    split = np.arange(SAMPLES * clients).reshape(clients, SAMPLES)
    model, schedule = mf.models.MLP(DIM, 200, 2), mf.availability.Explicit(there)
    history = mf.simulate(model, data, split, algorithm, schedule, local=mf.LocalSGD(lr=0.1, epochs=2), engine="native")
    seconds = [row["seconds"] for row in history.rows[3:]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{algorithm:9} {clients:8,} clients  {1000 * statistics.median(seconds):7.1f} ms a round  {peak:6.0f} MiB at most", flush=True)


if len(sys.argv) == 3:
    torch.set_num_threads(2)
    one(int(sys.argv[1]), sys.argv[2])
else:
    for algorithm in ("fedavg", "scaffold", "mifa", "mimic"):
        for clients in (1_000, 10_000, 100_000):
            subprocess.run([sys.executable, __file__, str(clients), algorithm], check=True)
