"""The status page of a federation and its Prometheus metrics."""

import contextlib
import http.client
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from importlib import resources

import numpy as np
import pytest
from flwr.app import Array, MetricRecord

import mimicfl.flower as mff
from mimicfl.cli.main import main
from mimicfl.errors import UsageError
from mimicfl.flower import watch
from mimicfl.metrics.lock import lock_folder
from tests.browser import chromium, needs_chromium
from tests.flower.toy import Toy, run

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A federation of three, one of which is refused in round 2 and one of which is absent in round 3."""

    def spoil(number, reply, message):
        t = message.content["config"]["server-round"] if message.metadata.message_type == "train" else 0
        if (number, t) == (1, 2):
            reply.content["arrays"]["w"] = Array(np.full(3, np.nan, np.float32))
        if (number, t) == (2, 3):
            raise RuntimeError(NASTY)
        return reply

    path = tmp_path_factory.mktemp("watch") / "ward-study"
    evaluate = {"evaluate_fn": lambda t, arrays: MetricRecord({"accuracy": 0.25 * t, "f1": 0.2 * t})}
    run(mff.MimiC(folder=path, wait_for=3, lr=0.3), Toy(spoil=spoil), rounds=3, **evaluate)
    return path


@pytest.fixture
def address(folder):
    with watch.make_server(folder, 0, with_prometheus=True) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def get(address, path, **headers):
    with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as reply:
        return reply.read().decode()


def code(address, path, **headers):
    try:
        get(address, path, **headers)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def test_status_tells_what_every_client_did(folder):
    found = watch.status(folder)
    clients = {client["id"]: client for client in found["clients"]}
    assert (found["rounds"], found["state"], found["name"]) == (3, "finished", "ward-study")
    assert [clients[name]["aggregated"] for name in "012"] == [3, 2, 2]
    assert clients["1"]["history"] == {0: "a", 1: "f", 2: "a"}
    assert "not finite" in clients["1"]["reason"]
    assert [clients[name]["since"] for name in "012"] == [0, 0, 1]
    assert found["curves"]["test_accuracy"] == [[1, 0.25], [2, 0.5], [3, 0.75]]
    assert found["curves"]["f1 (server)"][-1] == [3, pytest.approx(0.6)]
    assert "loss (evaluate)" in found["curves"]


def test_a_federation_whose_server_is_gone_is_not_called_running(folder, tmp_path):
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    (stopped / "final.safetensors").unlink()
    assert watch.status(stopped)["state"] == "interrupted"
    lock = lock_folder(stopped)
    assert watch.status(stopped)["state"] == "running"
    lock.close()


def test_labels_are_escaped_as_prometheus_expects():
    assert watch._label('a\\b"c\nd') == 'a\\\\b\\"c\\nd'


def test_a_browser_that_goes_away_leaves_no_traceback(address, capfd, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(watch, "status", gone)
    with contextlib.suppress(OSError, http.client.HTTPException):
        get(address, "/data.json")
    assert "<script>" in get(address, "/")
    assert "Traceback" not in capfd.readouterr().err


def test_page_data_and_metrics_are_served_to_this_machine_only(address):
    assert "<script>" in get(address, "/")
    assert json.loads(get(address, "/data.json"))["rounds"] == 3
    assert code(address, "/etc/passwd") == 404
    assert code(address, "/", Host="evil.example:80") == 403


def test_prometheus_metrics(address):
    lines = get(address, "/metrics").splitlines()
    assert "mimicfl_rounds_total 3" in lines
    assert "mimicfl_updates_failed_total 2" in lines
    assert 'mimicfl_client_rounds_since_update{client="2"} 1' in lines
    assert 'mimicfl_metric{metric="test_accuracy"} 0.75' in lines
    assert all(line.startswith(("#", "mimicfl_")) for line in lines)


def test_prometheus_is_served_only_if_asked_for(folder):
    with watch.make_server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert code(f"http://127.0.0.1:{server.server_address[1]}", "/metrics") == 404
        server.shutdown()


def test_other_folders_and_ports_in_use_are_refused(folder, tmp_path, capsys):
    assert main(["flower", "watch", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err
    with watch.make_server(folder, 0) as server, pytest.raises(UsageError, match="--port"):
        watch.make_server(folder, server.server_address[1])


@pytest.mark.slow
@needs_chromium
def test_the_page_updates_itself_and_escapes_what_clients_say(address, folder, monkeypatch, tmp_path):
    """In a browser: every poll shows one round more, and a client's text stays text."""
    status, polls = watch.status, []

    def later(path):
        polls.append(path)
        return status(path) | {"rounds": 2 + len(polls)}

    monkeypatch.setattr(watch, "status", later)
    page = chromium(address + "/", tmp_path, "--dump-dom", budget=7000)
    assert len(polls) >= 2
    assert f"ward-study: round {2 + len(polls)}" in page
    assert page.count("<figure>") >= 5
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert '<div id="problem" role="status"></div>' in page


@pytest.mark.slow
@needs_chromium
def test_reasons_are_readable_beside_many_rounds(tmp_path):
    """120 rounds of a client with a long id and a long reason fit into a narrow page."""
    reason = "cannot read train.parquet: disk quota exceeded for this user"
    rows = [{"round": t, "active": 1, "sent": ["9" * 19], "failed": {"9" * 19: reason}} for t in range(120)]
    clients = [client | {"id": name} for name, client in watch._clients(rows).items()]
    shown = {"name": "study", "settings": {}, "rounds": 120, "state": "running", "curves": {}, "first": 0, "clients": clients}
    shown |= {"traffic": {"bytes_up": 0, "bytes_down": 0}, "updated": None}
    measure = "document.title = `table ${document.querySelector('table').clientWidth} in ${innerWidth}`"
    page = resources.files("mimicfl.flower").joinpath("watch.html").read_text()
    assert "\nupdate();\n" in page
    (tmp_path / "page.html").write_text(page.replace("\nupdate();\n", f"\nshow({json.dumps(shown)}); {measure};\n"))
    found = chromium(f"file://{tmp_path / 'page.html'}", tmp_path, "--dump-dom", "--window-size=500,900")
    assert reason in found
    table, window = map(int, re.search(r"<title>table (\d+) in (\d+)</title>", found).groups())
    assert table <= window
