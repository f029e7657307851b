"""Flower's simulation on Ray with two actors, one thread per actor."""

import torch
import workload
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

cohort, rounds = workload.arguments()
client_app, server_app = ClientApp(), ServerApp()
HELD: dict = {}  # an actor keeps the data between rounds


@client_app.train()
def train(message, context):
    torch.set_num_threads(1)
    if not HELD:
        HELD["x"], HELD["y"] = (torch.from_numpy(a) for a in workload.data())
        HELD["net"] = workload.lenet()
    client = int(context.node_config["partition-id"])
    net, x, y = HELD["net"], HELD["x"][client], HELD["y"][client]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=workload.RATE)
    for batch in torch.cat([torch.randperm(workload.SAMPLES) for _ in range(workload.EPOCHS)]).split(workload.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": workload.SAMPLES})})
    return FlowerMessage(content=content, reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        clock.tick()
        return result


@server_app.main()
def main(grid, context):
    global clock
    clock = workload.Clock(cohort)
    nodes = {"min_train_nodes": cohort, "min_evaluate_nodes": 0, "min_available_nodes": workload.CLIENTS}
    strategy = Timed(fraction_train=cohort / workload.CLIENTS, fraction_evaluate=0.0, **nodes)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(workload.lenet().state_dict()), num_rounds=rounds)
    clock.report()


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=workload.CLIENTS, backend_config=resources)
