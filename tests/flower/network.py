"""A real federation on loopback: SuperLink and SuperNodes as processes of their own, each stopped at the end whatever happens."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ..conftest import wait_until

BIN = Path(sys.executable).parent
MARK = "MIMICFL_TEST_MARK"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Network:
    """Every process carries a mark in its environment, which all that it starts inherit: so all of them can be found and ended."""

    def __init__(self, folder, tls=None):
        self.folder, self.tls, self.port = Path(folder), tls, free_port()
        self.processes, self.running = [], {}
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        secure = f'root-certificates = "{tls / "ca.crt"}"' if tls else "insecure = true"
        (home / "config.toml").write_text(f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\n{secure}\n')
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
            "NO_COLOR": "1",
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            self.kill(process)

    def start(self, name, *command):
        """Start a process; its output goes to NAME.log."""
        mark = secrets.token_hex(8)
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = self.environment | {MARK: mark}
            ports = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(list(map(str, command)), **ports, env=environment, cwd=self.folder, start_new_session=True)
        process.mark = mark
        self.processes.append(process)
        self.running[name] = process
        return process

    def kill(self, process):
        """SIGKILL to the process and to all that it has started, as a power cut would."""
        while found := members(process.mark):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)
        process.wait()

    def superlink(self, *more):
        security = (
            ["--ssl-certfile", self.tls / "server.crt", "--ssl-keyfile", self.tls / "server.key", "--ssl-ca-certfile", self.tls / "ca.crt"]
            if self.tls
            else ["--insecure"]
        )
        where = ["--host", "127.0.0.1", "--port", self.port, "--disable-runtime-dependency-installation"]
        self.start("superlink", BIN / "flower-superlink", *security, *where, *more)
        link = self.running["superlink"]
        wait_until(lambda: link.poll() is not None or self._answers(), "the SuperLink's port")
        assert link.poll() is None, self.logs()

    def _answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 60):
            return True
        return False

    def supernode(self, number, of, *more, **config):
        security = ["--root-certificates", self.tls / "ca.crt"] if self.tls else ["--insecure"]
        words = {"partition-id": number, "num-partitions": of} | config
        text = " ".join(f'{key}="{value}"' if isinstance(value, (str, Path)) else f"{key}={value}" for key, value in words.items())
        where = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", free_port()]
        return self.start(f"node{number}", BIN / "flower-supernode", *security, *where, "--node-config", text, *more)

    def flwr(self, *words):
        done = subprocess.run([str(BIN / "flwr"), *map(str, words)], env=self.environment, cwd=self.folder, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def run_app(self, app, **settings):
        """Submit a run; returns at once."""
        text = " ".join(f"{key}='{value}'" if isinstance(value, (str, Path)) else f"{key}={value}" for key, value in settings.items())
        code, out = self.flwr("run", app, "loop", "--run-config", text)
        assert code == 0, out

    def server_apps(self):
        """Process ids of the ServerApps that the SuperLink has started."""
        return [pid for pid in members(self.running["superlink"].mark) if "flwr-serverapp" in command_of(pid)]

    def logs(self):
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted(self.folder.glob("*.log")))


def members(mark):
    """All processes that carry this mark: those that a test has started, and what they started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                alive = "\nState:\tZ" not in (entry / "status").read_text()
                if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
