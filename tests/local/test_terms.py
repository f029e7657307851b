"""Weight decay, momentum and clipping are what PyTorch means by them, on every engine and on Flower; runs without are what they were."""

import dataclasses

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.metrics.store import RunFolder
from mimicfl.params import flatten
from mimicfl.runner import settings_of

from ..conftest import end_on

TERMS = [{"weight_decay": 0.2}, {"momentum": 0.8}, {"weight_decay": 0.05, "momentum": 0.6}]
TERMS += [{"clip_norm": 0.1}, {"weight_decay": 0.05, "momentum": 0.6, "clip_norm": 0.3}]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_equals_pytorchs_own(quadratic, terms):
    model, part = quadratic["model"], torch.as_tensor(quadratic["split"][0])
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()  # from zero the first step would not decay
    local = mf.LocalSGD(steps=6, batch_size=None, lr=0.05, **terms)
    found = mf.simulate(**{**quadratic, "split": [part]}, rounds=1, local=local).params
    most = terms.get("clip_norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **{key: value for key, value in terms.items() if key != "clip_norm"})
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(quadratic["data"].x_train[part]), quadratic["data"].y_train[part]).div(2).backward()
        if most:
            assert nn.utils.clip_grad_norm_(model.parameters(), most) > most  # or nothing would be tested
        optimizer.step()
    torch.testing.assert_close(found, flatten(model).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["native", "workers", "batched"])
@pytest.mark.parametrize("algorithm", ["mimic", "fedprox:mu=0.5", "scaffold"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_every_engine_has_them(digits, engine, algorithm, terms):
    def end(engine, **terms):
        local = mf.LocalSGD(epochs=2, lr=0.02, **terms)
        given = {"algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 3, "local": local}
        return end_on(engine, **digits, **given)

    plain = end("plain", **terms)
    torch.testing.assert_close(end(engine, **terms), plain, rtol=1e-4, atol=2e-5)
    assert float((plain - end("plain")).norm()) > 0.05


@pytest.mark.parametrize("engine", ["plain", "native", "workers", "batched"])
def test_gradients_shorter_than_the_limit_stay_as_they_are(digits, engine):
    ends = [end_on(engine, **digits, rounds=2, local=mf.LocalSGD(clip_norm=most)) for most in (0.0, 1e6)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("terms", [{"momentum": 0.7}, {"clip_norm": 0.5}], ids=str)
def test_in_company_it_is_as_alone(terms):
    plan = mf.Experiment(rounds=3, engine="batched", **terms)
    said = []
    alone = mf.run(dataclasses.replace(plan, algorithm="mimic"), notice=said.append).params
    assert said == ["engine batched"]
    beside = mf.compare(plan, ["fedavg", "mimic"], seeds=1)["mimic"][0].params
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.8, 0.99, 1 - 1e-10])
def test_steps_are_worth_the_gradients_in_them(beta):
    """Ones as gradients: the sum of the steps is what they are worth, by the recursion itself."""
    u, sums = 0.0, [0.0]
    for _ in range(7):
        u = beta * u + 1.0
        sums.append(sums[-1] + u)
    found = mf.LocalSGD(momentum=beta).worth(torch.tensor([7, 1, 2]))
    assert found.tolist() == pytest.approx([sums[7], sums[1], sums[2]], rel=1e-12)
    assert mf.LocalSGD().worth(torch.tensor([7, 1])).tolist() == [7, 1]


def test_one_step_is_worth_one_gradient_whatever_the_momentum():
    """Less, by rounding, and Flower would refuse the client's answer."""
    assert all(float(mf.LocalSGD(momentum=k / 1000).worth(torch.tensor(1))) == 1.0 for k in range(1000))


def test_scaffolds_controls_stay_mean_gradients(quadratic):
    """On a slope without curvature, gradients are constant: the controls must be those gradients, with momentum as without."""
    flat = lambda output, target: (output * target).mean()  # noqa: E731
    data = quadratic["data"]
    states = []
    for momentum in (0.0, 0.9):
        local = mf.LocalSGD(steps=4, batch_size=None, lr=0.001, momentum=momentum)
        run = {**quadratic, "algorithm": Spied(), "rounds": 2, "local": local, "loss": flat}
        mf.simulate(**run)
        states.append(run["algorithm"].seen)
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)
    part = quadratic["split"][0]
    torch.testing.assert_close(states[1][0], (data.x_train[part] * data.y_train[part]).mean(0).double(), rtol=1e-9, atol=1e-12)


class Spied(mf.SCAFFOLD):
    def aggregate(self, state, active, g, step):
        state = super().aggregate(state, active, g, step)
        object.__setattr__(self, "seen", state.c_i[:].clone())
        return state


def test_runs_without_it_are_what_they_were(tmp_path):
    without, decayed = mf.Experiment(rounds=2), mf.Experiment(rounds=2, weight_decay=0.01, momentum=0.5, clip_norm=2.0)
    later = {"weight_decay", "momentum", "clip_norm"}
    assert not later & without.to_dict().keys()  # so the ids of recorded runs, made of the settings, stay
    assert without.id != decayed.id
    history = mf.run(decayed, tmp_path / "run")
    assert history.config["weight_decay"] == 0.01
    kept = settings_of(RunFolder(tmp_path / "run"))
    assert (kept.weight_decay, kept.momentum, kept.clip_norm) == (0.01, 0.5, 2.0)
    with pytest.raises(mf.UsageError, match=r"clip_norm is 2\.0 there"):
        mf.run(without, tmp_path / "run")


@pytest.mark.parametrize("name", ["weight_decay", "momentum", "clip_norm"])
def test_a_folder_of_objects_belongs_to_its_terms(digits, tmp_path, name):
    local = mf.LocalSGD(**{name: 0.1})
    mf.simulate(**digits, rounds=2, local=local, out=tmp_path)
    with pytest.raises(mf.UsageError, match="another"):
        mf.simulate(**digits, rounds=2, local=dataclasses.replace(local, **{name: 0.2}), out=tmp_path)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda _: mf.LocalSGD(weight_decay=-0.1), "weight_decay must be at least 0"),
        (lambda _: mf.Experiment(weight_decay=float("nan")), "weight_decay must be a number"),
        (lambda _: mf.LocalSGD(momentum=1), "less than 1"),
        (lambda _: mf.LocalSGD(clip_norm=-1), "clip_norm must be at least 0"),
        (lambda _: mf.Experiment(clip_norm=float("inf")), "clip_norm must be a number"),
        (lambda _: mf.Experiment(momentum=-0.1), "momentum must be at least 0 and less than 1"),
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(weight_decay=0.1), diagnose="every=1"),
            "diagnose is for plain SGD",
        ),
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(momentum=0.1, clip_norm=1), diagnose="every=1"),
            "diagnose is for plain SGD.*leave out momentum and clip_norm",
        ),
    ],
)
def test_mistakes_are_told_in_words(digits, make_it, words):
    with pytest.raises(mf.UsageError, match=words):
        make_it(digits)
