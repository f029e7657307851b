"""An engine that raises any error while it is prepared cannot run the model, and another one is used."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mimicfl as mf
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from tests.engines.engines import Residual


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.head = kind(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(self.recurrent(x[:, 0])[0][:, -1])


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x.flatten(1))


ODD = {
    "unused": Unused,
    "residual": Residual,
    "weight_norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 10))),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


class TestFallback:
    @pytest.mark.slow
    @pytest.mark.parametrize("engine", ["auto", "native", "batched"])
    @pytest.mark.parametrize("name", ODD)
    def test_any_model_trains_with_one_notice(self, digits, monkeypatch, name, engine):
        monkeypatch.delenv("MIMICFL_ENGINE")
        monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
        notices, given = [], {**digits, "model": ODD[name](), "rounds": 2, "availability": "static:0.1", "local": mf.LocalSGD(steps=2)}
        ours = mf.simulate(**given, engine=engine, notice=notices.append)
        assert len(notices) == 1
        assert notices[0].startswith("engine ")
        torch.testing.assert_close(ours.params, mf.simulate(**given, engine="plain").params, rtol=1e-4, atol=1e-5)

    def test_unused_parameters_do_not_change(self, digits):
        model = Unused()
        ours = mf.simulate(**{**digits, "model": model}, rounds=1, engine="plain")
        spare = torch.cat([p.detach().flatten() for p in model.spare.parameters()])
        assert torch.equal(ours.params[-len(spare) :], spare)

    @pytest.mark.slow
    @pytest.mark.parametrize("where", ["__init__", "train", "outputs"])
    def test_any_error_of_an_engine_falls_back_to_plain(self, digits, monkeypatch, where):
        def odd(*given, **named):
            raise KeyError("an odd one")

        monkeypatch.setattr(BatchedEngine, where, odd)
        notices = []
        mf.simulate(**digits, rounds=1, engine="batched", notice=notices.append)
        assert len(notices) == 1
        assert notices[0].startswith("engine plain: ")
        assert "an odd one" in notices[0]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
    def test_interrupts_and_out_of_memory_errors_are_raised(self, digits, monkeypatch, error):
        def stop(*given, **named):
            raise error("stop")

        monkeypatch.setattr(BatchedEngine, "train", stop)
        with pytest.raises(error):
            mf.simulate(**digits, rounds=1, engine="batched")
