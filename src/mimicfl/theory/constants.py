"""The constants L, sigma and kappa_i of a problem: exact for linear models, estimated for all others.

The paper assumes one constant for all w. Quadratics have a global L, but neither their gradient variance nor their heterogeneity is
bounded over all w. The proofs, however, use these only at the points that a run visits. So L is global if possible, and sigma and
kappa_i are computed at given points. (For a quadratic both are convex in w, so the largest value also holds between the points.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.samples import single
from ..errors import number, one_of
from ..seeds import stream
from .population import Population

# The largest second derivative of the loss with respect to the model's output, for one sample: for mse everywhere, for logistic at 0,
# for softmax an upper bound.
CURVATURE = {"mse": 1.0, "binary": 0.25, "cross-entropy": 0.5}
EXACT, BOUND, ESTIMATE = "exact", "upper bound", "estimate"


@dataclass(frozen=True)
class Constants:
    """The constants that the theorems need. `how` says how L was computed: exact, upper bound or estimate."""

    L: float
    sigma: float
    kappa: np.ndarray  # [N]
    how: str
    sigma_how: str = EXACT

    def __post_init__(self) -> None:
        number("L", self.L, low=0, open_low=True), number("sigma", self.sigma, low=0)
        for i, value in enumerate(self.kappa):
            number(f"kappa of client {i}", float(value), low=0)

    def sentences(self) -> list[str]:
        k = self.kappa
        return [
            f"L = {self.L:.4g} ({self.how})",
            f"sigma = {self.sigma:.4g} ({self.sigma_how}, largest over clients at the evaluated points)",
            f"kappa_i = {k.min():.4g} to {k.max():.4g} (at the evaluated points)",
        ]


def constants(
    population: Population, points: Sequence[Tensor], batch_sizes: Sequence[int], kind: str = "", iterations: int = 20
) -> Constants:
    """Compute the constants of these clients at these points; `kind` is the name of the loss if it is a built-in one."""
    linear = LinearModel.of(population, kind)
    L, sigma2, kappa2 = 0.0, 0.0, np.zeros(len(population.clients))
    for k, w in enumerate(points):
        g = population.gradients(w)[1]
        kappa2 = np.maximum(kappa2, heterogeneity(population, g))
        found = linear.variance(w, g, batch_sizes) if linear else sampled_variance(population, w, g, batch_sizes, 0, k)
        sigma2 = max(sigma2, float(found.max()))
        if linear is None:
            L = max(L, float(power_iteration(population, w, iterations, 0, k).max()))
    if linear:
        return Constants(float(linear.smoothness().max()), sigma2**0.5, kappa2**0.5, linear.how)
    how = f"{ESTIMATE}: power iteration at {len(points)} points of the path, so a lower bound of L elsewhere"
    return Constants(L, sigma2**0.5, kappa2**0.5, how, f"{ESTIMATE} from sampled batches" if sigma2 else EXACT)


def heterogeneity(population: Population, g: Tensor) -> np.ndarray:
    """Return kappa_i^2 = |grad f_i - grad f|^2, [N], from the clients' gradients `g` at one point."""
    return np.asarray((g - population.mean(g)).double().square().sum(dim=1).cpu())


class LinearModel:
    """A single linear layer with a built-in loss. f_i depends on w only through the scores A_i w, so its constants can be computed."""

    def __init__(self, features: list[Tensor], targets: list[Tensor], outputs: int, bias: bool, kind: str) -> None:
        self.A, self.y, self.outputs, self.bias, self.kind = features, targets, outputs, bias, one_of("loss", kind, CURVATURE)
        self.how = BOUND if kind == "cross-entropy" else EXACT

    @classmethod
    def of(cls, population: Population, kind: str) -> "LinearModel | None":
        layers = [layer for layer in population.module.modules() if not list(layer.children())]
        layers = [layer for layer in layers if not isinstance(layer, (nn.Flatten, nn.Identity))]
        if kind not in CURVATURE or len(layers) != 1 or not isinstance(layers[0], nn.Linear):
            return None
        layer, bias = layers[0], layers[0].bias is not None
        if len(population.names) != 1 + bias or (kind == "binary" and layer.out_features != 1):
            return None  # some parameters are frozen, or the loss does not match the number of outputs
        if not isinstance(population.clients.x, Tensor) or not isinstance(population.clients.y, Tensor):
            return None
        A, y = [], []
        for rows in population.clients.split:
            x, target = map(single, population._samples(torch.from_numpy(rows).to(population.clients.device)))
            x = x.reshape(len(x), -1).double()
            A.append(torch.cat([x, torch.ones_like(x[:, :1])], dim=1) if bias else x)
            y.append(target)
        return cls(A, y, layer.out_features, bias, kind)

    def smoothness(self) -> np.ndarray:
        """Return L_i, [N]: the curvature of the loss times the largest eigenvalue of A_i^T A_i / n_i.

        The value is attained everywhere for mse and at w = 0 for the logistic loss; for softmax, 1/2 is an upper bound.
        """
        top = [float(torch.linalg.eigvalsh(a.T @ a / len(a) if a.shape[1] <= len(a) else a @ a.T / len(a))[-1]) for a in self.A]
        return CURVATURE[self.kind] / (self.outputs if self.kind == "mse" else 1) * np.array(top)

    def variance(self, w: Tensor, g: Tensor, batch_sizes: Sequence[int]) -> np.ndarray:
        """Return E|grad F_i(w; batch) - grad f_i(w)|^2, [N], for batches drawn without replacement. Sample j has the gradient r_j a_j^T."""
        found = []
        for i, (a, y, b) in enumerate(zip(self.A, self.y, batch_sizes, strict=True)):
            residual = self._residual(self._scores(a, w), y)
            each = residual.square().sum(dim=1) * a.square().sum(dim=1)
            spread = max(float(each.mean() - g[i].double().square().sum()), 0.0)
            found.append(_of_batch(spread, len(a), b))
        return np.array(found)

    def _scores(self, a: Tensor, w: Tensor) -> Tensor:
        """Return the scores, [n, outputs]. The flat vector holds the weight matrix, then the bias, which belongs to the last feature."""
        inside = self.outputs * (a.shape[1] - self.bias)
        weight = w.double()[:inside].view(self.outputs, -1)
        return a @ (torch.cat([weight, w.double()[inside:, None]], dim=1) if self.bias else weight).T

    def _residual(self, score: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of each sample's loss with respect to its scores, [n, outputs]."""
        if self.kind == "mse":
            return (score - y.double().view_as(score)) / self.outputs
        if self.kind == "binary":
            return torch.sigmoid(score) - y.double().view_as(score)
        return torch.softmax(score, dim=1) - nn.functional.one_hot(y, self.outputs)


def _of_batch(spread: float, n: int, b: int) -> float:
    """Return the variance of the mean of b out of n samples drawn without replacement, from the variance of one sample."""
    return spread / b * (n - b) / (n - 1) if n > 1 else 0.0


def power_iteration(
    population: Population, w: Tensor, iterations: int = 20, seed: int = 0, key: int = 0, buffers: Any = None
) -> np.ndarray:
    """Estimate the largest |eigenvalue| of each client's Hessian at w, [N], from below. Each iteration costs about three passes."""
    found = []
    for i in range(len(population.clients)):
        v = torch.from_numpy(stream(seed, "power iteration", key, i).normal(size=w.numel())).to(w)
        size = torch.zeros(())
        for _ in range(iterations):
            v = v / v.norm()
            v = population.curvature(w, i, v, buffers)
            size = v.norm()
            if not float(size):
                break
        found.append(float(size))
    population.passes += 3 * iterations
    return np.array(found)


def sampled_variance(
    population: Population,
    w: Tensor,
    g: Tensor,
    batch_sizes: Sequence[int],
    seed: int = 0,
    key: int = 0,
    draws: int = 4,
    buffers: Any = None,
) -> np.ndarray:
    """Estimate each client's gradient variance at w from a few batches, [N]; it is 0 if a batch holds all samples of the client."""
    found = []
    for i, b in enumerate(batch_sizes):
        rows = population.clients.split[i]
        if b >= len(rows):
            found.append(0.0)
            continue
        rng = stream(seed, "gradient variance", key, i)
        batches = [population.gradient(w, rng.choice(rows, size=b, replace=False), buffers)[1] for _ in range(draws)]
        found.append(float(np.mean([float((batch - g[i]).double().square().sum()) for batch in batches])))
    return np.array(found)
