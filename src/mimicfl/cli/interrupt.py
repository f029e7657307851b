"""Ctrl-C in the program `mimicfl`: it ends at once and says how to resume.

A run can be killed at any moment without losing anything, so nothing has to be unwound. Unwinding would not be safe: a KeyboardInterrupt
inside a backward pass can make PyTorch abort, and inside a callback of the garbage collector Python prints it and drops it.
"""

import argparse
import contextlib
import os
import signal
import sys
from typing import Any

from ..files import drop_unfinished

SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
current: argparse.Namespace | None = None  # the command that is running
begun = False  # are its imports done?


def advice(parsed: argparse.Namespace | None) -> str:
    """How to resume the command."""
    if not begun:
        return "stopped before anything was started"
    folder = getattr(parsed, "folder", None)
    again = f"'mimicfl resume {folder}' or " if folder else ""
    return f"stopped; resume with {again}the same command"


def stop(number: int, frame: Any) -> None:
    """The handler of SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    if getattr(current, "ray", None):  # leave a cluster cleanly
        raise KeyboardInterrupt
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        drop_unfinished()
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)
    os.write(2, f"\nmimicfl: {advice(current)}\n".encode(errors="replace"))
    os._exit(130)
