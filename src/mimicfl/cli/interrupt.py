"""Ctrl-C during training."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ..engine.drive import in_training

SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def advice(parsed: argparse.Namespace | None) -> str:
    """How to resume what was stopped."""
    folder = getattr(parsed, "folder", None)
    again = f"'mimicfl resume {folder}' or " if folder else ""
    return f"stopped; resume with {again}the same command"


@contextlib.contextmanager
def calm(parsed: argparse.Namespace) -> Iterator[None]:
    """End the process at once if Ctrl-C arrives while clients are being trained.

    A KeyboardInterrupt inside a backward pass can make PyTorch abort. No file is being written at that time, and a run can be killed at
    any moment, so nothing is lost. At other times Ctrl-C raises KeyboardInterrupt as usual.
    """

    def stop(number: int, frame: Any) -> None:
        if not in_training():
            raise KeyboardInterrupt
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if sys.stdout is not None and sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
        os.write(2, f"\nmimicfl: {advice(parsed)}\n".encode(errors="replace"))
        os._exit(130)

    usual = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
