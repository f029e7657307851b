"""The CNN and the ResNet-18 by name."""

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl import UsageError
from mimicfl.clients.image_models import ResNet
from tests.conftest import end_on


def images(size=8, channels=3):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, channels, size, size, generator=generator), torch.arange(24) % 4
    return mf.Data(x, y, x[:8], y[:8])


def test_resnet_18_has_its_published_size():
    """11.17 million parameters for CIFAR-10, eight blocks of two convolutions, a stem, three projections and a linear layer."""
    model = ResNet(norm="batch")
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == 17 + 3
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("spec", ["cnn", "cnn:norm=batch", "resnet:width=4", "resnet:width=6,norm=batch"])
def test_by_name(spec):
    data = images()
    model = mf.models.build(spec, data, seed=1)
    assert model(data.x_test).shape == (8, 4)
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == ("batch" in spec)
    again = mf.models.build(spec, data, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("spec", "problem"), [("cnn:norm=layer", "norm"), ("resnet:width=0", "width"), ("resnet:width=4,norm=none", "norm"), ("cnn", "4x4")]
)
def test_wrong_options(spec, problem):
    with pytest.raises(UsageError, match=problem):
        mf.models.build(spec, images(3 if spec == "cnn" else 8))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["cnn", "resnet:width=4"])
@pytest.mark.parametrize("engine", ["batched", "workers"])
def test_engines_equal_plain(spec, engine):
    data = images()
    given = {
        "model": mf.models.build(spec, data, seed=0).double(),
        "data": data,
        "split": [torch.arange(8).numpy(), torch.arange(8, 24).numpy()],
        "local": mf.LocalSGD(epochs=1, batch_size=4, lr=0.05),
        "rounds": 2,
    }
    assert torch.allclose(end_on(engine, **given), end_on("plain", **given), rtol=1e-8, atol=1e-10)
