"""The bounds hold for measured curves of simulated runs on the built-in problems."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.report import theory_figures
from mimicfl.report.summary import group
from mimicfl.report.theory import bounded, check
from mimicfl.report.theory_rows import diagnosed

pytestmark = pytest.mark.slow

WORK = {"num_clients": 6, "batch_size": "full", "update": "mean", "dtype": "float64", "rounds": 40, "diagnose": "every=1"}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dataset", ["synthetic:quadratic", "synthetic:logistic"])
def test_bounds_hold_in_the_simulator(dataset, steps):
    """Exact constants, rates within the mixing certificate, local rates within Lemma 2's condition."""
    trial = mf.run(mf.Experiment(dataset=dataset, steps=steps, availability="static:0.6,warm_start=true", lr=1e-3, **WORK))
    L = diagnosed(trial)[0]["L"]
    assert diagnosed(trial)[0]["L_how"] == "exact"
    lr = 0.9 / (4 * L * steps) if steps > 1 else 0.01
    for row in trial.rows:
        row["local_lr"] = lr
    rate = 0.999 * check(trial, L, steps).constant
    e = mf.Experiment(dataset=dataset, steps=steps, availability="static:0.6,warm_start=true", lr=lr, global_lr=rate, **WORK)
    for algorithm, names in (("fedavg", {"Theorem 1"}), ("mimic", {"mixing bound"}), ("scaffold", set())):
        found = bounded(mf.run(mf.Experiment(**e.to_dict() | {"algorithm": algorithm})))
        assert names | {"Lemma 1 with the measured E_t"} <= set(found.bounds)
        for name, line in found.bounds.items():
            assert np.all(found.measured <= line * (1 + 1e-9)), (algorithm, name)
        lemma1 = found.bounds["Lemma 1 with the measured E_t"]
        assert (found.measured / lemma1).max() > 0.3


def test_lemma_1_bounds_runs_with_mini_batches():
    """Lemma 1 holds along every path, including the noise of mini-batches."""
    work = WORK | {"batch_size": 10, "update": "sum"}
    for algorithm in ("fedavg", "mimic", "mifa", "scaffold", "fedprox"):
        e = mf.Experiment(dataset="synthetic:quadratic", algorithm=algorithm, epochs=1, availability="static:0.4", lr=0.005, **work)
        history = mf.run(e)
        found = bounded(history)
        assert diagnosed(history)[1]["sigma2"] > 0
        assert np.all(found.measured <= found.bounds["Lemma 1 with the measured E_t"] * (1 + 1e-9)), algorithm


def diagnosed_runs(**varied):
    settings = WORK | {"dataset": "synthetic:quadratic", "steps": 1, "rounds": 3, "availability": "static:0.6", "lr": 1e-3}
    [(key, values)] = varied.items()
    return group([mf.run(mf.Experiment(algorithm=name, **settings | {key: v})) for name in ("fedavg", "mifa", "mimic") for v in values])


def test_figures_of_a_diagnosed_sweep_show_the_best_rates():
    drawn, notes = theory_figures.draw(diagnosed_runs(lr=[1e-3, 1e-2, 3e-2]))
    assert notes[0].startswith("These figures show 3 of 9 diagnosed configurations, each algorithm at its best rate")
    assert len(drawn["errors"].axes[0].lines) == 3


def test_many_diagnosed_configurations_are_listed_below_the_figures():
    """Inside the axes, long legends would cover the curves."""
    drawn, notes = theory_figures.draw(diagnosed_runs(availability=["static:0.6", "static:0.7", "static:0.8"]))
    assert notes[0].startswith("These figures show 8 of 9 diagnosed configurations, the first 8")
    for name in ("norms", "errors", "parts"):
        [legend] = drawn[name].legends
        assert len(legend.get_texts()) >= 8
        drawn[name].draw_without_rendering()
