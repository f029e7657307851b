"""Plain against native on this machine: microseconds of wall time per client-step.

    python benchmarks/engines.py [--repeats 5] [--threads 2]
"""

import argparse
import statistics
import tempfile
import time

import numpy as np
import torch

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.data.dataset import as_split
from mimicfl.engine.cohort import Ask, PlainCohort
from mimicfl.engine.native.cohort import NativeCohort
from mimicfl.local.losses import as_loss
from mimicfl.metrics.environment import environment
from mimicfl.params import flatten

# model, input shape, batch, samples a client, cohorts
WORKLOADS = {
    "LeNet, batch 16": ("lenet", (1, 28, 28), 16, 320, (3, 30)),
    "MLP 64-32-10, batch 16": ("mlp:32", (1, 8, 8), 16, 320, (3, 30)),
    "VGG-11 without dropout, batch 32": ("vgg11:dropout=0", (3, 32, 32), 32, 64, (2,)),
}


def cohorts(name: str, shape: tuple[int, ...], batch: int, samples: int) -> tuple[list, torch.Tensor, float]:
    x = torch.randint(0, 256, (30 * samples, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    data = mf.Data(x, y, x[:64], y[:64])
    split = as_split(mf.partition.iid(y, 30), len(y))
    model = mf.models.build(name, data)
    clients = Clients(data, split, torch.device("cpu"), torch.float32)
    local, loss = mf.LocalSGD(epochs=1, batch_size=batch), as_loss("cross-entropy")
    start = time.perf_counter()
    native = NativeCohort(model, clients, local, loss)
    return [PlainCohort(model, clients, local, loss), native], flatten(model), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print({key: value for key, value in environment().items() if key != "started"})
    for title, (name, shape, batch, samples, sizes) in WORKLOADS.items():
        engines, w, built = cohorts(name, shape, batch, samples)
        print(f"\n{title}: tracing, generating, compiling and checking took {built:.1f} s")
        for m in sizes:
            ask = Ask(0, 0, w, {}, np.arange(m), mf.Task(), 0.01, 0.01)
            plain, native = (engine.train(ask) for engine in engines)
            gap = float((plain.g - native.g).abs().max() / plain.g.abs().max())
            assert gap < 1e-3, f"native is not plain: {gap}"
            took: list[list[float]] = [[], []]
            for _ in range(options.repeats):
                for engine, times in zip(engines, took, strict=True):
                    start = time.perf_counter()
                    engine.train(ask)
                    times.append(1e6 * (time.perf_counter() - start) / int(plain.K.sum()))
            middle = [statistics.median(times) for times in took]
            spread = [f"{min(times):.0f}-{max(times):.0f}" for times in took]
            print(
                f"  cohort {m:2}: plain {middle[0]:7.1f} us ({spread[0]}), native {middle[1]:7.1f} us ({spread[1]}), "
                f"{middle[0] / middle[1]:.1f}x, largest relative difference {gap:.0e}"
            )


if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MIMICFL_CACHE"] = folder  # so that the compile is a first one
        main()
