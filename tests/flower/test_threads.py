"""Clients of a federation train with as many threads as the simulator's engine plain, since sums depend on their number."""

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.flower import client_app, server_app, simulate

CLIENTS, ROUNDS = 5, 3


@pytest.fixture(autouse=True)
def _two_threads():
    """Undone by the fixture of all tests."""
    torch.set_num_threads(2)


@pytest.mark.parametrize("algorithm", ["mimic", "scaffold"])
def test_the_model_is_the_simulators_bit_for_bit(tmp_path, algorithm):
    """The example of the tutorial. With two threads, PyTorch's products have other bits than with one."""
    digits, local = mf.datasets.load("digits"), mf.LocalSGD(epochs=1, batch_size=16, lr=0.1)
    split = mf.partition.shards(digits.y_train, CLIENTS, 4, seed=0)

    def model():
        return mf.models.build("mlp", digits, seed=0)

    expected = mf.simulate(model(), digits, split, algorithm, rounds=ROUNDS, local=local, engine="plain")
    client = client_app(model, lambda context: digits.subset(split[int(context.node_config["partition-id"])]), local=local)
    server = server_app(model, lambda: digits, algorithm=algorithm, num_clients=CLIENTS, lr=0.1, folder=tmp_path / "run")
    simulate(server, client, CLIENTS, {"num-rounds": ROUNDS, "wait-for": CLIENTS})
    assert torch.equal(mf.read(tmp_path / "run").params, expected.params)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("width", "expected"), [(4, 1), (4096, 2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_clients_use_the_threads_of_plain_and_restore_them(width, expected, workers):
    """One for small steps, else PyTorch's own number, also where several clients train at the same time."""
    x, y = torch.randn(256, 64), torch.zeros(256, dtype=torch.int64)
    local = mf.LocalSGD(epochs=1, batch_size=256)
    training, before = set(), set()

    class Model(nn.Sequential):
        def forward(self, inputs):
            if len(inputs) == len(x):  # operations are counted in smaller batches
                training.add(torch.get_num_threads())
            return super().forward(inputs)

    def model():
        torch.manual_seed(0)
        return Model(nn.Linear(64, width), nn.Linear(width, 4))

    def data(context):
        before.add(torch.get_num_threads())
        return x, y

    mf.simulate(model(), mf.Data(x, y, x[:9], y[:9]), [range(256)], rounds=1, local=local, engine="plain")
    assert expected in training  # what plain does; the model's check uses two threads
    training.clear()
    server = server_app(model, fraction_evaluate=0.0, lr=0.1)
    simulate(server, client_app(model, data, local=local), 4, {"num-rounds": 3, "wait-for": 4}, workers)
    assert training == {expected}
    assert before == {2} == {torch.get_num_threads()}
