"""Commands in processes of their own that start in milliseconds: forked from a process that has imported PyTorch, but not mimicfl.

`programs()` is a folder with `python`, `mimicfl` and Flower's programs. Each hands its arguments, environment, folder and open files to
the server, waits for the fork and ends with its exit code; if it is killed, so is the fork. Tests of what happens while Python starts
need the real programs.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

PROGRAMS = ("python", "mimicfl", "flwr", "flwr-clientapp", "flwr-serverapp", "flower-superexec", "flower-superlink", "flower-supernode")
IMPORTED = (
    "torch",
    "safetensors.torch",
    "matplotlib.pyplot",
    "PIL.Image",
    "jinja2",
    "rich.table",
    "flwr.supernode.cli",
    "flwr.superlink.cli",
    "peft",
)
CLIENT = """#!{python} -IS
import json, os, socket, sys
order = json.dumps({{"words": [{name!r}, *sys.argv[1:]], "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(order).to_bytes(8)], [0, 1, 2])
    server.sendall(order)
    code = int(server.recv(16) or b"70")  # 70: the command was not started
os._exit(code)
"""


@functools.cache
def programs():
    """Start the server of this process; returns the folder of the programs. The server ends with this process."""
    place = Path(tempfile.mkdtemp(prefix="mimicfl-fork-"))
    (place / "running").mkdir()
    for name in PROGRAMS:
        (place / name).write_text(CLIENT.format(python=sys.executable, name=name, address=str(place / "socket")))
        (place / name).chmod(0o700)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    server = subprocess.Popen([sys.executable, __file__, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(server.communicate)  # closes its input, which ends it
    assert server.stdout.readline() == b"ready\n"
    return place


def running():
    """The forks that have not ended: pid -> words and environment."""
    found = {}
    for file in (programs() / "running").iterdir():
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            order = json.loads(file.read_text())
            found[int(file.name)] = order["words"], order["environment"]
    return found


def serve(place):
    """Import, then fork for each command until the standard input ends."""
    del sys.path[0]  # the folder of this file
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # an optional package is missing
            importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "socket"))
    listener.listen(64)
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        if not os.fork():
            listener.close()
            return supervise(connection, place / "running")
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(place, ignore_errors=True)
    return 0


def supervise(connection, table):
    """Fork the command; report its exit code, or kill it if its client is gone."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(length):
        text += connection.recv(1 << 16)
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (ended, wakes, connection.detach()):
            os.close(number)
        (table / f"{os.getpid()}").write_bytes(text)
        begin(json.loads(text), files)
    if ended not in select.select([ended, connection], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (table / f"{child}").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def begin(order, files):
    """Run the command in this process, with its files, and end as Python ends, but without freeing what was imported before the fork."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for name in ("stdin", "stdout", "stderr"):
        old = getattr(sys, name)
        lines = name == "stderr" or os.isatty(old.fileno())
        new = open(old.fileno(), old.mode, 1 if lines else -1, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    ended = [1]

    def leave():
        sys.stdout.flush()
        os._exit(ended[0])

    atexit.register(leave)  # runs after what the command registers
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    try:
        obey(*order["words"])
        sys.exit(0)
    except SystemExit as end:
        ended[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def obey(program, *arguments):
    if program != "python":
        sys.argv = [program, *arguments]
        [command] = entry_points(group="console_scripts", name=program)
        sys.exit(command.load()())
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).parent.resolve()))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
