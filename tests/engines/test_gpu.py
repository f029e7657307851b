"""Tests that need a GPU: CUDA graphs, precision, resuming and the compiler."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.experiments.execute import run_plan
from tests.engines.engines import MODELS, needs_gpu, problem, requests_of


@pytest.mark.gpu
@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("engine", "precision", "close"),
        [("batched", "fp32", 1e-4), ("streams", "fp32", 1e-4), ("streams", "tf32", 0.05), ("streams", "bf16", 0.2)],
    )
    def test_float32_convolutions(self, engine, precision, close):
        kind = {"batched": BatchedEngine, "streams": StreamsEngine}[engine]
        torch.manual_seed(1)
        model, clients = problem(mf.models.LeNet(1, 16), "cuda", torch.float32)
        clients.x = torch.randint(0, 256, (len(clients.x), 1, 16, 16), dtype=torch.uint8, device="cuda")
        requests = requests_of(model, clients, mf.LocalSGD(steps=2, batch_size=8))
        loss = as_loss("cross-entropy")
        plain = PlainEngine(model, clients, loss).train(requests)
        ours = kind(model, clients, loss, precision=precision, lanes=4).train(requests)
        for mine, true in zip(ours, plain, strict=True):
            assert float((mine.g - true.g).norm() / true.g.norm()) < close

    @pytest.mark.parametrize("engine", ["batched", "streams"])
    def test_repeated_and_resumed_runs_are_bit_equal(self, tmp_path, engine):
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

    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    @pytest.mark.parametrize("last", [nn.Identity, nn.Dropout])
    def test_compiled_equals_traced(self, kind, last):
        model, clients = problem(nn.Sequential(*MODELS["convolutions"](), last()), "cuda", torch.float32)
        requests = requests_of(model, clients)
        loss = as_loss("cross-entropy")
        updates = [kind(model, clients, loss, lanes=4, compiled=c).train(requests) for c in (False, True)]
        for mine, true in zip(*updates, strict=True):
            assert float((mine.g - true.g).norm() / true.g.norm()) < 1e-2

    @pytest.mark.parametrize("engine", ["batched:5:compiled", "streams:5:compiled"])
    def test_with_fixed_lanes_other_runs_change_no_bit(self, engine):
        """The same run alone and together with runs of other algorithms: recorded results can be reproduced exactly."""
        plan = {
            a: mf.Experiment(model="mlp:20", rounds=3, epochs=1, algorithm=a, availability="time-varying:0.2", device="cuda", engine=engine)
            for a in ("mimic", "scaffold", "fedprox:mu=0.1")
        }
        together = run_plan(plan)
        assert torch.equal(together["mimic"].params, run_plan({"mimic": plan["mimic"]})["mimic"].params)

    @pytest.mark.parametrize("engine", ["batched:20:compiled", "streams:8:compiled"])
    def test_compiling_again_in_another_process_gives_the_same_bits(self, tmp_path, engine):
        """The compiler must not choose by timing, which may differ between processes."""
        script = f"""
import torch, mimicfl as mf
torch.manual_seed(0)
x, y = torch.randint(0, 256, (960, 1, 28, 28), dtype=torch.uint8), torch.arange(960) % 10
data = mf.Data(x, y, x[:40], y[:40])
torch.manual_seed(1)
arguments = {{"model": mf.models.build("lenet", data), "data": data, "split": mf.partition.iid(y, 20), "device": "cuda", "rounds": 3}}
run = mf.simulate(**arguments, local=mf.LocalSGD(epochs=2, lr=0.05, batch_size=16), engine="{engine}")
print(run.params.double().sum().item().hex(), run.params.double().norm().item().hex())
"""
        caches = [{name: str(tmp_path / str(n) / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")} for n in range(2)]
        started = [
            subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True) for env in caches
        ]
        first, second = (process.communicate()[0] for process in started)
        assert first == second
        assert first.count("0x") == 2

    def test_auto_gives_the_engine_and_the_reason(self, monkeypatch, digits):
        monkeypatch.delenv("MIMICFL_ENGINE")
        monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
        monkeypatch.setattr("mimicfl.engines.select.Trial.seconds", lambda trial, engine: 3.0 if engine.name == "plain" else 1.0)
        notices = []
        mf.simulate(**digits, rounds=2, device="cuda", notice=notices.append)
        assert re.match(r"engine (native|batched|streams): measured 3 times as fast as plain here", notices[0])
