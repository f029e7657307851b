"""Tasks and metrics of your own on Flower, as in the simulator."""

import pytest
import torch
from torch import nn

import mimicfl as mf
import mimicfl.flower as mff

N, ROUNDS = 3, 2
LOCAL = mf.LocalSGD(epochs=1, batch_size=4, lr=0.2)


def tokens():
    """A small language model: predict the next token, with padding."""
    text = torch.arange(24 * 7).view(24, 7) * 5 % 11
    y = text[:, 1:].clone()
    y[::3, 4:] = -100
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11), Swap())
    return model, mf.Data(text[:, :-1], y, text[:, :-1], y), "token-prediction", None


class Swap(nn.Module):
    """[samples, positions, classes] to [samples, classes, positions]."""

    def forward(self, x):
        return x.transpose(1, 2)


def labels():
    """Several labels per sample, and a metric of one's own."""
    x = torch.sin(torch.arange(24 * 6.0)).view(24, 6)
    y = (x[:, :3] + x[:, 3:] > 0).float()
    own = mf.tasks.Metric("spread", lambda output, target: output.std(dim=1))
    return nn.Linear(6, 3), mf.Data(x, y, x, y), "multi-label", ["macro-f1", own]


@pytest.mark.parametrize("make", [tokens, labels])
def test_a_task_works_as_in_the_simulator(make, tmp_path):
    def model():
        torch.manual_seed(1)
        return make()[0]

    _, data, task, metrics = make()
    split = mf.partition.iid(data.y_train, N, seed=0)

    def part(context):
        return data.subset(split[int(context.node_config["partition-id"])])

    what = {"task": task, "metrics": metrics}
    client = mff.client_app(model, part, local=LOCAL, **what)
    server = mff.server_app(model, lambda: data, **what, num_rounds=ROUNDS, wait_for=N, lr=0.2, fraction_evaluate=1.0, folder=tmp_path)
    mff.simulate(server, client, N)
    expected = mf.simulate(model(), data, split, "mimic", "always", ROUNDS, local=LOCAL, engine="plain", **what)
    found = mf.read(tmp_path)
    columns = [metric.column for metric in mf.tasks.make_task(task, metrics).metrics]
    assert columns
    for ours, theirs in zip(found.rows, expected.rows, strict=True):
        for column in ["test_loss", *columns]:
            assert ours[column] == pytest.approx(theirs[column], rel=1e-5), column
        assert columns[0].removeprefix("test_") in ours["metrics"]["evaluate"]
