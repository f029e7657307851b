"""An app as in Flower's PyTorch quickstart, unmodified but for the line that imports the strategy: simulated, and on real processes."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

import mimicfl.flower as mff
from mimicfl.flower.checkpoints import CheckpointStore
from mimicfl.metrics.store import RunFolder
from tests.conftest import wait_until
from tests.flower.network import hold_in, rows

APP = Path(__file__).parent / "quickstart"
IMPORT = "from flwr.serverapp.strategy import FedAvg\n"
N = 3
CONFIG = {"num-server-rounds": 6, "fraction-evaluate": 0.5, "local-epochs": 1, "learning-rate": 0.05, "batch-size": 16}


def with_line(folder, line):
    """A copy of the app in which this line imports the strategy."""
    app = shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    server = app / "quickstart" / "server_app.py"
    text = server.read_text()
    assert text.count(IMPORT) == 1
    server.write_text(text.replace(IMPORT, f"{line}\n"))
    return app


def imported(app, monkeypatch):
    """The app's ServerApp and ClientApp."""
    monkeypatch.syspath_prepend(str(app))
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        monkeypatch.delitem(sys.modules, name)
    return [importlib.import_module(f"quickstart.{name}").app for name in ("server_app", "client_app")]


def test_the_app_has_no_line_of_mimicfl():
    assert all("mimicfl" not in file.read_text() for file in APP.rglob("*.py"))


@pytest.mark.slow
def test_one_changed_line_in_the_simulation(tmp_path, monkeypatch):
    """Both strategies learn, on samples that no single client has; BatchNorm's statistics are part of the model."""
    accuracies = {}
    for line in (IMPORT.strip(), "from mimicfl.flower import MimiC as FedAvg"):
        server, client = imported(with_line(tmp_path / str(len(accuracies)), line), monkeypatch)
        final = tmp_path / "final.pt"
        mff.simulate(server, client, N, CONFIG | {"final-model": str(final)})
        task = sys.modules["quickstart.task"]
        model = task.Net()
        model.load_state_dict(torch.load(final))
        assert int(model.bn.num_batches_tracked) > 0
        accuracies[line] = task.test(model, task.DataLoader(task.images(64, 99), batch_size=64))[1]
    assert min(accuracies.values()) > 0.8, accuracies


def observed(tmp_path):
    """The app with one changed line: as `from mimicfl.flower import MimiC as FedAvg`, with a folder that shows rows and corrections."""
    app, folder = with_line(tmp_path / "app", "from quickstart.strategy import FedAvg"), tmp_path / "run"
    strategy = f"import functools\nfrom mimicfl.flower import MimiC\nFedAvg = functools.partial(MimiC, folder={str(folder)!r})\n"
    (app / "quickstart" / "strategy.py").write_text(strategy)
    return app, folder


def check_return(folder):
    """One client was lost in round 1 and came back as another node in round 2: MimiC's corrections sum to zero."""
    written = rows(folder)
    assert [row["active"] for row in written] == [3, 2, 3]
    [lost] = written[1]["failed"]
    assert len(set(written[2]["answered"]) - set(written[0]["answered"])) == 1
    assert lost not in written[2]["answered"]
    corrections = CheckpointStore(RunFolder(folder)).load()[0]["state.c.rows"]
    assert float(corrections.norm()) > 0
    torch.testing.assert_close(corrections.sum(dim=0), torch.zeros(corrections.shape[1]), atol=1e-5, rtol=0)
    return written[1]["failed"][lost], written[-1]["test_accuracy"]


@pytest.mark.slow
def test_a_client_that_returns_under_a_new_node_id_takes_over_its_correction(tmp_path, monkeypatch, flower_log):
    """The app has no query function and reports nothing to recognise a client by. In memory, as below on real processes."""
    app, folder = observed(tmp_path)
    server, client = imported(app, monkeypatch)
    lost = []

    def dies(node, message, context):
        if not lost and message.metadata.message_type == "train" and message.content["config"]["server-round"] == 2:
            lost.append(node)
            federation.join(dict(context.node_config))
            federation.leave(node)
        return None if node in lost else client(message, context)

    settings = CONFIG | {"num-server-rounds": 3, "final-model": str(tmp_path / "final.pt")}
    federation = mff.Federation(dies, N, run_config=settings)
    with federation.running() as grid:
        server(grid, Context(federation.run_id, 0, {}, RecordDict(), settings))
    check_return(folder)
    assert " ".join("\n".join(flower_log.lines).split()).count("its correction passes to") == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find processes")
def test_one_changed_line_on_real_processes(network, tmp_path):
    """A SuperNode is killed while it trains and comes back under a new node id, with nothing to recognise it by."""
    (app, folder), gate = observed(tmp_path), tmp_path / "gate"
    hold_in(app / "quickstart" / "task.py", "load_data", gate, folder)
    for client in (1, 2):  # client 2 waits until client 1 is back, however long that takes
        (gate / f"hold-{client}").write_text("1")
    network.superlink()
    nodes = [network.supernode(k, N) for k in range(N)]
    try:
        wait_until(lambda: network.flwr("supernode", "list", "loop", "--format", "json")[1].count('"online"') == N, "all nodes", every=1.0)
        network.run_app(app, **{"num-server-rounds": 3, "fraction-evaluate": 0.0, "final-model": str(tmp_path / "final.pt")})
        wait_until(lambda: (gate / "holding-1").exists(), "client 1 to be training in round 1")
        network.kill(nodes[1])
        (gate / "hold-1").unlink()
        network.supernode(1, N)
        wait_until(lambda: network.run_log().count("does not report a client id") == N + 1, "the new node to be known", every=1.0)
        (gate / "hold-2").unlink()
        wait_until(lambda: (tmp_path / "final.pt").exists(), "the run to finish")
        # Flower uploads what a ServerApp logs a little later.
        wait_until(
            lambda: network.run_log().count("its correction passes to") == 1, "the line about the correction in `flwr log`", every=1.0
        )
    except BaseException:  # including the timeout of the test
        print(network.logs())
        raise
    why, accuracy = check_return(folder)
    assert "offline" in why
    assert accuracy > 0.5
