"""Creates run folders for the trials and damages them in various ways."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

FILES = ("rows.jsonl", "final.safetensors", "checkpoint.safetensors", "config.toml", "env.json")
LEFT = ".1-ab.part"
RESULTS = ("rows.jsonl", "final.safetensors")


class Stop(Exception):
    """Stops a run in the middle, like a kill."""


def templates(folder: Path) -> None:
    """Create the runs that every trial copies: two finished, one stopped, one diagnosed, one compared, one made from Python objects."""
    import mimicfl as mf
    from mimicfl.experiments.build import build_problem

    small = {"num_clients": 4, "steps": 1, "model": "linear", "availability": "always", "engine": "plain", "checkpoint_every": 1}
    quick = mf.Experiment(**small, rounds=3)
    mf.run(quick, folder / "finished")
    mf.run(mf.Experiment(**small, rounds=3, seed=1, algorithm="fedavg"), folder / "other")
    mf.run(mf.Experiment(**small, rounds=3, dataset="synthetic:dim=3,samples=4", diagnose="every=1"), folder / "diagnosed")
    mf.compare(mf.Experiment(**small, rounds=2), ["fedavg", "mimic"], 2, folder / "compared")
    problem = build_problem(quick.resolved())
    mf.simulate(problem.template, problem.data, problem.split, rounds=3, local=problem.local, engine="plain", out=folder / "objects")

    def stop(_: object, row: dict, __: int) -> None:
        if row["round"] == 1:
            raise Stop

    try:
        mf.run(quick, folder / "stopped", stop)
    except Stop:
        return
    raise AssertionError("the run was not stopped")


def flip(rng: Random, file: Path) -> str:
    raw = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(raw)), rng.randrange(8)
    raw[at] ^= 1 << bit
    file.write_bytes(raw)
    return f"bit {bit} of byte {at} flipped"


def cut(rng: Random, file: Path) -> str:
    raw = file.read_bytes()
    at = rng.randrange(len(raw))
    file.write_bytes(raw[:at])
    return f"cut after {at} bytes"


def delete(rng: Random, file: Path) -> str:
    file.unlink()
    return "deleted"


def swap(rng: Random, file: Path) -> str:
    shutil.copy(file.parent.with_name("other") / file.name, file)
    return "replaced by another run's"


def garbage(rng: Random, file: Path) -> str:
    with file.open("ab") as end:
        end.write(rng.choice([b"\0", b"{}\n", b"[]\n", b"\xff\xfe\n", b"null\n", b'{"round": 3}\n', b"x" * 1000]))
    return "something appended"


def directory(rng: Random, file: Path) -> str:
    file.unlink()
    file.mkdir()
    return "a folder in its place"


def loop(rng: Random, file: Path) -> str:
    file.unlink()
    file.symlink_to(file.name)
    return "a link to itself"


def forbid(rng: Random, file: Path) -> str:
    file.chmod(0)
    return "no permission to read it"


def mix_lines(rng: Random, file: Path) -> str:
    lines = file.read_bytes().splitlines(keepends=True)
    way = rng.randrange(3)
    at = rng.randrange(len(lines))
    mixed = [lines[:at] + lines[at + 1 :], [*lines[:at], lines[at], *lines[at:]], lines[::-1]][way]
    file.write_bytes(b"".join(mixed))
    return ["a line removed", "a line doubled", "lines in reverse"][way]


def edit_number(rng: Random, file: Path) -> str:
    raw = bytearray(file.read_bytes())
    digits = [at for at, byte in enumerate(raw) if 48 <= byte <= 57]
    at = rng.choice(digits)
    raw[at] = 48 + (raw[at] - 48 + rng.randrange(1, 10)) % 10
    file.write_bytes(raw)
    return f"the digit at byte {at} changed"


def leftover(rng: Random, file: Path) -> str:
    file.with_name(f".{file.name}{LEFT}").write_bytes(b"half")
    return "a .part of it left over"


Damage = Callable[[Random, Path], str]
ANY: list[Damage] = [flip, flip, flip, cut, delete, swap, garbage, directory, loop, forbid, leftover]
TEXT: list[Damage] = [mix_lines, edit_number, edit_number]


def damage(rng: Random, run: Path) -> tuple[str, bool]:
    """Damage one file of a run; return a description, and whether readers must refuse it or show unchanged results."""
    name = rng.choice([name for name in (*FILES, *RESULTS, *RESULTS) if (run / name).exists()])
    how = rng.choice(ANY + TEXT * (name != "final.safetensors" and name != "checkpoint.safetensors"))
    gone = how in (delete, directory, loop) and name == "final.safetensors"  # the run then counts as unfinished
    return f"{run.name}/{name}: {how(rng, run / name)}", name in RESULTS and not gone


def fresh(place: Path, source: Path, runs: tuple[str, ...], seed: int | None) -> tuple[str, bool]:
    """Create a folder with copies of these runs; if there is a seed, damage the first of them."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in runs:
        shutil.copytree(source / name, place / name)
    return damage(Random(seed), place / runs[0]) if seed is not None else ("", False)
