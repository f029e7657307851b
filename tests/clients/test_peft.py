"""Adapters as they come from peft: trained, sent and restored like any other parameters; the base is shared."""

import copy

import pytest
import torch
from torch import nn

import mimicfl as mf
from tests.conftest import end_on

pytestmark = pytest.mark.slow  # importing peft takes seconds


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def adapted(peft, freeze_a=False):
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["1", "3"], init_lora_weights=False)).double()
    for name, p in model.named_parameters():
        if freeze_a and "lora_A" in name:
            p.requires_grad_(False)
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_lora_equals_the_whole_model_at_rate_zero(peft, digits, optimizer):
    """The base trained at rate zero, and the base frozen, give the same adapters."""
    whole = adapted(peft)
    for p in whole.parameters():
        p.requires_grad_(True)
    given = {**digits, "algorithm": "mimic", "availability": "static:0.3", "rounds": 3}
    lora = mf.simulate(**{**given, "model": adapted(peft)}, local=mf.Local(steps=3, lr=0.01, optimizer=optimizer))
    still = mf.Local(steps=3, lr=0.01, optimizer=optimizer, lr_multipliers={"*base_layer*": 0.0})
    found = dict(mf.simulate(**{**given, "model": whole}, local=still).model().named_parameters())
    adapters = {name: p for name, p in lora.model().named_parameters() if p.requires_grad}
    assert len(adapters) == 4
    assert lora.params.numel() == sum(p.numel() for p in adapters.values())
    for name, p in adapters.items():
        torch.testing.assert_close(p, found[name], rtol=1e-9, atol=1e-11)
        assert not torch.equal(p, dict(adapted(peft).named_parameters())[name])


@pytest.mark.parametrize("engine", ["workers", "batched"])
@pytest.mark.parametrize("freeze_a", [False, True])
def test_engines_agree(peft, digits, engine, freeze_a):
    given = {**digits, "model": adapted(peft, freeze_a), "rounds": 2, "availability": "static:0.3", "local": mf.Local(steps=2, lr=0.05)}
    torch.testing.assert_close(end_on(engine, **given), end_on("plain", **given), rtol=1e-7, atol=1e-9)


def test_mean_of_b_is_the_mean_of_the_models_if_a_is_frozen(peft, digits):
    """FFA-LoRA: averaging B averages the models, since the product is linear in B."""
    model = adapted(peft, freeze_a=True)
    ends, split = [], digits["split"][:3]
    local = mf.LocalSGD(steps=3, lr=0.5)

    def products(module):
        return torch.cat([layer.get_delta_weight("default").detach().reshape(-1) for layer in module.modules() if hasattr(layer, "lora_A")])

    together = mf.simulate(**{**digits, "model": model, "split": split}, algorithm="fedavg", rounds=1, local=local)
    for client in range(3):  # alone, but with the same batches: only this client is active in round 0
        alone = mf.availability.Explicit([[k == client for k in range(3)]])
        ends.append(
            products(
                mf.simulate(
                    **{**digits, "model": model, "split": split}, algorithm="fedavg", availability=alone, rounds=1, local=local
                ).model()
            )
        )
    torch.testing.assert_close(products(together.model()), torch.stack(ends).mean(dim=0), rtol=1e-9, atol=1e-12)


def test_runs_resume(peft, digits, tmp_path):
    """Two models that are built alike have the same fingerprint, and different ones have not."""
    given = {**digits, "rounds": 2, "local": mf.LocalSGD(steps=1)}
    first = mf.simulate(**given | {"model": adapted(peft)}, out=tmp_path)
    again = mf.simulate(**given | {"model": adapted(peft)}, out=tmp_path)
    assert torch.equal(first.params, again.params)
    other = copy.deepcopy(adapted(peft))
    with torch.no_grad():
        next(p for p in other.parameters() if not p.requires_grad).add_(1.0)
    with pytest.raises(mf.UsageError, match="frozen weights"):
        mf.simulate(**given | {"model": other}, out=tmp_path)
