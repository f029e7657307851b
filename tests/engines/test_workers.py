"""The workers engine trains any module on a CPU as the plain engine does."""

import faulthandler
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.layers import LayerOverrides
from mimicfl.engines.parallel import clients_at_once
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.workers import WithLayers, WorkersEngine
from mimicfl.metrics.store import RunFolder
from tests.conftest import end_on
from tests.engines.engines import MODELS, Viewing, assert_same, problem, requests_of


class TestWorkers:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", MODELS)
    def test_updates_equal_plain(self, name):
        model, clients = problem(MODELS[name]())
        requests = requests_of(model, clients)
        loss = as_loss("cross-entropy")
        assert_same(WorkersEngine(model, clients, loss, workers=3).train(requests), PlainEngine(model, clients, loss).train(requests))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["convolutions", "groups", "residual", "keywords"])
    def test_compiled_layers_equal_plain(self, name):
        """In float32, small convolutions and pooling are compiled wherever the model calls them."""
        model, clients = problem(MODELS[name](), dtype=torch.float32)
        requests = requests_of(model, clients)
        loss = as_loss("cross-entropy")
        engine = WorkersEngine(model, clients, loss, workers=3)
        assert isinstance(engine.plain.work.module, WithLayers)
        assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests), rtol=1e-4)

    def test_layers_called_with_keywords_are_recognised(self):
        with LayerOverrides(None) as seen:
            MODELS["keywords"]()(torch.zeros(2, 1, 8, 8))
        assert [kind for kind, _ in seen.shapes] == ["Convolution", "MaxPool"]

    @pytest.mark.slow
    @pytest.mark.parametrize("model", [MODELS["mlp"], Viewing])
    def test_updates_are_bit_equal_to_plain_if_the_layout_is_kept(self, model):
        """The layout is kept without images, and for a model that does not accept channels-last images."""
        model, clients = problem(model())
        requests = requests_of(model, clients)
        loss = as_loss("cross-entropy")
        ours, plain = (c.train(requests) for c in (WorkersEngine(model, clients, loss, workers=3), PlainEngine(model, clients, loss)))
        for mine, true in zip(ours, plain, strict=True):
            assert torch.equal(mine.g, true.g)
            assert torch.equal(mine.loss, true.loss)

    def test_number_of_processes_avoids_idle_cores(self):
        """Three clients on two cores use three processes, so that no core is idle while the last client trains."""
        assert [clients_at_once(clients, 2) for clients in (1, 2, 3, 4, 5, 7, 30, 33)] == [1, 2, 3, 2, 5, 2, 2, 3]

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:the model has BatchNorm")
    def test_batchnorm_and_dropout(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 10))
        arguments = {**digits, "model": model, "rounds": 3, "availability": "static:0.3", "local": mf.LocalSGD(epochs=1, batch_size=12)}
        torch.set_num_threads(2)
        try:
            notices = []
            ours = mf.simulate(**arguments, engine="workers", notice=notices.append)
        finally:
            torch.set_num_threads(1)
        assert notices == ["engine workers"]
        plain = mf.simulate(**arguments, engine="plain")
        torch.testing.assert_close(ours.params, plain.params)
        for name, value in plain.buffers.items():
            torch.testing.assert_close(ours.buffers[name], value)

    def test_error_of_a_client_is_raised_with_its_traceback(self):
        def wrong(output, target):
            raise ZeroDivisionError("in the custom loss")

        model, clients = problem(MODELS["mlp"]())
        engine = WorkersEngine(model, clients, wrong, workers=2)
        with pytest.raises(RuntimeError, match=r"(?s)worker process failed.*in the custom loss.*while training client"):
            engine.train(requests_of(model, clients))

    def test_killed_worker_raises_a_memory_error(self):
        def deadly(output, target):
            os.kill(os.getpid(), signal.SIGKILL)

        model, clients = problem(MODELS["mlp"]())
        with pytest.raises(MemoryError, match="killed"):
            WorkersEngine(model, clients, deadly, workers=2).train(requests_of(model, clients))

    def test_one_core_is_refused(self):
        model, clients = problem(MODELS["mlp"]())
        with pytest.raises(Unsupported, match="only one core"):
            WorkersEngine(model, clients, as_loss("cross-entropy"), workers=1)

    def test_a_visible_gpu_is_refused_with_advice(self, monkeypatch):
        model, clients = problem(MODELS["mlp"]())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(Unsupported, match="CUDA_VISIBLE_DEVICES"):
            WorkersEngine(model, clients, as_loss("cross-entropy"), workers=2)

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="workers run on Linux")
    def test_workers_end_when_their_parent_is_killed(self, tmp_path):
        """After a kill in the middle of a round, no process is left and the run folder can be claimed."""
        script = f"""
import os, time, torch, mimicfl as mf
torch.set_num_threads(2)
first = os.getpid()
def endless(output, target):
    while os.getpid() != first and os.path.exists({str(tmp_path / "go")!r}):
        os.write(1, f"{{os.getpid()}}\\n".encode())
        time.sleep(60)
    return torch.nn.functional.cross_entropy(output, target)
def go(row, total):
    open({str(tmp_path / "go")!r}, "w").close()
data = mf.datasets.load("digits")
split = mf.partition.iid(data.y_train, 6)
mf.simulate(mf.models.build("mlp", data), data, split, rounds=2, loss=endless, engine="workers", out={str(tmp_path / "run")!r}, progress=go)
"""
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            children = {int(parent.stdout.readline()) for _ in range(2)}  # both are training a client
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        assert len(children) == 2
        config = dict(RunFolder(tmp_path / "run").config)
        give_up = time.monotonic() + 50  # less than the 60 s that a child sleeps
        while any(alive(child) for child in children) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert not any(alive(child) for child in children)
        RunFolder.claim(tmp_path / "run", config).close()

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
    def test_forked_process_does_not_lock_the_folder(self, tmp_path):
        """Even if the forked process outlives the run."""
        folder = RunFolder.claim(tmp_path / "run", {"seed": 0})
        ready, stay = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.write(ready[1], b"x")
            os.close(stay[1])
            os.read(stay[0], 1)
            os._exit(0)
        try:
            os.read(ready[0], 1)
            folder.close()
            RunFolder.claim(tmp_path / "run", {"seed": 0}).close()
        finally:
            for end in (*ready, *stay):
                os.close(end)
            os.waitpid(child, 0)


def alive(process: int) -> bool:
    """Return whether the process is running and not a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class NormalisedImages(nn.Module):
    """Applies GroupNorm to its inputs; for channels-last images, PyTorch's backward pass then writes through a null pointer."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.head = nn.GroupNorm(2, 2), nn.Conv2d(2, 5, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.conv(self.norm(x)).flatten(2).logsumexp(2))


def images():
    x, y = torch.randn(20, 2, 7, 5), torch.arange(20) % 3
    split = [np.arange(4), np.arange(4, 9), np.arange(9, 20)]
    return {"model": NormalisedImages().double(), "data": mf.Data(x, y, x, y), "split": split, "local": mf.LocalSGD(lr=0.05), "rounds": 2}


@pytest.mark.slow
def test_channels_last_is_not_used_if_pytorch_crashes():
    given = images()
    assert torch.allclose(end_on("workers", **given), end_on("plain", **given), rtol=1e-9, atol=1e-12)


def test_crashing_workers_fall_back_to_plain(monkeypatch):
    """Any crash while the engine is prepared means that it cannot run the model; only SIGKILL is taken for a lack of memory."""
    given, parent, real = images(), os.getpid(), PlainEngine.train_one
    wanted = end_on("plain", **given)

    def crash(engine, request, row):
        if os.getpid() != parent:
            faulthandler.disable()  # the crash is intended, so its stack would only confuse readers of the test's output
            os.kill(os.getpid(), signal.SIGSEGV)
        return real(engine, request, row)

    monkeypatch.setattr(PlainEngine, "train_one", crash)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    notices = []
    ours = mf.simulate(**given, engine="workers", notice=notices.append).params
    assert notices[0].startswith("engine plain")
    assert "SIGSEGV" in notices[0]
    assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-12)
