"""A custom algorithm: MimiC with corrections that fade with age, which lies between FedAvg and MimiC.

An algorithm inherits from `mf.Algorithm`. `init` makes its state, and `aggregate` changes the state in place and returns nothing.

python examples/own_algorithm.py
mimicfl compare --plugin examples/own_algorithm.py --algorithms fading-mimic:fade=0.9 mimic --seeds 1 --rounds 50
"""

from dataclasses import dataclass

from torch import Tensor

import mimicfl as mf


@dataclass
class FadingState(mf.State):  # tensors only; mimicfl saves them, restores them and moves them to the GPU
    c: Tensor  # [N, d] each client's correction
    age: Tensor  # [N] aggregations since it was stored


@mf.register("fading-mimic")
@dataclass(frozen=True)
class FadingMimiC(mf.Algorithm[FadingState]):
    fade: float = 0.98  # a correction of age a is multiplied by fade^a: 0 is FedAvg, 1 is MimiC

    title = "Fading MimiC"  # its name in tables and figures; the class name if not given
    color = "#00798c"  # the colour of its curve; a free colour if not given

    def init(self, w: Tensor, num_clients: int) -> FadingState:
        return FadingState(w, w.new_zeros(num_clients, w.numel()), w.new_zeros(num_clients))

    def aggregate(self, state: FadingState, active: Tensor, g: Tensor, step: mf.Step) -> None:
        state.age += 1
        v = step.mean(g + self.fade ** state.age[active, None] * state.c[active])
        state.c[active] = v - g  # absent clients keep theirs
        state.age[active] = 0
        state.w = state.w - step.eta * v


if __name__ == "__main__":
    experiment = mf.Experiment(availability="label-correlated:classes=[0,1,2],rare=0.02,common=0.3", rounds=60)
    results = mf.compare(experiment, ["fedavg", FadingMimiC(fade=0.9), FadingMimiC(), "mimic"], seeds=[0])
    for name, [history] in results.items():
        print(f"{name:24} {100 * history.rows[-1]['test_accuracy']:.1f} %")
