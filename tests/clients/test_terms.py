"""Weight decay, momentum and clipping agree with PyTorch on every engine; runs without them keep their ids."""

import dataclasses

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.params import flatten
from mimicfl.experiments.results import settings_of
from mimicfl.metrics.store import RunFolder
from tests.conftest import end_on

TERMS = [{"weight_decay": 0.2}, {"momentum": 0.8}, {"weight_decay": 0.05, "momentum": 0.6}]
TERMS += [{"clip_norm": 0.1}, {"weight_decay": 0.05, "momentum": 0.6, "clip_norm": 0.3}]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_local_sgd_equals_torch_sgd(quadratic, terms):
    model, part = quadratic["model"], torch.as_tensor(quadratic["split"][0])
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()  # at zero, the first step would have no weight decay
    local = mf.LocalSGD(steps=6, batch_size=None, lr=0.05, **terms)
    found = mf.simulate(**{**quadratic, "split": [part]}, rounds=1, local=local).params
    most = terms.get("clip_norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **{key: value for key, value in terms.items() if key != "clip_norm"})
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(quadratic["data"].x_train[part]), quadratic["data"].y_train[part]).div(2).backward()
        if most:
            assert nn.utils.clip_grad_norm_(model.parameters(), most) > most  # otherwise clipping would not be tested
        optimizer.step()
    torch.testing.assert_close(found, flatten(model).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "every"), [("mimic", TERMS), ("fedprox:mu=0.5", TERMS[-1:]), ("scaffold", TERMS[-1:])])
def test_every_engine_agrees_with_plain(digits, algorithm, every):
    """Each term, beside MimiC's shift; all of them, beside a proximal term and SCAFFOLD's controls."""

    def end(engine, **terms):
        local = mf.LocalSGD(epochs=2, lr=0.02, **terms)
        given = {"algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 3, "local": local}
        return end_on(engine, **digits, **given)

    without = end("plain")
    for terms in every:
        plain = end("plain", **terms)
        assert float((plain - without).norm()) > 0.05, terms
        for engine in ("native", "workers", "batched"):
            torch.testing.assert_close(
                end(engine, **terms), plain, rtol=1e-4, atol=2e-5, msg=lambda text, at=(engine, terms): f"{at}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "native", "workers", "batched"])
def test_gradients_below_clip_norm_are_unchanged(digits, engine):
    ends = [end_on(engine, **digits, rounds=2, local=mf.LocalSGD(clip_norm=most)) for most in (0.0, 1e6)]
    assert torch.equal(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("terms", [{"momentum": 0.7}, {"clip_norm": 0.5}, {"optimizer": "adamw:eps=0.01", "weight_decay": 0.1}], ids=str)
def test_batched_run_equals_single_run(terms):
    plan = mf.Experiment(rounds=3, engine="batched", **terms)
    notices = []
    single = mf.run(dataclasses.replace(plan, algorithm="mimic"), notice=notices.append).params
    assert notices == ["engine batched"]
    batched = mf.compare(plan, ["fedavg", "mimic"], seeds=1)["mimic"][0].params
    torch.testing.assert_close(single, batched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.8, 0.99, 1 - 1e-10])
def test_worth_equals_the_momentum_recursion(beta):
    """With all gradients equal to 1, the sum of the steps is the total weight."""
    u, sums = 0.0, [0.0]
    for _ in range(7):
        u = beta * u + 1.0
        sums.append(sums[-1] + u)
    found = mf.LocalSGD(momentum=beta).worth(torch.tensor([7, 1, 2]))
    assert found.tolist() == pytest.approx([sums[7], sums[1], sums[2]], rel=1e-12)
    assert mf.LocalSGD().worth(torch.tensor([7, 1])).tolist() == [7, 1]


def test_worth_of_one_step_is_exactly_one():
    """If rounding made it smaller than 1, the Flower server would refuse the client's update."""
    assert all(float(mf.LocalSGD(momentum=k / 1000).worth(torch.tensor(1))) == 1.0 for k in range(1000))


def test_scaffold_controls_are_mean_gradients_with_momentum(quadratic):
    """For a linear loss the gradients are constant, so the controls must equal them with and without momentum."""
    linear_loss = lambda output, target: (output * target).mean()  # noqa: E731
    data = quadratic["data"]
    states, seen = [], []

    class RecordingSCAFFOLD(mf.SCAFFOLD):
        def aggregate(self, state, active, g, step):
            super().aggregate(state, active, g, step)
            seen.append(state.c_i[:].clone())

    for momentum in (0.0, 0.9):
        local = mf.LocalSGD(steps=4, batch_size=None, lr=0.001, momentum=momentum)
        run = {**quadratic, "algorithm": RecordingSCAFFOLD(), "rounds": 2, "local": local, "loss": linear_loss}
        mf.simulate(**run)
        states.append(seen[-1])
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)
    part = quadratic["split"][0]
    torch.testing.assert_close(states[1][0], (data.x_train[part] * data.y_train[part]).mean(0).double(), rtol=1e-9, atol=1e-12)


def test_unused_options_do_not_change_the_id_of_a_run(tmp_path):
    without, decayed = mf.Experiment(rounds=2), mf.Experiment(rounds=2, weight_decay=0.01, momentum=0.5, clip_norm=2.0)
    options = {"weight_decay", "momentum", "clip_norm"}
    assert not options & without.to_dict().keys()  # otherwise the ids of recorded runs would change
    assert without.id != decayed.id
    history = mf.run(decayed, tmp_path / "run")
    assert history.config["weight_decay"] == 0.01
    stored = settings_of(RunFolder(tmp_path / "run"))
    assert (stored.weight_decay, stored.momentum, stored.clip_norm) == (0.01, 0.5, 2.0)
    with pytest.raises(mf.UsageError, match="clip_norm"):
        mf.run(without, tmp_path / "run")


@pytest.mark.parametrize("name", ["weight_decay", "momentum", "clip_norm"])
def test_folder_of_a_run_with_other_options_is_refused(digits, tmp_path, name):
    local = mf.LocalSGD(**{name: 0.1})
    mf.simulate(**digits, rounds=2, local=local, out=tmp_path)
    with pytest.raises(mf.UsageError, match=r"different run|another"):
        mf.simulate(**digits, rounds=2, local=dataclasses.replace(local, **{name: 0.2}), out=tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda _: mf.LocalSGD(weight_decay=-0.1), "weight_decay must be at least 0"),
        (lambda _: mf.Experiment(weight_decay=float("nan")), "weight_decay must be a number"),
        (lambda _: mf.LocalSGD(momentum=1), "less than 1"),
        (lambda _: mf.LocalSGD(clip_norm=-1), "clip_norm must be at least 0"),
        (lambda _: mf.Experiment(clip_norm=float("inf")), "clip_norm must be a number"),
        (lambda _: mf.Experiment(momentum=-0.1), "momentum must be at least 0 and less than 1"),
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(weight_decay=0.1), diagnose="every=1"),
            "diagnose.*weight_decay",
        ),
        (
            lambda digits: mf.simulate(**digits, rounds=1, local=mf.LocalSGD(momentum=0.1, clip_norm=1), diagnose="every=1"),
            "diagnose.*momentum and clip_norm",
        ),
    ],
)
def test_invalid_options_raise_usage_error(digits, call, words):
    with pytest.raises(mf.UsageError, match=words):
        call(digits)
