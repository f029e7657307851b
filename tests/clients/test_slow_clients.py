"""Clients with different numbers of local steps or epochs, on every engine."""

import numpy as np
import pytest
import torch

import mimicfl as mf
import mimicfl.flower as mff
from tests.conftest import end_on

N = 30
STEPS = [1 + i % 7 for i in range(N)]


@pytest.mark.slow
@pytest.mark.parametrize("work", [{"steps": STEPS}, {"epochs": np.array(STEPS) % 3 + 1}], ids=str)
@pytest.mark.parametrize("algorithm", ["mimic", "scaffold"])
@pytest.mark.parametrize("engine", ["native", "workers", "batched"])
def test_every_engine_supports_steps_and_epochs_per_client(digits, engine, algorithm, work):
    given = {"algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 3, "update": "mean"}
    local = mf.LocalSGD(lr=0.05, batch_size=8, **work)
    ends = [end_on(name, **digits, **given, local=local) for name in (engine, "plain")]
    torch.testing.assert_close(*ends, rtol=1e-4, atol=2e-5)


def test_each_client_takes_its_number_of_steps(digits):
    seen = []

    class RecordingFedAvg(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            seen.append(dict(zip(active.tolist(), step.K.tolist(), strict=True)))
            super().aggregate(state, active, g, step)

    mf.simulate(**digits, algorithm=RecordingFedAvg(), availability="static:0.5", rounds=4, local=mf.LocalSGD(steps=STEPS))
    assert len(seen) == 4
    assert all(STEPS[client] == K for round_ in seen for client, K in round_.items())


def test_list_of_equal_numbers_equals_one_number(digits):
    ends = [mf.simulate(**digits, rounds=2, local=mf.LocalSGD(steps=steps)).params for steps in (3, [3] * N)]
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=[1, 2])),
            "steps has 2 .*30",
        ),
        (lambda _: mf.LocalSGD(steps=[1, 0]), "each of steps must be .*got 0"),
        (lambda _: mf.LocalSGD(epochs=[1, 2], steps=3), "epochs or steps, not both"),
        (lambda _: mff.client_app(lambda: None, lambda c: None, local=mf.LocalSGD(steps=[1, 2])), "steps"),
    ],
)
def test_invalid_lists_raise_usage_error(digits, call, words):
    with pytest.raises(mf.UsageError, match=words):
        call(digits)


def test_folder_of_a_run_with_other_steps_is_refused(digits, tmp_path):
    mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=STEPS), out=tmp_path)
    assert mf.read(tmp_path).config["steps"] == STEPS
    with pytest.raises(mf.UsageError, match="holds a different run"):
        mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=STEPS[::-1]), out=tmp_path)
