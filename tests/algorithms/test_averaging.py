"""Averaged models: the mean of all models with weights in closed form is evaluated and kept, and clients train as without it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mimicfl as mf
from mimicfl.algorithms.averaging import RunningMean
from mimicfl.algorithms.server import average_buffers
from mimicfl.clients.params import load
from mimicfl.experiments.execute import run_plan
from mimicfl.metrics.store import RunFolder
from mimicfl.report.summary import group
from tests.conftest import BUILT_IN, random_schedule

ROUNDS = 14
ALGORITHMS = [*BUILT_IN, "fedawe:evaluate=mean", "mifa:never_seen=wait"]
LOCAL = mf.LocalSGD(epochs=1, batch_size=4, lr=0.05)


def weights(n, average):
    """Of the models after n server steps: model k = 1..n counts a Gamma(n) Gamma(k - 1 + a) / (Gamma(k) Gamma(n + a)), the sum is 1."""
    a, log = average, math.lgamma
    return [a * math.exp(log(n) + log(k - 1 + a) - log(k) - log(n + a)) for k in range(1, n + 1)]


def expected(models, busy, average):
    """After every round, the mean of the models that a server step made, all of which are stored; before the first, the initial model."""
    means, made = [], []
    for model, one in zip(models, busy, strict=True):
        made += [model] if one else []
        means.append(sum(w * x for w, x in zip(weights(len(made), average), made, strict=True)) if made else model)
    return means


def given(quadratic, **more):
    schedule = mf.availability.Explicit(random_schedule(ROUNDS, 6, seed=3))
    return {**quadratic, "availability": schedule, "local": LOCAL} | more


def models_of(**arguments):
    """The run, and what a callback sees as its model after every round."""
    found = []
    history = mf.simulate(**arguments, each_round=lambda info: found.append(info.params.clone()))
    return history, found


def test_the_weights_sum_to_one():
    assert sum(weights(50, 9)) == pytest.approx(1)
    assert weights(3, 1) == pytest.approx([1 / 3] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("average", [1, 2.5, 9])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_weighted_sum_of_all_models(quadratic, algorithm, average):
    plain, models = models_of(**given(quadratic), algorithm=algorithm)
    averaged, means = models_of(**given(quadratic), algorithm=algorithm, average=average)
    wanted = expected(models, [bool(row["clients"]) for row in plain.rows], average)
    torch.testing.assert_close(torch.stack(means), torch.stack(wanted), rtol=1e-12, atol=1e-13)
    assert torch.equal(averaged.params, means[-1])
    assert not torch.allclose(averaged.params, plain.params, atol=1e-3)


VARIANTS = {
    "warm start": {"availability": "static:0.4,warm_start=true", "rounds": ROUNDS},
    "asynchronous": {"availability": "always", "rounds": ROUNDS, "speed": "lognormal:50", "asynchronous": 2},
    "server optimizer": {"server_optimizer": "adam:lr=0.05"},
    "selection by loss": {"availability": "always", "rounds": ROUNDS, "select": "power-of-choice:2,4"},
    "diagnosed": {"diagnose": "every=3"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_composes_and_leaves_training_alone(quadratic, tmp_path, variant):
    """The state of the algorithm, the global model, the schedule, the training loss and the diagnoses are the same bits."""
    runs = {}
    for average in (0, 9):
        folder = tmp_path / str(average)
        runs[average] = models_of(**given(quadratic, **VARIANTS[variant]), algorithm="mimic", average=average, out=folder)
    (plain, models), (averaged, means) = runs.values()
    saved = [load_file(tmp_path / average / "checkpoint.safetensors") for average in "09"]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())
    assert saved[1].keys() - saved[0].keys() == {"average.w", "average.steps"}
    for key in ("clients", "train_loss", "diagnosis"):
        assert [_timeless(row.get(key)) for row in plain.rows] == [_timeless(row.get(key)) for row in averaged.rows]
    wanted = expected(models, [bool(row["clients"]) for row in plain.rows], 9)
    torch.testing.assert_close(torch.stack(means), torch.stack(wanted), rtol=1e-12, atol=1e-13)


def _timeless(value):
    return {k: v for k, v in value.items() if k != "seconds"} if isinstance(value, dict) else value


def test_rounds_without_updates_change_nothing(quadratic):
    """Neither before the first update nor later: the same updates with pauses between them end with the same bits."""
    busy = random_schedule(6, 6, seed=1, p=0.6)
    busy[3] = True  # random_schedule leaves this round empty
    pauses = np.insert(busy, [0, 0, 3, 3, 5], False, axis=0)
    local = mf.LocalSGD(steps=2, batch_size=None, lr=0.05)  # without random numbers, which depend on the round
    runs = [
        models_of(**quadratic, availability=mf.availability.Explicit(rows), local=local, algorithm="mimic", average=3)
        for rows in (busy, pauses)
    ]
    assert torch.equal(runs[0][0].params, runs[1][0].params)
    assert torch.equal(torch.stack(runs[1][1])[[0, 1]], torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(torch.stack(runs[1][1])[pauses.any(axis=1)], torch.stack(runs[0][1]))


def test_what_is_evaluated_and_kept_is_the_mean(quadratic, tmp_path):
    """The distance and the test loss in the rows, the best model, and the stored one."""
    best = mf.callbacks.BestModel("test_loss")
    history, means = models_of_with(best, **given(quadratic), algorithm="mimic", average=9, out=tmp_path)
    data = quadratic["data"]
    for row, mean in zip(history.rows, means, strict=True):
        assert row["distance"] == pytest.approx(float((mean - data.optimum).norm()), rel=1e-12)
        error = load(quadratic["model"], mean)(data.x_test.double()).detach() - data.y_test.double().view(-1, 1)
        assert row["test_loss"] == pytest.approx(float(0.5 * error.square().mean()), rel=1e-9)
    assert torch.equal(load_file(tmp_path / "best.safetensors")["params"], means[best.found[""].round])
    assert torch.equal(mf.read(tmp_path).params, history.params)
    assert torch.equal(torch.cat([p.detach().flatten() for p in history.model().parameters()]), history.params)


def models_of_with(callback, **arguments):
    found = []
    return mf.simulate(**arguments, callbacks=[callback, lambda info: found.append(info.params.clone())]), found


def with_batch_norm(digits, **more):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).double()
    settings = {"data": digits["data"], "split": digits["split"][:4], "availability": "static:0.6,warm_start=true", "rounds": 5}
    return {"model": model, **settings, "algorithm": "mimic", "local": mf.LocalSGD(steps=2, batch_size=8)} | more


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_running_statistics_are_averaged_and_counters_are_the_last(digits, tmp_path):
    torch.manual_seed(1)
    arguments, seen = with_batch_norm(digits), []
    mf.simulate(**arguments, each_round=lambda info: seen.append({k: v.clone() for k, v in info.model().named_buffers()}))
    history = mf.simulate(**arguments, average=9, out=tmp_path)
    assert all(row["clients"] for row in history.rows)
    for name in ("2.running_mean", "2.running_var"):
        wanted = sum(w * each[name] for w, each in zip(weights(5, 9), seen, strict=True))
        torch.testing.assert_close(history.buffers[name], wanted, rtol=1e-12, atol=1e-13)
        assert torch.equal(mf.read(tmp_path).buffers[name], history.buffers[name])
        assert torch.equal(dict(history.model().named_buffers())[name], history.buffers[name])
    assert torch.equal(history.buffers["2.num_batches_tracked"], seen[-1]["2.num_batches_tracked"])
    data = digits["data"]
    right = history.model().eval()(data.inputs(data.x_train, torch.float64)).argmax(1) == data.y_train
    assert history.client_accuracy == pytest.approx([float(right[part].double().mean()) for part in digits["split"][:4]])


def test_constant_buffers_stay_bit_equal():
    masked = torch.tensor([0.1, -math.inf, math.inf])
    mean = RunningMean(3, torch.zeros(2), {"mask": masked, "count": torch.tensor(0)})
    for count in range(1, 6):
        mean.add(torch.ones(2), {"mask": masked.clone(), "count": torch.tensor(count)})
    assert torch.equal(mean.buffers["mask"], masked)
    assert int(mean.buffers["count"]) == 5
    assert torch.equal(mean.w, torch.ones(2))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_statistics_in_half_precision_follow_late_rounds(kind):
    """What a late round adds is below the rounding step of the type: a mean in this type would stand still."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros(5, dtype=torch.float64)
    mean = RunningMean(1, torch.zeros(2), {"mean": torch.ones(5, dtype=kind)})
    for k in range(2000):
        now = (1 + k / 2000 + 0.1 * torch.randn(5, generator=generator)).to(kind)
        total += now.double()
        mean.add(torch.zeros(2), {"mean": now})
    assert mean.buffers["mean"].dtype == kind
    torch.testing.assert_close(mean.buffers["mean"].double(), total / 2000, rtol=float(torch.finfo(kind).eps), atol=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_clients_are_not_rounded_to_half_precision(kind):
    rows = torch.rand(7, 100, generator=torch.Generator().manual_seed(0)).to(kind)
    weights = torch.full((7,), 1 / 7)
    found = average_buffers({"mean": rows}, weights)["mean"]
    exact = rows.double().mean(0)
    low, high = (exact * (1 - 1e-6)).to(kind), (exact * (1 + 1e-6)).to(kind)  # near a tie, float32 may round to either side
    assert ((low <= found) & (found <= high)).all()


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_half_precision_resumes_to_the_same_bits(digits, tmp_path):
    arguments = with_batch_norm(digits, rounds=7, average=3)
    arguments["model"] = arguments["model"].bfloat16()
    end = mf.simulate(**arguments)
    interrupted(tmp_path, 4, **arguments)
    unfinished, four = mf.read(tmp_path), mf.simulate(**arguments | {"rounds": 4})
    assert all(torch.equal(value, unfinished.buffers[name]) for name, value in four.buffers.items())
    resumed = mf.simulate(**arguments, out=tmp_path)
    assert torch.equal(resumed.params, end.params)
    for name, value in end.buffers.items():
        assert resumed.buffers[name].dtype == value.dtype == arguments["model"].state_dict()[name].dtype
        assert torch.equal(value, resumed.buffers[name])


def interrupted(folder, t, **arguments):
    """The run, stopped after round t as a process that is killed: what follows the last checkpoint is lost."""

    def stop(row, total):
        if row["round"] == t:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**arguments, out=folder, checkpoint_every=2, progress=stop)


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
@pytest.mark.parametrize("more", [{}, {"algorithm": "fedsteer", "server_optimizer": "yogi"}, {"algorithm": "fedawe:evaluate=mean"}])
def test_interrupted_runs_resume_to_the_same_bits(digits, tmp_path, more):
    arguments = with_batch_norm(digits, rounds=7, average=3, **more)
    end = mf.simulate(**arguments)
    interrupted(tmp_path, 4, **arguments)
    unfinished = mf.read(tmp_path)
    assert torch.equal(unfinished.params, mf.simulate(**arguments | {"rounds": 4}).params)  # of the checkpoint after round 4
    assert torch.equal(unfinished.buffers["2.running_var"], mf.simulate(**arguments | {"rounds": 4}).buffers["2.running_var"])
    resumed = mf.simulate(**arguments, out=tmp_path)
    assert torch.equal(resumed.params, end.params)
    assert all(torch.equal(value, end.buffers[name]) for name, value in resumed.buffers.items())
    assert [row["test_loss"] for row in resumed.rows] == [row["test_loss"] for row in end.rows]
    for other in (0, 4):
        with pytest.raises(mf.UsageError, match=r"different run.*average"):
            mf.simulate(**arguments | {"average": other}, out=tmp_path)


def test_a_finished_run_can_be_extended(quadratic, tmp_path):
    arguments = {**quadratic, "local": LOCAL, "availability": "static:0.5", "average": 9}
    mf.simulate(**arguments, rounds=6, out=tmp_path)
    assert torch.equal(mf.simulate(**arguments, rounds=9, out=tmp_path).params, mf.simulate(**arguments, rounds=9).params)


def test_a_checkpoint_without_the_mean_is_refused(quadratic, tmp_path):
    arguments = given(quadratic, average=9)
    interrupted(tmp_path, 5, **arguments)
    folder = RunFolder.claim(tmp_path, RunFolder(tmp_path).config)
    tensors, facts = folder.load("checkpoint")
    kept = {key: value for key, value in facts.items() if key not in ("format", "crc32")}
    folder.save("checkpoint", {name: value for name, value in tensors.items() if name != "average.w"}, **kept)
    folder.close()
    with pytest.raises(mf.UsageError, match=r"does not fit.*average\.w"):
        mf.simulate(**arguments, out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched"])
def test_runs_with_and_without_it_train_together(engine):
    """In one group, whose models are evaluated in one pass: every run ends as it does alone."""
    base = mf.Experiment(rounds=6, dtype="float64", num_clients=8, epochs=1, engine=engine, availability="static:0.5")
    plan = {f"{name}-{a}": dataclasses.replace(base, algorithm=name, average=a) for name in ("mimic", "fedsteer") for a in (0, 9)}
    said = []
    together = run_plan(plan, notice=said.append)
    assert said == [f"engine {engine}"]
    for name, e in plan.items():
        alone = mf.run(dataclasses.replace(e, engine="plain"))
        torch.testing.assert_close(together[name].params, alone.params, rtol=1e-9, atol=1e-11)
        assert [row["test_accuracy"] for row in together[name].rows] == [row["test_accuracy"] for row in alone.rows]
    assert together["mimic-0"].rows[-1]["test_loss"] != together["mimic-9"].rows[-1]["test_loss"]
    assert [row["train_loss"] for row in together["mimic-0"].rows] == [row["train_loss"] for row in together["mimic-9"].rows]
    labels = [each.label for each in group(list(together.values()))]
    assert labels == ["MimiC, average 0.0", "MimiC, average 9.0", "FedSteer, average 0.0", "FedSteer, average 9.0"]


def test_settings_name_it():
    base, averaged = mf.Experiment(rounds=2), mf.Experiment(rounds=2, average=9)
    assert "average" not in base.to_dict()
    assert averaged.to_dict()["average"] == 9
    assert mf.Experiment(rounds=2, average=0).id == base.id != averaged.id
    assert mf.Experiment(average="9").average == averaged.average


@pytest.mark.parametrize("value", [0.5, -1, math.nan, math.inf, "x", None, True])
def test_invalid_values_are_refused(quadratic, value):
    for start in (lambda: mf.Experiment(average=value), lambda: mf.simulate(**given(quadratic), average=value)):
        with pytest.raises(mf.UsageError, match="average"):
            start()
