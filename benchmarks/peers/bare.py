"""A simple hand-written PyTorch loop with two threads."""

import copy

import torch
import workload

torch.set_num_threads(workload.THREADS)
work, rounds = workload.arguments()
x, y = work.data()
model = work.model()
names = [name for name, p in model.named_parameters() if p.requires_grad]
zero = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
control, controls = zero, {}  # of SCAFFOLD: the server's, and one per client that has participated


def local_training(own, client):
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=work.rate)
    mine = controls.get(client, zero)
    for batch in torch.cat([torch.randperm(work.samples) for _ in range(work.epochs)]).split(work.batch):
        optimizer.zero_grad()
        workload.loss(own(x[client][batch]), y[client][batch]).backward()
        if work.stateful:
            for name, p in own.named_parameters():
                p.grad += control[name] - mine[name]
        optimizer.step()


def new_controls(own, client):
    """SCAFFOLD's option II; returns the change of the client's control."""
    mine, before, after = controls.get(client, zero), dict(model.named_parameters()), dict(own.named_parameters())
    scale = work.steps * work.rate
    controls[client] = {name: mine[name] - control[name] + (before[name].data - after[name].data) / scale for name in names}
    return {name: controls[client][name] - mine[name] for name in names}


clock = workload.Clock(work)
for t in range(rounds):
    states, changes = [], []
    for client in work.active(t).tolist():
        own = copy.deepcopy(model)
        local_training(own, client)
        states.append({name: value for name, value in own.state_dict().items() if name in names or value.dtype.is_floating_point})
        if work.stateful:
            changes.append(new_controls(own, client))
    model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}, strict=False)
    if work.stateful:
        control = {name: control[name] + sum(change[name] for change in changes) / work.clients for name in names}
    clock.tick()
clock.report()
