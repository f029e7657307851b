"""A fork server: a process that has imported mimicfl and forks on request, so that a command starts in milliseconds instead of seconds.

It reads one request per line from its standard input and replies with lines of JSON: the child's pid at once, its status when it has
ended. The child stays a zombie until the next line arrives, so its pid, group and session cannot be reused while they are examined.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mimicfl_command  # type: ignore[import-untyped]

from .preload import preload

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTALLED = "import sys; from mimicfl_command import main; sys.exit(main())"  # same as the installed command


def serve() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # signals must not arrive before the new child can handle them
    preload()
    gc.freeze()
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            say.detach()
            return obey(json.loads(line))
        print(json.dumps({"pid": child}), file=say, flush=True)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        print(json.dumps({"status": status}), file=say, flush=True)
        sys.stdin.readline()
        os.waitpid(child, 0)
    return 0


def obey(order: dict[str, Any]) -> int:
    """Run the command in the child process, in its own session."""
    os.setsid()
    for number in HELD:  # a soak in the background inherits ignored signals
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT and not order["fresh"] else signal.SIG_DFL)
    for descriptor, file in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.closerange(3, 256)
    os.environ.update(order["environment"])
    for kind, value in order["limits"].items():
        number = getattr(resource, kind)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))
    if order["fresh"]:
        return _fresh(order)
    torch.set_num_threads(order["threads"])
    return _begin((lambda: _call(order)) if order["call"] else lambda: _command(order["arguments"]))


def _begin(begin: Callable[[], int]) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    except KeyboardInterrupt:  # same as the installed command during its startup
        os.write(2, b"\nmimicfl: stopped before anything was started\n")
        os._exit(130)
    return begin()


def _command(arguments: list[str]) -> int:
    sys.argv = ["mimicfl", *arguments]
    return int(mimicfl_command.main())


def _call(order: dict[str, Any]) -> int:
    """Call a function of the soak and write its result to a file."""
    module, _, function = order["call"].partition(":")
    found = getattr(importlib.import_module(module), function)(**order["arguments"])
    Path(order["result"]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _fresh(order: dict[str, Any]) -> int:
    os.environ["OMP_NUM_THREADS"] = str(order["threads"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    os.execv(sys.executable, [sys.executable, "-c", INSTALLED, *order["arguments"]])


if __name__ == "__main__":
    sys.exit(serve())
