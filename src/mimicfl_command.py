"""The command `mimicfl`. It stands beside the package, whose import takes seconds: Ctrl-C must be calm meanwhile, too."""

import os
import signal


def main() -> int:
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
    """End at once: a KeyboardInterrupt in the middle of PyTorch's import can abort the process, and there is nothing to save."""
    os.write(2, b"\nmimicfl: stopped before anything was begun\n")
    os._exit(130)
