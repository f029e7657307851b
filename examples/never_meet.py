"""Two clients that never participate together: the bounded gaps of the paper's Theorem 2 are not enough for MimiC.

Both clients have their minimum at w = 0, but one loss is fifty times steeper. Both participate in round 0. Afterwards client 0
participates in five of six rounds and client 1, alone, in the sixth. MimiC's two memories are then never averaged again, so its
steps follow the curvature of the frequent client and end at the wrong point, although the rates decay as in the paper's Lemma 6.
One common round in thirty is enough to prevent this. Theory and figure: docs/theory.md.

python examples/never_meet.py
"""

import numpy as np
import torch

import mimicfl as mf

ROUNDS = 1200


def schedule(meet_every: int = 0) -> mf.availability.Explicit:
    available = np.zeros((ROUNDS, 2), dtype=bool)
    available[:, 0] = True
    available[::6] = [False, True]
    available[0] = True
    if meet_every:
        available[::meet_every] = True
    return mf.availability.Explicit(available)


def run(algorithm: str, pattern: mf.availability.Pattern) -> mf.History:
    """f_i(w) = h_i w^2 / 2 with one sample per client: x = sqrt(h_i), y = 0. The initial model is w = 1."""
    x = np.sqrt([[0.02], [1.0]])
    data = mf.Data(x, np.zeros((2, 1)), x, np.zeros((2, 1)), optimum=torch.zeros(1))
    model = mf.models.Logistic(1, 1, bias=False).double()
    torch.nn.init.ones_(next(model.parameters()))
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.1)
    rate = mf.lr.theory(c=40, beta=300)
    return mf.simulate(model, data, [[0], [1]], algorithm, pattern, local=local, global_lr=rate, update="mean", eval_every=100)


if __name__ == "__main__":
    for meetings, pattern in {"never meet again": schedule(), "meet every 30th round": schedule(30)}.items():
        for algorithm in ("mifa", "mimic"):
            distance = run(algorithm, pattern).rows[-1]["distance"]
            print(f"clients that {meetings:22} {algorithm:6} ends at {100 * distance:5.1f} % of the initial distance to the minimum")
