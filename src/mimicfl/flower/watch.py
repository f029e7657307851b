"""`mimicfl flower watch DIR`: a local page that follows a federation, and Prometheus metrics by option.

The server reads the run folder only; it needs no connection to Flower and changes nothing. It listens on this machine alone.
"""

import contextlib
import json
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UsageError, integer
from ..metrics.listing import state_of
from ..metrics.store import RunFolder
from .names import natural_key

SHOWN_ROUNDS = 120  # rounds per client on the page
COLUMNS = (("server", "accuracy"), ("server", "loss"), ("train", "train_loss"))  # metrics that are columns of the rows already
CURVES = ("test_accuracy", "test_loss", "train_loss")


def status(path: str | Path) -> dict[str, Any]:
    """What the page shows: the state of the run, its curves, and what every client did."""
    folder = RunFolder(path)
    rows = folder.rows()
    clients = _clients(rows)
    first = max(0, len(rows) - SHOWN_ROUNDS)
    return {
        "name": folder.path.resolve().name,
        "settings": {key: str(value) for key, value in folder.config.items()},
        "rounds": len(rows),
        "state": state_of(folder.path),
        "curves": _curves(rows),
        "first": first,
        "clients": [clients[name] | {"id": name} for name in sorted(clients, key=natural_key)],
        "traffic": {key: rows[-1][key] if rows else 0 for key in ("bytes_up", "bytes_down")},
        "updated": (folder.path / "rows.jsonl").stat().st_mtime if rows else None,
    }


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """[round, value] of every metric that has a number in some round, and the number of aggregated updates."""
    curves: dict[str, list[list[float]]] = {"updates aggregated": [[row["round"] + 1, row["active"]] for row in rows]}
    for row in rows:
        values = {key: row.get(key) for key in CURVES}
        for kind, metrics in row.get("metrics", {}).items():
            values |= {f"{key} ({kind})": value for key, value in metrics.items() if (kind, key.replace("-", "_")) not in COLUMNS}
        for key, value in values.items():
            if isinstance(value, (int, float)):
                curves.setdefault(key, []).append([row["round"] + 1, value])
    return curves


def _clients(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each client did in the last rounds: how often it was aggregated and refused, and how many rounds ago it was last aggregated."""
    found: dict[str, dict[str, Any]] = {}
    first = max(0, len(rows) - SHOWN_ROUNDS)
    for row in rows:
        for name in {*row.get("sent", []), *row.get("answered", []), *row.get("failed", {})}:
            client = found.setdefault(name, {"aggregated": 0, "failed": 0, "last": None, "reason": "", "history": {}})
            if name in row.get("answered", []):
                client["aggregated"], client["last"] = client["aggregated"] + 1, row["round"] + 1
            elif name in row.get("failed", {}):
                client["failed"], client["reason"] = client["failed"] + 1, str(row["failed"][name])[:300]
            if row["round"] >= first:
                client["history"][row["round"]] = "a" if name in row.get("answered", []) else "f" if name in row.get("failed", {}) else "s"
    for client in found.values():
        client["since"] = None if client["last"] is None else len(rows) - client["last"]
    return found


def prometheus(path: str | Path) -> str:
    """The state of a federation in the text format of Prometheus."""
    folder = RunFolder(path)
    rows = folder.rows()
    last = rows[-1] if rows else {}
    lines: list[str] = []

    def add(name: str, kind: str, about: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.extend([f"# HELP mimicfl_{name} {about}", f"# TYPE mimicfl_{name} {kind}"])
        lines.extend(f"mimicfl_{name}{labels} {value:.10g}" for labels, value in samples)

    add("rounds_total", "counter", "Completed rounds.", [("", len(rows))])
    add("finished", "gauge", "1 if the run is finished.", [("", int(folder.finished))])
    add("updates_aggregated_total", "counter", "Aggregated updates.", [("", sum(row["active"] for row in rows))])
    add("updates_failed_total", "counter", "Updates that failed or were refused.", [("", sum(len(row.get("failed", {})) for row in rows))])
    add("round_seconds", "gauge", "Duration of the last round.", [("", last.get("seconds") or 0.0)])
    add("active_clients", "gauge", "Clients aggregated in the last round.", [("", last.get("active", 0))])
    for way in ("up", "down"):
        add(f"bytes_{way}_total", "counter", f"Bytes of arrays sent {way}.", [("", last.get(f"bytes_{way}", 0))])
    metrics = [(f'{{metric="{_label(name)}"}}', points[-1][1]) for name, points in _curves(rows).items() if points]
    add("metric", "gauge", "Last value of a metric.", metrics)
    since = [(name, client["since"]) for name, client in _clients(rows).items() if client["since"] is not None]
    samples = [(f'{{client="{_label(name)}"}}', rounds) for name, rounds in since]
    add("client_rounds_since_update", "gauge", "Rounds since a client was last aggregated.", samples)
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """A label value, escaped as in Prometheus' text format."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def make_server(path: str | Path, port: int = 8765, with_prometheus: bool = False) -> ThreadingHTTPServer:
    """A server on this machine that shows the federation in a run folder; port 0 chooses a free one."""
    RunFolder(path)  # refuses what is not a run folder
    page = resources.files(__package__).joinpath("watch.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # the browser has closed the connection
                self._answer()

        def _answer(self) -> None:
            # A page of another site must not read this one under a name of its own (DNS rebinding).
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
                return self._send(403, "text/plain", b"this page is served to this machine only\n")
            try:
                if self.path == "/":
                    return self._send(200, "text/html; charset=utf-8", page)
                if self.path == "/data.json":
                    return self._send(200, "application/json", json.dumps(status(path)).encode())
                if self.path == "/metrics" and with_prometheus:
                    return self._send(200, "text/plain; version=0.0.4; charset=utf-8", prometheus(path).encode())
            except ConnectionError:
                raise
            except (UsageError, OSError) as error:
                return self._send(503, "text/plain; charset=utf-8", str(error).encode())
            return self._send(404, "text/plain", b"not found\n")

        def _send(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", integer("port", port, low=0, high=65535)), Handler)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error.strerror}); choose another one with --port") from None
