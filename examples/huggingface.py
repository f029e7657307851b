"""Hugging Face: a small transformer built from a `transformers` config and a `datasets.Dataset` from memory; nothing is downloaded.

Twelve shops collect reviews. A review is padded to one length and comes with an attention mask; the model takes both as keywords and
returns an object with `logits`. Needs `pip install 'mimicfl[huggingface]'`.

python examples/huggingface.py
"""

import datasets
import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

import mimicfl as mf

WORDS = ["<pad>", "good", "great", "love", "bad", "poor", "broken", "the", "it", "is", "very", "a", "phone", "box", "shop", "really"]
LENGTH = 10


def reviews(shops: int = 12, each: int = 60, seed: int = 0) -> dict[str, list]:
    """Reviews of 4 to 10 words; the label says whether more words are kind than unkind. Shops differ in how kind their customers are."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list] = {name: [] for name in ("input_ids", "attention_mask", "label", "shop")}
    for shop in range(shops):
        kind = rng.beta(0.5, 0.5)
        for _ in range(each):
            size = int(rng.integers(4, LENGTH + 1))
            mood = [int(rng.integers(1, 4)) if rng.random() < kind else int(rng.integers(4, 7)) for _ in range(size)]
            words = [word if rng.random() < 0.5 else int(rng.integers(7, len(WORDS))) for word in mood]
            score = sum((0 < word < 4) - (3 < word < 7) for word in words)
            columns["input_ids"].append(words + [0] * (LENGTH - size))
            columns["attention_mask"].append([1] * size + [0] * (LENGTH - size))
            columns["label"].append(int(score > 0))
            columns["shop"].append(f"shop-{shop:02}")
    return columns


def main() -> None:
    parts = datasets.Dataset.from_dict(reviews()).train_test_split(test_size=0.2, seed=0)
    data = mf.Data.from_huggingface(parts, inputs=["input_ids", "attention_mask"], target="label", client="shop", name="reviews")
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    split = mf.partition.by_ids(data.ids)
    local = mf.Local(optimizer="adamw", lr=0.003, epochs=1, batch_size=8)
    history = mf.simulate(
        model, data, split, "mimic", "time-varying:0.3", rounds=15, local=local, task="classification", metrics=["accuracy", "auroc"]
    )
    last = history.rows[-1]
    print(f"accuracy {100 * last['test_accuracy']:.1f} %, AUROC {last['test_auroc']:.3f}")
    print(f"worst tenth of the {len(split)} shops {100 * last['clients_worst_tenth']:.1f} %")


if __name__ == "__main__":
    main()
