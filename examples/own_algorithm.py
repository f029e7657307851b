"""Own algorithm: three methods and one line. This one is FedStale (Rodio and Neglia, 2024), between FedAvg and FedVARP.

python examples/own_algorithm.py
mimicfl compare --plugin examples/own_algorithm.py --algorithms fedstale:beta=0.5 mimic --seeds 1 --rounds 50
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import mimicfl as mf


@dataclass
class StaleState(mf.State):  # tensors only: saved, resumed and moved to the GPU without a word from us
    y: Tensor  # [N, d] each client's last update
    mean: Tensor  # [d] of the rows of y


@mf.register("fedstale")
@dataclass(frozen=True)
class FedStale:
    beta: float = 0.8  # how much of what absent clients said last is believed: 0 is FedAvg, 1 is FedVARP

    def init(self, w: Tensor, num_clients: int) -> StaleState:
        return StaleState(w, torch.zeros(num_clients, w.numel(), dtype=w.dtype, device=w.device), torch.zeros_like(w))

    def task(self, state: StaleState, active: Tensor) -> mf.Task:
        return mf.Task()  # plain local SGD

    def aggregate(self, state: StaleState, active: Tensor, g: Tensor, step: mf.Step) -> StaleState:
        v = step.mean(g - self.beta * state.y[active]) + self.beta * state.mean
        state.mean = state.mean + step.share @ (g - state.y[active])
        state.y[active] = g
        state.w = state.w - step.eta * v
        return state


if __name__ == "__main__":
    experiment = mf.Experiment(availability="label-correlated:classes=[0,1,2],rare=0.02,common=0.3", rounds=60)
    results = mf.compare(experiment, ["fedavg", FedStale(beta=0.5), FedStale(), "fedvarp", "mimic"], seeds=[0])
    for name, [history] in results.items():
        print(f"{name:18} {100 * history.rows[-1]['test_accuracy']:.1f} %")
