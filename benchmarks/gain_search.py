"""Which gain: the family of FedGain beside MIFA, FedVARP and MimiC, per dataset and availability pattern, each at its best rate.

    python benchmarks/gain_search.py digits --seeds 10                      (CPU, about a second per run on an idle core)
    python benchmarks/gain_search.py fmnist --seeds 10 --device cuda        (one H200: all runs of a cell train together)

For every cell the table gives the mean accuracy over the last tenth of the run at each algorithm's best rate, the regret (how far it
is behind the best algorithm of the cell) and its paired standard error. Finished runs are kept in --out and not run again.
"""

import argparse
from pathlib import Path

import numpy as np

import mimicfl as mf

RARE = "label-correlated:classes=[0,1,2,3,4],rare=0.03,common=0.17"
SEARCH = (RARE, "time-varying:0.1", "bounded:20", "dirichlet:0.1,labels=true")
HELD_OUT = ("circles:10", "circles:10,by=labels", "markov:0.05,0.45", "outages:up=0.05,down=0.3,p=0.6")
ALGORITHMS = ("fedavg", "fedau", "scaffold", "mifa", "fedvarp", "mimic", "fedgain:gain=0.5", "fedgain", "fedgain:gain=0.9")
PROBLEMS = {
    "digits": {"dataset": "digits", "rates": (0.1, 0.3)},
    "fmnist": {"dataset": "fmnist:standardise=false", "model": "lenet", "rates": (0.03, 0.1, 0.2)},
}


def late_mean(history: mf.History) -> float:
    """Mean accuracy over the last tenth of the rounds, in percent."""
    rows = [row["test_accuracy"] for row in history.rows[-max(1, len(history.rows) // 10) :] if row.get("test_accuracy") is not None]
    return 100 * float(np.mean(rows))


def measure(problem: str, cell: str, seeds: list[int], device: str, rounds: int, out: Path) -> dict[str, np.ndarray]:
    """Accuracy per seed of each algorithm, at the rate with the best mean."""
    best: dict[str, np.ndarray] = {}
    settings = dict(PROBLEMS[problem])
    for rate in settings.pop("rates"):
        e = mf.Experiment(**settings, availability=cell, lr=f"geometric:{rate},0.99", rounds=rounds, eval_every=2, device=device)
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in cell)
        for algorithm, runs in mf.compare(e, ALGORITHMS, seeds, out / problem / name / str(rate)).items():
            found = np.array([late_mean(run) for run in runs])
            if len(found) == len(seeds) and (algorithm not in best or found.mean() > best[algorithm].mean()):  # a diverged run is missing
                best[algorithm] = found
    return best


def show(cell: str, found: dict[str, np.ndarray]) -> None:
    top = max(found, key=lambda name: float(found[name].mean()))
    print(f"\n{cell}")
    for name, values in found.items():
        gap = values - found[top]
        error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else float("nan")
        print(f"  {name:28} {values.mean():6.2f}   regret {-gap.mean():5.2f} ± {error:.2f}   worst seed {values.min():6.2f}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("problem", choices=PROBLEMS)
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--first-seed", type=int, default=10, help="seeds 0-9 were used to choose the default")
    p.add_argument("--rounds", type=int, default=200)
    p.add_argument("--device", default="cpu")
    p.add_argument("--cells", nargs="*", default=[*SEARCH, *HELD_OUT])
    p.add_argument("--out", type=Path, default=Path("runs/gain-search"))
    given = p.parse_args()
    seeds = list(range(given.first_seed, given.first_seed + given.seeds))
    for cell in given.cells:
        show(cell, measure(given.problem, cell, seeds, given.device, given.rounds, given.out))


if __name__ == "__main__":
    main()
