"""Chance: one seed fixes everything that is random, on a CPU and on a GPU."""

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf


class TestChance:
    def test_same_seed_same_bits(self, digits):
        a, b, c = (mf.simulate(**digits, availability="static:0.2", rounds=4, seed=s) for s in (5, 5, 6))
        assert torch.equal(a.params, b.params)
        assert not torch.equal(a.params, c.params)
        strip = [{k: v for k, v in row.items() if k != "seconds"} for row in a.rows]
        assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in b.rows]

    def test_the_global_generators_are_neither_used_nor_moved(self, digits):
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        torch.random.set_rng_state(before)
        a = mf.simulate(model, digits["data"], digits["split"], rounds=2).params
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(99)
        np.random.seed(7)
        assert torch.equal(a, mf.simulate(model, digits["data"], digits["split"], rounds=2).params)

    def test_dropout_differs_between_clients_and_rounds(self, digits):
        class Spy(nn.Module):
            seen = []  # noqa: RUF012

            def __init__(self):
                super().__init__()
                self.flat, self.drop, self.layer = nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)

            def forward(self, x):
                if self.training:
                    Spy.seen.append(tuple((self.drop(torch.ones(32)) > 0).tolist()))
                return self.layer(self.flat(x))

        mf.simulate(Spy(), digits["data"], digits["split"], availability="time-varying:0.1", rounds=2, local=mf.LocalSGD(steps=1))
        assert len(Spy.seen) == 6
        assert len(set(Spy.seen)) == 6

    def test_a_client_draws_the_same_batches_in_any_cohort(self, quadratic):
        """Batches are keyed by round and client: alone or in company, client 2 does the same work."""
        alone, company = np.zeros((1, 6), bool), np.ones((1, 6), bool)
        alone[0, 2] = True
        local = mf.LocalSGD(steps=2, batch_size=3, lr=0.05)
        single = mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(alone), local=local).params
        parts = []
        for i in range(6):
            one = np.zeros((1, 6), bool)
            one[0, i] = True
            parts.append(mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(one), local=local).params)
        together = mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(company), local=local).params
        torch.testing.assert_close(torch.stack(parts).mean(0), together)
        assert torch.equal(parts[2], single)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold", "mifa", "mimic"])
def test_gpu_equals_cpu(digits, algorithm):
    digits["model"].double()
    runs = [mf.simulate(**digits, algorithm=algorithm, availability="static:0.3", rounds=5, device=d).params for d in ("cpu", "cuda")]
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["lenet", "vgg11"])
def test_convolutions_on_a_gpu_repeat_and_resume_to_the_bit(tmp_path, name):
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    x, y = torch.randint(0, 256, (240, *shape), dtype=torch.uint8), torch.arange(240) % 10
    data = mf.Data(x, y, x[:40], y[:40], augment=name == "vgg11")
    arguments = {"model": mf.models.build(name, data), "data": data, "split": mf.partition.iid(y, 4), "device": "cuda", "rounds": 4}
    arguments |= {"algorithm": "mimic", "availability": "static:0.6,warm_start=true", "local": mf.LocalSGD(epochs=2, lr=0.05)}

    class Stop(Exception):
        pass

    def stop(row, total):
        if row["round"] == 2:
            raise Stop

    whole = mf.simulate(**arguments)
    assert torch.equal(whole.params, mf.simulate(**arguments).params)
    with pytest.raises(Stop):
        mf.simulate(**arguments, out=tmp_path, checkpoint_every=1, progress=stop)
    assert torch.equal(whole.params, mf.simulate(**arguments, out=tmp_path).params)


@pytest.mark.slow
def test_small_calls_are_not_shared_between_threads(digits):
    """Two threads gain little there, and stall when another program wants the cores; afterwards there are as many as before."""
    narrow = nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 10))
    wide = nn.Sequential(nn.Conv2d(1, 256, 3, padding=1), nn.Conv2d(256, 256, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    before, seen = torch.get_num_threads(), {}
    torch.set_num_threads(3)
    try:
        for name, model in (("mlp", digits["model"]), ("narrow", narrow), ("wide", nn.Sequential(*wide, nn.Linear(256, 10)))):
            given = {**digits, "model": model, "rounds": 1, "engine": "plain", "availability": "static:0.01"}
            mf.simulate(**given, progress=lambda row, total, name=name: seen.update({name: torch.get_num_threads()}))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {"mlp": 1, "narrow": 1, "wide": 3}
