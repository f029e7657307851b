"""Candidates beside MIFA, FedVARP, MimiC, SCAFFOLD and FedSteer, each at its best rate under every availability pattern.

    python benchmarks/gain_search.py digits --seeds 10                                  (CPU, about a second per run)
    python benchmarks/gain_search.py fmnist --device cuda --minutes 4 --out results     (one GPU: up to GROUP runs train together)

First every algorithm trains with all rates on tuning seeds; then with the best rate of the pattern on the seeds that are compared, one
seed after the other. For every pattern the table gives the mean accuracy over the last tenth of the run, how far it is behind the best
algorithm, and the paired standard error; at the end the means over the patterns. The accuracies are kept in OUT/NAME.json: what is there
is not run again, so the same command continues after --minutes. An algorithm that the package does not have is in gain_candidates.py.
`mimic average=9` is MimiC with averaged models, which records/gain/fmnist.json calls `mimic-averaged`, or `fedgain:window=9`.
"""

import argparse
import json
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import gain_candidates  # noqa: F401  (registers its algorithms)
import numpy as np

from mimicfl.benchmark import suite
from mimicfl.errors import Diverged
from mimicfl.experiments.execute import run_plan
from mimicfl.settings import Experiment, from_dict

RIVALS = ("fedavg", "mifa", "fedvarp", "mimic", "scaffold", "fedsteer")
CANDIDATES = (
    *(f"{name} average=9" for name in ("mifa", "mimic", "fedgain", "fedsteer")),
    "fedsteer:horizon=400",
    *(f"fedsteer:{options}horizon=400 average=9" for options in ("", "gain=0.5,", "gain=0.75,follow=direction,")),
    *(f"damped:share={share} average=9" for share in (0.5, 0.8)),
)
PATTERNS = {p.name: p.availability for p in suite.PATTERNS} | {
    "time-varying": "time-varying:0.1",
    "labels-dirichlet": "dirichlet:0.1,labels=true",
}
SEARCHED = ("time-varying", "label-tied", "bounded", "labels-dirichlet", "phones")
PROBLEMS = {  # settings and first rates
    "digits": (suite.DIGITS, (0.1, 0.3)),
    "fmnist": (suite.FASHION | {"rounds": 100}, (0.03, 0.1)),
    "cifar10": (suite.CIFAR | {"rounds": 100}, (0.03, 0.1)),
    "digits80": (suite.DIGITS | {"epochs": 80}, (0.1, 0.3)),  # 240 local steps
    "lenet15": ({key: value for key, value in suite.FASHION.items() if key != "epochs"} | {"steps": 15}, (0.01, 0.03, 0.1, 0.3)),
}
CHANCE = 10.0  # percent: what a run that diverges scores
Accuracies = dict[str, float]  # by "pattern|algorithm|rate|final|seed", in percent; final is the last rate as a share of the first


def experiment(problem: str, key: str, rounds: int | None, device: str) -> Experiment:
    """The run of a key."""
    settings, _ = PROBLEMS[problem]
    pattern, algorithm, rate, final, seed = key.split("|")
    rounds = rounds or int(settings["rounds"])
    spec, _, average = algorithm.partition(" average=")
    own = {"algorithm": spec, "average": float(average or 0), "availability": PATTERNS[pattern], "seed": int(seed)}
    own |= {"rounds": rounds, "device": device}
    own |= {"engine": "native"} if device.startswith("cuda") and problem != "cifar10" else {}
    return from_dict(settings | own | {"lr": f"geometric:{rate},{float(final) ** (1 / rounds):.6g}"}, key)


def renamed(key: str) -> str:
    """A key of an earlier file, in which averaged models were an option of some algorithms, or an algorithm of their own."""
    pattern, algorithm, *rest = key.split("|")
    found = re.sub(r"-averaged(:window=9)?$|[:,]window=9$", " average=9", algorithm)
    return "|".join([pattern, found, *rest])


def train(problem: str, keys: Sequence[str], rounds: int | None, device: str) -> Accuracies:
    """Train the runs of these keys as one group; the accuracies of the last tenth of the rounds, averaged."""
    plan = {str(i): experiment(problem, key, rounds, device) for i, key in enumerate(keys)}
    key_of = {(e.algorithm, e.average, e.availability, e.lr, e.seed): key for key, e in zip(keys, plan.values(), strict=True)}
    found: dict[str, dict[int, float]] = {key: {} for key in keys}

    def note(e: Experiment, row: dict[str, float], last: int) -> None:
        if row.get("test_accuracy") is not None:
            found[key_of[e.algorithm, e.average, e.availability, e.lr, e.seed]][int(row["round"])] = row["test_accuracy"]

    try:
        run_plan(plan, progress=note)
    except Diverged as error:  # the other runs were finished
        print(error, flush=True)
    length = rounds or int(PROBLEMS[problem][0]["rounds"])
    return {key: late_mean(rows, length) for key, rows in found.items()}


def late_mean(rows: dict[int, float], rounds: int) -> float:
    late = [accuracy for t, accuracy in rows.items() if t >= rounds - max(1, rounds // 10)]
    ended = bool(rows) and max(rows) >= rounds - 1
    return 100 * float(np.mean(late)) if ended else CHANCE


def scores(known: Accuracies, pattern: str, algorithm: str, seeds: Sequence[int]) -> dict[tuple[str, str], dict[int, float]]:
    """The accuracies of each (rate, final) by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for key, accuracy in known.items():
        where, name, rate, final, seed = key.split("|")
        if (where, name) == (pattern, algorithm) and int(seed) in seeds:
            found.setdefault((rate, final), {})[int(seed)] = accuracy
    return found


def best_config(known: Accuracies, pattern: str, algorithm: str, tuning: Sequence[int]) -> tuple[str, str]:
    found = scores(known, pattern, algorithm, tuning)
    return max(found, key=lambda config: float(np.mean(list(found[config].values()))))


def show(known: Accuracies, given: argparse.Namespace, tuning: Sequence[int], final: Sequence[int]) -> None:
    """One table per pattern, over the seeds that all algorithms have, and the means over the patterns."""
    regrets: dict[str, list[float]] = {a: [] for a in given.algorithms}
    means: dict[str, list[float]] = {a: [] for a in given.algorithms}
    for pattern in given.patterns:
        best = {a: best_config(known, pattern, a, tuning) for a in given.algorithms}
        runs = {a: scores(known, pattern, a, final).get(best[a], {}) for a in given.algorithms}
        shared = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
        values = {a: np.array([runs[a][s] for s in shared]) for a in given.algorithms}
        if not shared:
            print(f"\n{pattern}: no seed has been finished by all")
            continue
        top = max(values, key=lambda a: float(values[a].mean()))
        print(f"\n{pattern}, {len(shared)} seeds")
        for name in sorted(values, key=lambda a: -float(values[a].mean())):
            gap = values[top] - values[name]
            error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else float("nan")
            rate, last = best[name]
            print(f"  {name:36} {values[name].mean():6.2f}   behind {gap.mean():5.2f} ± {error:.2f}   rate {rate}, final {last}")
            regrets[name].append(float(gap.mean()))
            means[name].append(float(values[name].mean()))
    if any(means.values()):
        print(f"\n{'over the patterns':38} {'mean':>6}   mean and largest distance from the best")
        for name in sorted(means, key=lambda a: -float(np.mean(means[a]))):
            print(f"  {name:36} {np.mean(means[name]):6.2f}   {np.mean(regrets[name]):5.2f}  {np.max(regrets[name]):5.2f}", flush=True)


def stages(known: Accuracies, given: argparse.Namespace, tuning: Sequence[int], final: Sequence[int]) -> Iterator[list[str]]:
    """The keys of each part of the search. A part is not asked for before the parts before it are known."""
    cells = [(p, a) for p in given.patterns for a in given.algorithms]
    for seed in tuning:
        yield [f"{p}|{a}|{rate:g}|{last:g}|{seed}" for p, a in cells for rate in given.rates for last in given.finals]
    best = {(p, a): best_config(known, p, a, tuning) for p, a in cells}
    yield ["|".join([p, a, *best[p, a], str(seed)]) for seed in final for p, a in cells]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("problem", choices=PROBLEMS)
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--first-seed", type=int, default=610, help="the candidates were designed with seeds 100 to 109 and 400 to 409")
    p.add_argument("--tuning-seeds", type=int, default=1)
    p.add_argument("--first-tuning-seed", type=int, default=600)
    p.add_argument("--rounds", type=int)
    p.add_argument("--rates", nargs="*", type=float, help="first rates; those of the problem if not given")
    p.add_argument("--finals", nargs="*", type=float, default=[0.05, 0.5], help="the last rate as a share of the first")
    p.add_argument("--device", default="cpu")
    p.add_argument("--group", type=int, default=300, help="how many runs train together at most")
    p.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no group that would exceed this, judged by the slowest so far"
    )
    p.add_argument("--patterns", nargs="*", default=SEARCHED, choices=PATTERNS)
    p.add_argument("--algorithms", nargs="*", default=[*RIVALS, *CANDIDATES])
    p.add_argument("--out", type=Path, default=Path("runs/gain-search"))
    return p


def main() -> None:
    given = parser().parse_args()
    given.rates = given.rates or PROBLEMS[given.problem][1]
    warnings.simplefilter("ignore", UserWarning)
    file = given.out / f"{given.problem}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    known: Accuracies = {renamed(key): value for key, value in json.loads(file.read_text()).items()} if file.exists() else {}
    tuning = range(given.first_tuning_seed, given.first_tuning_seed + given.tuning_seeds)
    final = range(given.first_seed, given.first_seed + given.seeds)
    begun, slowest = time.monotonic(), 0.0
    for keys in stages(known, given, tuning, final):
        todo = [key for key in keys if key not in known]
        for group in (todo[i : i + given.group] for i in range(0, len(todo), given.group)):
            if (time.monotonic() - begun + slowest * len(group)) / 60 > given.minutes:
                print(f"stopped before a group of {len(group)} runs; the same command continues", flush=True)
                if len(scores(known, given.patterns[-1], given.algorithms[-1], tuning)) == len(given.rates) * len(given.finals):
                    show(known, given, tuning, final)
                return
            before = time.monotonic()
            known |= train(given.problem, group, given.rounds, given.device)
            file.write_text(json.dumps(known, indent=0, sort_keys=True))
            slowest = max(slowest, (time.monotonic() - before) / len(group))
            print(f"{len(group)} runs in {time.monotonic() - before:.0f} s, {len(known)} known", flush=True)
    show(known, given, tuning, final)


if __name__ == "__main__":
    main()
