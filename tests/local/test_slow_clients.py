"""Clients that do not all do the same amount of work, on every engine."""

import numpy as np
import pytest
import torch

import mimicfl as mf
import mimicfl.flower as mff

from ..conftest import end_on

N = 30
STEPS = [1 + i % 7 for i in range(N)]


@pytest.mark.parametrize("work", [{"steps": STEPS}, {"epochs": np.array(STEPS) % 3 + 1}], ids=str)
@pytest.mark.parametrize("algorithm", ["mimic", "scaffold"])
@pytest.mark.parametrize("engine", ["native", "workers", "batched"])
def test_every_engine_knows_each_clients_work(digits, engine, algorithm, work):
    given = {"algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 3, "update": "mean"}
    local = mf.LocalSGD(lr=0.05, batch_size=8, **work)
    ends = [end_on(name, **digits, **given, local=local) for name in (engine, "plain")]
    torch.testing.assert_close(*ends, rtol=1e-4, atol=2e-5)


class Noting(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        self.__dict__.setdefault("seen", []).append(dict(zip(active.tolist(), step.K.tolist(), strict=True)))
        return super().aggregate(state, active, g, step)


def test_each_client_takes_its_own_steps(digits):
    noting = Noting()
    mf.simulate(**digits, algorithm=noting, availability="static:0.5", rounds=4, local=mf.LocalSGD(steps=STEPS))
    assert len(noting.seen) == 4
    assert all(STEPS[client] == K for round_ in noting.seen for client, K in round_.items())


def test_equal_numbers_are_one_number(digits):
    ends = [mf.simulate(**digits, rounds=2, local=mf.LocalSGD(steps=steps)).params for steps in (3, [3] * N)]
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=[1, 2])),
            "steps has 2 numbers, one a client, and there are 30",
        ),
        (lambda _: mf.LocalSGD(steps=[1, 0]), "each of steps must be a whole number of at least 1, got 0"),
        (lambda _: mf.LocalSGD(epochs=[1, 2], steps=3), "epochs or steps, not both"),
        (lambda _: mff.client_app(lambda: None, lambda c: None, local=mf.LocalSGD(steps=[1, 2])), "every client of a network"),
    ],
)
def test_mistakes(digits, make_it, words):
    with pytest.raises(mf.UsageError, match=words):
        make_it(digits)


def test_a_folder_is_of_its_steps(digits, tmp_path):
    mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=STEPS), out=tmp_path)
    assert mf.read(tmp_path).config["steps"] == STEPS
    with pytest.raises(mf.UsageError, match="holds a different run"):
        mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=STEPS[::-1]), out=tmp_path)
