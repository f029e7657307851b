"""Your own model, data and loss: any nn.Module, any arrays, and any function of (output, target).

`mf.simulate` takes them as objects. Registered under a name, the model and the data also work in settings and on the command line.

python examples/own_model_and_data.py
mimicfl run --plugin examples/own_model_and_data.py --dataset sensors --partition natural --model gated:8 --rounds 40
"""

import numpy as np
import torch
from torch import nn

import mimicfl as mf


@mf.datasets.register("sensors")
def sensors() -> mf.Data:
    """Twelve sensors, each with its own bias."""
    rng = np.random.default_rng(0)
    sensor = np.repeat(np.arange(12), 50)
    x = rng.normal(size=(600, 6)) + 0.5 * rng.normal(size=(12, 6))[sensor]
    y = (x @ np.array([1.0, -1.0, 0.5, 0.0, 0.0, 2.0]) > 0).astype(np.int64)
    held_out = rng.random(600) < 0.2
    return mf.Data(x[~held_out], y[~held_out], x[held_out], y[held_out], name="sensors", ids=sensor[~held_out])


@mf.models.register("gated")
class Gated(nn.Module):
    def __init__(self, data: mf.Data, width: int = 16) -> None:  # `data` is the run's data; `gated:8` has width 8
        super().__init__()
        inputs = data.x_train.shape[1]
        self.value, self.gate, self.head = nn.Linear(inputs, width), nn.Linear(inputs, width), nn.Linear(width, data.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.value(x) * torch.sigmoid(self.gate(x)))
        return output


def smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.05)


if __name__ == "__main__":
    data = sensors()
    torch.manual_seed(0)  # fixes the initial weights; the seed of simulate fixes everything else
    history = mf.simulate(
        model=Gated(data),
        data=data,
        split=mf.partition.by_ids(data.ids),
        algorithm="mimic",
        availability="markov:0.2,0.4",
        rounds=40,
        local=mf.LocalSGD(steps=10, batch_size=16, lr=0.1),
        loss=smoothed,
    )
    trained = history.model()
    worst = min(accuracy for accuracy in history.client_accuracy if accuracy is not None)
    print(f"accuracy {100 * history.rows[-1]['test_accuracy']:.1f} %, worst client {100 * worst:.1f} %")
    print(f"{sum(p.numel() for p in trained.parameters())} parameters, {history.rows[-1]['bytes_up'] / 1e3:.0f} kB sent up")
