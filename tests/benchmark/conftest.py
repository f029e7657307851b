"""A tiny part of the benchmark, and results that need no training."""

import dataclasses

import pytest

from mimicfl.benchmark import suite
from mimicfl.benchmark.grid import Axis, Grid
from mimicfl.benchmark.progress import progress_of
from mimicfl.benchmark.records import register, write_cell
from mimicfl.benchmark.suite import PARTS, Part, PatternCase

ENVIRONMENT = {"mimicfl": "0.0", "torch": "2.0", "processor": "some CPU", "gpu": None, "engine": "plain", "started": "now"}


@pytest.fixture
def tiny(monkeypatch) -> Part:
    """Two algorithms with four configurations each, one pattern, four seeds, three rounds."""
    axes = (Axis("rate", (0.05, 0.1), 2.0), Axis("final", (0.5, 1.0)))
    part = dataclasses.replace(
        PARTS["digits"],
        name="tiny",
        settings=PARTS["digits"].settings | {"rounds": 3, "epochs": 1, "num_clients": 6},
        patterns=(PatternCase("half", "static:0.5", "half of the clients"),),
        grids=(Grid("fedavg", axes), Grid("mimic", axes)),
        seeds=4,
    )
    monkeypatch.setattr(suite, "PARTS", {"tiny": part})
    for place in ("mimicfl.report.benchmark", "mimicfl.cli.benchmark"):
        monkeypatch.setattr(f"{place}.PARTS", {"tiny": part})
    return part


def fill(part, records, tail, stages=("tuning", "final")):
    """Record results without training; `tail(cell, experiment)` is the accuracy of a run."""
    plan = register(records, part)
    for cell in part.cells():
        results = {}
        while (state := progress_of(cell, results)).missing and state.stage in stages:
            for e in state.missing:
                found = {"id": e.id, "plan": plan, "stage": state.stage, "seed": e.seed, "environment": ENVIRONMENT}
                value = tail(cell, e)
                found |= {"diverged": "in round 1"} if value is None else {"tail": value, "curve": [100, round(1000 * value)]}
                results[e.id] = found
        write_cell(records, cell, results)
