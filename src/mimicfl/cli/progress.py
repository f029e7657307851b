"""Progress of one run or of many: a bar with rate and remaining time on a terminal, plain lines when piped."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..config import Experiment
from ..metrics.history import Row
from ..report.summary import show, title

LINE_EVERY = 10.0  # seconds between plain lines of one run


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "", style="dim")


class Reporter:
    """Call it after every round; use as a context manager."""

    def __init__(self, console: Console, runs: int = 1) -> None:
        self.console, self.runs = console, runs
        self.current: tuple[str, int] | None = None
        self.index = self.first = 0
        self.label = self.note = ""
        self.began = self.printed = self.ended = time.monotonic()
        self.task = self.all = TaskID(0)
        self.live = console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        self.bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True, disable=not self.live)

    def __enter__(self) -> "Reporter":
        self.bars.start()
        if self.live and self.runs > 1:
            self.all = self.bars.add_task("all runs", total=self.runs, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bars.stop()

    def __call__(self, experiment: Experiment, row: Row, total: int) -> None:
        key = (experiment.algorithm, experiment.seed)
        if key != self.current:
            self._begin(experiment, row, total)
        note = f"{self.metric(row)}"
        done = row["round"] + 1
        if self.live:
            self.bars.update(self.task, completed=done, note=note or self.note)
            if self.runs > 1:
                self.bars.update(self.all, completed=self.index - 1 + done / total)
        elif done == total or time.monotonic() - self.printed > LINE_EVERY:
            self._line(done, total, note)
        self.note = note or self.note
        if done == total:
            self.ended = time.monotonic()

    def notice(self, sentence: str) -> None:
        """A line above the bars."""
        self.console.print(sentence, style="dim", soft_wrap=True)
        self.ended = time.monotonic()  # choosing an engine is not training

    def _begin(self, experiment: Experiment, row: Row, total: int) -> None:
        if self.live and self.current is not None:
            self.bars.remove_task(self.task)
        self.current = (experiment.algorithm, experiment.seed)
        self.index += 1
        self.label = f"{title(experiment.algorithm)}, seed {experiment.seed}"
        self.began, self.printed = self.ended, time.monotonic()
        self.first = row["round"]
        self.note = ""
        if self.live:
            self.task = self.bars.add_task(self.label, total=total, completed=self.first, note="")

    def _line(self, done: int, total: int, note: str) -> None:
        self.printed = time.monotonic()
        speed = (done - self.first) / max(self.printed - self.began, 1e-9)
        left = f", {(total - done) / speed:.0f} s left" if done < total else ""
        which = f"[{self.index}/{self.runs}] " if self.runs > 1 else ""
        self.console.print(
            f"{which}{self.label}: round {done}/{total}, {note or self.note}, {speed:.1f} rounds/s{left}", markup=False, highlight=False
        )

    @staticmethod
    def metric(row: Row) -> str:
        if row.get("test_accuracy") is not None:
            return f"accuracy {show('test_accuracy', row['test_accuracy'])}"
        if row.get("test_loss") is not None:
            return f"test loss {row['test_loss']:.4g}"
        return ""
