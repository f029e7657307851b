"""Output to the terminal: text from files is escaped, so that it cannot control the terminal."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..text import visible


class PatientConsole(Console):
    """Prints text without markup. If the reader closes the pipe (`| head`), printing stops and training continues."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all text before styles are added: names from a run folder may contain escape sequences."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdigit() and int(columns) else 120
    return PatientConsole(width=width, markup=False, highlight=False)


def say(sentence: str) -> None:
    """One line on the error stream."""
    with contextlib.suppress(OSError):
        print(f"mimicfl: {visible(sentence)}", file=sys.stderr)


def notice(sentence: object) -> None:
    """A notice on the error stream."""
    say(f"notice: {sentence}")
