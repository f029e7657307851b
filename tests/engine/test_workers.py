"""Worker processes: any module on a CPU, as the plain cohort trains it."""

import os
import signal

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.engine.cohort import PlainCohort
from mimicfl.engine.native.layers import Quick
from mimicfl.engine.support import Unsupported
from mimicfl.engine.workers import WorkersCohort
from mimicfl.local.losses import as_loss

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
