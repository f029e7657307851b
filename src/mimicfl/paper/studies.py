"""Declarations of all experiments of the paper's Section VI, and of additional ones: what varies, the algorithms, the published results."""

from typing import Any

from ..errors import UsageError, nearest
from . import published
from .study import Study


def _ratios(*ratios: float) -> dict[str, dict[str, Any]]:
    return {f"{round(100 * ratio)}%": {"availability": f"time-varying:{ratio:g},warm_start=true"} for ratio in ratios}


def _gaps(*most: int) -> dict[str, dict[str, Any]]:
    return {str(tau): {"availability": f"bounded:{tau}"} for tau in most}


def _probabilities(*chances: float) -> dict[str, dict[str, Any]]:
    return {f"{p:g}": {"availability": f"static:{p:g},warm_start=true"} for p in chances}


def _classes(*numbers: int) -> dict[str, dict[str, Any]]:
    """Two classes per client use the two shards of all other experiments."""
    return {str(k): {"availability": "static:0.1,warm_start=true"} | ({"partition": f"classes:{k}"} if k > 2 else {}) for k in numbers}


TEN = _ratios(0.1)["10%"]
STANDARDISED = {"dataset": "fmnist"}
NO_DROPOUTS = {"nobody drops out": {"availability": "always"}}

STUDIES = {
    study.name: study
    for study in [
        Study(
            "table-4-fmnist",
            "Table IV, Fashion-MNIST",
            "Test accuracy after 200 model uploads. A fraction P of the clients is available, drawn by weights that change every round.",
            "fmnist",
            "P",
            _ratios(0.1, 0.3, 0.5),
            published=published.TABLE_4_FMNIST,
            drawn="curves",
        ),
        Study(
            "table-4-cifar10",
            "Table IV, CIFAR-10",
            "Test accuracy after 400 model uploads. A fraction P of the clients is available, drawn by weights that change every round.",
            "cifar10",
            "P",
            _ratios(0.1, 0.3, 0.5),
            published=published.TABLE_4_CIFAR10,
            drawn="curves",
        ),
        Study(
            "table-3",
            "Table III, Fashion-MNIST",
            "Test accuracy after 200 model uploads. Client i is available every tau_i rounds, with tau_i uniform up to tau_max. "
            "(The authors' script draws the gaps differently; see the study `gaps`.)",
            "fmnist",
            "tau_max",
            _gaps(20, 50, 100),
            published=published.TABLE_3,
        ),
        Study(
            "table-5",
            "Table V, CIFAR-10",
            "Test accuracy after 400 model uploads. Each client is available with probability 0.1; "
            "the columns vary the number of classes that it holds.",
            "cifar10",
            "classes per client",
            _classes(2, 5, 8, 10),
            published=published.TABLE_5,
        ),
        Study(
            "figure-4",
            "Figure 4, Fashion-MNIST",
            "Test accuracy during training. Client i is available every tau_i rounds, tau_max = 20.",
            "fmnist",
            "tau_max",
            _gaps(20),
            drawn="curves",
            claimed=False,  # counted in Table III
        ),
        Study(
            "figure-5",
            "Figure 5, CIFAR-10",
            "Test accuracy during training. Client i is available every tau_i rounds, tau_max = 20.",
            "cifar10",
            "tau_max",
            _gaps(20),
            drawn="curves",
        ),
        Study(
            "figure-6",
            "Figure 6, Fashion-MNIST",
            "Test accuracy after 200 model uploads against the probability p that a client is available. "
            "(The paper's text gives neither the accuracies of its figure nor the values of p; these values of p are ours.)",
            "fmnist",
            "p",
            _probabilities(0.05, 0.1, 0.2, 0.3),
            ("fedavg", "mifa", "mimic"),
            drawn="against",
        ),
        Study(
            "figure-7",
            "Figure 7, Fashion-MNIST",
            "Test accuracy during training. Each client is available with probability 0.1.",
            "fmnist",
            "p",
            _probabilities(0.1),
            drawn="curves",
        ),
        Study(
            "figure-8",
            "Figure 8, CIFAR-10",
            "Test accuracy during training. Each client is available with probability 0.3.",
            "cifar10",
            "p",
            _probabilities(0.3),
            drawn="curves",
        ),
        Study(
            "no-dropouts-fmnist",
            "No dropouts, Fashion-MNIST",
            "FedAvg with all clients available in every round: the reference for the other experiments.",
            "fmnist",
            "",
            NO_DROPOUTS,
            ("fedavg",),
            published=published.NO_DROPOUTS_FMNIST,
        ),
        Study(
            "no-dropouts-cifar10",
            "No dropouts, CIFAR-10",
            "FedAvg with all clients available in every round: the reference for the other experiments.",
            "cifar10",
            "",
            NO_DROPOUTS,
            ("fedavg",),
            published=published.NO_DROPOUTS_CIFAR10,
        ),
        Study(
            "standardised",
            "Table IV with standardised inputs, Fashion-MNIST",
            "The same with inputs of mean 0 and standard deviation 1, as is usual today. All algorithms learn faster.",
            "fmnist",
            "P",
            {label: settings | STANDARDISED for label, settings in _ratios(0.1, 0.3, 0.5).items()},
            published=published.TABLE_4_FMNIST,
            drawn="curves",
            claimed=False,
        ),
        Study(
            "choices",
            "What the paper leaves open, Fashion-MNIST",
            "P = 10 % again: as chosen, without the floor of the rate, with standardised inputs, and with standardised inputs and one "
            "more choice changed.",
            "fmnist",
            "",
            {
                "as chosen": TEN,
                "no floor of the rate": TEN | {"lr": "geometric:0.01,0.95"},
                "standardised": TEN | STANDARDISED,
                "... no floor of the rate": TEN | STANDARDISED | {"lr": "geometric:0.01,0.95"},
                "... no full first round": STANDARDISED | {"availability": "time-varying:0.1"},
                "... local rate constant": TEN | STANDARDISED | {"lr": "constant:0.01", "global_lr": "geometric:0.01,0.95,floor=1e-05"},
            },
            ("fedavg", "mifa", "mimic"),
            claimed=False,
        ),
        Study(
            "authors",
            "With settings of the authors' script, Fashion-MNIST",
            "P = 10 % with `--preset authors`: memory in steps instead of gradients; client i holds class i mod 10 and one random class.",
            "fmnist",
            "P",
            {"10%": TEN | {"preset": "authors", "partition": "auto"}},
            published={name: {"10%": row["10%"]} for name, row in published.TABLE_4_FMNIST.items()},
            claimed=False,
        ),
        Study(
            "gaps",
            "Table III, other readings of the gaps, Fashion-MNIST",
            "tau_max = 20 again: as chosen, with clients that start at a random point of their period, and with the half-normal gaps of "
            "the authors' script. With these, about 18 of 30 clients are available per round, the same ones for every tau_max.",
            "fmnist",
            "",
            {"as chosen": _gaps(20)["20"]}
            | {"random phases": {"availability": "bounded:20,phase=random,warm_start=true"}}
            | {"gaps of the script": {"availability": "bounded:20,gaps=half-normal"}},
            published={
                name: dict.fromkeys(("as chosen", "random phases", "gaps of the script"), row["20"])
                for name, row in published.TABLE_3.items()
            },
            drawn="curves",
            claimed=False,
        ),
        Study(
            "rivals",
            "Algorithms that are not in the paper, Fashion-MNIST",
            "FedVARP, which keeps the same memory as MIFA but takes different steps, FedAU, which gives more weight to clients that "
            "participate rarely, and FedAvg with momentum, beside the algorithms that they extend.",
            "fmnist",
            "",
            {"P = 10%": TEN, "tau_max = 20": _gaps(20)["20"]},
            ("fedavg", "fedavgm", "fedau", "mifa", "fedvarp", "mimic"),
            drawn="curves",
            claimed=False,
        ),
        Study(
            "tune-fedprox",
            "Tuning FedProx, Fashion-MNIST",
            "P = 10 %, standardised inputs, seeds that no table uses.",
            "fmnist",
            "",
            {f"mu={mu:g}": TEN | STANDARDISED | {"algorithm": f"fedprox:mu={mu:g}"} for mu in (0.001, 0.01, 0.1, 1.0)},
            ("fedprox",),
            first_seed=100,
        ),
        Study(
            "tune-rates",
            "Tuning the rate of FedAvg, MIFA and MimiC, Fashion-MNIST",
            "P = 10 %, standardised inputs, seeds that no table uses.",
            "fmnist",
            "rate",
            {f"{rate:g}": TEN | STANDARDISED | {"lr": f"geometric:{rate:g},0.95,floor=1e-05"} for rate in (0.005, 0.01, 0.02)},
            ("fedavg", "mifa", "mimic"),
            claimed=False,
            first_seed=100,
        ),
        Study(
            "tune-scaffold",
            "Tuning SCAFFOLD, Fashion-MNIST",
            "P = 10 %, standardised inputs, seeds that no table uses. "
            "SCAFFOLD runs half the rounds, so in one column its rate decays twice as fast.",
            "fmnist",
            "rate",
            {
                **{f"{rate:g}": TEN | STANDARDISED | {"lr": f"geometric:{rate:g},0.95,floor=1e-05"} for rate in (0.005, 0.01, 0.02)},
                "0.01-fast": TEN | STANDARDISED | {"lr": "geometric:0.01,0.9025,floor=1e-05"},
            },
            ("scaffold",),
            first_seed=100,
        ),
    ]
}


def find(names: list[str]) -> list[Study]:
    """Find studies by name; `all` means all of them, in the recommended order."""
    for name in names:
        if name not in (*STUDIES, "all"):
            raise UsageError(f"there is no experiment {name!r}; {nearest(name, STUDIES)}; see mimicfl reproduce --list")
    if not names or "all" in names:
        return list(STUDIES.values())
    return [STUDIES[name] for name in dict.fromkeys(names)]
