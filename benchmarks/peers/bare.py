"""A simple hand-written PyTorch loop with two threads."""

import copy

import torch
import workload
from torch import nn

torch.set_num_threads(2)
cohort, rounds = workload.arguments()
x, y = (torch.from_numpy(a) for a in workload.data())
model = workload.lenet()
clock = workload.Clock(cohort)
for t in range(rounds):
    states = []
    for i in range(cohort):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=workload.RATE)
        order = torch.cat([torch.randperm(workload.SAMPLES) for _ in range(workload.EPOCHS)])
        for batch in order.split(workload.BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(x[(t + i) % 30][batch]), y[(t + i) % 30][batch]).backward()
            optimizer.step()
        states.append(own.state_dict())
    model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})
    clock.tick()
clock.report()
