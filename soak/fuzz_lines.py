"""Runs command lines with files and folders: each must succeed, or be refused with one sentence and exit code 2."""

import json
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from . import fuzz_folders
from .fuzz_case import Line
from .fuzz_generate import generate
from .outcome import Outcome
from .preload import preload
from .sandbox import Ended, forked
from .shrink import shrink

PART = "command lines"


@dataclass
class Bench:
    """The folder in which trials run, and the expected results for undamaged runs."""

    folder: Path
    main: Callable[[list[str]], int]
    whole: dict[tuple[str, ...], str] = field(default_factory=dict)  # the output of a command on undamaged runs
    shrunk: set[str] = field(default_factory=set)  # kinds of failures that were already shrunk

    def run(self, line: Line, damaged: bool = True) -> tuple[Ended, Path, tuple[str, bool]]:
        """Run it in a new folder with its files and runs. The folder is nested, so that `..` stays inside the sandbox."""
        shutil.rmtree(self.folder / "trial", ignore_errors=True)
        place = self.folder / "trial" / "a" / "b"
        said = fuzz_folders.fresh(place, self.folder / "templates", line.copies, line.damage if damaged else None)
        for name, content in line.files.items():
            (place / name).write_bytes(content)
        return forked(lambda: self.main(line.argv), place), place, said

    def undamaged(self, line: Line) -> str:
        key = (*line.argv, *line.copies)
        if key not in self.whole:
            self.whole[key] = self.run(line, damaged=False)[0].out
        return self.whole[key]


def trials(seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]:
    bench = prepared(folder)
    while not enough():
        yield trial(bench, seed)
        seed += 1


def prepared(folder: Path) -> Bench:
    from mimicfl.cli.main import main
    from mimicfl.data.datasets import FETCHABLE

    preload()
    for source in FETCHABLE.values():  # trials must not download data
        vars(source)["FETCHERS"] = {}
    fuzz_folders.templates(folder / "templates")
    return Bench(folder, main)


def trial(bench: Bench, seed: int) -> Outcome:
    line = generate(Random(seed))
    verdict, detail, said = judge(bench, line)
    counts = {line.command: 1} | ({"damaged folders": 1} if line.damage is not None else {})
    what = " · ".join(filter(None, [shlex.join(line.argv)[:300], said]))
    again = reproduction(bench, line, detail, said) if verdict == "failed" else ""
    return Outcome(PART, verdict, seed, what, detail, again, counts)


def judge(bench: Bench, line: Line) -> tuple[Any, str, str]:
    """Run the line; return the verdict, for a failure its kind and a description, and what was damaged."""
    ended, place, (said, strict) = bench.run(line)
    leftovers = [path.name for path in place.rglob("*.part") if not path.name.endswith(fuzz_folders.LEFT)]
    kind = ended.trouble
    if not kind and ended.code not in (0, 2):
        kind = f"exit code {ended.code}"
    if not kind and leftovers:
        kind = "leftovers: .part files"
    if not kind:
        kind = _refusal(ended) if ended.code == 2 else _success(bench, line, ended, place, strict)
    seen = f"{kind}\nexit code {ended.code}\n{ended.err.strip()[-1500:]}" if kind else ""
    return "failed" if kind else "refused" if ended.code == 2 else "ok", seen, said


def _refusal(ended: Ended) -> str:
    sentences = [text for text in ended.err.splitlines() if text.startswith("mimicfl: ") and not text.startswith("mimicfl: notice:")]
    if not ended.err.startswith("mimicfl: ") or not sentences:
        return "refused without a message"
    return "" if len(sentences) == 1 and len(sentences[0]) > 15 else "refused with more or less than one sentence"


def _success(bench: Bench, line: Line, ended: Ended, place: Path, strict: bool) -> str:
    if line.wrong:
        return f"accepted although wrong: {line.wrong}"
    if not ended.out.strip():
        return "success without output"
    if noise := [text for text in ended.err.splitlines() if text.strip() and not text.startswith("mimicfl:")]:
        return f"noise on stderr: {noise[0][:80]}"
    strict = strict and line.copies[0] in line.argv
    # An unfinished run may show fewer rounds, because a kill can leave an incomplete line.
    if strict and line.command == "report" and line.copies[0] != "stopped" and ended.out != bench.undamaged(line):
        return "damage accepted: report prints different numbers"
    whole = "finished" if line.copies[:1] == ("stopped",) else line.copies[0] if line.copies else ""
    if strict and line.command in ("run", "resume") and not _as_before(place / line.copies[0], bench.folder / "templates" / whole):
        return f"damage accepted: {line.command} ends with different numbers"
    return (
        ""
        if line.damage is not None
        else next((trouble for run in place.rglob("config.toml") if (trouble := _implausible(run.parent))), "")
    )


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def _as_before(run: Path, whole: Path) -> bool:
    """Return whether a run begins with all rows of an undamaged one, except for times; text after the last row is never read."""
    expected = _rows(whole)
    try:
        lines = (run / "rows.jsonl").read_bytes().split(b"\n")[: len(expected)]
        return [_timeless(json.loads(line)) for line in lines] == [_timeless(row) for row in expected]
    except (OSError, ValueError, AttributeError):
        return False


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without the values that change between runs."""
    return {key: row.get(key) for key in ("round", "clients", "train_loss", "test_loss", "test_accuracy", "uploads")}


def _implausible(run: Path) -> str:
    """Check that a finished run has the requested number of rounds, and accuracies between 0 and 1."""
    if not (run / "final.safetensors").exists():
        return ""
    config, rows = tomllib.loads((run / "config.toml").read_text(encoding="utf-8")), _rows(run)
    if not rows or len(rows) > config.get("rounds", len(rows)) or ("uploads" not in config and len(rows) < config.get("rounds", 0)):
        return f"implausible: {len(rows)} rows for {config.get('rounds')} requested rounds"
    shares = [row["test_accuracy"] for row in rows if row.get("test_accuracy") is not None]
    return "" if all(0 <= share <= 1 for share in shares) else "implausible: an accuracy outside [0, 1]"


def reproduction(bench: Bench, line: Line, detail: str, said: str) -> str:
    """Return the shortest command line with the same kind of failure, for a shell; each kind is shrunk once."""
    kind = detail.partition("\n")[0]
    if kind not in bench.shrunk and not kind.startswith("hang"):
        bench.shrunk.add(kind)

        def same(smaller: Line) -> bool:
            return judge(bench, smaller)[1].partition("\n")[0] == kind

        line = replace(line, options=shrink(line.options, lambda options: same(replace(line, options=options))))
        line = replace(line, lines=shrink(line.lines, lambda lines: same(replace(line, lines=lines))))
    return "\n".join([*([f"damaged: {said}"] if said else []), line.shell()])
