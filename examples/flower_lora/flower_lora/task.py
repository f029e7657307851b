"""What is trained: a frozen transformer that predicts the next token, with LoRA adapters; and on which text."""

import peft
import torch
from torch import nn

import mimicfl as mf

TOKENS, WIDTH, LENGTH = 32, 32, 12
TEXT = "the federation trains while some of its clients are away and nobody waits for them to come back "


class Transformer(nn.Module):
    """Predicts every next token from those before it: [samples, positions] to [samples, tokens, positions]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x).transpose(1, 2)


def base() -> nn.Module:
    """The pretrained model: the same on the server and on every client, here from a seed."""
    torch.manual_seed(0)
    return Transformer()


def model() -> nn.Module:
    """The base with adapters; only these and the head are trained, and travel."""
    frozen = base()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value", "up"], modules_to_save=["head"])
    return peft.get_peft_model(frozen, config)


def sentences(shift: int) -> mf.Data:
    """Windows of the text, with the letters of one client moved by `shift`: every client writes a dialect of its own."""
    codes = torch.tensor([(ord(letter) - 96 + shift if letter != " " else 0) % TOKENS for letter in TEXT])
    windows = codes.unfold(0, LENGTH + 1, 2)
    x, y = windows[:, :-1].clone(), windows[:, 1:].clone()
    return mf.Data(x, y, x, y, task="token-prediction")


def data(context) -> mf.Data:
    """The samples of the client that runs this."""
    return sentences(int(context.node_config["partition-id"]))


def test() -> mf.Data:
    """The samples of all three dialects."""
    x, y = (torch.cat([getattr(sentences(k), name) for k in range(3)]) for name in ("x_train", "y_train"))
    return mf.Data(x, y, x, y, task="token-prediction")
