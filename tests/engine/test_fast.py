"""The fast cohorts against the plain one: same clients, same answers, whatever the sizes, the company and the algorithm's terms."""

import os
import re
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.engine import support
from mimicfl.engine.batched.cohort import BatchedCohort
from mimicfl.engine.batched.rewrite import chance
from mimicfl.engine.cohort import Ask, PlainCohort
from mimicfl.engine.lanes import width
from mimicfl.engine.streams import StreamsCohort
from mimicfl.engine.support import Unsupported
from mimicfl.engine.workers import WorkersCohort
from mimicfl.local.losses import as_loss
from mimicfl.params import flatten
from mimicfl.sweep import carry_out

from .models import Moody, accuracy_with_dropout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
SIZES = (30, 7, 43, 1)  # full batches, one that is not, one sample alone


class Residual(nn.Module):
    """Not a chain, with layers of its own kind: nothing here knows it."""

    def __init__(self):
        super().__init__()
        self.conv, self.same, self.head = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 16, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = F.gelu(self.conv(x))
        return self.head((self.scale * x + torch.tanh(self.same(x))).flatten(1))


class Viewing(nn.Module):
    """Flattens by `view`, which refuses images whose channels are innermost."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3), nn.Linear(3 * 6 * 6, 10)

    def forward(self, x):
        return self.last(self.first(x).view(len(x), -1))


MODELS = {
    "mlp": lambda: mf.models.MLP(64, 12, 10),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 20, 2, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(20, 10)
    ),
    "groups": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 10)),
    "residual": Residual,
}


def problem(model, device="cpu", dtype=torch.float64, augment=False):
    x = torch.randint(0, 256, (sum(SIZES), 1, 8, 8), dtype=torch.uint8)
    y = torch.arange(len(x)) % 10
    data = mf.Data(x, y, x[:10], y[:10], augment=augment)
    split = np.split(np.random.default_rng(0).permutation(len(x)), np.cumsum(SIZES)[:-1])
    return model.to(dtype), Clients(data, split, torch.device(device), dtype)


def asks_of(model, clients, local=None, terms=True):
    """Two runs with other models, rounds, rates, active clients; one of them with a shift and a proximal term."""
    local = local or mf.LocalSGD(epochs=2, batch_size=8)
    w = flatten(model).to(clients.device)
    buffers = {name: value.to(clients.device) for name, value in model.named_buffers()}
    shift = 0.01 * torch.randn(4, w.numel(), dtype=w.dtype).to(clients.device)
    task = mf.Task(shift, 0.1) if terms else mf.Task()
    return [
        Ask(clients, local, 3, 5, w, buffers, np.arange(4), task, 0.05, 0.05),
        Ask(clients, local, 1, 6, 1.1 * w, buffers, np.array([0, 1]), mf.Task(), 0.02, 0.05),
    ]


def assert_same(ours, plain, rtol=1e-9):
    for mine, true in zip(ours, plain, strict=True):
        scale = float(true.g.abs().max())
        torch.testing.assert_close(mine.g, true.g, rtol=0, atol=rtol * scale)
        torch.testing.assert_close(mine.loss, true.loss, rtol=rtol, atol=rtol)
        assert mine.K.tolist() == true.K.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_stacked_and_streamed_equal_plain(device, name, kind, lanes):
    model, clients = problem(MODELS[name](), device)
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=lanes).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("name", MODELS)
def test_what_streams_hand_to_the_compiler_equals_plain(monkeypatch, name):
    """The traced function of loss and gradients, without the compiler's minutes."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda traced, **_: seen.append(traced) or traced)
    model, clients = problem(MODELS[name]())
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(StreamsCohort(model, clients, loss, lanes=3, compiled=True).train(asks), PlainCohort(model, clients, loss).train(asks))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
@pytest.mark.parametrize(
    "local", [mf.LocalSGD(steps=3, batch_size=None), mf.LocalSGD(steps=7, batch_size=8), mf.LocalSGD(epochs=1, batch_size=64)]
)
def test_full_batches_and_odd_numbers_of_steps(kind, local):
    model, clients = problem(MODELS["mlp"]())
    asks = asks_of(model, clients, local)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=2).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
def test_augmented_images(kind):
    model, clients = problem(MODELS["convolutions"](), augment=True)
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=3).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("name", ["mse", "binary", "smooth"])
def test_any_loss_that_is_a_mean_over_samples(name):
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.arange(50) % 2
    data = mf.Data(x, y.double()[:, None] if name == "mse" else y, x[:5], y.double()[:5, None] if name == "mse" else y[:5])
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2 if name == "smooth" else 1)).double()
    clients = Clients(data, [np.arange(20), np.arange(20, 50)], torch.device("cpu"), torch.float64)
    loss = (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1)) if name == "smooth" else as_loss(name)
    ask = Ask(clients, mf.LocalSGD(epochs=2, batch_size=8), 0, 0, flatten(model), {}, np.array([0, 1]), mf.Task(), 0.1, 0.1)
    assert_same(BatchedCohort(model, clients, loss).train([ask]), PlainCohort(model, clients, loss).train([ask]))


def test_company_changes_nothing():
    """A run's clients give the same answers alone and beside another run's, whatever lanes they land in."""
    model, clients = problem(MODELS["convolutions"]())
    asks = asks_of(model, clients)
    cohort = BatchedCohort(model, clients, as_loss("cross-entropy"), lanes=2)
    assert_same([cohort.train([ask])[0] for ask in asks], cohort.train(asks), rtol=1e-12)


class TestDropout:
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(64, 10))

    @pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
    def test_is_keyed_by_run_round_client_and_step(self, kind):
        model, clients = problem(self.model())
        asks = asks_of(model, clients, terms=False)
        loss = as_loss("cross-entropy")
        first = kind(model, clients, loss, lanes=2).train(asks)
        assert_same(kind(model, clients, loss, lanes=5).train(asks[::-1])[::-1], first, rtol=1e-12)
        other = Ask(clients, asks[0].local, 4, 5, asks[0].w, {}, asks[0].active, mf.Task(), 0.05, 0.05)
        assert not torch.allclose(kind(model, clients, loss, lanes=2).train([other])[0].g, first[0].g)

    def test_lets_through_the_right_share_everywhere(self):
        draws = torch.stack([chance(torch.tensor(1234567 + k), (200,)) for k in range(500)])
        kept = (draws >= 0.4).double()
        assert kept.mean() == pytest.approx(0.6, abs=0.005)
        assert kept.mean(dim=0).std() == pytest.approx((0.6 * 0.4 / 500) ** 0.5, rel=0.2)  # no place is favoured
        assert kept.mean(dim=1).std() == pytest.approx((0.6 * 0.4 / 200) ** 0.5, rel=0.2)  # nor any key
        both = (kept[1:] - 0.6) * (kept[:-1] - 0.6)
        assert abs(both.mean()) < 0.005  # neighbouring keys know nothing of each other
        for left, right in ((kept[1:, :-1], kept[:-1, 1:]), (kept[1:, 1:], kept[:-1, :-1])):
            assert abs(((left - 0.6) * (right - 0.6)).mean()) < 0.005  # nor is one the other, moved by a place

    @pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
    def test_in_many_layers(self, kind):
        """Each layer draws its own, however many there are."""
        model, clients = problem(nn.Sequential(nn.Flatten(), *[nn.Dropout(0.5) for _ in range(6)], nn.Linear(64, 10)))
        [one, _] = kind(model, clients, as_loss("cross-entropy"), lanes=2).train(asks_of(model, clients, terms=False))
        share = (one.g[2, : 64 * 10].view(10, 64).abs().sum(dim=0) > 0).double().mean()
        assert share < 0.9  # 1/64 of the inputs pass all six; one mask for all would let half of them through in every step

    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_what_cannot_be_compiled_runs_as_traced(self, digits, monkeypatch, dropout):
        def broken(traced, **_):
            raise RuntimeError("no compiler today")

        monkeypatch.setattr(torch, "compile", broken)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10))
        said, arguments = [], {**digits, "model": model, "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**arguments, engine="batched:3:compiled", notice=said.append)
        assert said == ["engine batched, not compiled: it cannot be stacked (no compiler today)"]
        assert torch.equal(ours.params, mf.simulate(**arguments, engine="batched:3").params)

    def test_trains(self, digits):
        torch.manual_seed(0)
        runs = [accuracy_with_dropout(digits, engine, rounds=15, epochs=2) for engine in ("batched", "plain")]
        assert runs[0] == pytest.approx(runs[1], abs=0.06)
        assert runs[0] > 0.7


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Moody(), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), "running statistics"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, 10)), "cannot be stacked"),
    ],
)
def test_what_cannot_be_stacked_goes_on_plainly(digits, model, words):
    said = []
    history = mf.simulate(**{**digits, "model": model}, rounds=1, engine="batched", notice=said.append)
    assert len(history.rows) == 1
    assert len(said) == 1
    assert said[0].startswith("engine plain: ")
    assert words in said[0]


def test_a_loss_that_is_no_mean_is_found_out(digits):
    def sum_loss(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    said = []
    mf.simulate(**digits, loss=sum_loss, rounds=1, local=mf.LocalSGD(lr=1e-4), engine="batched", notice=said.append)
    assert "disagrees with PyTorch" in said[0]


def test_memory_that_does_not_suffice_halves_the_lanes(monkeypatch):
    model, clients = problem(MODELS["mlp"]())
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    cohort = BatchedCohort(model, clients, loss, lanes=6)
    real, tried = cohort._work_off, []

    def short_of_memory(jobs):
        tried.append(cohort.width)
        if cohort.width > 2:
            raise torch.OutOfMemoryError("no")
        return real(jobs)

    monkeypatch.setattr(cohort, "_work_off", short_of_memory)
    assert_same(cohort.train(asks), PlainCohort(model, clients, loss).train(asks))
    assert tried == [6, 3, 1]
    with pytest.raises(MemoryError, match="one client alone"):
        support.halving(cohort, lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))


def test_lanes_follow_the_schedule():
    cuda = torch.device("cuda")
    assert width([3, 2, 4, 3], cuda) == 4
    assert width([30] * 9, cuda) in range(15, 33)
    assert width([405] * 9, cuda) * 4 >= 405  # a few full waves, not one that is mostly empty
    assert width([100_000], cuda) <= 512


class TestWorkers:
    @pytest.mark.parametrize("name", MODELS)
    def test_equal_plain(self, name):
        model, clients = problem(MODELS[name]())
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        assert_same(WorkersCohort(model, clients, loss, workers=3).train(asks), PlainCohort(model, clients, loss).train(asks))

    @pytest.mark.parametrize("name", ["convolutions", "groups", "residual"])
    def test_compiled_layers_equal_plain(self, name):
        """In float32 small convolutions and pooling are compiled, wherever the model calls them."""
        model, clients = problem(MODELS[name](), dtype=torch.float32)
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        cohort = WorkersCohort(model, clients, loss, workers=3)
        assert "forward" in vars(cohort.plain.work.module)
        assert_same(cohort.train(asks), PlainCohort(model, clients, loss).train(asks), rtol=1e-4)

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


@pytest.mark.gpu
@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("engine", "precision", "close"),
        [("batched", "fp32", 1e-4), ("streams", "fp32", 1e-4), ("streams", "tf32", 0.05), ("streams", "bf16", 0.2)],
    )
    def test_float32_convolutions(self, engine, precision, close):
        kind = {"batched": BatchedCohort, "streams": StreamsCohort}[engine]
        torch.manual_seed(1)
        model, clients = problem(mf.models.LeNet(1, 16), "cuda", torch.float32)
        clients.x = torch.randint(0, 256, (len(clients.x), 1, 16, 16), dtype=torch.uint8, device="cuda")
        asks = asks_of(model, clients, mf.LocalSGD(steps=2, batch_size=8))
        loss = as_loss("cross-entropy")
        plain = PlainCohort(model, clients, loss).train(asks)
        ours = kind(model, clients, loss, precision=precision, lanes=4).train(asks)
        for mine, true in zip(ours, plain, strict=True):
            assert float((mine.g - true.g).norm() / true.g.norm()) < close

    @pytest.mark.parametrize("engine", ["batched", "streams"])
    def test_repeats_and_resumes_to_the_bit(self, tmp_path, engine):
        x, y = torch.randint(0, 256, (240, 1, 28, 28), dtype=torch.uint8), torch.arange(240) % 10
        data = mf.Data(x, y, x[:40], y[:40])
        arguments = {"model": mf.models.build("lenet", data), "data": data, "split": mf.partition.iid(y, 4), "device": "cuda", "rounds": 4}
        arguments |= {"algorithm": "scaffold", "availability": "static:0.6", "local": mf.LocalSGD(epochs=2, lr=0.05), "engine": engine}
        whole = mf.simulate(**arguments)
        assert torch.equal(whole.params, mf.simulate(**arguments).params)

        def stop(row, total):
            if row["round"] == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mf.simulate(**arguments, out=tmp_path, checkpoint_every=1, progress=stop)
        assert torch.equal(whole.params, mf.simulate(**{**arguments, "engine": "auto"}, out=tmp_path).params)

    @pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
    @pytest.mark.parametrize("last", [nn.Identity, nn.Dropout])
    def test_compiled_equals_traced(self, kind, last):
        model, clients = problem(nn.Sequential(*MODELS["convolutions"](), last()), "cuda", torch.float32)
        asks = asks_of(model, clients)
        loss = as_loss("cross-entropy")
        answers = [kind(model, clients, loss, lanes=4, compiled=c).train(asks) for c in (False, True)]
        for mine, true in zip(*answers, strict=True):
            assert float((mine.g - true.g).norm() / true.g.norm()) < 1e-2

    @pytest.mark.parametrize("engine", ["batched:5:compiled", "streams:5:compiled"])
    def test_with_fixed_lanes_company_changes_no_bit(self, engine):
        """The same run alone, and beside others of other algorithms: this is what makes a recorded number come again."""
        plan = {
            a: mf.Experiment(model="mlp:20", rounds=3, epochs=1, algorithm=a, availability="time-varying:0.2", device="cuda", engine=engine)
            for a in ("mimic", "scaffold", "fedprox:mu=0.1")
        }
        together = carry_out(plan)
        assert torch.equal(together["mimic"].params, carry_out({"mimic": plan["mimic"]})["mimic"].params)

    def test_auto_says_which_and_why(self, monkeypatch, digits):
        monkeypatch.delenv("MIMICFL_ENGINE")
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        said = []
        mf.simulate(**digits, rounds=2, device="cuda", notice=said.append)
        assert re.match(r"engine (batched|streams): measured \d+ times as fast as plain here", said[0])
