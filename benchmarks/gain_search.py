"""FedSteer and FedGain beside SCAFFOLD, MIFA, FedVARP and MimiC, per availability pattern of the benchmark, each at its best rate.

    python benchmarks/gain_search.py digits --seeds 10                                    (CPU, about a second per run)
    python benchmarks/gain_search.py fmnist --device cuda --minutes 4.5 --out results     (one GPU: all runs of a seed train together)

One seed after the other, with all patterns, algorithms and rates, until the seeds or the minutes are used up. For every pattern the table
gives the mean accuracy over the last tenth of the run at each algorithm's best rate, how far it is behind the best algorithm, and the
paired standard error. The accuracies are kept in OUT/NAME.json, and what is there is not run again.
"""

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mimicfl.benchmark.suite import CIFAR, DIGITS, FASHION, PATTERNS
from mimicfl.errors import Diverged
from mimicfl.experiments.execute import carry_out
from mimicfl.settings import Experiment, from_dict

ALGORITHMS = ("fedsteer", "fedsteer:gain=0.5", "fedsteer:gain=0.6,follow=direction", "scaffold", "mimic", "mifa", "fedvarp")
PROBLEMS = {  # settings and configurations: the first rate, and the last as a share of it
    "digits": (DIGITS, ((0.3, 0.5), (0.3, 0.2), (0.3, 0.05), (0.1, 0.5))),
    "fmnist": (FASHION | {"rounds": 100}, ((0.03, 0.2), (0.1, 0.2), (0.1, 0.05))),
    "cifar10": (CIFAR | {"rounds": 100}, ((0.03, 0.2), (0.1, 0.2))),
}
CHANCE = 0.1  # what a run that diverges scores
Accuracies = dict[str, float]  # by "pattern|algorithm|rate|final|seed", in percent


def experiment(problem: str, key: str, rounds: int | None, device: str) -> Experiment:
    """The run of a key."""
    settings, _ = PROBLEMS[problem]
    pattern, algorithm, rate, final, seed = key.split("|")
    rounds = rounds or int(settings["rounds"])
    availability = next(p.availability for p in PATTERNS if p.name == pattern)
    own = {"availability": availability, "algorithm": algorithm, "seed": int(seed), "rounds": rounds, "device": device}
    return from_dict(settings | own | {"lr": f"geometric:{rate},{float(final) ** (1 / rounds):.6g}"}, key)


def train(problem: str, keys: Sequence[str], rounds: int | None, device: str) -> Accuracies:
    """Train the runs of these keys as one group; the accuracies of the last tenth of the rounds, averaged."""
    plan = {key.replace("|", "-").replace(":", "-"): experiment(problem, key, rounds, device) for key in keys}
    key_of = {(e.algorithm, e.availability, e.lr, e.seed): key for key, e in zip(keys, plan.values(), strict=True)}
    found: dict[str, dict[int, float]] = {key: {} for key in keys}

    def note(e: Experiment, row: dict[str, float], last: int) -> None:
        if row.get("test_accuracy") is not None:
            found[key_of[e.algorithm, e.availability, e.lr, e.seed]][int(row["round"])] = row["test_accuracy"]

    try:
        carry_out(plan, progress=note)
    except Diverged as error:  # the other runs were finished
        print(error, flush=True)
    return {key: 100 * late_mean(rows, next(iter(plan.values())).rounds) for key, rows in found.items()}


def late_mean(rows: dict[int, float], rounds: int) -> float:
    late = [accuracy for t, accuracy in rows.items() if t >= rounds - max(1, rounds // 10)]
    ended = bool(rows) and max(rows) >= rounds - 1
    return float(np.mean(late)) if ended else CHANCE


def show(known: Accuracies, patterns: Sequence[str], algorithms: Sequence[str]) -> None:
    """One table per pattern, over the seeds that all algorithms have."""
    for pattern in patterns:
        best = {a: best_rate(known, pattern, a) for a in algorithms}
        top = max(best, key=lambda a: float(best[a][1].mean()))
        print(f"\n{pattern}")
        for name, (config, values) in best.items():
            gap = values - best[top][1]
            error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else float("nan")
            print(
                f"  {name:36} {values.mean():6.2f}   behind {-gap.mean():5.2f} ± {error:.2f}   rate {config[0]}, final {config[1]}",
                flush=True,
            )


def best_rate(known: Accuracies, pattern: str, algorithm: str) -> tuple[tuple[str, str], np.ndarray]:
    """The configuration with the best mean, and its accuracies in the order of the seeds."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for key, accuracy in known.items():
        where, name, rate, final, seed = key.split("|")
        if (where, name) == (pattern, algorithm):
            found.setdefault((rate, final), {})[int(seed)] = accuracy
    values = {config: np.array([by_seed[s] for s in sorted(by_seed)]) for config, by_seed in found.items()}
    return max(values.items(), key=lambda item: float(item[1].mean()))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("problem", choices=PROBLEMS)
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--first-seed", type=int, default=200, help="FedSteer was designed on digits with seeds 100 to 109")
    p.add_argument("--rounds", type=int)
    p.add_argument("--device", default="cpu")
    p.add_argument("--minutes", type=float, default=float("inf"), help="begin no seed that would exceed this, judged by the last one")
    p.add_argument("--patterns", nargs="*", default=["label-tied", "heterogeneous", "exchangeable", "phones"])
    p.add_argument("--algorithms", nargs="*", default=ALGORITHMS)
    p.add_argument("--out", type=Path, default=Path("runs/gain-search"))
    given = p.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    file = given.out / f"{given.problem}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    known: Accuracies = json.loads(file.read_text()) if file.exists() else {}
    begun, longest = time.monotonic(), 0.0
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        configs = PROBLEMS[given.problem][1]
        keys = [f"{p}|{a}|{rate:g}|{final:g}|{seed}" for p in given.patterns for a in given.algorithms for rate, final in configs]
        if (time.monotonic() - begun + longest) / 60 > given.minutes:
            break
        before = time.monotonic()
        if todo := [key for key in keys if key not in known]:
            known |= train(given.problem, todo, given.rounds, given.device)
            file.write_text(json.dumps(known, indent=0, sort_keys=True))
        longest = max(longest, time.monotonic() - before)
        print(f"seed {seed}: {time.monotonic() - before:.0f} s", flush=True)
    show(known, given.patterns, given.algorithms)


if __name__ == "__main__":
    main()
