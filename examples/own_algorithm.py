"""Own algorithm: three methods and one line. This one is FedVARP (Jhunjhunwala et al., 2022).

python examples/own_algorithm.py
mimicfl compare --plugin examples/own_algorithm.py --algorithms fedvarp mimic --seeds 1 --rounds 50
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import mimicfl as mf


@dataclass
class VarpState(mf.State):  # tensors only: saved, resumed and moved to the GPU without a word from us
    y: Tensor  # [N, d] each client's last update
    mean: Tensor  # [d] of the rows of y


@mf.register("fedvarp")
@dataclass(frozen=True)
class FedVARP:
    def init(self, w: Tensor, num_clients: int) -> VarpState:
        return VarpState(w, torch.zeros(num_clients, w.numel(), dtype=w.dtype, device=w.device), torch.zeros_like(w))

    def task(self, state: VarpState, active: Tensor) -> mf.Task:
        return mf.Task()  # plain local SGD

    def aggregate(self, state: VarpState, active: Tensor, g: Tensor, step: mf.Step) -> VarpState:
        news = g - state.y[active]
        v = step.mean(news) + state.mean  # the mean of the news, on top of what everybody said last
        state.mean = state.mean + step.share @ news
        state.y[active] = g
        state.w = state.w - step.eta * v
        return state


if __name__ == "__main__":
    experiment = mf.Experiment(availability="label-correlated:classes=[0,1,2],rare=0.02,common=0.3", rounds=60)
    results = mf.compare(experiment, ["fedavg", "fedvarp", "mimic"], seeds=[0])
    for name, [history] in results.items():
        print(f"{name:8} {100 * history.rows[-1]['test_accuracy']:.1f} %")
