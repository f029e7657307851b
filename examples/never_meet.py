"""Two clients who never meet: the bounded gaps of the paper's Theorem 2 are not enough for MimiC.

Both agree about the minimum, w = 0, but one valley is fifty times as steep. Everybody is there in round 0; afterwards client 0
comes in five rounds of six and client 1, alone, in the sixth. MimiC's two memories are then never averaged again, so its steps follow the
frequent client's curvature and end at the wrong point, although the rates fall as the paper's Lemma 6 has them. One common round in
thirty mends it. (Theory and picture: docs/theory.md.)
"""

import numpy as np
import torch

import mimicfl as mf

ROUNDS = 1200


def schedule(meet_every=None):
    available = np.zeros((ROUNDS, 2), dtype=bool)
    available[:, 0] = True
    available[::6] = [False, True]
    available[0] = True
    if meet_every:
        available[::meet_every] = True
    return mf.availability.Explicit(available)


def run(algorithm, pattern):
    """f_i(w) = h_i w^2 / 2 as one sample a client: x = sqrt(h_i), y = 0. The start is w = 1."""
    x = np.sqrt([[0.02], [1.0]])
    data = mf.Data(x, np.zeros((2, 1)), x, np.zeros((2, 1)), optimum=torch.zeros(1))
    model = mf.models.Logistic(1, 1, bias=False).double()
    model[1].weight.data.fill_(1.0)
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.1)
    rate = mf.lr.theory(c=40, beta=300)
    return mf.simulate(model, data, [[0], [1]], algorithm, pattern, local=local, global_lr=rate, update="mean", eval_every=100)


if __name__ == "__main__":
    for words, pattern in {"never meet again": schedule(), "meet in every 30th round": schedule(30)}.items():
        for algorithm in ("mifa", "mimic"):
            distance = run(algorithm, pattern).rows[-1]["distance"]
            print(f"clients who {words:26} {algorithm:7} ends {100 * distance:5.1f} % of the starting distance from the minimum")
