"""`ProgressBar`: one line that shows how far runs are, in a notebook or on a terminal."""

import html
import sys
import time
from typing import Any

from .metrics.columns import shown_primary

EVERY = 0.2  # seconds between updates


class ProgressBar:
    """Pass it as `progress=` to `mf.simulate`, `mf.run` or `mf.compare`; it shows one bar for all runs of the call.

    In a notebook it updates one output in place, without extra packages. On a terminal it rewrites one line of stderr. Elsewhere, as in a
    log file, it shows nothing.
    """

    def __init__(self) -> None:
        self.done: dict[str, tuple[int, int]] = {}  # rounds of each run, and of how many
        self.shown = 0.0
        self.display: Any = None

    def __call__(self, *facts: Any) -> None:
        """Called after each round: with the experiment (not by `simulate`), the row and the number of rounds."""
        *experiment, row, total = facts
        self.done[experiment[0].name if experiment else ""] = row["round"] + 1, total
        rounds, of = (sum(each) for each in zip(*self.done.values(), strict=True))
        now = time.monotonic()
        if rounds == of or now - self.shown > EVERY:
            self.shown = now
            self._show(rounds, of, self._words(experiment, row))

    def _words(self, experiment: list[Any], row: dict[str, Any]) -> str:
        parts = [f"{experiment[0].algorithm}, seed {experiment[0].seed}"] if experiment else []
        result = shown_primary(row, experiment[0].to_dict() if experiment else {"metrics": _task_metrics(row)})
        return ": ".join([*parts, *([result] if result else [])])

    def _show(self, rounds: int, of: int, words: str) -> None:
        if in_notebook():
            self._show_html(f'<progress value="{rounds}" max="{of}"></progress> {rounds}/{of} rounds, {html.escape(words)}')
        elif sys.stderr.isatty():
            end = "\n" if rounds == of else ""
            print(f"\r{'█' * (20 * rounds // of):20} {rounds}/{of} rounds, {words}\x1b[K", end=end, file=sys.stderr, flush=True)

    def _show_html(self, text: str) -> None:
        shown: Any = sys.modules["IPython"]
        page = shown.display.HTML(text)
        if self.display is None:
            self.display = shown.display.display(page, display_id=True)
        else:
            self.display.update(page)


def _task_metrics(row: dict[str, Any]) -> str:
    """The metrics of a task as far as a row shows them: rows without a task have an accuracy and a loss only."""
    found = [column for column in row if column.startswith("test_") and column not in ("test_loss", "test_accuracy")]
    return ",".join(column.removeprefix("test_") for column in found if row.get("test_accuracy") is None)


def in_notebook() -> bool:
    """Is this the kernel of a notebook?"""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"
