"""Generates TOML files with settings and grids, valid and invalid, and other files that a command line may name."""

import json
from random import Random

from .fuzz_values import SETTINGS, mutated

NUMBERS = ("num_clients", "rounds", "uploads", "epochs", "steps", "seed", "eval_every", "checkpoint_every")
REALS = ("weight_decay", "momentum", "clip_norm")
# Values of a type that no setting has, hence always refused.
WRONG = ["[[]]", "{ a = 1 }", "2020-01-01", "12:00:00", "[1, [2, 3]]", "true", "[{}]"]
ODD = [
    "nan",
    "-inf",
    "1e400",
    "9" * 40,
    "-1",
    "0",
    "1.0",
    '""',
    "'x'",
    '"\\u0000"',
    '"a\\u0000.py"',
    '"""\nx"""',
    '"\\uD7FF"',
    "[]",
    '["a", "b"]',
    "0x7f",
]
BROKEN = [
    "=",
    "a =",
    "a = ",
    "[",
    "[a",
    "]",
    "a = 'x",
    'a = "\\q"',
    "a = 1 2",
    "rounds = 01",
    "= 3",
    "a b = 1",
    "[grid]\n[grid]",
    "\0",
    "a = \x01",
]
UNKNOWN = ["round", "rouns", "a.b", '"a b"', '""', "Rounds", "_rounds", "grid.x", "source", "id"]
GRIDS = {
    "algorithm": [
        '["fedavg", "mimic"]',
        '["fedavg"]',
        '["fedau", "fedau:cutoff=50"]',
        '["nonsense"]',
        "[1]",
        "[[]]",
        "[]",
        '"mimic"',
        "[nan]",
    ],
    "seed": ["1", "2", "[0, 3]", "0", "-1", "[0, 0]", "[-1]", "true", '["1"]', "1.5", "9" * 20],
    "lr": ["[0.1, 0.01]", '["geometric:0.1,0.9"]', "[0, 0.0]", "[nan]", "{ a = 1 }", "[0.1, 0.10]"],
    "rounds": ["[1]", "[1, 2]", "[0]", "3", '["x"]', "[true]"],
    "availability": ['["always", "static:0.5"]', '["alwys"]', '["always", "always"]'],
    "nonsense": ["[1]"],
}
BOMB = [
    f"{name} = [{', '.join(map(str, range(1, 80)))}]"
    for name in ("seed", "rounds", "num_clients", "eval_every", "checkpoint_every", "batch_size")
]


def literal(name: str, text: str) -> str:
    """Return a value of the tables above as TOML."""
    if name == "plugins":
        return json.dumps([text])
    return text if name in (*NUMBERS, *REALS) and text.lstrip("-").replace(".", "", 1).isdigit() else json.dumps(text)


def settings(rng: Random, base: dict[str, str]) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the lines of a file, and the lines, with counts, that must be refused unless the command line overrides them."""
    values = dict(base)
    for name in rng.sample(list(SETTINGS), rng.randrange(4)):
        values[name] = rng.choice(SETTINGS[name].right)
    found = {name: literal(name, value) for name, value in values.items()}
    way = rng.random()
    bad = rng.choice(list(SETTINGS))
    if way < 0.3:
        found[bad] = rng.choice(WRONG)
    elif way < 0.5:
        found[bad] = rng.choice(ODD)
    elif way < 0.6:
        name = rng.choice([name for name in SETTINGS if SETTINGS[name].wrong])
        found[name] = literal(name, rng.choice(SETTINGS[name].wrong))
    wrong = []
    lines = [f"{name.replace('_', rng.choice('-_'))} = {value}" for name, value in found.items()]
    if way < 0.3:
        wrong = [(lines[list(found).index(bad)], 1)]
    elif 0.6 <= way < 0.7:
        wrong = [(f"{rng.choice(UNKNOWN)} = 1", 1)]
        lines.insert(rng.randrange(len(lines) + 1), wrong[0][0])
    elif 0.7 <= way < 0.78:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(BROKEN))
    elif 0.78 <= way < 0.82 and lines:
        wrong = [(rng.choice(lines), 2)]
        lines.append(wrong[0][0])
    return lines, wrong


def grid(rng: Random) -> list[str]:
    """Return the lines of a [grid] table."""
    if rng.random() < 0.02:
        return ["[grid]", *BOMB]
    names = rng.sample(list(GRIDS)[:-1], rng.randrange(1, 3)) + ["nonsense"] * (rng.random() < 0.1)
    head = rng.choice(["[grid]"] * 12 + ["[Grid]", "[grid.more]", "[[grid]]", "grid = 3", ""])
    return [head, *(f"{name} = {GRIDS[name][0] if rng.random() < 0.6 else rng.choice(GRIDS[name])}" for name in names)]


def encoded(rng: Random, lines: list[str]) -> bytes:
    """Return the bytes of a file, sometimes damaged."""
    text = "\n".join(lines) + "\n"
    way = rng.random()
    if way < 0.9:
        return text.encode("utf-8", "surrogatepass")
    if way < 0.93:
        return mutated(rng, text).encode("utf-8", "surrogatepass")
    raw = text.encode("utf-8", "surrogatepass")
    return rng.choice(
        [
            b"\xff\xfe" + text.encode("utf-16-le", "surrogatepass"),
            b"\xef\xbb\xbf" + raw,
            raw + b"\xe9",
            raw.replace(b"\n", b"\r"),
            raw[:-3],
            b"",
            b"\0" * 9,
        ]
    )


PLUGIN = """
import mimicfl as mf
mf.register("own", type("Own", (mf.FedAvg,), {}))
"""
SCHEDULES = [
    "1,1,1,1\n1,0,1,1\n0,1,1,0\n",
    "",
    "a,b\n",
    "1,1\n1\n",
    "2,1,1,1\n",
    "[[1,0,1,1],[1,1,1,1]]",
    "nan,1,1,1\n",
    "\0",
    "# only\n",
    "{}",
]


def companions(rng: Random) -> dict[str, bytes]:
    """Return the plugin and schedule files that are in the folder of every command line."""
    return {
        "plugin.py": PLUGIN.encode(),
        "broken.py": b"import nowhere\n",
        "schedule.csv": rng.choice(SCHEDULES).encode(),
        "schedule.json": rng.choice(SCHEDULES).encode(),
    }
