"""Do model, data and loss fit together? Tried on two test samples before a run begins."""

import warnings

import torch
from torch import Tensor, nn

from ..clients.losses import Loss, cross_entropy, mse
from ..data.clients import Holdout
from ..data.convert import check_counted, classes_without, same_shape
from ..data.dataset import Data
from ..data.samples import Samples, count, forward, rows, shapes
from ..errors import UsageError, first_line
from ..metrics.evaluate import counted_targets, ignored_by
from ..tasks import LearningTask


def check_model(module: nn.Module, test: Holdout, data: Data, loss: Loss) -> Tensor:
    """Does the model take these samples, do its outputs fit the classes, and does the loss fit both? Returns the outputs of two."""
    chosen = probe_rows(test.y, loss)
    x, y = data.inputs(rows(test.x, chosen), test.dtype), rows(test.y, chosen)
    samples = count(x)
    module.eval()
    try:
        output = forward(module, x)
    except Exception as error:
        shape = f"samples of shape {shapes(x)}" if isinstance(x, Tensor) else f"inputs ({shapes(x)})"
        raise UsageError(f"the model cannot take {shape}: {first_line(error)}") from error
    module.train()
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != samples:
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"the model must give one tensor with a row for every sample, got {got} for {samples} samples")
    if isinstance(loss, LearningTask):
        loss.check(output, y, data)
        loss.check_metrics(output.detach(), y)
    else:
        check_classes(output, y, data, loss)
    check_loss(output, y, loss)
    warn_about_batch_norm(module)
    return output


def probe_rows(y: Samples, loss: Loss) -> Tensor:
    """Two test samples to try the model with. They have targets that count, if any do: without one, a mean over targets is not a number."""
    if isinstance(y, Tensor) and not y.is_floating_point():
        held = counted_targets(y, loss).reshape(len(y), -1).any(dim=1).nonzero()[:2, 0]
        if len(held):
            return held
    return torch.arange(min(2, count(y)))


def warn_about_batch_norm(module: nn.Module) -> None:
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        warnings.warn(
            "the model has BatchNorm: its running statistics are averaged over the active clients but get no correction; "
            "GroupNorm has none and suits federated learning better",
            stacklevel=5,
        )


def check_classes(output: Tensor, y: Samples, data: Data, loss: Loss) -> None:
    """Do the outputs fit the classes?"""
    if isinstance(y, Tensor):
        check_outputs(output, y, loss)
    outputs = output.shape[1] if output.ndim > 1 else 1
    if outputs == 1 and loss is cross_entropy:  # the loss would always be 0
        raise UsageError("cross-entropy needs one output per class and at least two, but the model has 1; add outputs or use loss='binary'")
    if not data.num_classes:
        return
    check_counted(data.y_test, ignored_by(loss))
    classes = classes_without(ignored_by(loss), data.y_train, data.y_test)
    one_for_two = outputs == 1 and classes <= 2 and loss is not cross_entropy
    if classes > outputs and not one_for_two:
        raise UsageError(f"the model has {outputs} outputs, the data has {classes} classes: give its last layer {classes}")


def check_loss(output: Tensor, y: Samples, loss: Loss) -> None:
    """Does the loss fit outputs and targets, and is it finite?"""
    try:
        value = loss(output, y)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"it gives a tensor of shape {tuple(value.shape)}, but must give one number: the mean over the batch")
        value.backward()
    except Exception as error:
        targets = f"targets of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"targets ({shapes(y)})"
        raise UsageError(f"the loss does not fit outputs of shape {tuple(output.shape)} and {targets}: {first_line(error)}") from error
    check_broadcasting(output.detach(), y, loss, value.detach())
    if not bool(torch.isfinite(value)):
        raise UsageError("the loss of the initial model is not finite on the test data: check the data's scale and the model")


def check_broadcasting(output: Tensor, y: Samples, loss: Loss, value: Tensor) -> None:
    """Outputs [B, 1] and targets [B] have one output per target, but their difference is [B, B]: a loss must not depend on that."""
    if not isinstance(y, Tensor) or not y.is_floating_point() or output.shape == y.shape or output.numel() != y.numel():
        return
    try:
        aligned = loss(output.view_as(y), y)
    except Exception:  # a loss may need the shape that the outputs have
        return
    if not torch.allclose(aligned, value, rtol=1e-3, equal_nan=True):
        raise UsageError(
            f"the loss compares every output with every target, since outputs are {tuple(output.shape)} and targets {tuple(y.shape)}; "
            f"give y the shape of the outputs"
        )


def check_inputs(module: nn.Module, x: Samples) -> None:
    """Does the model take a batch as the data's transform returns it?"""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if isinstance(x, Tensor) and x.is_cuda else []):
            forward(module.eval(), x)
    except Exception as error:
        raise UsageError(f"the model cannot take a batch that transform returns ({shapes(x)}): {first_line(error)}") from error
    module.train()


def check_outputs(output: Tensor, y: Tensor, loss: Loss) -> None:
    """Outputs must be [batch, classes, ...] for targets [batch, ...], since accuracy is taken along the second dimension."""
    if y.is_floating_point():
        if loss is mse and not same_shape(output, y):
            raise UsageError(f"loss 'mse' needs one output per target: got {tuple(output.shape)} for {tuple(y.shape)}")
        return
    shapes = f"outputs of shape {tuple(output.shape)}, targets of shape {tuple(y.shape)}"
    if output.ndim < 2 or output.shape[1] == 1:
        fits = output.numel() == y.numel()
    else:
        fits = output.shape[2:] == y.shape[1:]
        if not fits and output.shape[1:-1] == y.shape[1:]:
            turned = "transpose(1, 2)" if output.ndim == 3 else "movedim(-1, 1)"
            raise UsageError(f"the classes must be the output's second dimension, not its last ({shapes}); return output.{turned}")
    if not fits:
        raise UsageError(
            f"the model's output must be [batch, classes, ...] where targets are [batch, ...] ({shapes}); "
            "give other targets, such as several labels per sample, as real numbers"
        )
