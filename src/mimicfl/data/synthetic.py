"""Synthetic problems with a known optimum: heterogeneous least squares and logistic regression."""

import numpy as np
import torch

from ..errors import integer, number, one_of
from ..seeds import stream
from .dataset import Data


def synthetic(
    kind: str = "quadratic",
    num_clients: int = 30,
    dim: int = 20,
    samples: int = 40,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    seed: int = 0,
) -> Data:
    """Generate data in which client i has the true parameters w_i = w + heterogeneity * z_i, so local minima differ.

    `optimum` is the minimiser of f, the mean of all clients' losses: from the normal equations for `quadratic`
    (f_i = half the mean squared error), by Newton's method for `logistic`.
    """
    one_of("synthetic kind", kind, ["quadratic", "logistic"])
    integer("num_clients", num_clients), integer("dim", dim), integer("samples", samples), integer("seed", seed, low=0)
    number("heterogeneity", heterogeneity, low=0), number("noise", noise, low=0)
    center = stream(seed, "synthetic").normal(size=dim)
    parts = {"train": samples, "test": max(1, samples // 4)}
    x: dict[str, list[np.ndarray]] = {part: [] for part in parts}
    y: dict[str, list[np.ndarray]] = {part: [] for part in parts}
    for client in range(num_clients):
        rng = stream(seed, "synthetic", client)
        truth = center + heterogeneity * rng.normal(size=dim)
        spread = 0.5 + rng.random(dim)  # clients also differ in the scale of their features
        for part, count in parts.items():
            a = rng.normal(size=(count, dim)) * spread
            score = a @ truth + noise * rng.normal(size=count)
            x[part].append(a)
            y[part].append(score if kind == "quadratic" else (rng.random(count) < _sigmoid(score)).astype(np.int64))
    a, b = np.concatenate(x["train"]), np.concatenate(y["train"])
    optimum = np.linalg.lstsq(a, b, rcond=None)[0] if kind == "quadratic" else _newton(a, b)
    shape = (-1, 1) if kind == "quadratic" else (-1,)
    return Data(
        a,
        b.reshape(shape),
        np.concatenate(x["test"]),
        np.concatenate(y["test"]).reshape(shape),
        name=f"synthetic-{kind}",
        loss="mse" if kind == "quadratic" else "binary",
        ids=np.repeat(np.arange(num_clients), samples),
        optimum=torch.from_numpy(optimum),
    )


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * z)))


def _newton(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimise the mean logistic loss; each step is halved until the loss does not increase."""

    def loss(w: np.ndarray) -> float:
        z = a @ w
        return float(np.mean(np.logaddexp(0, z) - b * z))

    w = np.zeros(a.shape[1])
    for _ in range(100):
        p = _sigmoid(a @ w)
        gradient = a.T @ (p - b) / len(b)
        if np.linalg.norm(gradient) < 1e-13:
            break
        hessian = (a * (p * (1 - p))[:, None]).T @ a / len(b) + 1e-14 * np.eye(len(w))
        step = np.linalg.solve(hessian, gradient)
        while loss(w - step) > loss(w) + 1e-16 and np.linalg.norm(step) > 1e-14:
            step /= 2
        w = w - step
    return w
