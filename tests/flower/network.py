"""A real federation on loopback: SuperLink and SuperNodes as separate processes, all of which are stopped at the end.

Its processes, and those of the apps, of which there is one per message, fork from one that has imported PyTorch and Flower; with
`cold=True` they start as Flower's programs do.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests import fork_server
from tests.conftest import wait_until

BIN = Path(sys.executable).parent
MARK = "MIMICFL_TEST_MARK"

# Wraps a function of an app's task: a file `hold-<client>` names the round in which that client waits, so that it can be killed there.
HOLD = """

def {function}(*given, real={function}):
    import pathlib, time
    gate, rows = pathlib.Path({gate!r}), pathlib.Path({rows!r})
    me = given[0] if isinstance(given[0], int) else given[0].node_config["partition-id"]
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    hold = gate / f"hold-{{me}}"
    if hold.exists() and int(hold.read_text()) == done:
        (gate / f"holding-{{me}}").touch()
        while hold.exists():
            time.sleep(0.1)
    return real(*given)
"""


def hold_in(task, function, gate, run):
    """Let clients wait where their app loads its data; the first argument is the context or the client's number."""
    gate.mkdir(exist_ok=True)
    task.write_text(task.read_text() + HOLD.format(function=function, gate=str(gate), rows=str(run / "rows.jsonl")))


def rows(folder):
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Network:
    """A SuperLink and its SuperNodes.

    Every process has a mark in its environment. Its children inherit the mark, so all of them can be found and stopped.
    """

    def __init__(self, folder, tls=None):
        self.folder, self.tls, self.port = Path(folder), tls, free_port()
        self.node_port = self.port  # where SuperNodes connect; a proxy has another one
        self.processes, self.running = [], {}
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        secure = f'root-certificates = "{tls / "ca.crt"}"' if tls else "insecure = true"
        (home / "config.toml").write_text(f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\n{secure}\n')
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(fork_server.programs()), str(BIN), os.environ["PATH"]]),
            "PYTHONWARNINGS": "ignore",
            "NO_COLOR": "1",
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            self.kill(process)

    def start(self, name, program, *arguments, cold=False):
        """Start a process; its output goes to NAME.log."""
        mark = secrets.token_hex(8)
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = self.environment | {MARK: mark}
            if cold:
                environment["PATH"] = environment["PATH"].partition(os.pathsep)[2]
            ports = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            command = [shutil.which(program, path=environment["PATH"]), *map(str, arguments)]
            process = subprocess.Popen(command, **ports, env=environment, cwd=self.folder, start_new_session=True)
        process.mark = mark
        self.processes.append(process)
        self.running[name] = process
        return process

    def kill(self, process):
        """Send SIGKILL to the process and to all its descendants, like a power failure."""
        while found := members(process.mark):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)
        if process.poll() is None:  # nginx overwrites its environment, and with it the mark; it stops its own workers
            process.terminate()
        process.wait()

    def superlink(self, *more, cold=False):
        security = (
            ["--ssl-certfile", self.tls / "server.crt", "--ssl-keyfile", self.tls / "server.key", "--ssl-ca-certfile", self.tls / "ca.crt"]
            if self.tls
            else ["--insecure"]
        )
        where = ["--host", "127.0.0.1", "--port", self.port, "--disable-runtime-dependency-installation"]
        self.start("superlink", "flower-superlink", *security, *where, *more, cold=cold)
        link = self.running["superlink"]
        wait_until(lambda: link.poll() is not None or self._accepts(), "the SuperLink's port")
        assert link.poll() is None, self.logs()

    def _accepts(self, port=None):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port or self.port), 60):
            return True
        return False

    def proxy(self, nginx, config):
        """Start nginx with a configuration of the documentation, on this machine and these ports; SuperNodes connect through it."""
        self.node_port = free_port()
        text = Path(config).read_text()
        temporary = [f"{kind}_temp_path {self.folder}/nginx-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        for written, here in {
            "listen 8443": f"listen 127.0.0.1:{self.node_port}",
            "superlink:8000": f"127.0.0.1:{self.port}",
            "/keys/": f"{self.tls}/",
            "http {": " ".join(["http {", *temporary]),
        }.items():
            assert written in text
            text = text.replace(written, here)
        # The workers of a root's nginx are another user, who cannot write to the folder of a test.
        user = "user root;\n" if os.geteuid() == 0 else ""
        (self.folder / "nginx.conf").write_text(f"{user}pid {self.folder}/nginx.pid;\n{text}")
        self.start("proxy", nginx, "-c", self.folder / "nginx.conf", "-p", self.folder, "-g", "daemon off;")
        proxy = self.running["proxy"]
        wait_until(lambda: proxy.poll() is not None or self._accepts(self.node_port), "the proxy's port")
        assert proxy.poll() is None, self.logs()

    def supernode(self, number, of, *more, cold=False, **config):
        security = ["--root-certificates", self.tls / "ca.crt"] if self.tls else ["--insecure"]
        node_config = {"partition-id": number, "num-partitions": of} | config
        text = " ".join(f'{key}="{value}"' if isinstance(value, (str, Path)) else f"{key}={value}" for key, value in node_config.items())
        where = ["--superlink", f"127.0.0.1:{self.node_port}", "--host", "127.0.0.1", "--port", free_port()]
        return self.start(f"node{number}", "flower-supernode", *security, *where, "--node-config", text, *more, cold=cold)

    def flwr(self, *arguments):
        """Run a flwr command; returns its exit code and output."""
        command = [str(fork_server.programs() / "flwr"), *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def run_app(self, app, **settings):
        """Submit a run and return immediately."""
        text = " ".join(f"{key}='{value}'" if isinstance(value, (str, Path)) else f"{key}={value}" for key, value in settings.items())
        code, out = self.flwr("run", app, "loop", "--run-config", text)
        assert code == 0, out

    def runs(self):
        """The runs as Flower lists them, with their ids and their traffic."""
        _, text = self.flwr("list", "loop", "--format", "json")
        return json.loads(text[text.index("{") :])["runs"]

    def run_log(self):
        """What the ServerApp of the only run has logged."""
        [run] = self.runs()
        return self.flwr("log", run["run-id"], "loop", "--show")[1]

    def server_apps(self):
        """Process ids of the ServerApps started by the SuperLink, which is not `cold`."""
        mark = self.running["superlink"].mark
        return [pid for pid, (words, given) in fork_server.running().items() if words[0] == "flwr-serverapp" and given.get(MARK) == mark]

    def logs(self):
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted(self.folder.glob("*.log")))


def members(mark):
    """Process ids of all live processes with this mark."""
    found = [pid for pid, (_, given) in fork_server.running().items() if given.get(MARK) == mark]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                alive = "\nState:\tZ" not in (entry / "status").read_text()
                if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
