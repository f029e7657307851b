"""More algorithms as naive loops over clients in float64, written from their papers, sharing no code with the package."""

import numpy as np

from tests.algorithms.reference import local_train


class Federation:
    """Clients that train from any start, and who is active when. Rates are functions of t."""

    def __init__(self, problem, schedule, eta_L, eta, update="sum", weights=None, decay=0.0, momentum=0.0):
        self.problem, self.schedule, self.eta_L, self.eta, self.update = problem, schedule, eta_L, eta, update
        self.n, self.d = len(problem), problem[0][0].shape[1]
        self.share = np.full(self.n, 1 / self.n) if weights is None else np.asarray(weights) / np.sum(weights)
        self.decay, self.momentum = decay, momentum

    def rounds(self):
        for t, row in enumerate(self.schedule):
            yield t, [i for i in range(self.n) if row[i]]

    def train(self, i, t, start, drift=None):
        """The update of client i, and its mean direction."""
        x, y, batches = self.problem[i]
        taken, held = local_train(start, x, y, batches(t), self.eta_L(t), drift, 0.0, self.decay, self.momentum)
        return (sum(taken) if self.update == "sum" else sum(taken) / held), sum(taken) / held

    def steps(self, active, t):
        """How many gradients the updates hold on average: one with update="mean", else the number of steps, more with momentum."""
        return 1 if self.update == "mean" else self.gradients(active, t)

    def gradients(self, active, t):
        """The number of local steps on average, more with momentum."""
        held = [local_train(np.zeros(self.d), *self.problem[i][:2], self.problem[i][2](t), 0.0, momentum=self.momentum)[1] for i in active]
        return sum(self.among(active)[i] * steps for i, steps in zip(active, held, strict=True))

    def among(self, active):
        return {i: self.share[i] / sum(self.share[j] for j in active) for i in active}


def known_p(f, p):
    w = np.zeros(f.d)
    for t, active in f.rounds():
        w = w - f.eta(t) * sum((f.share[i] / p[i] * f.train(i, t, w)[0] for i in active), np.zeros(f.d))
    return w


def fedstale(f, beta, p=None, cutoff=50):
    w, y = np.zeros(f.d), np.zeros((f.n, f.d))
    gaps, away = {i: [] for i in range(f.n)}, dict.fromkeys(range(f.n), 0)
    for t, active in f.rounds():
        for i in range(f.n):  # the gaps that were cut off before this round are known
            if away[i] == cutoff:
                gaps[i].append(cutoff)
                away[i] = 0
        inverse = {i: 1 / p[i] if p is not None else np.mean(gaps[i]) if gaps[i] else 1.0 for i in range(f.n)}
        for i in range(f.n):
            away[i] += 1
            if i in active:
                gaps[i].append(away[i])
                away[i] = 0
        if not active:
            continue
        g = {i: f.train(i, t, w)[0] for i in active}
        fresh = sum(f.share[i] * inverse[i] * g[i] for i in active)
        stale = sum(f.share[j] * y[j] for j in range(f.n)) - sum(f.share[i] * inverse[i] * y[i] for i in active)
        w = w - f.eta(t) * (fresh + beta * stale)
        for i in active:
            y[i] = g[i]
    return w


def fedawe(f, clip=0.0, evaluate="last"):
    x, last, w = [np.zeros(f.d) for _ in range(f.n)], [-1] * f.n, np.zeros(f.d)
    for t, active in f.rounds():
        if not active:
            continue
        p = f.among(active)
        repeated = sum(p[i] * (t - last[i]) * f.eta_L(t) * f.train(i, t, x[i])[0] for i in active)
        if clip and np.linalg.norm(repeated) > clip:
            repeated = repeated * clip / np.linalg.norm(repeated)
        w = sum(p[i] * x[i] for i in active) - f.eta(t) / f.eta_L(t) * repeated
        for i in active:
            x[i], last[i] = w, t
    return sum(f.share[i] * x[i] for i in range(f.n)) if evaluate == "mean" else w


def amplified(f, period, gamma, controls):
    """Amplified FedAvg, or amplified SCAFFOLD with controls. A period that ends in an empty round ends with the next busy one."""
    w, anchor, due = np.zeros(f.d), np.zeros(f.d), period - 1
    c_i = np.zeros((f.n, f.d))
    seen = {i: [] for i in range(f.n)}
    for t, active in f.rounds():
        if not active:
            continue
        p, c, start = f.among(active), f.share @ c_i, w
        for i in active:
            drift = c - c_i[i] if controls else None
            g, mean = f.train(i, t, start, drift)
            w = w - f.eta(t) * p[i] * g
            seen[i].append(mean - (drift if controls else 0.0))
        if t >= due:
            w = anchor + gamma * (w - anchor)
            anchor, due = w, ((t + 1) // period + 1) * period - 1
            for i in range(f.n):
                if controls and seen[i]:
                    c_i[i] = np.mean(seen[i], axis=0)
                seen[i] = []
    return w


def fedgain(f, gain, follow="direction"):
    """Every client's update of now, guessed for the absent: y_j + gain (movement since then). The direction is the mean guess."""
    w, y, u, k = np.zeros(f.d), np.zeros((f.n, f.d)), np.zeros((f.n, f.d)), np.ones(f.n)  # k = 1 until seen
    for t, active in f.rounds():
        if not active:
            continue
        g = {i: f.train(i, t, w)[0] for i in active}
        absent = [j for j in range(f.n) if j not in active]
        known = sum(f.share[i] * g[i] for i in active) + sum((f.share[j] * y[j] for j in absent), np.zeros(f.d))
        if follow == "direction":  # v = known + sum over absent of share_j k_j (v - u_j), solved for v
            left = 1 - sum(f.share[j] * k[j] for j in absent)
            v = (known - sum((f.share[j] * k[j] * u[j] for j in absent), np.zeros(f.d))) / left
        else:
            p = f.among(active)
            movement = sum(p[i] * (g[i] - y[i]) for i in active)
            v = known + gain * sum(f.share[j] for j in absent) * movement
        for i in active:
            y[i], u[i], k[i] = g[i], v, gain
        w = w - f.eta(t) * v
    return w


def fedsteer(f, gain, never_seen="mean", horizon=0):
    """SCAFFOLD with a gain. The controls of clients not seen yet are c, the mean of the others; or zero, which c then counts.

    With a horizon the shift is weaker by a factor that depends on the number of steps of the last round's clients.
    """
    x, y, seen, a = np.zeros(f.d), {}, [], 1.0

    def control():
        among = range(f.n) if never_seen == "zero" else seen
        return sum((f.share[j] * y[j] for j in seen), np.zeros(f.d)) / max(sum(f.share[j] for j in among), 1e-300)

    for t, active in f.rounds():
        if not active:
            continue
        c, p, among = control(), {}, f.among(active)
        old = {i: y.get(i, c if never_seen == "mean" else np.zeros(f.d)) for i in active}
        for i in active:
            shift = a * (c - old[i])
            p[i] = f.train(i, t, x, shift)[1] - shift  # the shift taken back out
        as_active = c + sum(among[i] * (p[i] - old[i]) for i in active)  # all clients change as the active ones did
        y |= p
        seen += [i for i in active if i not in seen]
        v = (1 - gain) * control() + gain * as_active
        x = x - f.eta(t) * f.steps(active, t) * v
        a = horizon / (horizon + f.gradients(active, t)) if horizon else 1.0
    return x


def fedsteer_direction(f, gain, horizon=0):
    """FedGain in units of one step, whose local steps are shifted by the last direction minus the guess for the client."""
    x, v, a = np.zeros(f.d), np.zeros(f.d), 1.0
    y, u, k = np.zeros((f.n, f.d)), np.zeros((f.n, f.d)), np.ones(f.n)  # k = 1 until seen
    for t, active in f.rounds():
        if not active:
            continue
        shift = {i: a * (v - (y[i] + k[i] * (v - u[i]))) for i in active}
        p = {i: f.train(i, t, x, shift[i])[1] - shift[i] for i in active}
        absent = [j for j in range(f.n) if j not in active]
        known = sum(f.share[i] * p[i] for i in active) + sum((f.share[j] * (y[j] - k[j] * u[j]) for j in absent), np.zeros(f.d))
        v = known / (1 - sum(f.share[j] * k[j] for j in absent))
        for i in active:
            y[i], u[i], k[i] = p[i], v, gain
        x = x - f.eta(t) * f.steps(active, t) * v
        a = horizon / (horizon + f.gradients(active, t)) if horizon else 1.0
    return x


def focus(f):
    """The clients' sides as in the paper: y_i tracks the gradient from where the last round left it."""
    w, y, before = np.zeros(f.d), np.zeros(f.d), np.zeros((f.n, f.d))
    for t, active in f.rounds():
        if not active:
            continue
        pushed = np.zeros(f.d)
        for i in active:
            features, targets, batches = f.problem[i]
            x, own, last = w.copy(), np.zeros(f.d), before[i]
            for batch in batches(t):
                a, b = features[batch], targets[batch]
                gradient = a.T @ (a @ x - b) / len(batch) + f.decay * x
                own, last = own + gradient - last, gradient
                x = x - f.eta_L(t) * own
            pushed += f.n * f.share[i] * (last - before[i])
            before[i] = last
        y = y + pushed
        w = w - f.eta(t) * y
    return w
