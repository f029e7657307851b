"""A language model: a transformer, trained from scratch with AdamW on the State of the Union addresses, with 43 presidents as clients.

Presidents drop out: four of them participate in each round. MimiC is compared with FedAvg, on the text of all presidents and
on the last tenth of each president's own addresses. Without arguments the example uses a small text that it makes up, so that it needs
no download and takes seconds; with `sotu` it trains on the addresses.

python examples/language_model.py
python examples/language_model.py sotu
"""

import sys
from typing import Any

import numpy as np

import mimicfl as mf

LENGTH = 16


def made_up(writers: int = 20, sentences: int = 25) -> mf.Data:
    """Sentences of a few words per writer, who prefer different words: characters, their next characters, and the writers."""
    rng = np.random.default_rng(0)
    words = np.array(
        [
            "the",
            "people",
            "of",
            "union",
            "peace",
            "war",
            "trade",
            "labor",
            "and",
            "for",
            "our",
            "states",
            "great",
            "public",
            "law",
            "money",
            "land",
            "to",
        ]
    )
    letters = sorted(set(" ".join(words)))
    parts: dict[str, list] = {name: [] for name in ("x_train", "y_train", "x_test", "y_test", "ids", "test_ids")}
    for writer in range(writers):
        taste = rng.dirichlet(np.full(len(words), 0.3))
        text = " ".join(rng.choice(words, size=8 * sentences, p=taste))
        tokens = np.array([letters.index(c) for c in text])
        pieces = np.stack([tokens[k : k + LENGTH + 1] for k in range(0, len(tokens) - LENGTH, LENGTH)])
        cut = int(0.9 * len(pieces))
        for part, ids, held in (("train", "ids", pieces[:cut]), ("test", "test_ids", pieces[cut:])):
            parts[f"x_{part}"].append(held[:, :-1])
            parts[f"y_{part}"].append(held[:, 1:])
            parts[ids].append(np.full(len(held), writer))
    whole: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return mf.Data(**whole, name="made-up", task="token-prediction")


def main(full: bool) -> None:
    data = mf.datasets.load("sotu") if full else made_up()
    model = mf.models.build("transformer" if full else "transformer:width=32,layers=2,heads=2", data, seed=0)
    split = mf.partition.by_ids(data.ids)
    local = mf.Local(optimizer="adamw", lr=0.003, weight_decay=0.01, steps=10, batch_size=16, clip_norm=1.0)
    print(f"{data}, {len(split)} clients, {sum(p.numel() for p in model.parameters()):,} parameters")
    for algorithm in ("fedavg", "mimic"):
        rounds = 300 if full else 25
        history = mf.simulate(
            model, data, split, algorithm, f"time-varying:{4 / len(split)}", rounds, local=local, eval_every=rounds, seed=0
        )
        last = history.rows[-1]
        print(
            f"{algorithm:7} next character right: {100 * last['test_accuracy']:.1f} %, perplexity {last['test_perplexity']:.2f}; "
            f"worst tenth of the clients {100 * last['clients_worst_tenth']:.1f} %, "
            f"rarest tenth {100 * last['clients_rarest_tenth']:.1f} %, never seen {percent(last['clients_never_seen'])}"
        )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main("sotu" in sys.argv[1:])
