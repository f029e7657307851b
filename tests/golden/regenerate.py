"""Regenerates golden.json: python -m tests.golden.regenerate. Run it only if results change on purpose; the commit must give the reason."""

import json
from pathlib import Path

import mimicfl as mf

FILE = Path(__file__).with_name("golden.json")
CASES = {
    "digits-mimic": {"algorithm": "mimic", "availability": "static:0.2"},
    "digits-scaffold": {"algorithm": "scaffold", "availability": "bounded:6,phase=random"},
    "digits-mifa": {"algorithm": "mifa:never_seen=exclude", "availability": "time-varying:0.2", "partition": "dirichlet:0.5"},
    "digits-fedprox": {"algorithm": "fedprox:mu=0.1", "availability": "markov:0.2,0.5", "weighting": "samples", "partition": "classes:3"},
    "logistic-fedavg": {"dataset": "synthetic:logistic", "algorithm": "fedavg", "availability": "cyclic:6,2", "update": "mean", "lr": 0.1},
}


def measure(case: dict) -> dict:
    history = mf.run(mf.Experiment(rounds=6, epochs=2, dtype="float64", seed=11, **case))
    return {
        "clients": [row["clients"] for row in history.rows],
        "test_loss": [row["test_loss"] for row in history.rows],
        "norm": float(history.params.norm()),
        "first": history.params[:5].tolist(),
    }


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(measure(case))}" for name, case in CASES.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
