"""Generates random command lines."""

from random import Random

from . import fuzz_settings as toml
from .fuzz_case import Line, Option
from .fuzz_values import (
    ALGORITHMS,
    BASE,
    ODD,
    PATTERNS,
    SETTINGS,
    WRONG_ALGORITHMS,
    WRONG_PATTERNS,
    Values,
    harmless,
    integer,
    mutated,
    number,
)

SEEDS = Values(["1", "2", "0,3", "4,", "1,1"], ["x", "-1", "0", "1.5", "1,x", "nan", "99999"])
OUT = Values(["out", "new/deep/out", "mit leer zeichen"], ["plugin.py"])
PATHS = ["finished", "other", "stopped", "compared", "objects", "diagnosed"]
ONLY = ("device", "engine", "state_budget", "checkpoint_every", "data_path")
STUDIES = Values(["table-4-fmnist", "table-4-cifar10"], ["table-9", "", "Table-4-fmnist", "all all"])
UNKNOWN = ["--nonsense", "--round", "-x", "--rounds-", "--älgo", "--=3", "--outt=3"]


def generate(rng: Random) -> Line:
    """Draw one of the commands; fast commands are drawn more often."""
    makers = [
        (run, 34),
        (compare, 4),
        (sweep, 7),
        (damaged, 12),
        (look, 5),
        (availability, 14),
        (reproduce, 6),
        (data, 4),
        (flower, 3),
        (bench, 2),
    ]
    maker = rng.choices([maker for maker, _ in [*makers, (odd, 3)]], [weight for _, weight in [*makers, (odd, 3)]])[0]
    line = maker(rng)
    if rng.random() < 0.04:
        unknown = (rng.choice(UNKNOWN),)
        line = _with(line, options=[*line.options, unknown], claims=(*line.claims, unknown))
    return _with(line, options=[tuple(harmless(word) for word in option) for option in line.options])


def _with(line: Line, **changes: object) -> Line:
    return Line(**vars(line) | changes)  # type: ignore[arg-type]


def _flag(rng: Random, name: str) -> str:
    if name == "num_clients" and rng.random() < 0.5:
        return "--clients"
    return "--plugin" if name == "plugins" else f"--{name.replace('_', '-')}"


def _options(rng: Random, table: dict[str, Values], base: dict[str, str], most: int = 4) -> tuple[list[Option], tuple[Option, ...]]:
    """Add options to the base, some of them wrong or unusual; also return those that must be refused."""
    values = dict(base)
    for name in rng.sample(list(table), min(len(table), rng.randrange(most + 1))):
        values[name] = rng.choice(table[name].right or [""])
        values.pop({"epochs": "steps", "uploads": "rounds"}.get(name, ""), None)
    options = [(_flag(rng, name), value) for name, value in values.items()]
    claims: list[Option] = []
    way = rng.random()
    if way < 0.45:
        name = rng.choice([name for name in table if table[name].wrong])
        bad: Option = (_flag(rng, name), rng.choice(table[name].wrong))
        options = [option for option in options if option[0] not in (bad[0], "--clients", "--num-clients") or name != "num_clients"]
        options, claims = [option for option in options if option[0] != bad[0]] + [bad], [bad]
    elif way < 0.75:
        for _ in range(rng.randrange(1, 3)):
            name = rng.choice(list(table))
            right = rng.choice(table[name].right or [""])
            options.append((_flag(rng, name), mutated(rng, right)))
    options = _bounded(options)
    rng.shuffle(options)
    if rng.random() < 0.1 and options:
        options = [(f"{flag}={value}",) if (flag, value) not in claims else (flag, value) for flag, value in options]
    if rng.random() < 0.04:
        options.append((rng.choice(["--help", "-h", *(option[0] for option in options)]),))
        claims = []
    return options, tuple(claims)


def _bounded(options: list[Option]) -> list[Option]:
    """Remove valid values that would take long; a mutated `3` may become `33`, which is still small."""
    heavy = (
        "--rounds",
        "--uploads",
        "--epochs",
        "--steps",
        "--clients",
        "--num-clients",
        "--repeats",
        "--cohorts",
        "--batch-size",
        "--threads",
    )
    return [
        (option[0], "33")
        if len(option) == 2 and option[0] in heavy and option[1].strip().isdigit() and 33 < float(option[1].strip()) < 1e9
        else option
        for option in options
    ]


def _file(rng: Random, grid: bool = False) -> dict[str, object]:
    lines, wrong = toml.settings(
        rng, {} if rng.random() < 0.1 else {key: value for key, value in BASE.items() if not grid or key != "rounds"}
    )
    if grid:
        lines += toml.grid(rng)
        wrong = []
    way = rng.random()
    return {"lines": lines, "in_file": tuple(wrong) if way < 0.6 else (), "encoding": rng.randrange(10**9) if way < 0.97 else None}


def run(rng: Random) -> Line:
    table = SETTINGS | {"out": OUT}
    options, claims = _options(rng, table, BASE)
    if rng.random() < 0.15:
        options += [("--availability", rng.choice(["explicit:schedule.csv", "explicit:schedule.json", "explicit:plugin.py"]))]
    if rng.random() < 0.25:
        file = _file(rng)
        return Line(
            "run",
            [(rng.choice(["settings.toml"] * 9 + [".", "plugin.py"]),), *options[: rng.randrange(4)]],
            beside=toml.companions(rng),
            **file,
        )  # type: ignore[arg-type]
    return Line("run", options, beside=toml.companions(rng), claims=claims)


def compare(rng: Random) -> Line:
    table = {name: values for name, values in SETTINGS.items() if name not in ("algorithm", "seed")} | {"seeds": SEEDS, "out": OUT}
    options, claims = _options(rng, table, BASE | {"rounds": "1", "seeds": "1"}, most=2)
    names = rng.sample(ALGORITHMS, rng.randrange(1, 3))
    if rng.random() < 0.4:
        names.append(rng.choice(WRONG_ALGORITHMS))
        claims = (*claims, ("--algorithms", *names))
    return Line("compare", [*options, ("--algorithms", *names)], beside=toml.companions(rng), claims=claims)


def sweep(rng: Random) -> Line:
    options, claims = _options(rng, {name: SETTINGS[name] for name in ONLY} | {"out": OUT}, {}, most=1)
    options, claims = (options, claims) if rng.random() < 0.3 else ([], ())
    file = _file(rng, grid=True)
    return Line(
        "sweep", [(rng.choice(["settings.toml"] * 12 + ["plugin.py", ".", "nowhere.toml"]),), *options], beside=toml.companions(rng), **file
    )  # type: ignore[arg-type]


def damaged(rng: Random) -> Line:
    """Draw a command on a run folder, which is damaged in most cases."""
    name = rng.choice(["finished"] * 5 + ["stopped"] * 3 + ["diagnosed", "objects"])
    commands: list[tuple[str, list[Option]]] = [
        ("report", [(name,)]),
        ("resume", [(name,)]),
        ("theory", [("check",), (name,)]),
        ("theory", [("show",), (name,)]),
    ]
    again = [(_flag(rng, key), value) for key, value in (BASE | {"rounds": "3", "checkpoint_every": "1"}).items()]
    commands += [("run", [*again, ("--out", name)]), ("report", [(name,), ("--out", "elsewhere")])]
    weights = [6, 8, 1, 1, 6, 1] if name in ("finished", "stopped") else [3, 3, 1, 1, 1, 0]
    command, options = rng.choices(commands, weights)[0]
    return Line(command, options, copies=(name, "other"), damage=rng.randrange(10**9))


def look(rng: Random) -> Line:
    """Draw `report`, `resume` or `theory` on a folder that may or may not exist."""
    paths = [
        rng.choice([*PATHS, *PATHS, "nowhere", "", ".", "plugin.py", "finished/rows.jsonl", mutated(rng, "finished")])
        for _ in range(rng.randrange(0, 3))
    ]
    words: list[Option] = [(path,) for path in paths]
    command = rng.choice(["report", "resume", "resume", "theory"])
    if command == "theory":
        table = {"L": number("1", "0.5"), "K": integer(1, 3), "tau-max": integer(1, 5), "nu": number("0.1")}
        options, _ = _options(rng, table, {}, most=2)
        words = [(rng.choice(["check", "check", "show", "check ", "look"]),), *words, *options]
    elif command == "report":
        words += rng.choice(
            [[], [], [("--out", "elsewhere")], [("--paper",)], [("--records", "nowhere"), ("--paper",)], [("--out", "plugin.py")]]
        )
    elif rng.random() < 0.3:
        words += [("--plugin", rng.choice(SETTINGS["plugins"].right + SETTINGS["plugins"].wrong))]
    return Line(command, words, beside=toml.companions(rng), copies=tuple(dict.fromkeys(path for path in paths if path in PATHS)))


def availability(rng: Random) -> Line:
    table = {"clients": integer(1, 4, 70), "rounds": integer(1, 5, 150), "seed": integer(0, 3, none=True), "plugins": SETTINGS["plugins"]}
    table |= {"out": Values(["s.png"], ["s", "s.gif", ".png.", "nowhere"]), "dataset": Values(["digits"])}
    options, claims = _options(rng, table, {} if rng.random() < 0.5 else {"rounds": "4", "clients": "4"}, most=2)
    spec = rng.choice(
        [
            rng.choice(PATTERNS),
            rng.choice(WRONG_PATTERNS),
            mutated(rng, rng.choice(PATTERNS)),
            "explicit:schedule.csv",
            "explicit:schedule.json",
        ]
    )
    words: list[Option] = [("show",) if rng.random() < 0.97 else ("draw",), (spec,)]
    return Line("availability", [*words, *options], beside=toml.companions(rng), claims=claims)


def reproduce(rng: Random) -> Line:
    table = {
        "seeds": SEEDS,
        "scale": number("0.01", "0.1", wrong=("0",)),
        "minutes": number("0", "1"),
        "records": Values(["records"]),
        "out": OUT,
    }
    options, _ = _options(rng, table | {name: SETTINGS[name] for name in ONLY}, {}, most=2)
    names = [(rng.choice(STUDIES.right + STUDIES.wrong),) for _ in range(rng.randrange(0, 2))]
    flags: list[Option] = [
        (flag,) for flag in ("--list", "--status", "--again") if rng.random() < (0.5 if flag == "--list" or names else 0.05)
    ]
    more: list[Option] = [("--algorithms", rng.choice(["mimic", "fedavg", "nobody"]))] if rng.random() < 0.5 else []
    more += [("--columns", rng.choice(["10%", "x", ""]))] if rng.random() < 0.3 else []
    return Line("reproduce", [*names, *flags, *options, *more], beside=toml.companions(rng))


def data(rng: Random) -> Line:
    words: list[Option] = [(rng.choice(["list", "list", "fetch", "fetch", "get", mutated(rng, "list")]),)]
    words += [(rng.choice(["fmnist", "cifar10", "digits", "synthetic", "mnist", "", *ODD]),)] * (rng.random() < 0.7)
    return Line(
        "data",
        words + ([("--path", rng.choice([".", "nowhere", "plugin.py", ""]))] if rng.random() < 0.4 else []),
        beside=toml.companions(rng),
    )


def flower(rng: Random) -> Line:
    name = rng.choice(
        ["my-app", "a/b/app", "app2", "plugin.py", ".", "..", "9lives", "torch", "tests", "ünïcode", "a b", mutated(rng, "my-app"), ""]
    )
    return Line("flower", [("new",) if rng.random() < 0.9 else ("old",), (name,)], beside=toml.companions(rng))


def bench(rng: Random) -> Line:
    table = {
        "model": Values(["logistic"], SETTINGS["model"].wrong[:5]),
        "batch-size": integer(2),
        "steps": integer(1),
        "repeats": integer(1),
        "threads": integer(1),
    }
    table |= {"cohorts": Values(["1", "1,2"], ["", "x", "0", "-1", "1,,2"]), "engines": Values(["workers"], ["fast", "plain,x"])}
    table |= {"device": Values(["cpu"], SETTINGS["device"].wrong[1:]), "precision": SETTINGS["precision"]}
    small = {"model": "logistic", "steps": "1", "repeats": "1", "cohorts": "1", "engines": "workers"}
    options, claims = _options(rng, table, small, most=0)
    return Line("bench", options, claims=claims)


def odd(rng: Random) -> Line:
    """Draw words that are not a command."""
    words = [
        rng.choice([*ODD, "--help", "--version", "-h", "--", "demo --rounds", "comapre", "Run", "run"]) for _ in range(rng.randrange(0, 3))
    ]
    if rng.random() < 0.3:
        return Line("demo", [("--rounds", "3")], claims=(("--rounds", "3"),))
    return Line("(none)", [(word,) for word in words])
