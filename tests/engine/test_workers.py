"""Worker processes: any module on a CPU, as the plain cohort trains it."""

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
from mimicfl.engine.cohort import PlainCohort
from mimicfl.engine.native.layers import Quick
from mimicfl.engine.support import Unsupported
from mimicfl.engine.workers import WorkersCohort
from mimicfl.local.losses import as_loss
from mimicfl.metrics.store import RunFolder

from ..conftest import end_on
from .cohorts import MODELS, Viewing, asks_of, assert_same, problem


class TestWorkers:
    @pytest.mark.parametrize("name", MODELS)
    def test_equal_plain(self, name):
        model, clients = problem(MODELS[name]())
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        assert_same(WorkersCohort(model, clients, loss, workers=3).train(asks), PlainCohort(model, clients, loss).train(asks))

    @pytest.mark.parametrize("name", ["convolutions", "groups", "residual", "keywords"])
    def test_compiled_layers_equal_plain(self, name):
        """In float32 small convolutions and pooling are compiled, wherever the model calls them."""
        model, clients = problem(MODELS[name](), dtype=torch.float32)
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        cohort = WorkersCohort(model, clients, loss, workers=3)
        assert "forward" in vars(cohort.plain.work.module)
        assert_same(cohort.train(asks), PlainCohort(model, clients, loss).train(asks), rtol=1e-4)

    def test_layers_are_recognised_however_they_are_called(self):
        with Quick(None) as seen:
            MODELS["keywords"]()(torch.zeros(2, 1, 8, 8))
        assert [kind for kind, _ in seen.shapes] == ["Convolution", "MaxPool"]

    @pytest.mark.parametrize("model", [MODELS["mlp"], Viewing])
    def test_equal_plain_to_the_bit_where_the_layout_stays(self, model):
        """Without images, and in a model that only reads its own layout."""
        model, clients = problem(model())
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        ours, plain = (c.train(asks) for c in (WorkersCohort(model, clients, loss, workers=3), PlainCohort(model, clients, loss)))
        for mine, true in zip(ours, plain, strict=True):
            assert torch.equal(mine.g, true.g)
            assert torch.equal(mine.loss, true.loss)

    def test_few_clients_have_a_process_each(self):
        """Three clients on two cores: all three run, so that no core idles beside the last."""
        model, clients = problem(MODELS["mlp"]())
        cohort = WorkersCohort(model, clients, as_loss("cross-entropy"), workers=2)
        assert [cohort.processes(jobs) for jobs in (1, 2, 3, 4, 5, 7, 30, 33)] == [1, 2, 3, 2, 5, 2, 2, 3]

    @pytest.mark.filterwarnings("ignore:the model has BatchNorm")
    def test_batchnorm_and_dropout(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 10))
        arguments = {**digits, "model": model, "rounds": 3, "availability": "static:0.3", "local": mf.LocalSGD(epochs=1, batch_size=12)}
        torch.set_num_threads(2)
        try:
            said = []
            ours = mf.simulate(**arguments, engine="workers", notice=said.append)
        finally:
            torch.set_num_threads(1)
        assert said == ["engine workers"]
        plain = mf.simulate(**arguments, engine="plain")
        torch.testing.assert_close(ours.params, plain.params)
        for name, value in plain.buffers.items():
            torch.testing.assert_close(ours.buffers[name], value)

    def test_a_failing_client_is_told_with_its_traceback(self):
        def wrong(output, target):
            raise ZeroDivisionError("in the user's own loss")

        model, clients = problem(MODELS["mlp"]())
        cohort = WorkersCohort(model, clients, wrong, workers=2)
        with pytest.raises(RuntimeError, match=r"(?s)a worker process failed.*in the user's own loss.*while training client"):
            cohort.train(asks_of(model, clients))

    def test_a_killed_worker_is_noticed(self):
        def deadly(output, target):
            os.kill(os.getpid(), signal.SIGKILL)

        model, clients = problem(MODELS["mlp"]())
        with pytest.raises(MemoryError, match="killed"):
            WorkersCohort(model, clients, deadly, workers=2).train(asks_of(model, clients))

    def test_one_core_has_no_use_for_them(self):
        model, clients = problem(MODELS["mlp"]())
        with pytest.raises(Unsupported, match="only one core"):
            WorkersCohort(model, clients, as_loss("cross-entropy"), workers=1)

    @pytest.mark.skipif(sys.platform != "linux", reason="workers run on Linux")
    def test_end_with_their_parent(self, tmp_path):
        """Killed in a round that never ends, it leaves no process behind, and its folder can be claimed."""
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
            children = {int(parent.stdout.readline()) for _ in range(2)}  # both are in the middle of a client
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        assert len(children) == 2
        config = dict(RunFolder(tmp_path / "run").config)
        give_up = time.monotonic() + 50  # of the 60 s that a child would sleep
        while any(alive(child) for child in children) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert not any(alive(child) for child in children)
        RunFolder.claim(tmp_path / "run", config).close()

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
    def test_a_forked_process_does_not_hold_the_folder(self, tmp_path):
        """Not even one that outlives the run."""
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
    """Is it running, and not just a zombie?"""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class NormalisedImages(nn.Module):
    """PyTorch's backward pass of a GroupNorm that is applied to channels-last images writes through a null pointer."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.head = nn.GroupNorm(2, 2), nn.Conv2d(2, 5, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.conv(self.norm(x)).flatten(2).logsumexp(2))


def images():
    x, y = torch.randn(20, 2, 7, 5), torch.arange(20) % 3
    split = [np.arange(4), np.arange(4, 9), np.arange(9, 20)]
    return {"model": NormalisedImages().double(), "data": mf.Data(x, y, x, y), "split": split, "local": mf.LocalSGD(lr=0.05), "rounds": 2}


def test_a_layout_in_which_pytorch_crashes_is_not_used():
    given = images()
    assert torch.allclose(end_on("workers", **given), end_on("plain", **given), rtol=1e-9, atol=1e-12)


def test_workers_that_crash_are_left_to_plain(monkeypatch):
    """Whatever fails while an engine is prepared means that it cannot run; only a kill from outside suggests a lack of memory."""
    given, parent, real = images(), os.getpid(), PlainCohort.train_one
    wanted = end_on("plain", **given)

    def crash(cohort, ask, row):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return real(cohort, ask, row)

    monkeypatch.setattr(PlainCohort, "train_one", crash)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    told = []
    ours = mf.simulate(**given, engine="workers", notice=told.append).params
    assert told[0].startswith("engine plain")
    assert "SIGSEGV" in told[0]
    assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-12)
