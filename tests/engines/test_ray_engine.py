"""The ray engine with workers in this process: the result does not depend on which worker trains which clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mimicfl as mf
from mimicfl.algorithms.base import declared
from mimicfl.algorithms.server import Server
from mimicfl.engines.cluster.engine import RayEngine, cluster_parts, with_fewer_lanes
from mimicfl.engines.cluster.shares import divide
from mimicfl.engines.cluster.worker import Setup, Worker
from mimicfl.engines.create import create
from mimicfl.engines.interface import train_clients
from mimicfl.engines.plain import PlainEngine
from tests.conftest import BUILT_IN
from tests.engines.engines import MODELS, SIZES, problem, request_of
from tests.engines.inputs import CASES, clients_of

MEANS = [name for name, factory in BUILT_IN.items() if declared(factory, "mean_suffices")]


class Here:
    """Workers in this process, in place of a cluster; `order` says which worker takes the message of which group."""

    def __init__(self, setup, clients, workers, order=lambda number, workers: number % workers):
        self.clients, self.order = clients, order
        self.workers, self.held = [Worker(setup) for _ in range(workers)], [set() for _ in range(workers)]

    def put(self, value):
        return value

    def run(self, work):
        return {number: self._reply(number, *message) for number, message in work.items()}

    def _reply(self, number, jobs, models):
        at = self.order(number, len(self.workers))
        new = sorted({int(client) for job in jobs for client in job.active} - self.held[at])
        self.held[at] |= set(new)
        index = np.concatenate([np.arange(0), *(self.clients.split[client] for client in new)])
        given = (new, *(engine_rows(part, index) for part in (self.clients.x, self.clients.y)))
        return self.workers[at].train(jobs, given if new else None, *models)


def engine_rows(samples, index):
    if isinstance(samples, dict):
        return {name: x[index].numpy() for name, x in samples.items()}
    return tuple(x[index].numpy() for x in samples) if isinstance(samples, tuple) else samples[index].numpy()


def ray_engine(model, clients, loss, groups=3, workers=2, label="plain", **options):
    setup = Setup(model, loss, clients.emptied(), "fp32", label)
    return RayEngine(Here(setup, clients, workers, **options), create(label, model, clients, loss, "fp32"), groups)


def request(model, clients, task=None, **options):
    w, buffers = torch.cat([p.detach().reshape(-1) for p in model.parameters()]), dict(model.named_buffers())
    local = mf.LocalSGD(epochs=2, batch_size=8, **options)
    active = np.arange(len(clients))
    return request_of(clients, local, 3, 1, w, buffers, active, task or mf.Instructions(), 0.1, 0.1)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 9))
def test_groups_cover_the_clients_and_are_even(sizes, groups):
    active, sizes = np.arange(len(sizes)) * 3, np.array(sizes)
    found = divide(active, sizes, groups)
    assert sorted(np.concatenate(found)) == list(range(len(active)))
    load = [sizes[rows].sum() for rows in found]
    assert max(load) <= max(1.25 * np.mean(load), min(load) + sizes.max())
    assert all(np.array_equal(a, b) for a, b in zip(found, divide(active, sizes, groups), strict=True))


def test_clients_stay_where_their_samples_are_if_the_groups_are_even():
    found = divide(np.array([0, 1, 4, 7, 10]), np.ones(5), 2)
    assert [rows.tolist() for rows in found] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("name", ["mlp", "groups", "residual"])
def test_rows_equal_plain_to_the_bit(name):
    model, clients = problem(MODELS[name]())
    loss, shift = mf.losses.cross_entropy, torch.randn(len(SIZES), sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    asked = request(model, clients, mf.Instructions(shift, 0.2, send=("last_gradient",)), momentum=0.5)
    ours, [plain] = ray_engine(model, clients, loss), PlainEngine(model, clients, loss).train([asked])
    for _ in range(2):  # the second time, the workers have the samples
        [found] = ours.train([asked])
        assert torch.equal(found.g, plain.g)
        assert torch.equal(found.loss, plain.loss)
        assert torch.equal(found.K, plain.K)
        assert torch.equal(found.sent["last_gradient"], plain.sent["last_gradient"])


def test_groups_of_one_request_are_weighted_means():
    model, clients = problem(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)))
    clients = replace_sizes(clients)
    loss, asked = mf.losses.cross_entropy, request(model, clients)
    asked = replace(asked, share=torch.tensor([0.1, 0.2, 0.3, 0.15], dtype=torch.float64), mean_suffices=True)
    [plain] = PlainEngine(model, clients, loss).train([asked])
    [found] = ray_engine(model, clients, loss, groups=2).train([asked])
    assert found.g.shape[0] == 2
    weights = asked.share / asked.share.sum()
    torch.testing.assert_close(found.summed(weights) @ found.g, weights @ plain.g)
    assert torch.equal(found.loss, plain.loss)
    one, two = (
        Server(mf.FedAvg(), asked.w, dict(asked.buffers), asked.share, local_lr=lambda t, m: 0.1, global_lr=lambda t, m: 0.1) for _ in "ab"
    )
    one.apply(asked, plain), two.apply(asked, found)
    torch.testing.assert_close(one.w, two.w)
    for name, value in one.buffers.items():
        torch.testing.assert_close(two.buffers[name], value)


def replace_sizes(clients):
    """Without the client that has a single sample, which BatchNorm cannot take."""
    clients.split[3] = clients.split[0][:5]
    clients.sizes = np.array([len(part) for part in clients.split])
    return clients


@pytest.mark.parametrize("name", CASES)
def test_samples_with_several_inputs(name):
    make, data = CASES[name]
    model, clients = make().double(), clients_of(data())
    asked = request(model, clients)
    loss = mf.losses.cross_entropy
    [found], [plain] = ray_engine(model, clients, loss).train([asked]), PlainEngine(model, clients, loss).train([asked])
    assert torch.equal(found.g, plain.g)


def test_own_starts_and_several_runs():
    model, clients = problem(MODELS["mlp"]())
    loss, asked = mf.losses.cross_entropy, request(model, clients)
    starts = replace(asked, instructions=mf.Instructions(start=asked.w + torch.randn(len(SIZES), len(asked.w), dtype=torch.float64)))
    runs = [starts, replace(asked, seed=5, active=np.array([1, 2]), share=asked.share[:2])]
    for found, plain in zip(
        *(train_clients(e, runs) for e in (ray_engine(model, clients, loss), PlainEngine(model, clients, loss))), strict=True
    ):
        assert torch.equal(found.g, plain.g)


@pytest.mark.parametrize("label", ["native", "batched:4"])
def test_the_result_does_not_depend_on_who_trains(label):
    model, clients = problem(mf.models.MLP(64, 12, 10), dtype=torch.float32)
    loss, asked = mf.losses.cross_entropy, replace(request(model.float(), clients), mean_suffices=True)
    one = ray_engine(model, clients, loss, label=label).train([asked])[0]
    two = ray_engine(model, clients, loss, label=label, workers=3, order=lambda number, workers: workers - 1).train([asked])[0]
    assert torch.equal(one.g, two.g)
    weights = asked.share / asked.share.sum()
    plain = PlainEngine(model, clients, loss).train([asked])[0]
    torch.testing.assert_close(one.summed(weights) @ one.g, weights @ plain.g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MEANS)
def test_where_the_mean_suffices_groups_change_nothing(name):
    """A server that gets means over groups makes the same model as one that gets rows."""
    torch.manual_seed(0)
    w, g, active = torch.randn(7).double(), torch.randn(5, 7).double(), torch.arange(5)
    share, group = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15]).double(), torch.tensor([0, 1, 0, 1, 1])
    states = []
    for rows in (True, False):
        algorithm = BUILT_IN[name]()
        state = algorithm.init(w.clone(), 5)
        for t in range(45):
            updates = mf.algorithms.server.ClientUpdates(g, torch.ones(5), torch.ones(5), group=None if rows else group)
            weights = updates.summed(share) if rows else torch.zeros(2).double().index_add(0, group, share)
            means = g if rows else torch.stack([share[group == k] @ g[group == k] / share[group == k].sum() for k in (0, 1)])
            algorithm.aggregate(state, active, means * (1 + t), mf.Step(t, 0.1, 0.1, torch.ones(5), weights, weights))
        states.append(state.w)
    torch.testing.assert_close(*states)


def test_a_subclass_does_not_inherit_that_the_mean_suffices():
    class Median(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w - step.eta * g.median(dim=0).values

    rate = {"local_lr": lambda t, m: 0.1, "global_lr": lambda t, m: 0.1}
    share, active = torch.full((3,), 1 / 3), np.arange(3)
    assert Server(mf.FedAvg(), torch.zeros(4), {}, share, **rate).request(0, active).mean_suffices
    assert not Server(Median(), torch.zeros(4), {}, share, **rate).request(0, active).mean_suffices
    assert not Server(mf.FedAvg(), torch.zeros(4), {}, share, **rate, update="mean").request(0, active).mean_suffices
    assert not Server(mf.SCAFFOLD(), torch.zeros(4), {}, share, **rate).request(0, active).mean_suffices


def test_labels():
    assert cluster_parts("ray:4:batched:64:compiled") == (4, "batched:64:compiled")
    assert cluster_parts("native") == (0, "native")
    assert with_fewer_lanes("batched:64:compiled", 3) == "batched:22:compiled"
    assert with_fewer_lanes("plain", 3) == "plain"
