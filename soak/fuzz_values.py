"""Values for command lines and TOML files: valid ones, invalid ones, and strings that may be either."""

from dataclasses import dataclass, field
from random import Random

import mimicfl as mf

ODD = ["", " ", "\t", "\n", "é", "😀", "\udcff", "\x1b[31m", "\u202e", "-", "=", ":", ",", "[", "]]", "{}", "null", "None", "true", "0x10"]
ODD += ["1e400", "-0", "nan", "-inf", "a" * 5000, "%s", "{0}", "$(x)", "*", "?", "\\", "'", '"', ".", "..", "x/../y", "1" * 400, "[" * 2000]
INSERTED = list(":,=[]{}.-+ \t\n\0é😀e0919\"'#%")  # no slash, so that nothing is written outside the trial's folder


@dataclass(frozen=True)
class Values:
    """`right` values are valid by themselves (they may conflict with others); `wrong` values are always refused."""

    right: list[str]
    wrong: list[str] = field(default_factory=list)


def integer(*right: int, none: bool = False, high: bool = True) -> Values:
    """An integer of at least 1, or at least 0 with `none`."""
    wrong = ["", "x", "-1", "1.5", "nan", "inf", "1e2", "2,3", "[2]", "true", "2 2", "--"] + ["0"] * (not none) + ["9" * 30] * high
    return Values([str(number) for number in right], wrong)


def number(*right: str, wrong: tuple[str, ...] = ()) -> Values:
    return Values(list(right), ["", "x", "-0.5", "nan", "inf", "-inf", "1e400", "0.1,0.2", "[0.1]", "true", *wrong])


RATES = ["0.1", "1e-3", "constant:0.05", "geometric:0.1,0.9", "geometric:0.1,0.99,floor=1e-3", "theory:c=0.1,beta=10", "theory:0.01"]
WRONG_RATES = [
    "",
    "0",
    "-1",
    "nan",
    "inf",
    "geometric",
    "geometric:0.1",
    "geometric:0.1,2",
    "geometric:0.1,0.9,9,9",
    "geometric:rate=x,decay=0.5",
]
WRONG_RATES += [
    "constant:",
    "constant:0",
    "constant:1,rate=2",
    "theory:c=0",
    "theory:c=1,beta=0",
    "theory:L=1",
    "linear:0.1",
    "theory:c=true",
]
ALGORITHMS = [*mf.algorithms.ALGORITHMS.factories, "fedprox:mu=0.01", "fedprox:0.1", "mifa:never_seen=exclude", "mifa:never_seen=wait"]
ALGORITHMS += ["mimic:memory=step", "fedau:cutoff=3", "fedavgm:momentum=0.5,damped=false"]
WRONG_ALGORITHMS = ["fedavgg", "fedprox:mu=-1", "fedprox:mu=nan", "fedprox:mu=x", "fedprox:nu=1", "mifa:never_seen=never", "mimic:1,2,3,4"]
WRONG_ALGORITHMS += [
    "fedau:cutoff=0",
    "fedau:cutoff=1.5",
    "fedavgm:momentum=1",
    "fedavgm:damped=1",
    "fedavg:1",
    "mimic:memory=",
    "MimiC",
    "auto",
]
PATTERNS = ["always", "bounded:2", "bounded:3,phase=random", "bounded:5,gaps=half-normal", "static:0.5", "static:1", "time-varying:0.5"]
PATTERNS += [
    "markov:0.5,0.5",
    "cyclic:3,2",
    "always:warm_start=true",
    "static:0.3,warm_start=true",
    "label-correlated:classes=[0,1],rare=0.3",
]
WRONG_PATTERNS = [
    "",
    "allways",
    "bounded:-1",
    "bounded:1.5",
    "bounded:2,phase=odd",
    "static:2",
    "static:-0.1",
    "static:nan",
    "time-varying:1.1",
]
WRONG_PATTERNS += [
    "markov:0,0",
    "markov:2,1",
    "cyclic:2,3",
    "cyclic:0",
    "explicit",
    "explicit:nowhere.csv",
    "explicit:.",
    "always:warm_start=1",
]
WRONG_PATTERNS += [
    "label-correlated:classes=3",
    "label-correlated:classes=[-1]",
    "label-correlated:classes=[99]",
    "label-correlated:share=0",
]
WRONG_PATTERNS += ["static:p=0.1,p=0.2", "static:0.1,0.2,0.3", "bounded:tau_max=2,3", "time-varying:0"]

SETTINGS = {
    "dataset": Values(
        ["digits"] * 4 + ["synthetic", "synthetic:logistic", "synthetic:dim=3,samples=4", "synthetic:heterogeneity=0"],
        [
            "",
            "digit",
            "Digits",
            "digits:3",
            "synthetic:dim=0",
            "synthetic:dim=-1",
            "synthetic:cubic",
            "synthetic:noise=nan",
            "fmnist",
            "cifar10",
        ],
    ),
    "data_path": Values(["data"]),
    "num_clients": integer(3, 4, 5, 8),
    "partition": Values(
        ["shards:2", "shards", "classes:2", "classes:5", "anchored", "dirichlet:0.5", "dirichlet:5", "iid", "natural", "auto"],
        [
            "",
            "shard",
            "shards:0",
            "shards:-1",
            "shards:x",
            "classes:11",
            "dirichlet:0",
            "dirichlet:-1",
            "dirichlet:nan",
            "iid:3",
            "shards:1e9",
        ],
    ),
    "model": Values(
        ["linear"] * 4 + ["logistic", "mlp", "mlp:4", "mlp:5,3", "auto"],
        ["", "mlp:0", "mlp:-3", "mlp:x", "mlp:1.5", "lenet", "vgg11", "linear:3", "resnet", "mlp:[3]", "mlp:width=3"],
    ),
    "loss": Values(["auto", "cross-entropy"], ["", "crossentropy", "l1", "mse:2"]),
    "algorithm": Values(ALGORITHMS, ["", *WRONG_ALGORITHMS]),
    "availability": Values(PATTERNS, WRONG_PATTERNS),
    "rounds": integer(1, 2, 3),
    "uploads": integer(1, 2, 4),
    "epochs": integer(1),
    "steps": integer(1, 2, 3),
    "batch_size": Values(["1", "4", "16", "full", "auto"], ["", "0", "-1", "x", "1.5", "nan", "[2]", "9" * 30]),
    "lr": Values([*RATES, "auto"], WRONG_RATES),
    "global_lr": Values([*RATES, "local"], WRONG_RATES),
    "average": number("0", "1", "9", "2.5", wrong=("0.5",)),
    "optimizer": Values(["sgd"], ["", "adma", "adam:lr=1", "adam:betas=1", "sgd:nesterov=1"]),
    "weight_decay": number("0", "0.01"),
    "momentum": number("0", "0.5", wrong=("1", "1.5")),
    "clip_norm": number("0", "1", "0.001"),
    "update": Values(["sum", "mean"], ["", "Sum", "median", "1"]),
    "weighting": Values(["uniform", "samples"], ["", "size", "Uniform"]),
    "preset": Values(["none", "authors"], ["", "author", "None"]),
    "seed": integer(0, 1, 7, 123456789, none=True),
    "device": Values(["cpu", "auto"], ["", "gpu", "cuda:99", "tpu", "cpu:x", "meta"]),
    "engine": Values(
        ["plain"] * 20 + ["auto"] * 8 + ["native", "native", "workers", "batched"],
        ["", "fast", "native:3", "batched:0", "batched:x", "batched:9999"],
    ),
    "precision": Values(["fp32"], ["", "fp64", "FP32", "half"]),
    "dtype": Values(["float32", "float64"], ["", "float16", "double", "int"]),
    "eval_every": integer(1, 2, 5),
    "diagnose": Values(
        ["off"] * 6 + ["every=1", "every=2,parts=false"], ["every=0", "every=-1", "every=x", "often", "every=1,parts=2", "1,2"]
    ),
    "state_budget": Values(["auto", "1", "0.5,2"], ["x", "-1", "nan", "1,2,3", "1,x"]),
    "checkpoint_every": integer(0, 1, 2, none=True),
    "plugins": Values(["plugin.py", "json"], ["", "nowhere.py", "broken.py", "no_such_module", ".", "plugin"]),
}
BASE = {"num_clients": "4", "rounds": "2", "steps": "1", "model": "linear", "availability": "always", "engine": "plain"}


def mutated(rng: Random, text: str) -> str:
    """Return the text with a part removed, doubled, inserted or changed."""
    if rng.random() < 0.3:
        return rng.choice(ODD)
    at = rng.randrange(len(text) + 1)
    way = rng.randrange(6)
    forms = [text[:at], text[at:], text[:at] + rng.choice(INSERTED) + text[at:], text[:at] + text[at + 1 :], text + text, text.swapcase()]
    return forms[way]


def harmless(text: str) -> str:
    """Remove absolute paths, the user's home, and NUL, which operating systems do not pass to a program."""
    return text.replace("\0", "").lstrip("/~")
