"""Checks before use: a compiled network is compared with its module and loss, on samples of all classes."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.clients import Clients
from ...data.dataset import Data
from ...local.losses import Loss, cross_entropy, mse
from ...params import flatten, trainable
from ...seeds import number
from ..calls import without_dropout
from ..support import Unsupported
from .trace import BATCH

if TYPE_CHECKING:
    from .cohort import Program

SPACED, CLASSES = 24, 40  # samples spread over the data, and one more from each of so many classes
# Relative to the largest value: the error of a wrong layer is far larger, that of float32 rounding far smaller. If rounding moves a
# maximum to another pixel, the gradient changes a little.
OUTPUTS, GRADIENT = 1e-4, 1e-3


def loss_name(loss: Loss, data: Data) -> str:
    """The name of the compiled loss; only for losses known to be equal to it on these labels."""
    if loss is mse:
        return "mse"
    if loss is not cross_entropy and loss is not F.cross_entropy:
        _plain_cross_entropy(loss, data)
    if not data.num_classes or data.y_train.ndim != 1:
        raise Unsupported("its labels are not one class per sample")
    return "cross-entropy"


def _plain_cross_entropy(loss: Loss, data: Data) -> None:
    """Refuse everything but nn.CrossEntropyLoss with settings equivalent to the defaults."""
    if not isinstance(loss, nn.CrossEntropyLoss) or type(loss) is not nn.CrossEntropyLoss or "forward" in vars(loss):
        raise Unsupported("its loss is neither cross-entropy nor mse")
    for word, plain in {"weight": None, "reduction": "mean", "label_smoothing": 0.0}.items():
        if (given := getattr(loss, word)) is not plain and given != plain:
            raise Unsupported(f"its CrossEntropyLoss has {word}={given}")
    if any(bool((y == loss.ignore_index).any()) for y in (data.y_train, data.y_test)):
        raise Unsupported(f"its CrossEntropyLoss ignores class {loss.ignore_index}, which some samples have")
    if loss._forward_hooks or loss._forward_pre_hooks or loss._backward_hooks or loss._backward_pre_hooks:
        raise Unsupported("its CrossEntropyLoss has hooks")


def verify(program: "Program", make: Callable[[nn.Module], "Program"], model: nn.Module, clients: Clients, loss: Loss) -> None:
    """Compare outputs in evaluation mode, and loss and gradient in training mode; the model is not changed."""
    data = clients.data
    rows = probe(clients.y)
    _evaluation(program, moved(model), data, (clients.x[rows], data.x_test[probe(data.y_test)]))
    quiet = without_dropout(model, data.inputs(clients.x[rows], torch.float32))
    if quiet is not None:  # engines draw dropout differently, so training is compared without it
        program, model = make(quiet), quiet
    _training(program, moved(model), clients, loss, rows)


def _evaluation(program: "Program", model: nn.Module, data: Data, samples: tuple[Tensor, ...]) -> None:
    model.eval()
    for x in samples:
        with torch.no_grad():
            exact = model(data.inputs(x, torch.float32))
        _agree("outputs in evaluation mode", program.predict(flatten(model), program.pool(x), 1), exact, OUTPUTS)


def _training(program: "Program", model: nn.Module, clients: Clients, loss: Loss, rows: np.ndarray) -> None:
    model.train()
    y = clients.y[rows]
    output = model(clients.data.inputs(clients.x[rows], torch.float32))
    value = loss(output, y)
    gradients = torch.autograd.grad(value, trainable(model), allow_unused=True, materialize_grads=True)
    exact = torch.cat([g.reshape(-1) for g in gradients])
    g, ours = program.step(flatten(model), program.pool(clients.x[rows]), program.target(y))
    _agree("loss", ours, value.detach().reshape(1), OUTPUTS, floor=1.0)
    _agree("gradient", g, exact, GRADIENT)


def _agree(what: str, ours: Tensor, exact: Tensor, tolerance: float, floor: float = 1e-6) -> None:
    scale = float(exact.abs().max().clamp_min(floor))
    if ours.shape != exact.shape or not torch.allclose(ours.to(exact.dtype), exact, rtol=0, atol=tolerance * scale):
        raise Unsupported(f"its compiled form disagrees with PyTorch on a test batch ({what})")


def probe(y: Tensor) -> np.ndarray:
    """Rows spread over the samples and the first of each class; always more than were traced."""
    rows = np.linspace(0, len(y) - 1, min(len(y), SPACED)).astype(np.int64)
    if y.ndim == 1 and not y.is_floating_point():
        rows = np.concatenate([rows, np.unique(y.numpy(), return_index=True)[1][:CLASSES]])
    return np.resize(np.unique(rows), max(len(np.unique(rows)), BATCH + 1))


def moved(model: nn.Module) -> nn.Module:
    """A copy with perturbed weights: zeros could hide an error."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(number(0, "native check"))
    with torch.no_grad():
        for p in trainable(model):
            fan_in = p[0].numel() if p.ndim > 1 else 4
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device), alpha=0.5 / fan_in**0.5)
    return model
