"""The algorithms as naive loops over clients in float64, written from the papers, sharing no code with the package.

The problem is least squares: f_i(w) = |X_i w - y_i|^2 / (2 n_i), whose batch gradient is X^T (X w - y) / batch.
"""

import numpy as np


def local_train(w_t, x, y, batches, eta_L, drift=None, mu=0.0, decay=0.0, momentum=0.0):
    """K local steps; returns the list of the directions taken, and how many gradients they hold."""
    w, u = w_t.copy(), 0.0
    taken, share, held = [], 0.0, 0.0
    for batch in batches:
        a, b = x[batch], y[batch]
        h = a.T @ (a @ w - b) / len(batch)
        if drift is not None:
            h = h + drift
        h = h + mu * (w - w_t) + decay * w
        u, share = momentum * u + h, momentum * share + 1.0
        taken.append(u)
        held += share
        w = w - eta_L * u
    return taken, held


def run(
    name,
    problem,
    schedule,
    eta_L,
    eta,
    update="sum",
    weights=None,
    decay=0.0,
    momentum=0.0,
    mu=0.0,
    never_seen="zero",
    memory="gradient",
    beta=0.9,
    damped=True,
    cutoff=50,
):
    """`problem[i]` = (X_i, y_i, batches_of_round); rates are functions of t; `weights[i]` the share of client i."""
    n, d = len(problem), problem[0][0].shape[1]
    share = np.full(n, 1 / n) if weights is None else np.asarray(weights) / np.sum(weights)
    w = np.zeros(d)
    c = {i: np.zeros(d) for i in range(n)}  # MimiC's corrections, SCAFFOLD's controls
    last = {}  # MIFA's and FedVARP's memory
    m = np.zeros(d)  # FedAvgM's momentum at the server
    gaps, away = {i: [] for i in range(n)}, dict.fromkeys(range(n), 0)  # FedAU's: the gaps so far, the rounds since the last one ended
    c_server = np.zeros(d)
    for t, row in enumerate(schedule):
        active = [i for i in range(n) if row[i]]
        omega = {i: np.mean(gaps[i]) if gaps[i] else 1.0 for i in range(n)}
        for i in range(n):
            away[i] += 1
            if row[i] or away[i] == cutoff:
                gaps[i].append(away[i])
                away[i] = 0
        if not active:
            continue
        g, per_step = {}, {}
        for i in active:
            x, y, batches = problem[i]
            drift = c_server - c[i] if name == "scaffold" else None
            taken, held = local_train(w, x, y, batches(t), eta_L(t), drift, mu if name == "fedprox" else 0.0, decay, momentum)
            per_step[i] = sum(taken) / held
            g[i] = sum(taken) if update == "sum" else per_step[i]
        p = {i: share[i] / sum(share[j] for j in active) for i in active}
        unit = eta(t) if memory == "step" else 1.0
        if name in ("fedavg", "fedprox"):
            w = w - eta(t) * sum(p[i] * g[i] for i in active)
        elif name == "fedau":
            w = w - eta(t) * sum(share[i] * omega[i] * g[i] for i in active)
        elif name == "fedavgm":
            m = beta * m + eta(t) * sum(
                p[i] * g[i] for i in active
            )  # eta g is the change of the model, of which the paper's momentum is made
            w = w - ((1 - beta) if damped else 1) * m
        elif name == "scaffold":
            change = {i: (c[i] - c_server + per_step[i]) - c[i] for i in active}
            w = w - eta(t) * sum(p[i] * g[i] for i in active)
            c_server = c_server + sum(share[i] * change[i] for i in active)
            for i in active:
                c[i] = c[i] + change[i]
        elif name == "mifa":
            for i in active:
                last[i] = unit * g[i]
            if never_seen == "wait" and len(last) < n:
                continue
            total = sum(share[i] * last[i] for i in last)
            if never_seen == "exclude":
                total = total / sum(share[i] for i in last)
            w = w - eta(t) / unit * total
        elif name == "fedvarp":
            y = [last.get(i, np.zeros(d)) for i in range(n)]
            w = w - eta(t) * (sum(p[i] * (g[i] - y[i]) for i in active) + sum(share[j] * y[j] for j in range(n)))
            last |= g
        elif name == "mimic":
            v = sum(p[i] * (unit * g[i] + c[i]) for i in active)
            for i in active:
                c[i] = v - unit * g[i]
            w = w - eta(t) / unit * v
    return w, c, c_server, last
