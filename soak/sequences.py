"""Building blocks of random networks for tokens [L], sequences [L, D] and vectors [D]."""

import random

from .networks import Shape, Text, one, piece

WORDS = 11  # size of the vocabulary


# --- tokens [L]


@piece("tokens", "sequence")
def embedding(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", "", ", padding_idx=0"])
    return [f"self.{n} = nn.Embedding({WORDS}, 4{words})"], one(r, f"x = self.{n}(x)", f"x = F.embedding(x, self.{n}.weight)")


@piece("tokens", "sequence")
def tied_embedding(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Embedding({WORDS}, 4)"], [f"x = F.linear(torch.tanh(self.{n}(x)), self.{n}.weight)"]


@piece("tokens", "vector")
def embedding_bag(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.EmbeddingBag({WORDS}, 5, mode='{r.choice(['mean', 'sum'])}')"], [f"x = self.{n}(x)"]


@piece("tokens", "vector")
def one_hot(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Parameter(0.3 * torch.randn({WORDS}, 4))"], [
        f"x = (F.one_hot(x, {WORDS}).to(self.{n}.dtype) @ self.{n}).mean(1)"
    ]


# --- sequences [L, D]


@piece("sequence")
def recurrent(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", "", ", bidirectional=True", ", num_layers=2", ", bias=False"])
    kind = r.choice(["LSTM", "GRU", "RNN", "LSTM"])
    words += ", proj_size=2" if kind == "LSTM" and r.random() < 0.2 else ""
    return [f"self.{n} = nn.{kind}({shape[1]}, 3, batch_first=True{words})"], [f"x = self.{n}(x)[0]"]


@piece("sequence", "vector")
def last_state(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.GRU({shape[1]}, 4, batch_first=True)"], [f"x = self.{n}(x)[1][0]"]


@piece("sequence")
def recurrent_cell(r: random.Random, shape: Shape, n: str) -> Text:
    lines = [f"h{n} = x.new_zeros(len(x), 3)", "for step in x.unbind(1):", f"    h{n} = self.{n}(step, h{n})", f"x = h{n}[:, None]"]
    return [f"self.{n} = nn.GRUCell({shape[1]}, 3)"], lines


@piece("sequence")
def attention(r: random.Random, shape: Shape, n: str) -> Text:
    heads = 2 if shape[1] % 2 == 0 else 1
    line = r.choice([f"x = self.{n}(x, x, x, need_weights=False)[0]", f"x = x + self.{n}(x, x, x)[0]"])
    return [f"self.{n} = nn.MultiheadAttention({shape[1]}, {heads}, dropout=0.0, batch_first=True)"], [line]


@piece("sequence")
def transformer(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", ", norm_first=True", ", activation='gelu'"])
    return [f"self.{n} = nn.TransformerEncoderLayer({shape[1]}, 1, 5, dropout=0.0, batch_first=True{words})"], [f"x = self.{n}(x)"]


@piece("sequence")
def own_attention(r: random.Random, shape: Shape, n: str) -> Text:
    lines = [f"q, k, v = self.{n}(x).chunk(3, -1)", f"x = F.scaled_dot_product_attention(q, k, v, is_causal={r.random() < 0.5})"]
    return [f"self.{n} = nn.Linear({shape[1]}, 9)"], r.choice([lines, [lines[0], "x = torch.softmax(q @ k.transpose(1, 2), -1) @ v"]])


@piece("sequence")
def masked_attention(r: random.Random, shape: Shape, n: str) -> Text:
    mask = r.choice(["m{n}.tril()", "m{n}.triu(1)", "m{n}.tril() | m{n}.triu(2)", "m{n}.to(x.dtype).cumsum(0).sin()"])
    lines = [
        f"q, k, v = self.{n}(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(3, -1)",
        f"m{n} = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)",
        f"x = F.scaled_dot_product_attention(q, k, v, attn_mask={mask.format(n=n)}, scale={r.choice([None, 0.5])})",
        "x = x.transpose(1, 2).flatten(2)",
    ]
    return [f"self.{n} = nn.Linear({shape[1]}, 12)"], lines


@piece("sequence")
def token_norm(r: random.Random, shape: Shape, n: str) -> Text:
    made = [f"self.{n} = nn.BatchNorm1d({shape[1]})"]
    return made, one(r, f"x = self.{n}(x.flatten(0, 1)).view(x.shape)", f"x = self.{n}(x.transpose(1, 2)).transpose(1, 2)")


@piece("sequence")
def token_linear(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[1]}, 4)"], one(r, f"x = self.{n}(x)", f"x = torch.relu(self.{n}(x)).cumsum(1)")


@piece("sequence", "signal")
def over_time(r: random.Random, shape: Shape, n: str) -> Text:
    return [], one(r, "x = x.transpose(1, 2)", "x = x.permute(0, 2, 1).contiguous()")


@piece("sequence", "vector")
def pooled(r: random.Random, shape: Shape, n: str) -> Text:
    return [], one(r, "x = x.mean(1)", "x = x[:, -1]", "x = x.amax(1)", "x = x.max(1).values", "x = torch.einsum('bld->bd', x)")


# --- vectors [D]


@piece("vector")
def linear(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[0]}, {r.randrange(2, 8)}, bias={r.random() < 0.7})"], [f"x = self.{n}(x)"]


@piece("vector")
def functional_linear(r: random.Random, shape: Shape, n: str) -> Text:
    made = [f"self.{n} = nn.Parameter(0.3 * torch.randn(5, {shape[0]}))", f"self.{n}b = nn.Parameter(torch.zeros(5))"]
    return made, one(
        r, f"x = F.linear(x, self.{n}, self.{n}b)", f"x = x @ self.{n}.t() + self.{n}b", f"x = torch.addmm(self.{n}b, x, self.{n}.t())"
    )


@piece("vector")
def linear_twice(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[0]}, {shape[0]})"], [f"x = self.{n}(torch.relu(self.{n}(x)))"]


@piece("vector")
def linear_tied(r: random.Random, shape: Shape, n: str) -> Text:
    c = shape[0]
    shared = [f"self.{n} = nn.Linear({c}, {c})", f"self.{n}b = nn.Linear({c}, {c})", f"self.{n}b.weight = self.{n}.weight"]
    autoencoder = ([f"self.{n} = nn.Linear({c}, 3)"], [f"x = F.linear(torch.tanh(self.{n}(x)), self.{n}.weight.t())"])
    return r.choice([(shared, [f"x = self.{n}b(self.{n}(x).relu())"]), autoencoder])


@piece("vector")
def linear_frozen(r: random.Random, shape: Shape, n: str) -> Text:
    part = r.choice(["", ".weight", ".bias"])
    return [f"self.{n} = nn.Linear({shape[0]}, 5)", f"self.{n}{part}.requires_grad_(False)"], [f"x = self.{n}(x)"]


@piece("vector")
def weight_norm_linear(r: random.Random, shape: Shape, n: str) -> Text:
    made = r.choice(["weight_norm", "spectral_norm", "orthogonal"])
    return [f"self.{n} = nn.utils.parametrizations.{made}(nn.Linear({shape[0]}, {shape[0]}))"], [f"x = self.{n}(x)"]


@piece("vector")
def own_parametrization(r: random.Random, shape: Shape, n: str) -> Text:
    made = [f"self.{n} = nn.Linear({shape[0]}, 4)", f"nn.utils.parametrize.register_parametrization(self.{n}, 'weight', nn.Softplus())"]
    return made, [f"x = self.{n}(x)"]


@piece("vector")
def gated(r: random.Random, shape: Shape, n: str) -> Text:
    lines = r.choice([[f"x = F.glu(self.{n}(x))"], [f"a, b = self.{n}(x).chunk(2, 1)", "x = a * b.sigmoid()"]])
    return [f"self.{n} = nn.Linear({shape[0]}, 8)"], lines


@piece("vector")
def dense_residual(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Sequential(nn.Linear({shape[0]}, 4), nn.GELU(), nn.Linear(4, {shape[0]}))"], [f"x = x + self.{n}(x)"]


@piece("vector")
def bilinear(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Bilinear({shape[0]}, {shape[0]}, 3)"], [f"x = self.{n}(x, x)"]


@piece("vector")
def experts(r: random.Random, shape: Shape, n: str) -> Text:
    made = [f"self.{n} = nn.ModuleList([nn.Linear({shape[0]}, 4) for _ in range(3)])", f"self.{n}g = nn.Linear({shape[0]}, 3)"]
    return made, [f"x = (torch.stack([m(x) for m in self.{n}], 1) * self.{n}g(x).softmax(1)[..., None]).sum(1)"]


@piece("vector", "image")
def folded(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[0]}, 32)"], one(
        r, f"x = self.{n}(x).view(-1, 2, 4, 4)", f"x = self.{n}(x).unflatten(1, (2, 4, 4))"
    )
