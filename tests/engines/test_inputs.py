"""Dict and tuple inputs on every engine: the same updates as plain, or a clear reason why the engine cannot."""

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.engine import NativeEngine
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.engines.workers import WorkersEngine
from mimicfl.simulation.train import train
from tests.conftest import make_run
from tests.engines.engines import assert_same, requests_of
from tests.engines.inputs import CASES, Masked, TwoInputs, clients_of, masked_data, two_inputs_data


@pytest.mark.parametrize("case", CASES)
def test_plain_equals_a_loop_over_the_batches(case):
    """Written from the definition: the entries of a dict are keywords, those of a tuple positions."""
    make, data = CASES[case]
    model, clients = make().double(), clients_of(data())
    local = mf.LocalSGD(epochs=1, batch_size=None)
    request = requests_of(model, clients, local, terms=False)[0]
    ours = PlainEngine(model, clients, as_loss("cross-entropy")).train([request])[0]
    for client, rows in enumerate(clients.split):
        if case == "dict":
            output = model(tokens=clients.x["tokens"][rows], mask=clients.x["mask"][rows])
        else:
            output = model(clients.x[0][rows], clients.x[1][rows].double() / 255)["logits"]
        loss = torch.nn.functional.cross_entropy(output, clients.y[rows])
        g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(ours.g[client], g, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [WorkersEngine, BatchedEngine, StreamsEngine])
def test_every_engine_equals_plain(case, kind):
    make, data = CASES[case]
    model, clients = make().double(), clients_of(data())
    requests, loss = requests_of(model, clients), as_loss("cross-entropy")
    engine = kind(model, clients, loss, workers=2) if kind is WorkersEngine else kind(model, clients, loss, lanes=3)
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests))


@pytest.mark.parametrize("case", CASES)
def test_native_says_why_it_cannot(case):
    make, data = CASES[case]
    with pytest.raises(Unsupported, match="not single tensors"):
        NativeEngine(make(), clients_of(data(), dtype=torch.float32), as_loss("cross-entropy"))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "words"), [("native", "engine plain"), ("workers", "workers"), ("batched", "batched")])
def test_a_run_takes_the_engine_or_falls_back(engine, words):
    """With the checks that every run begins with: equality of training and of evaluation."""
    torch.set_num_threads(2)
    data, notices = masked_data(), []
    split = np.array_split(np.arange(data.num_train), 4)
    model = Masked().double()
    plain, ours = (mf.simulate(model, data, split, rounds=2, engine=name, notice=notices.append, seed=1) for name in ("plain", engine))
    assert words in notices[-1]
    torch.testing.assert_close(ours.params, plain.params, rtol=1e-9, atol=1e-12)


def shifted(x, generator):
    return x[0] + torch.randn(x[0].shape, generator=generator, dtype=x[0].dtype, device=x[0].device), x[1]


class TestTransform:
    def run(self, data, engine="plain", **options):
        split = np.array_split(np.arange(data.num_train), 3)
        settings = {"rounds": 2, "algorithm": "fedavg", "local": mf.LocalSGD(epochs=1, batch_size=16), "seed": 1} | options
        torch.manual_seed(5)
        return mf.simulate(TwoInputs().double(), data, split, engine=engine, **settings)

    def test_called_on_every_batch_of_inputs(self):
        seen = []

        def transform(x, generator):
            seen.append((len(x[0]), x[1].dtype, float(x[1].max()) <= 1))
            return x

        data = two_inputs_data(transform=transform)
        self.run(data)
        sizes = [len(part) for part in np.array_split(np.arange(data.num_train), 3)]
        batches = sum(-(-size // 16) for size in sizes)
        assert len(seen) == 1 + 2 * batches  # once before training, to check it
        assert sum(n for n, _, _ in seen) == 2 + 2 * data.num_train
        assert {(dtype, scaled) for _, dtype, scaled in seen} == {(torch.float64, True)}

    def test_changes_training_only(self):
        plain, moved = (self.run(two_inputs_data(transform=f)) for f in (None, shifted))
        assert not torch.equal(plain.params, moved.params)
        assert plain.rows[0]["test_loss"] != moved.rows[0]["test_loss"]

    def test_runs_share_a_program_only_with_the_same_transform(self):
        """The samples are the same, so only the transform distinguishes the runs."""

        def program(transform):
            return self.run(two_inputs_data(transform=transform), rounds=1).fingerprint.program

        assert len({program(f) for f in (None, shifted, lambda x, generator: x)}) == 3
        assert program(shifted) == program(shifted)

    @pytest.mark.slow
    def test_random_numbers_depend_on_seed_round_and_client_only(self):
        """The same on workers, which train the clients in another order, and in a run that is resumed; other seeds draw others."""
        torch.set_num_threads(2)
        data = two_inputs_data(transform=shifted)
        plain = self.run(data)
        assert torch.equal(plain.params, self.run(data, "workers").params)
        assert not torch.equal(plain.params, self.run(data, seed=2).params)

    def test_resumed_runs_end_with_the_same_bits(self, tmp_path):
        data = two_inputs_data(transform=shifted)
        self.run(data, rounds=1, out=tmp_path / "run")
        assert torch.equal(self.run(data, rounds=2, out=tmp_path / "run").params, self.run(data).params)

    @pytest.mark.parametrize("engine", ["batched", "native"])
    def test_other_engines_fall_back(self, engine):
        notices = []
        self.run(two_inputs_data(transform=shifted), engine, notice=notices.append)
        assert "engine plain" in notices[0]
        assert "transform" in notices[0]

    @pytest.mark.parametrize(
        ("transform", "words"),
        [
            (lambda x, g: x[0], "like the batch it received"),
            (lambda x, g: (x[0][:1], x[1][:1]), "number of samples"),
            (lambda x, g: (x[0][:, :2], x[1]), "transform returns"),
            (lambda x, g: 1 / 0, "transform fails"),
            (lambda x: x, "transform fails"),
            (3, "must be a function"),
        ],
    )
    def test_mistakes_are_found_before_training(self, transform, words):
        with pytest.raises(mf.UsageError, match=words):
            self.run(two_inputs_data(transform=transform))

    def test_is_part_of_the_fingerprint(self, tmp_path):
        self.run(two_inputs_data(transform=shifted), out=tmp_path / "run")
        with pytest.raises(mf.UsageError, match="different run"):
            self.run(two_inputs_data(transform=lambda x, g: x), out=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched"])
def test_runs_that_train_together_equal_runs_alone(engine):
    data, model = masked_data(), Masked().double()
    split = np.array_split(np.arange(data.num_train), 4)

    def ends(seeds):
        runs = [make_run(model, data, split, rounds=2, seed=seed) for seed in seeds]
        return [history.params for history in train(runs, [None] * len(runs), engine)]

    for ours, alone in zip(ends([1, 2]), ends([1]) + ends([2]), strict=True):
        assert torch.equal(ours, alone)
