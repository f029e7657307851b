"""The command `mimicfl`. It stands beside the package: Ctrl-C must be calm while the package is imported, too."""

import os
import signal
import sys


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        from mimicfl import __version__

        print(f"mimicfl {__version__}")
        return 0
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the caller has Ctrl-C ignored
    if heard:
        signal.signal(signal.SIGINT, _stop)
    from mimicfl.cli import interrupt
    from mimicfl.cli.main import main as command

    if heard:
        signal.signal(signal.SIGINT, interrupt.stop)  # from here on the command says how to go on
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
    os.write(2, b"\nmimicfl: stopped before anything was begun\n")
    os._exit(130)
