"""`python -m soak`: run random tests of the whole package and print a table of the outcomes."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import table
from .parts import PARTS
from .runner import Process, run

MINUTES = 3.0


def main() -> int:
    arguments = _parser().parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        print(f"soak: unknown part {unknown[0]!r}; the parts are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    chosen = {name: PARTS[name] for name in arguments.parts or PARTS}
    minutes = arguments.minutes if arguments.minutes is not None else 0.0 if arguments.trials else MINUTES
    out = arguments.out or Path("runs") / time.strftime("soak-%Y%m%d-%H%M%S")
    console, began = Console(), time.monotonic()
    with Progress(console) as progress:
        outcomes = run(chosen, arguments.seed, minutes, arguments.trials, out, progress)
    heading = f"Soak of {(time.monotonic() - began) / 60:.1f} minutes, seed {arguments.seed}"
    (out / "soak.md").write_text(table.markdown(outcomes, list(chosen), heading), encoding="utf-8", errors="backslashreplace")
    view = Table(*table.HEAD, title=heading)
    for line in table.lines(outcomes, chosen):
        view.add_row(*line)
    console.print(view)
    for paragraph in table.failures(outcomes):
        console.print(Text("\n" + paragraph.encode("utf-8", "backslashreplace").decode()), soft_wrap=True)
    console.print(f"\ntable    {out / 'soak.md'}", soft_wrap=True)
    return int(any(outcome.verdict == "failed" for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)} (default all)")
    parser.add_argument("--minutes", type=float, help=f"how long to run (default {MINUTES:g}; no limit with --trials)", metavar="M")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first trial of each part; trial k has the seed S + k (default 0)", metavar="S"
    )
    parser.add_argument("--trials", type=int, default=0, help="trials of each part (default: as many as the time allows)", metavar="N")
    parser.add_argument("--out", type=Path, help="folder for the outcomes and the table (default runs/soak-TIME)", metavar="DIR")
    return parser


class Progress:
    """Shows one line per part: updated in place on a terminal, printed twice per minute elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.live, self.printed = console, Live(console=console, transient=True), time.monotonic()

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __call__(self, processes: list[Process]) -> None:
        outcomes = [outcome for process in processes for outcome in process.outcomes]
        parts = list(dict.fromkeys(process.part for process in processes))
        said = [
            f"{part:20} {n:>8} tried {ok:>8} ok {no:>8} refused {bad:>6} failed" for part, n, ok, no, bad, _ in table.lines(outcomes, parts)
        ]
        if self.console.is_terminal:
            self.live.update(Text("\n".join(said)))
        elif time.monotonic() - self.printed > 30:
            self.printed = time.monotonic()
            print("\n".join(said), flush=True)


if __name__ == "__main__":
    sys.exit(main())
