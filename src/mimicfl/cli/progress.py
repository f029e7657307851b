"""Progress of one run or of many: a bar with rate and remaining time on a terminal, plain lines when piped."""

import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..metrics.columns import shown_primary
from ..metrics.rows import Row
from ..report.summary import title
from ..settings import Experiment

LINE_EVERY = 10.0  # seconds between plain lines of one run


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "", style="dim")


class Reporter:
    """Call it after every round of any run; use it as a context manager.

    The heading is printed with the first notice, when all settings are checked: after a mistake only its message is shown.
    """

    def __init__(self, console: Console, plan: Sequence[Experiment] = (), runs: int = 1, heading: str = "") -> None:
        self.console, self.runs, self.heading = console, len(plan) or runs, heading
        told = (f.name for f in dataclasses.fields(Experiment) if f.name not in ("algorithm", "seed"))
        self.varied = [key for key in told if len({repr(getattr(e, key)) for e in plan}) > 1][:3]  # part of a run's label
        self.done: dict[str, tuple[int, int]] = {}  # rounds of each run, and of how many
        self.first: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.finished = 0
        self.began = self.printed = time.monotonic()
        self.task = TaskID(0)
        self.live = console.is_terminal
        about, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
        columns = (about, BarColumn(bar_width=24), MofNCompleteColumn(), Rate(), TimeRemainingColumn(), note)
        self.bars = Progress(*columns, console=console, transient=True, disable=not self.live)

    def __enter__(self) -> "Reporter":
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bars.stop()
        if kind is None:
            self._head()  # nothing was left to train

    def __call__(self, experiment: Experiment, row: Row, total: int) -> None:
        key, rounds = experiment.name, row["round"] + 1
        if not self.done:
            self.began = time.monotonic() - float(row.get("seconds") or 0.0)
            self.task = self.bars.add_task("", total=total, note="")
        self.first.setdefault(key, row["round"])
        self.done[key] = rounds, total
        self.notes[key] = shown_primary(row, experiment.to_dict()) or self.notes.get(key, "")
        ended = rounds == total
        self.finished += ended
        if self.live:
            together = sum(self.done[k][0] for k in self.done), sum(self.done[k][1] for k in self.done)
            what = self.label(experiment) if self.runs == 1 else f"{self.finished} of {self.runs} runs finished"
            note = self.notes[key] if self.runs == 1 else f"{self.label(experiment)}: {self.notes[key]}"
            self.bars.update(self.task, description=what, completed=together[0], total=together[1], note=note)
        elif ended or time.monotonic() - self.printed > LINE_EVERY:
            self._line(experiment, ended)

    def notice(self, sentence: str) -> None:
        """A line above the bars."""
        self._head()
        self.console.print(sentence, style="dim", soft_wrap=True)

    def _head(self) -> None:
        heading, self.heading = self.heading, ""
        if heading:
            self.console.print(heading, style="dim", soft_wrap=True)

    def label(self, experiment: Experiment) -> str:
        return ", ".join(
            [title(experiment.algorithm), *[f"{key} {getattr(experiment, key)}" for key in self.varied], f"seed {experiment.seed}"]
        )

    def _line(self, experiment: Experiment, ended: bool) -> None:
        self.printed = time.monotonic()
        rounds, total = self.done[experiment.name]
        made = sum(done - self.first[key] for key, (done, _) in self.done.items())
        speed = made / max(self.printed - self.began, 1e-9)
        left = sum(total - done for done, total in self.done.values()) / speed
        which = f"[{self.finished}/{self.runs}] " if self.runs > 1 else ""
        rest = f", {left:.0f} s left" if not ended and left else ""
        note = self.notes[experiment.name]
        self.console.print(f"{which}{self.label(experiment)}: round {rounds}/{total}, {note}, {speed:.1f} rounds/s{rest}", soft_wrap=True)
