"""Diagnoses of every algorithm match a reference implementation, and they do not change the run."""

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.metrics.diagnostics import Diagnose, parse_diagnose
from tests.conftest import BUILT_IN

ALGORITHMS = ["fedprox:mu=0.1" if name == "fedprox" else name for name in BUILT_IN]
ROUNDS = 9


def available():
    pattern = np.random.default_rng(4).random((ROUNDS, 6)) < 0.5
    pattern[0], pattern[4] = True, False
    return pattern


def gradients(problem, w):
    """Reference implementation: all clients' gradients of half the mean squared error, [N, d]."""
    x, y = problem["data"].x_train.double().numpy(), problem["data"].y_train.double().numpy()[:, 0]
    return np.array([x[rows].T @ (x[rows] @ w - y[rows]) / len(rows) for rows in problem["split"]])


def simulate(problem, algorithm, rounds=ROUNDS, **more):
    settings = {"local": mf.LocalSGD(steps=3, batch_size=4, lr=0.02), "availability": mf.availability.Explicit(available())}
    return mf.simulate(**problem, algorithm=algorithm, rounds=rounds, **settings | more)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["sum", "mean"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_diagnoses_match_the_reference(quadratic, algorithm, update):
    history = simulate(quadratic, algorithm, update=update, diagnose="every=1")
    models = [np.zeros(5)] + [simulate(quadratic, algorithm, t, update=update).params.numpy() for t in range(1, ROUNDS + 1)]
    for t, row in enumerate(history.rows):
        active = np.flatnonzero(available()[t])
        if not len(active):
            assert "diagnosis" not in row
            continue
        found = row["diagnosis"]
        g = gradients(quadratic, models[t])
        rate = row["global_lr"] * (3 if update == "sum" else 1)
        v, full = (models[t] - models[t + 1]) / rate, g.mean(axis=0)
        expected = {"grad2": full @ full, "v2": v @ v, "E": (v - full) @ (v - full), "gamma": np.sum((g[active].mean(axis=0) - full) ** 2)}
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-15), (t, key)
        assert found["kappa2"] == pytest.approx(np.sum((g - full) ** 2, axis=1).tolist(), rel=1e-5)
        assert found["eta"] == pytest.approx(rate)
        assert found["L"] == pytest.approx(max(np.linalg.eigvalsh(x.T @ x / len(x))[-1] for x in samples(quadratic)))
        assert found["f_low"] <= found["f"]


def samples(problem):
    return [problem["data"].x_train.double().numpy()[rows] for rows in problem["split"]]


def test_the_direction_of_mimic_is_the_gradient_plus_A1_plus_A2(quadratic):
    """Equation (approximate) of the paper for K = 1 and full batches. A_1 is the error of the round in which a client last participated."""
    history = simulate(quadratic, "mimic", local=mf.LocalSGD(steps=1, batch_size=None, lr=0.05), update="mean", diagnose="every=1")
    found = {row["round"]: row["diagnosis"] for row in history.rows if "diagnosis" in row}
    for t in [t for t in found if t]:
        assert found[t]["A"] == pytest.approx(found[t]["E"], rel=1e-9)
        before = [np.flatnonzero(available()[:t, i])[-1] for i in np.flatnonzero(available()[t])]
        assert found[t]["A1"] == pytest.approx(np.mean([found[s]["E"] for s in before]), rel=1e-9, abs=1e-25)
        assert found[t]["newcomers"] == 0
        assert found[t]["staleness"]["active"] == sorted(t - s for s in before)
    assert found[0]["A"] is None
    assert found[0]["E"] == pytest.approx(0, abs=1e-20)


def test_newcomers_contribute_their_full_deviation(quadratic):
    schedule = np.array([[1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0]], dtype=bool)
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.05)
    given = {"local": local, "update": "mean", "availability": mf.availability.Explicit(schedule)}
    rows = simulate(quadratic, "mimic", 2, diagnose="every=1", **given).rows
    w1 = simulate(quadratic, "mimic", 1, **given).params.numpy()
    g = gradients(quadratic, w1)
    expected = np.sum((g[[2, 3]] - g.mean(axis=0)) ** 2) / 3
    assert rows[1]["diagnosis"]["newcomers"] == pytest.approx(expected)
    assert rows[0]["diagnosis"]["newcomers"] == pytest.approx(rows[0]["diagnosis"]["gamma"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_diagnostics_do_not_change_the_run(quadratic, algorithm):
    diagnosed, plain = simulate(quadratic, algorithm, diagnose="every=2"), simulate(quadratic, algorithm, diagnose="off")
    assert torch.equal(diagnosed.params, plain.params)
    assert [row["round"] for row in diagnosed.rows if "diagnosis" in row] == [0, 1, 3, 5, 7, 8]
    assert not any("diagnosis" in row for row in plain.rows)
    strip = [{k: v for k, v in row.items() if k not in ("diagnosis", "seconds")} for row in diagnosed.rows]
    assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in plain.rows]


def test_no_gradient_is_computed_without_diagnostics(quadratic, monkeypatch):
    from mimicfl.theory.population import Population

    def refuse(*_):
        raise AssertionError("computed a gradient")

    monkeypatch.setattr(Population, "gradients", refuse)
    simulate(quadratic, "mimic", diagnose=None)
    with pytest.raises(AssertionError, match="computed a gradient"):
        simulate(quadratic, "mimic", diagnose=4)


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_resumed_runs_have_the_same_diagnoses(quadratic, tmp_path, stop):
    """A_1 and A_2 need values of earlier rounds, which the checkpoint holds."""

    def interrupt(row, _):
        if row["round"] == stop:
            raise KeyboardInterrupt

    given = {"diagnose": "every=3", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        simulate(quadratic, "mimic", out=tmp_path / "run", progress=interrupt, **given)
    again = simulate(quadratic, "mimic", out=tmp_path / "run", **given)
    whole = simulate(quadratic, "mimic", diagnose="every=3")

    def figures(history):
        return [{k: v for k, v in row["diagnosis"].items() if k != "seconds"} for row in history.rows if "diagnosis" in row]

    assert figures(again) == figures(whole)
    assert any(found["A2"] for found in figures(whole))
    stored = mf.read(tmp_path / "run").rows
    assert stored == again.rows


@pytest.mark.slow
def test_diagnosis_of_a_network_matches_autograd(digits):
    """Gradient norm and objective bias of a float32 network match autograd over the samples of all clients."""
    more = {"rounds": 4, "availability": "static:0.3,warm_start=true", "local": mf.LocalSGD(epochs=1, lr=0.05)}
    rows = mf.simulate(**digits, **more, diagnose="every=4,power=3").rows
    w = mf.simulate(**digits, **more | {"rounds": 3}).model()
    g = []
    for part in digits["split"]:
        w.zero_grad()
        torch.nn.functional.cross_entropy(
            w(digits["data"].inputs(digits["data"].x_train[part], torch.float32)), digits["data"].y_train[part]
        ).backward()
        g.append(torch.cat([p.grad.reshape(-1) for p in w.parameters()]).double())
    full = torch.stack(g).mean(dim=0)
    found = rows[3]["diagnosis"]
    assert found["grad2"] == pytest.approx(float(full.square().sum()), rel=1e-4)
    here = torch.stack([g[i] for i in rows[3]["clients"]]).mean(dim=0)
    assert found["gamma"] == pytest.approx(float((here - full).square().sum()), rel=1e-4)
    assert found["L_how"] == "estimate"
    assert found["L"] > 0
    assert found["sigma2"] > 0
    assert rows[3]["class_accuracy"]


def images():
    """Convolutions, BatchNorm and dropout, on images stored as bytes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, size=(60, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, size=60)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 3)]
    split = [np.arange(60)[k::4] for k in range(4)]
    return {"model": nn.Sequential(*layers), "data": mf.Data(x, y, x[:9], y[:9]), "split": split}


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_dropout_and_batchnorm_are_in_evaluation_mode():
    problem = images()
    given = {"local": mf.LocalSGD(epochs=1, batch_size=5, lr=0.05), "availability": "static:0.7,warm_start=true"}
    row = mf.simulate(**problem, rounds=3, diagnose="every=3", **given).rows[2]
    model = mf.simulate(**problem, rounds=2, **given).model().eval()
    g = []
    for part in problem["split"]:
        model.zero_grad()
        nn.functional.cross_entropy(
            model(problem["data"].inputs(problem["data"].x_train[part], torch.float32)), problem["data"].y_train[part]
        ).backward()
        g.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double())
    assert row["diagnosis"]["grad2"] == pytest.approx(float(torch.stack(g).mean(dim=0).square().sum()), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_diagnoses_match_on_a_gpu(quadratic):
    work = {"rounds": 2, "availability": "static:0.7,warm_start=true", "local": mf.LocalSGD(steps=1, batch_size=None)}
    for problem, keys in ((quadratic, ("grad2", "gamma", "f", "E", "L")), (images(), ("grad2", "gamma", "f"))):  # dropout masks differ
        found = [mf.simulate(**problem, **work, diagnose="every=1", device=device).rows[0]["diagnosis"] for device in ("cpu", "cuda")]
        for key in keys:
            assert found[1][key] == pytest.approx(found[0][key], rel=1e-3, abs=1e-6)


def test_sample_weights_and_unequal_splits(quadratic):
    """With another split or other weights the optimum of the data is not the minimum of f, so it gives no lower bound."""
    split = [part[: 3 + k] for k, part in enumerate(quadratic["split"])]
    problem = quadratic | {"split": split}
    assert simulate(quadratic, "fedavg", 1, diagnose=1).rows[0]["diagnosis"]["f_low"] > 0
    assert simulate(problem, "fedavg", 1, diagnose=1).rows[0]["diagnosis"]["f_low"] == 0
    found = simulate(problem, "fedavg", 1, weighting="samples", diagnose=1).rows[0]["diagnosis"]
    g, sizes = gradients(problem, np.zeros(5)), np.array([len(part) for part in split])
    assert found["grad2"] == pytest.approx(np.sum((sizes @ g / sizes.sum()) ** 2))
    assert found["gamma"] == pytest.approx(0, abs=1e-20)


def test_valid_settings():
    assert parse_diagnose("every=10") == parse_diagnose("10") == parse_diagnose(10) == parse_diagnose("every=10,parts=true") == Diagnose(10)
    assert parse_diagnose("off") is parse_diagnose(None) is parse_diagnose("") is None
    assert parse_diagnose("every=1,parts=false,power=3") == Diagnose(1, False, 3)


@pytest.mark.parametrize(
    "given", ["every=0", "every=x", "often", "every=10,depth=3", "3,4", -1, 2.5, "every=2,parts=maybe", "every=2,power=-1"]
)
def test_invalid_settings_are_refused(given):
    with pytest.raises(mf.UsageError):
        parse_diagnose(given)
