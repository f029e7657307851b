"""Flower's simulation on Ray with two actors, one thread per actor. It has no availability traces: it draws as many clients at random."""

import torch
import workload
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

work, rounds = workload.arguments()
client_app, server_app = ClientApp(), ServerApp()
HELD: dict = {}  # an actor keeps the data between rounds


def trained(net):
    """What travels: the trainable parameters and the buffers; not a frozen base."""
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    return {name: value for name, value in net.state_dict().items() if name not in frozen}


@client_app.train()
def train(message, context):
    torch.set_num_threads(1)
    if not HELD:
        HELD["x"], HELD["y"] = work.data()
        HELD["net"] = work.model()
    client = int(context.node_config["partition-id"])
    net, x, y = HELD["net"], HELD["x"][client], HELD["y"][client]
    net.train()
    before = message.content["arrays"].to_torch_state_dict()
    net.load_state_dict(before, strict=False)
    shift = controls(message, context, net) if work.stateful else None
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=work.rate)
    for batch in torch.cat([torch.randperm(work.samples) for _ in range(work.epochs)]).split(work.batch):
        optimizer.zero_grad()
        workload.loss(net(x[batch]), y[batch]).backward()
        if shift is not None:
            for name, p in net.named_parameters():
                p.grad += shift[name]
        optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(trained(net)), "metrics": MetricRecord({"num-examples": work.samples})})
    if shift is not None:
        # SCAFFOLD's option II: c_i+ - c_i = (w_t - w) / (K eta) - c; the control stays with the client
        change = {name: (before[name] - p.data) / (work.steps * work.rate) for name, p in net.named_parameters()}
        change = {name: value - message.content["control"].to_torch_state_dict()[name] for name, value in change.items()}
        mine = context.state["control"].to_torch_state_dict() if "control" in context.state else dict.fromkeys(change, 0.0)
        context.state["control"] = ArrayRecord({name: mine[name] + value for name, value in change.items()})
        content["change"] = ArrayRecord(change)
    return FlowerMessage(content=content, reply_to=message)


def controls(message, context, net):
    """c - c_i, which every local step of SCAFFOLD adds to the gradient."""
    server = message.content["control"].to_torch_state_dict()
    mine = context.state["control"].to_torch_state_dict() if "control" in context.state else {}
    return {name: server[name] - mine.get(name, 0.0) for name, _ in net.named_parameters()}


class Timed(FedAvg):
    control: dict | None = None

    def configure_train(self, *given):
        messages = list(super().configure_train(*given))
        for message in messages if work.stateful else []:
            message.content["control"] = ArrayRecord(self.control)
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies if work.stateful else []:
            for name, value in reply.content.pop("change").to_torch_state_dict().items():
                self.control[name] = self.control[name] + value / work.clients
        result = super().aggregate_train(server_round, replies)
        clock.tick()
        return result


@server_app.main()
def main(grid, context):
    global clock
    clock = workload.Clock(work)
    net = work.model()
    nodes = {"min_train_nodes": work.cohort, "min_evaluate_nodes": 0, "min_available_nodes": work.clients}
    strategy = Timed(fraction_train=work.cohort / work.clients, fraction_evaluate=0.0, **nodes)
    strategy.control = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    strategy.start(grid=grid, initial_arrays=ArrayRecord(trained(net)), num_rounds=rounds)
    clock.report()


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=work.clients, backend_config=resources)
