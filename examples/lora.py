"""Federated fine-tuning with LoRA under dropouts: a small transformer is pre-trained centrally, then clients train adapters of it.

The transformer reads an 8x8 image as a sequence of eight rows. It is pre-trained on the digits 0 to 4. Thirty clients, who hold two of the
ten digits each, adapt it to all of them; holders of the digits 7, 8 and 9 participate in only 5 % of the rounds. The base is frozen: it is
never sent, and all clients share one copy. A second run freezes the factor A of every adapter as well (FFA-LoRA).

    pip install 'mimicfl[peft]'
    python examples/lora.py
"""

import peft
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf

WIDTH, HEADS, LAYERS, RANK, ROUNDS = 32, 4, 2, 4, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (each(h).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for each in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + added


class Transformer(nn.Module):
    """Classifies images by the mean of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) / 10)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.rows(x.view(-1, 8, 8)) + self.places).mean(dim=-2))
        return logits


def pretrained(data: mf.Data) -> Transformer:
    """A transformer that knows the digits 0 to 4."""
    torch.manual_seed(0)
    model, known = Transformer(), data.y_train < 5
    x, y = data.inputs(data.x_train[known], torch.float32), data.y_train[known]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(15):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model


def adapted(base: nn.Module, freeze_a: bool) -> nn.Module:
    """The base with adapters on queries, values and the first layer of every MLP, and a new head; only these are trained."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value", "up"], modules_to_save=["head"])
    model = peft.get_peft_model(base, config)
    for name, p in model.named_parameters():
        if freeze_a and "lora_A" in name:
            p.requires_grad_(False)
    return model


def main() -> None:
    data = mf.datasets.load("digits")
    split = mf.partition.shards(data.y_train, 30, 2, seed=0)
    availability = mf.availability.LabelCorrelated([7, 8, 9], rare=0.05)
    local = mf.Local(optimizer="adamw", lr=3e-3, epochs=1, batch_size=16)
    for freeze_a in (False, True):
        for algorithm in ("fedavg", "mimic"):
            model = adapted(pretrained(data), freeze_a)
            trained, frozen = (sum(p.numel() for p in model.parameters() if p.requires_grad is kind) for kind in (True, False))
            history = mf.simulate(model, data, split, algorithm, availability, ROUNDS, local=local, eval_every=10)
            name = f"{algorithm} {'with A frozen' if freeze_a else 'with A and B'}"
            print(f"{name}: {history.rows[-1]['test_accuracy']:.1%}, {trained:,} of {trained + frozen:,} parameters trained and sent")


if __name__ == "__main__":
    main()
