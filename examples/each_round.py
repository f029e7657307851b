"""A callback: it measures after every round, stops the run early and keeps the best model.

python examples/each_round.py
"""

from typing import Any

import torch

import mimicfl as mf

data = mf.datasets.load("digits")
split = mf.partition.shards(data.y_train, num_clients=30, shards_per_client=2, seed=0)
best: dict[str, Any] = {"worst": -1.0}


def worst_client(info: mf.RoundInfo) -> dict[str, float]:
    with torch.no_grad():
        right = info.model()(data.inputs(data.x_train, torch.float32)).argmax(1) == data.y_train
    worst = min(float(right[samples].float().mean()) for samples in split)  # accuracy on the client that the model fits worst
    if worst > best["worst"]:
        best.update(worst=worst, round=info.row["round"], params=info.params)
    elif info.row["round"] - best["round"] >= 40:
        info.stop()
    return {"worst_client": worst}  # is added to the round's row, in rows.jsonl and mf.frame as well


history = mf.simulate(
    model=mf.models.build("mlp:32", data, seed=0),
    data=data,
    split=split,
    availability="static:0.2",
    rounds=300,
    local=mf.LocalSGD(epochs=2, lr=0.1),
    each_round=worst_client,
)
print(f"stopped after {len(history.rows)} of 300 rounds")
print(f"best accuracy of the worst client: {100 * best['worst']:.1f} %, in round {best['round']}")
