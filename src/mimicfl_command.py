"""The command `mimicfl`. It is outside the package, so that Ctrl-C prints no traceback while the package is imported."""

import os
import signal
import sys


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        from mimicfl import __version__

        print(f"mimicfl {__version__}")
        return 0
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False if the caller ignores Ctrl-C
    if heard:
        signal.signal(signal.SIGINT, _stop)
    from mimicfl.cli import interrupt
    from mimicfl.cli.main import main as command

    if heard:
        signal.signal(signal.SIGINT, interrupt.stop)  # from here on the message says how to resume
    try:
        return command()
    except KeyboardInterrupt:  # a second Ctrl-C while the first is being handled
        os.write(2, b"\nmimicfl: stopped\n")
        return 130
    finally:
        if heard:  # the exit code is fixed: another Ctrl-C would only print a traceback while Python shuts down
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop(*_: object) -> None:
    """End at once: a KeyboardInterrupt in the middle of an import can abort the process, and there is nothing to save."""
    os.write(2, b"\nmimicfl: stopped before anything was started\n")
    os._exit(130)
