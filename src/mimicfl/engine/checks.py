"""Checks that need the model and the device, before the first round; and of a user's algorithm after each."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.clients import Holdout
from ..data.dataset import Data
from ..errors import UsageError, first_line, shown
from ..local.losses import Loss, cross_entropy
from ..local.lr import check_certificate, theory
from ..local.update import LocalSGD
from ..rows import Rows
from ..theory.rounds import Rounds


def pick_device(name: str) -> torch.device:
    if isinstance(name, str) and name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name) if isinstance(name, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {shown(name)} is unknown; use cpu, cuda, cuda:0 or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, but torch finds no GPU here: use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} was asked for, this machine has {torch.cuda.device_count()} GPU(s), counted from 0")
    return device


def check_model(module: nn.Module, test: Holdout, data: Data, loss: Loss) -> None:
    """Does the model take these samples, do its outputs fit the classes, and does the loss fit both?"""
    x, y = next(iter(test))
    x, y = x[:2], y[:2]
    shape = tuple(data.x_train.shape[1:])
    module.eval()
    try:
        output = module(x)
    except Exception as error:
        raise UsageError(f"the model cannot take samples of shape {shape}: {first_line(error)}") from error
    module.train()
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(x):
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"the model must give one tensor with a row for every sample, got {got} for {len(x)} samples")
    check_outputs(output, y)
    outputs = output.shape[1] if output.ndim > 1 else 1
    if outputs == 1 and loss is cross_entropy:  # the loss would always be 0
        raise UsageError("cross-entropy needs one output per class and at least two, but the model has 1; add outputs or use loss='binary'")
    one_for_two = outputs == 1 and data.num_classes == 2 and loss is not cross_entropy
    if data.num_classes > outputs and not one_for_two:
        raise UsageError(
            f"the model has {outputs} outputs, the data has {data.num_classes} classes: give its last layer {data.num_classes}"
        )
    try:
        value = loss(output, y)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"it gives a tensor of shape {tuple(value.shape)}, but must give one number: the mean over the batch")
        value.backward()
    except Exception as error:
        shapes = f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(y.shape)}"
        raise UsageError(f"the loss does not fit {shapes}: {first_line(error)}") from error
    if not bool(torch.isfinite(value)):
        raise UsageError("the loss of the initial model is not finite on the test data: check the data's scale and the model")
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        warnings.warn(
            "the model has BatchNorm: its running statistics are averaged over the active clients but get no correction; "
            "GroupNorm has none and suits federated learning better",
            stacklevel=4,
        )


def check_outputs(output: Tensor, y: Tensor) -> None:
    """Outputs must be [batch, classes, ...] for targets [batch, ...], since accuracy is taken along the second dimension."""
    if y.is_floating_point():
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


def check_rate(run: Any) -> None:
    """A rate of zero or less must not surface after an hour; one that was found from constants must fit the run it is used in."""
    for t, m in enumerate(run.available.sum(axis=1).tolist()):
        if m:
            run.local_lr(t, m), run.global_lr(t, m)  # own functions are checked wherever they are called
    if isinstance(run.global_lr, theory) and run.global_lr.horizon is not None and run.available.any():
        if run.local.extras:
            without = " and ".join(run.local.extras)
            raise UsageError(f"a rate with a certificate is for plain SGD: leave out {without}, or give another global_lr")
        rounds = Rounds(np.ones(len(run.available)), run.available)
        steps = max(len(run.local.batch_sizes(int(size), client)) for client, size in enumerate(run.clients.sizes))
        largest = max(run.local_lr(int(t), int(m)) for t, m in zip(rounds.number, rounds.m, strict=True))
        check_certificate(run.global_lr, rounds, steps, largest, run.update)


def check_lists(local: LocalSGD, clients: int) -> None:
    for name, numbers in local.lists.items():
        if len(numbers) != clients:
            raise UsageError(f"{name} has {len(numbers)} numbers, one a client, and there are {clients} clients")


def check_state(state: Any, w: Tensor, before: Any, algorithm: object) -> None:
    """An algorithm's state must be what can be saved and resumed: a dataclass of tensors, the same one in every round."""
    name = type(algorithm).__name__
    if state is None:
        raise UsageError(f"{name}.{'init' if before is None else 'aggregate'} returned nothing: end it with `return state`")
    if not dataclasses.is_dataclass(state) or isinstance(state, type) or state.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UsageError(f"{name}: the state must be a dataclass (not frozen) like mimicfl.State, got {type(state).__name__}")
    if before is not None and type(state) is not type(before):
        raise UsageError(
            f"{name}.aggregate returned a {type(state).__name__}, init a {type(before).__name__}: return the state it was given"
        )
    for field in dataclasses.fields(state):
        if not isinstance(getattr(state, field.name), (Tensor, Rows)):
            raise UsageError(f"{name}: state.{field.name} must be a tensor, so that it can be saved, got {getattr(state, field.name)!r}")
    own = getattr(state, "w", None)
    if not isinstance(own, Tensor) or own.shape != w.shape or own.dtype != w.dtype:
        found = f"{own.dtype} of shape {tuple(own.shape)}" if isinstance(own, Tensor) else "none"
        raise UsageError(f"{name}: state.w must be the model as {w.dtype} of shape {tuple(w.shape)}, got {found}")
