"""Random quadratics, and naive loops of FedAvg and MimiC, written from the paper, that measure every quantity of its proofs."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Quadratic:
    """f_i(w) = (w - b_i)^T H_i (w - b_i) / 2; f_i may be concave in some directions, their mean is convex."""

    H: np.ndarray  # [N, d, d]
    b: np.ndarray  # [N, d]

    @property
    def N(self):
        return len(self.H)

    @property
    def L(self):
        return float(max(np.abs(np.linalg.eigvalsh(h)).max() for h in self.H))

    def grad(self, w, i):
        return (w - self.b[i]) @ self.H[i]

    def full(self, w):
        return sum(self.grad(w, i) for i in range(self.N)) / self.N

    def f(self, w):
        return sum(0.5 * np.einsum("...a,ab,...b->...", w - b, h, w - b) for h, b in zip(self.H, self.b, strict=True)) / self.N

    @property
    def optimum(self):
        return np.linalg.solve(self.H.sum(axis=0), np.einsum("nab,nb->a", self.H, self.b))


def quadratic(rng, N=None, d=None, spread=1.0):
    N, d = N or int(rng.integers(2, 7)), d or int(rng.integers(1, 5))
    H = []
    for _ in range(N):
        q, _ = np.linalg.qr(rng.normal(size=(d, d)))
        H.append(q @ np.diag(rng.uniform(-0.3, 1, size=d)) @ q.T)
    H = np.array(H)
    H += max(0.0, 0.1 - np.linalg.eigvalsh(H.mean(axis=0)).min()) * np.eye(d)
    return Quadratic(H * rng.uniform(0.5, 4), spread * rng.normal(size=(N, d)))


def availability(rng, T, N, all_in_first_round=True, p=None):
    available = rng.random((T, N)) < (rng.uniform(0.2, 0.9) if p is None else p)
    if all_in_first_round:
        available[0] = True
    if not available.any(axis=1)[0]:
        available[0, 0] = True
    return available


def local(problem, w, i, K, eta_L, noise=None):
    """Return g_i(w), the mean of K local gradients; noise [K, ..., d] is added to them."""
    here, total = w, 0.0
    for k in range(K):
        step = problem.grad(here, i) + (0.0 if noise is None else noise[k])
        total = total + step
        here = here - eta_L * step
    return total / K


def loop(problem, available, eta, w0, algorithm="mimic", K=1, eta_L=0.0, sigma=0.0, replicas=1, seed=0):
    """Run one loop over rounds and clients and return means over replicas. With sigma = 0 nothing is random, and one replica suffices."""
    rng = np.random.default_rng(seed)
    N, d = problem.b.shape
    w = np.tile(w0, (replicas, 1))
    c = np.zeros((N, replicas, d))
    seen = np.zeros(N, dtype=bool)
    out = {key: [] for key in ("f", "grad2", "v2", "E", "Phi", "gamma", "newcomers", "kappa2", "drift", "w")}
    for t in range(len(available)):
        S = np.flatnonzero(available[t])
        full = problem.full(w)
        if len(S) == 0:
            continue
        g, clean = {}, {}
        for i in S:
            noise = rng.normal(size=(K, replicas, d)) * sigma / np.sqrt(d) if sigma else None
            clean[i], g[i] = local(problem, w, i, K, eta_L), local(problem, w, i, K, eta_L, noise)
        correct = algorithm == "mimic"
        v = sum(g[i] + c[i] * correct for i in S) / len(S)
        expected = sum(clean[i] + c[i] * correct for i in S) / len(S)  # E_t[v_t]: the updates are linear in the noise
        bias = sum(problem.grad(w, i) for i in S) / len(S) - full
        new = sum((np.sum((clean[i] - full) ** 2, axis=-1) for i in S if not seen[i]), np.zeros(replicas)) / len(S)
        if correct and t == 0 and len(S) == N:
            new = np.sum((expected - full) ** 2, axis=-1)  # if all clients are new, the error of their mean counts
        kappa = [np.sum((problem.grad(w, i) - full) ** 2, axis=-1) for i in S]
        record = [problem.f(w), *(np.sum(a**2, axis=-1) for a in (full, expected, expected - full, v - expected, bias)), new]
        for key, value in zip(("f", "grad2", "v2", "E", "Phi", "gamma", "newcomers"), record, strict=True):
            out[key].append(float(np.mean(value)))
        out["kappa2"].append(float(np.mean(kappa)))
        mean_update = sum(local(problem, w, i, K, eta_L) for i in range(N)) / N
        out["drift"].append(float(np.mean(np.sum((mean_update - full) ** 2, axis=-1))))
        out["w"].append(w.mean(axis=0))
        for i in S:
            c[i] = v - g[i]
            seen[i] = True
        w = w - eta[t] * v
    out["f"].append(float(np.mean(problem.f(w))))
    out["final"] = w
    return {key: np.array(value) for key, value in out.items()}
