"""The ray engine on a real cluster: equal to one machine; the clients of a lost worker train elsewhere in the same round."""

import contextlib
import os
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.cli.main import main
from mimicfl.engines.cluster import connect, engine

IGNORED = ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning")  # Ray leaves files of its own open
pytestmark = [pytest.mark.filterwarnings(f"ignore::{name}") for name in IGNORED]


@pytest.fixture(scope="module")
def cluster():
    """Two workers on this machine."""
    pytest.importorskip("ray")
    ray = connect.import_ray()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def settings(algorithm, **options):
    given = {"rounds": 5, "num_clients": 8, "epochs": 1, "availability": "static:0.6", "engine": "plain"}
    return mf.Experiment(algorithm=algorithm, **given | options)


@pytest.mark.slow
def test_runs_on_a_cluster_equal_those_on_this_machine(cluster):
    """Means over groups, rows, two vectors per client, own starts and gradients that are sent; the runs share the workers."""
    said, algorithms = [], ["fedavg", "mimic", "scaffold", "fedawe", "focus"]
    one = mf.compare(settings("mimic"), algorithms, 1)
    two = mf.compare(settings("mimic"), algorithms, 1, ray="auto", notice=said.append)
    for name in algorithms:
        torch.testing.assert_close(two[name][0].params, one[name][0].params, rtol=0, atol=1e-6)
    assert any("2 workers" in text for text in said)


@pytest.mark.slow
def test_resumed_runs_on_a_cluster_have_the_same_bits(cluster, tmp_path, monkeypatch):
    given, algorithms = settings("mimic", checkpoint_every=1), ["fedavg", "mimic"]
    whole = mf.compare(given, algorithms, 1, tmp_path / "whole", ray="auto")

    def stop(experiment, row, rounds):
        if row["round"] == 2 and experiment.algorithm == "mimic":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.compare(given, algorithms, 1, tmp_path / "cut", ray="auto", progress=stop)
    monkeypatch.setattr(engine, "count_workers", lambda ray, device: 1)  # a smaller cluster: the same groups, one after the other
    said = []
    resumed = mf.compare(given, algorithms, 1, tmp_path / "cut", ray="auto", notice=said.append)
    for name in algorithms:
        assert torch.equal(resumed[name][0].params, whole[name][0].params)
    assert not any("up to rounding" in text for text in said)
    [folder] = (tmp_path / "cut").glob("mimic*")
    other = mf.run(settings("mimic", checkpoint_every=1, rounds=6), folder, notice=said.append)
    assert "resumed from ray:2:plain" in said[-1]
    assert len(other.rows) == 6


class Deadly:
    """A transform that kills a worker in the middle of its third batch, once."""

    def __init__(self, marker):
        self.marker, self.driver, self.calls = str(marker), os.getpid(), 0

    def __call__(self, x, generator):
        self.calls += 1
        if os.getpid() != self.driver and self.calls > 12:
            with contextlib.suppress(FileNotFoundError):  # the worker that removes the file is the one that dies
                os.unlink(self.marker)
                os.kill(os.getpid(), signal.SIGKILL)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "mimic"])
def test_clients_of_a_killed_worker_train_elsewhere_in_the_same_round(cluster, algorithm, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 6)).astype(np.float32), rng.integers(0, 3, 160)
    split, found, said = list(np.arange(160).reshape(8, 20)), [], []
    (tmp_path / "marker").touch()
    data = mf.Data(x, y, x[:20], y[:20], transform=Deadly(tmp_path / "marker"))
    torch.manual_seed(0)
    given = (nn.Linear(6, 3), data, split, algorithm, "always", 4)
    for ray in ("auto", ""):  # on this machine, nobody is killed
        found.append(mf.simulate(*given, local=mf.LocalSGD(epochs=1, batch_size=5, lr=0.1), engine="plain", ray=ray, notice=said.append))
    assert not (tmp_path / "marker").exists()
    assert sum("a worker was lost" in text for text in said) == 1
    # MimiC's server gets a row per client, as here; FedAvg's gets means over groups, which round in another order.
    torch.testing.assert_close(found[0].params, found[1].params, rtol=0, atol=0 if algorithm == "mimic" else 1e-6)
    assert [row["clients"] for row in found[0].rows] == [row["clients"] for row in found[1].rows]


@pytest.mark.slow
def test_a_client_that_kills_every_worker_ends_the_run_with_a_sentence(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("mimicfl.engines.cluster.pool.MOST_DEATHS", 2)

    class Always(Deadly):
        def __call__(self, x, generator):
            if os.getpid() != self.driver and len(x) == 3:  # client 0's last batch
                os.kill(os.getpid(), signal.SIGKILL)
            return x

    x, y = torch.randn(40, 6), torch.arange(40) % 3
    data = mf.Data(x, y, x[:20], y[:20], transform=Always(tmp_path / "x"))
    given = (nn.Linear(6, 3), data, [np.arange(23), np.arange(23, 40)], "fedavg", "always", 2)
    with pytest.raises(mf.UsageError, match="workers died"):
        mf.simulate(*given, local=mf.LocalSGD(epochs=1, batch_size=5), engine="plain", ray="auto")


@pytest.mark.slow
def test_a_model_of_a_plugin_is_sent_with_its_code(cluster, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import mimicfl as mf\nfrom torch import nn\n\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.last = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n        return self.last(x.flatten(1))\n\n"
        "@mf.models.register('mine')\ndef mine(data):\n    return Mine()\n"
    )
    given = settings("fedavg", model="mine", plugins=[str(tmp_path / "mine.py")])
    torch.testing.assert_close(mf.run(given, ray="auto").params, mf.run(given).params, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_an_error_on_a_worker_is_that_of_the_model(cluster):
    class Wrong(nn.Linear):
        driver = os.getpid()

        def forward(self, x):
            if os.getpid() != self.driver:
                raise ArithmeticError("a mistake in the model")
            return super().forward(x)

    x, y = torch.randn(40, 6), torch.arange(40) % 3
    with pytest.raises(ArithmeticError, match="a mistake in the model"):
        mf.simulate(Wrong(6, 3), mf.Data(x, y, x, y), [np.arange(20), np.arange(20, 40)], "fedavg", "always", 2, engine="plain", ray="auto")


# -- mistakes ------------------------------------------------------------------------------------------------------------------------


def test_an_unreachable_cluster_is_a_sentence(tmp_path, capsys):
    pytest.importorskip("ray")
    out = tmp_path / "run"
    assert main(["run", "--rounds", "2", "--ray", "127.0.0.1:1", "--out", str(out)]) == 2
    assert "no Ray cluster at '127.0.0.1:1'" in capsys.readouterr().err
    assert not out.exists()


def test_missing_ray_is_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "--rounds", "2", "--ray", "auto", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'mimicfl[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_address_must_be_text():
    with pytest.raises(mf.UsageError, match="ray must be"):
        connect.check_address(3)
