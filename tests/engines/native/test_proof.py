"""The native engine refuses what it cannot compute exactly: losses, modes, inputs, shared parameters; and it gives the correct reason."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import LOSSES
from mimicfl.data.clients import Holdout
from mimicfl.engines.native import Unsupported, network, verify
from mimicfl.engines.native.engine import Program
from mimicfl.engines.native.trace import trace
from tests.engines.native.problems import assert_close, linear, native, needs_compiler, problem

pytestmark = needs_compiler
LOCAL = mf.LocalSGD(epochs=2, batch_size=7, lr=0.05, momentum=0.5, weight_decay=0.1, clip_norm=0.3)


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output, target) + 0.01 * output.square().mean()


def hooked():
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, given, value: 2 * value)
    return loss


class TestLosses:
    @pytest.mark.parametrize(
        ("loss", "words"),
        [
            (nn.CrossEntropyLoss(ignore_index=3), "ignores class 3"),
            (nn.CrossEntropyLoss(weight=torch.ones(4)), "weight"),
            (nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing"),
            (nn.CrossEntropyLoss(reduction="sum"), "reduction"),
            (Smoothed(), "neither cross-entropy nor mse"),
            (hooked(), "hooks"),
            (lambda output, target: F.cross_entropy(output, target, ignore_index=0), "neither cross-entropy nor mse"),
        ],
    )
    def test_unsupported_losses_are_refused(self, loss, words):
        with pytest.raises(Unsupported, match=words):
            native(linear(), problem((6,), 4), loss)

    @pytest.mark.slow
    @pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=4), F.cross_entropy])
    def test_equivalent_losses_are_accepted(self, loss):
        native(linear(), problem((6,), 4), loss)

    def test_replaced_registry_entry_is_refused(self, monkeypatch):
        monkeypatch.setitem(LOSSES.factories, "cross-entropy", Smoothed())
        with pytest.raises(Unsupported, match="neither cross-entropy nor mse"):
            native(linear(), problem((6,), 4), LOSSES.find("cross-entropy"))

    @pytest.mark.parametrize("last", [0, 1, 2, 3])
    def test_loss_is_compared_on_every_class(self, last, monkeypatch):
        """An ignored class is found even if it has a single sample."""
        monkeypatch.setattr(network, "loss_name", lambda loss, data: "cross-entropy")
        data = problem((6,), 4, n=400)
        data = mf.Data(data.x_train, torch.where(torch.arange(400) == 391, last, (last + 1) % 4), data.x_test, data.y_test)
        with pytest.raises(Unsupported, match="disagrees with PyTorch"):
            native(linear(), data, nn.CrossEntropyLoss(ignore_index=last))

    def test_targets_of_the_wrong_shape_are_refused(self):
        x = torch.randn(8, 6)
        with pytest.raises(Unsupported, match="4 outputs but 1 targets"):
            native(linear(), mf.Data(x, torch.randn(8), x, torch.randn(8)), "mse")
        with pytest.raises(Unsupported, match="one class per sample"):
            native(linear(), mf.Data(x, torch.rand(8, 4), x, torch.rand(8, 4)), "cross-entropy")
        with pytest.raises(Unsupported, match="fewer outputs than classes"):
            native(linear(), problem((6,), 5))


class Modes(nn.Module):
    """Computes a different function in evaluation mode."""

    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 4), nn.ReLU()

    def forward(self, x):
        x = self.a(x)
        if self.how == "softmax":
            return x if self.training else F.softmax(x, 1)
        return x if self.training else self.b(x)


class TestModes:
    @pytest.mark.parametrize(("how", "words"), [("softmax", "evaluation mode .*softmax"), ("relu", "different layers in evaluation")])
    def test_different_function_in_evaluation_mode_is_refused(self, how, words):
        with pytest.raises(Unsupported, match=words):
            native(Modes(how), problem((6,), 4))

    @pytest.mark.slow
    @pytest.mark.parametrize("training", [True, False])
    def test_outputs_are_compared_in_both_modes(self, training, monkeypatch):
        """The comparison finds a difference that tracing missed."""
        monkeypatch.setattr(network, "trace", lambda model, shape: trace(nn.Sequential(model.a, *[model.b] * (not training)), shape))
        with pytest.raises(Unsupported, match="outputs in evaluation mode" if training else "loss|gradient"):
            native(Modes("relu"), problem((6,), 4))

    def test_test_samples_are_compared(self, monkeypatch):
        """Inputs that are wrong only for test samples are found."""
        data = problem((6,), 4)
        data = mf.Data(data.x_train, data.y_train, data.x_train + 9, data.y_train)
        real = Program.pool
        monkeypatch.setattr(Program, "pool", lambda program, x: real(program, x) * (1 + 0.5 * (x.mean() > 5)))
        with pytest.raises(Unsupported, match="evaluation mode"):
            native(linear(), data)

    @pytest.mark.slow
    def test_model_and_random_state_are_not_changed(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))
        model[2].eval()
        before, state = [m.training for m in model.modules()], copy.deepcopy(model.state_dict())
        data, random_state = problem((6,), 4, n=30), torch.get_rng_state()
        native(model, data)
        assert torch.equal(torch.get_rng_state(), random_state)
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
        assert [m.training for m in model.modules()] == before
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.slow
    def test_model_of_zeros_is_compared_at_perturbed_weights(self, monkeypatch):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        for p in model.parameters():
            nn.init.zeros_(p)
        monkeypatch.setattr(network, "trace", lambda module, shape: [layer for layer in trace(module, shape) if layer.kind != "relu"])
        with pytest.raises(Unsupported, match="disagrees with PyTorch"):
            native(model, problem((6,), 4))

    @pytest.mark.parametrize(
        ("wrong", "by", "accepted"),
        [({0}, 0.01, True), ({0, 2}, 0.01, True), ({0, 1, 3}, 0.01, False), ({0, 1, 2, 3}, 0.01, False), ({0}, 0.3, False)],
    )
    def test_gradient_that_differs_at_a_kink_is_compared_at_other_weights(self, monkeypatch, wrong, by, accepted):
        real, calls = Program.step, []

        def step(program, *given):
            g, loss = real(program, *given)
            calls.append(1 + by * (len(calls) in wrong))
            return g * calls[-1], loss

        monkeypatch.setattr(Program, "step", step)
        with nullcontext() if accepted else pytest.raises(Unsupported, match="disagrees with PyTorch"):
            native(linear(), problem((6,), 4))

    def test_compared_rows_cover_all_classes_and_exceed_the_traced_batch(self):
        y = torch.zeros(1000, dtype=torch.long)
        y[[500, 501, 999]] = torch.tensor([1, 2, 3])
        assert set(y[verify.probe_rows(y)].tolist()) == {0, 1, 2, 3}
        assert all(len(verify.probe_rows(torch.zeros(n, dtype=torch.long))) > 3 for n in range(1, 9))


def mixed_data():
    """Return uint8 training and float test samples, bypassing the checks of `Data`."""
    x, y = torch.randint(0, 256, (30, 1, 6, 6), dtype=torch.uint8), torch.arange(30) % 4
    data = mf.Data(x, y, x, y)
    object.__setattr__(data, "x_test", x.float() / 255)
    return data


class TestInputs:
    def test_mixed_uint8_and_float_samples_are_refused(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
        with pytest.raises(Unsupported, match="training samples are uint8 and its test samples float32"):
            native(model, mixed_data())

    @pytest.mark.slow
    def test_test_samples_of_another_type_use_the_module(self):
        x, y = torch.randint(0, 256, (30, 1, 6, 6), dtype=torch.uint8), torch.arange(30) % 4
        data = mf.Data(x, y, x, y)
        ours = native(nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), data)
        w = torch.zeros(1, 37 * 4)
        assert ours.outputs(w, [], Holdout(data, torch.device("cpu"), torch.float32)) is not None
        other = mf.Data(x / 255, y, x / 255, y)
        assert ours.outputs(w, [], Holdout(other, torch.device("cpu"), torch.float32)) is None

    def test_integer_inputs_are_refused_with_or_without_augmentation(self):
        x, y = torch.randint(0, 9, (30, 1, 6, 6)), torch.arange(30) % 4
        for augment in (False, True):
            with pytest.raises(Unsupported, match="int64"):
                native(nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), mf.Data(x, y, x, y, augment=augment))

    @pytest.mark.slow
    def test_default_dtype_does_not_matter(self):
        torch.set_default_dtype(torch.float64)
        try:
            model, data = linear().float(), problem((6,), 4)
            native(model, mf.Data(data.x_train.float(), data.y_train, data.x_train.float(), data.y_train))
        finally:
            torch.set_default_dtype(torch.float32)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.a, self.idle, self.b = nn.Parameter(torch.ones(3)), nn.Linear(64, 8), nn.Linear(5, 5), nn.Linear(8, 10)

    def forward(self, x):
        return self.b(torch.relu(self.a(x.flatten(1))))


class Twice(nn.Module):
    """Uses one layer twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = torch.tanh(self.a(x.flatten(1)))
        return self.c(torch.tanh(self.b(torch.relu(self.b(x)))))


def tied():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    net[3].weight = net[1].weight
    return net


def tied_convolutions():
    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(), nn.Linear(64, 10))
    net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net


@pytest.mark.slow
@pytest.mark.parametrize("make", [Unused, Twice, tied, tied_convolutions])
def test_shared_and_unused_parameters_equal_plain(make, digits):
    """Also checks the terms that act on parameters without a gradient: shift, proximal term, weight decay and momentum."""
    torch.manual_seed(3)
    given = {**digits, "model": make(), "availability": "static:0.5,warm_start=true", "rounds": 3, "local": LOCAL}
    for algorithm in ("scaffold", "fedprox:mu=0.5"):
        notices = []
        runs = [mf.simulate(**given, algorithm=algorithm, engine=engine, notice=notices.append).params for engine in ("native", "plain")]
        assert notices[0] == "engine native"
        assert_close(*runs, 1e-4)
