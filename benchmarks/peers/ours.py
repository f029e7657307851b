"""mimicfl with two threads, on the engine given as the third argument; a fourth names a device."""

import sys

import numpy as np
import torch
import workload

import mimicfl as mf

torch.set_num_threads(2 if sys.argv[3] == "workers" else workload.THREADS)  # workers is for several cores; its processes have one thread
work, rounds = workload.arguments()
engine, device = sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "cpu"
x, y = (part.flatten(0, 1) for part in work.data())
data = mf.Data(x, y, x[:16], y[:16], **({"task": "token-prediction"} if work.vocabulary else {}))
active = np.zeros((rounds, work.clients), dtype=bool)
for t in range(rounds):
    active[t, work.active(t)] = True
shared = {
    "model": work.model(),
    "data": data,
    "split": mf.partition.by_ids(np.repeat(np.arange(work.clients), work.samples)),
    "algorithm": "scaffold" if work.stateful else "fedavg",
    "engine": engine,
    "device": device,
}
brief = {"local": mf.LocalSGD(steps=1, batch_size=work.batch, lr=1e-3), "rounds": 1, "availability": mf.availability.Explicit(active[:1])}
# One step: float32 and float64 differ by 1 % of two steps of the ResNet, and by a third of that in one.
begin = torch.cat([p.detach().reshape(-1) for p in shared["model"].parameters() if p.requires_grad])
one, two = (mf.simulate(**shared | brief | {"engine": name}).params for name in ("plain", engine))
assert float((one - two).norm()) < 0.01 * float((one.cpu() - begin).norm()), f"{engine} does not match plain"
said = []
clock = workload.Clock(work)
local = mf.LocalSGD(epochs=work.epochs, batch_size=work.batch, lr=work.rate)
mf.simulate(
    **shared,
    availability=mf.availability.Explicit(active),
    rounds=rounds,
    local=local,
    eval_every=rounds,
    progress=lambda row, total: clock.tick(),
    notice=said.append,
)
assert said[0].startswith(f"engine {engine}"), f"{engine} cannot run this: {said[0]}"
clock.report()
