"""Check that model, data and loss fit together, on two test samples before a run starts."""

import copy
import warnings

import torch
from torch import Tensor, nn

from ..clients.losses import Loss, cross_entropy, mse
from ..data.clients import Holdout
from ..data.convert import check_counted, classes_without, same_shape
from ..data.dataset import Data
from ..data.samples import Samples, count, forward, named, rows, shapes, tensors
from ..errors import UsageError, first_line
from ..metrics.evaluate import counted_targets, ignored_by
from ..tasks import LearningTask


def check_model(module: nn.Module, test: Holdout, data: Data, loss: Loss) -> Tensor:
    """Check that the model accepts the samples, its outputs match the classes, and the loss accepts both; return two samples' outputs."""
    chosen = probe_rows(test.y, loss)
    x, y = data.inputs(rows(test.x, chosen), test.dtype), rows(test.y, chosen)
    samples = count(x)
    module.eval()
    try:
        output = forward(module, x)
    except Exception as error:
        shape = f"samples of shape {shapes(x)}" if isinstance(x, Tensor) else f"inputs ({shapes(x)})"
        raise UsageError(f"the model does not accept {shape}: {first_line(error)}") from error
    module.train()
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != samples:
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"the model must return one tensor with one row per sample, got {got} for {samples} samples")
    if isinstance(loss, LearningTask):
        loss.check(output, y, data)
        loss.check_metrics(output.detach(), y)
    else:
        check_classes(output, y, data, loss)
    check_loss(output, y, loss)
    warn_about_batch_norm(module)
    warn_about_counters(module, x)
    return output


def probe_rows(y: Samples, loss: Loss) -> Tensor:
    """Two test samples to try the model on, with targets that are not ignored if possible: otherwise a mean over targets is nan."""
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


def warn_about_counters(module: nn.Module, inputs: Samples) -> None:
    """Warn about numbers that the model keeps in attributes and changes whenever it is called."""
    if not any(_own_numbers(module)):
        return
    device = tensors(inputs)[0].device
    try:
        tried = copy.deepcopy(module).train()
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            forward(tried, inputs)
            before = _own_numbers(tried)
            forward(tried, inputs)
    except Exception:  # such as BatchNorm, which refuses one value per channel
        return
    pairs = zip(before, _own_numbers(tried), strict=True)
    changed = sorted({name for old, new in pairs for name in new if name in old and new[name] != old[name]})
    if changed:
        warnings.warn(
            f"the model changes its attribute {' and '.join(changed)} whenever it is called: no checkpoint holds it, and engines differ in "
            "how often they call a model. If its outputs depend on it, make it a buffer (register_buffer)",
            stacklevel=5,
        )


def _own_numbers(module: nn.Module) -> list[dict[str, float]]:
    """The attributes that are numbers, of every submodule that is not a layer of PyTorch."""
    own = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
    return [{name: value for name, value in vars(part).items() if type(value) in (int, float)} for part in own]


def check_classes(output: Tensor, y: Samples, data: Data, loss: Loss) -> None:
    """Check that the outputs match the classes."""
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
        raise UsageError(f"the model has {outputs} outputs but the data has {classes} classes: change its last layer to {classes} outputs")


def check_loss(output: Tensor, y: Samples, loss: Loss) -> None:
    """Check that the loss accepts outputs and targets, and that it is finite."""
    try:
        value = loss(output, y)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"it returns a tensor of shape {tuple(value.shape)}, but must return one number: the mean over the batch")
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
    """Check that the model accepts a batch as the data's transform returns it."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if isinstance(x, Tensor) and x.is_cuda else []):
            forward(module.eval(), x)
    except Exception as error:
        raise UsageError(f"the model does not accept a batch that transform returns ({shapes(x)}): {first_line(error)}") from error
    module.train()


def check_whole_numbers(module: nn.Module, x: Samples, name: str, data: Data, dtype: torch.dtype, used: Tensor) -> None:
    """Try the samples with the largest and the smallest whole number of each input: an embedding refuses numbers out of its range."""
    for entry, values in named(x, name).items():
        if values.is_floating_point() or values.dtype in (torch.bool, torch.uint8) or not values.numel():
            continue
        each = values.reshape(len(values), -1)
        high, low = used[each.amax(dim=1)[used].argmax()], used[each.amin(dim=1)[used].argmin()]
        try:
            with torch.no_grad():
                forward(module.eval(), data.inputs(rows(x, torch.stack([high, low])), dtype))
        except Exception as error:
            reach = f"{int(each[low].min())} to {int(each[high].max())}"
            raise UsageError(f"the model does not accept {entry}, whose numbers reach from {reach}: {first_line(error)}") from error
        finally:
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
