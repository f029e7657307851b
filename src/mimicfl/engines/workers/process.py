"""Processes that are forked from this one, so that they share its models, data and code without copying them."""

import ctypes
import os
import signal
import sys
import warnings

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before any fork


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the children never use
        return os.fork()


def die_with_parent(parent: int) -> None:
    """Ask the system to end this process when its parent dies, since no one would read its results."""
    if _SYSTEM is not None:
        _SYSTEM.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the parent decides what happens. Its handlers are not for its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def keep_memory() -> None:
    """Let this process keep what it frees: large tensors otherwise return to the system in every step, and come back page by page."""
    if _SYSTEM is not None and hasattr(_SYSTEM, "mallopt"):
        for option, size in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 64 << 20)):
            _SYSTEM.mallopt(option, size)


def exit_reason(status: int) -> str:
    """Describe how a process ended."""
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"
