"""mimicfl with two threads, on the engine given as the third argument."""

import sys

import numpy as np
import torch
import workload

import mimicfl as mf

torch.set_num_threads(2)
cohort, rounds = workload.arguments()
x, y = workload.data()
x, y = x.reshape(-1, 1, 28, 28), y.reshape(-1)
data = mf.Data(x, y, x[:16], y[:16])
split = mf.partition.by_ids(np.repeat(np.arange(workload.CLIENTS), workload.SAMPLES))
schedule = mf.availability.TimeVarying(cohort / workload.CLIENTS)
local = mf.LocalSGD(epochs=workload.EPOCHS, batch_size=workload.BATCH, lr=workload.RATE)
shared = {"model": workload.lenet(), "data": data, "split": split, "algorithm": "fedavg", "availability": schedule, "local": local}
brief = {**shared, "local": mf.LocalSGD(steps=20, batch_size=workload.BATCH, lr=workload.RATE), "availability": "static:0.1"}
one, two = (mf.simulate(**brief, rounds=1, engine=engine).params for engine in ("plain", sys.argv[3]))
assert float((one - two).abs().max()) < 1e-5, f"{sys.argv[3]} does not match plain"
clock = workload.Clock(cohort)
mf.simulate(**shared, rounds=rounds, eval_every=rounds, engine=sys.argv[3], progress=lambda row, total: clock.tick())
clock.report()
