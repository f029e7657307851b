"""Client optimizers equal a loop over clients with torch.optim, and agree on all engines."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import flatten
from mimicfl.clients.train import draw
from mimicfl.data.clients import Clients
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from tests.conftest import end_on
from tests.engines.engines import DEVICES, MODELS, assert_same, problem, requests_of


def radam(parameters, lr):
    return torch.optim.RAdam(parameters, lr=lr, betas=(0.8, 0.95))


CASES = {
    "momentum": ({"momentum": 0.8}, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8)),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (
        {"optimizer": "adam", "betas": (0.8, 0.95), "weight_decay": 0.1},
        lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "adamw": (
        {"optimizer": "adamw:eps=1e-5", "weight_decay": 0.1},
        lambda p, lr: torch.optim.AdamW(p, lr=lr, eps=1e-5, weight_decay=0.1),
    ),
    "rmsprop": ({"optimizer": torch.optim.RMSprop}, lambda p, lr: torch.optim.RMSprop(p, lr=lr)),
    "factory": ({"optimizer": radam}, radam),
    "adafactor": ({"optimizer": torch.optim.Adafactor}, lambda p, lr: torch.optim.Adafactor(p, lr=lr)),  # matrices and vectors differ
}
STACKED = ["nesterov", "adam", "adamw"]


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def fedavg_loop(model, data, split, local, make, rounds, multipliers=None):
    """FedAvg as a loop over clients: every client trains a copy of the model with torch.optim, and the copies are averaged."""
    clients = Clients(data, split, torch.device("cpu"), torch.float64)
    w = flatten(model)
    for t in range(rounds):
        ends = []
        for client in range(len(split)):
            nn.utils.vector_to_parameters(w.clone(), model.parameters())
            named = list(model.named_parameters())
            groups = [{"params": [p], "lr": 0.05 * (multipliers or {}).get(name, 1.0)} for name, p in named]
            optimizer = make(groups if multipliers else [p for _, p in named], 0.05)
            sizes, order, moves = draw(clients, client, local, 0, (t, client))
            for x, y in clients.batches(client, order, sizes, moves):
                optimizer.zero_grad()
                (0.5 * nn.functional.mse_loss(model(x), y)).backward()
                optimizer.step()
            ends.append(flatten(model))
        w = torch.stack(ends).mean(dim=0)
    return w


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("multipliers", [None, {"0.weight": 3.0, "2.bias": 0.0}], ids=["one rate", "groups"])
def test_equals_a_loop_with_torch_optim(quadratic, case, multipliers):
    options, make = CASES[case]
    local = mf.Local(epochs=2, batch_size=4, lr=0.05, lr_multipliers=multipliers or {}, **options)
    given = {**quadratic, "model": two_layers(), "algorithm": "fedavg", "rounds": 3, "local": local}
    found = mf.simulate(**given).params
    wanted = fedavg_loop(two_layers(), quadratic["data"], quadratic["split"], local, make, 3, multipliers)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert (wanted - flatten(two_layers())).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
@pytest.mark.parametrize("case", STACKED)
def test_stacked_engines_equal_plain(device, kind, case):
    """Lanes are reused: the state of the previous client must not affect the next one."""
    model, clients = problem(MODELS["convolutions"](), device)
    options = {**CASES[case][0], "clip_norm": 0.5, "lr_multipliers": {"*.bias": 0.5}}
    requests = requests_of(model, clients, mf.Local(epochs=2, batch_size=8, **options))
    loss = as_loss("cross-entropy")
    engine = kind(model, clients, loss, lanes=2)
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests), rtol=1e-7)
    requests = requests_of(model, clients, mf.LocalSGD(epochs=2, batch_size=8))  # the same engine with another optimizer
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["workers", "batched", "native"])
@pytest.mark.parametrize("case", ["nesterov", "adamw", "factory"])
def test_runs_agree_or_say_why_not(digits, engine, case):
    model = mf.models.MLP(64, 8, 10).double()
    local = mf.Local(steps=3, lr=0.01, **CASES[case][0])
    given = {**digits, "model": model, "algorithm": "mimic", "availability": "static:0.5", "rounds": 3, "local": local}
    plain = end_on("plain", **given)
    if engine == "native" or (engine, case) == ("batched", "factory"):
        notices = []
        mf.simulate(**given | {"rounds": 1}, engine=engine, notice=notices.append)
        assert notices[0].startswith("engine plain: ")
        assert re.search("optimizer|nesterov|float64", notices[0])
    else:
        torch.testing.assert_close(end_on(engine, **given), plain, rtol=1e-6, atol=1e-8)


def test_sgd_is_local_sgd(quadratic):
    old, new = mf.LocalSGD(epochs=2, lr=0.05, momentum=0.5), mf.Local(epochs=2, lr=0.05, optimizer="sgd:momentum=0.5")
    first, second = (mf.simulate(**quadratic, rounds=2, local=local) for local in (old, new))
    assert torch.equal(first.params, second.params)
    assert first.fingerprint == second.fingerprint
    assert mf.Local(optimizer="adam").fingerprint != mf.Local(optimizer="adamw").fingerprint


def test_worth_equals_the_nesterov_recursion():
    u, sums = 0.0, [0.0]
    for _ in range(7):
        u = 0.7 * u + 1.0
        sums.append(sums[-1] + 1.0 + 0.7 * u)
    found = mf.Local(momentum=0.7, nesterov=True).worth(torch.tensor([7, 1, 2]))
    assert found.tolist() == pytest.approx([sums[7], sums[1], sums[2]], rel=1e-12)
    assert mf.Local(optimizer="adam").worth(torch.tensor([7, 1])).tolist() == [7, 1]


@pytest.mark.slow
def test_settings_keep_their_ids():
    plain, adam = mf.Experiment(rounds=2), mf.Experiment(rounds=2, optimizer="adam:betas=[0.9,0.99]")
    assert "optimizer" not in plain.to_dict()
    assert plain.id != adam.id
    ends = [mf.run(mf.Experiment(rounds=2, num_clients=5, lr=0.001, **given)).params for given in ({}, {"optimizer": "adam"})]
    assert not torch.equal(*ends)


def test_scaffold_warns_that_steps_are_not_gradients(quadratic):
    with pytest.warns(UserWarning, match="SCAFFOLD treats"):
        mf.simulate(**quadratic, algorithm="scaffold", rounds=1, local=mf.Local(optimizer="adam"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mf.simulate(**quadratic, algorithm="scaffold", rounds=1, local=mf.Local(momentum=0.5, nesterov=True))


def lbfgs(parameters, lr):
    return torch.optim.LBFGS(parameters, lr=lr)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adma"}, "did you mean 'adam'"),
        ({"optimizer": 3}, "optimizer must be a name"),
        ({"optimizer": "adam:momentum=0.9"}, "no option 'momentum'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is not an option of adam"),
        ({"betas": (0.9, 0.99)}, "betas is not an option of sgd"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "less than 1"),
        ({"optimizer": "adam", "betas": 0.9}, "two numbers"),
        ({"optimizer": "adam", "eps": 0.0}, "eps must be more than 0"),
        ({"optimizer": "adamw:weight_decay=0.1", "weight_decay": 0.2}, "give it once"),
        ({"optimizer": "adam:weight_decay=0", "weight_decay": 0.2}, "give it once"),
        ({"optimizer": torch.optim.Adam, "weight_decay": 0.2}, "own weight decay"),
        ({"lr_multipliers": {"head.*": 2.0}}, "'head.\\*' matches no trainable parameter"),
        ({"lr_multipliers": {"*": -1.0}}, "at least 0"),
        ({"lr_multipliers": 3}, "map name patterns to numbers"),
        ({"optimizer": lbfgs}, "evaluates the loss several times"),
        ({"optimizer": torch.optim.SparseAdam}, "cannot take a step"),
        ({"optimizer": lambda parameters, lr: None}, "must return a torch.optim.Optimizer"),
        ({"optimizer": lambda parameters: None}, "cannot be made"),
    ],
)
def test_bad_options_are_refused(quadratic, options, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**quadratic, rounds=1, local=mf.Local(**options))


def test_lists_of_steps(quadratic):
    """Clients may have different numbers of steps under any optimizer."""
    local = mf.Local(steps=list(range(1, 7)), batch_size=None, lr=0.01, optimizer="adam")
    found = mf.simulate(**quadratic, algorithm="fedavg", rounds=1, local=local, availability=mf.availability.Explicit(np.eye(6)[:1] == 1))
    one = mf.simulate(
        **{**quadratic, "split": quadratic["split"][:1]}, algorithm="fedavg", rounds=1, local=mf.Local(steps=1, lr=0.01, optimizer="adam")
    )
    torch.testing.assert_close(found.params, one.params, rtol=1e-10, atol=1e-12)
