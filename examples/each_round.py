"""Own measurements after every round, an early end, and the best model: one function.

python examples/each_round.py
"""

import torch

import mimicfl as mf

data = mf.datasets.load("digits")
split = mf.partition.shards(data.y_train, num_clients=30, shards_per_client=2, seed=0)
best = {"worst": -1.0}


def look(now: mf.Moment) -> dict[str, float]:
    with torch.no_grad():
        right = now.model()(data.inputs(data.x_train, torch.float32)).argmax(1) == data.y_train
    worst = min(float(right[own].float().mean()) for own in split)  # the client that the global model serves worst
    if worst > best["worst"]:
        best.update(worst=worst, round=now.row["round"], params=now.params)
    elif now.row["round"] - best["round"] >= 40:
        now.stop()
    return {"worst_client": worst}  # joins the row, in rows.jsonl and mf.frame as well


history = mf.simulate(
    model=mf.models.build("mlp:32", data, seed=0),
    data=data,
    split=split,
    availability="static:0.2",
    rounds=300,
    local=mf.LocalSGD(epochs=2, lr=0.1),
    each_round=look,
)
print(f"{len(history.rows)} rounds of at most 300; the worst client was best served in round {best['round']}: {100 * best['worst']:.1f} %")
