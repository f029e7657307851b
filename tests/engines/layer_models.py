"""Models with normalisation, recurrent layers and attention, by name."""

import torch
from torch import nn
from torch.nn import functional as F


def normalised(image=nn.BatchNorm2d, vector=nn.BatchNorm1d, **how):
    hidden = nn.Sequential(nn.Linear(144, 6), vector(6, **how), nn.ReLU(), nn.Linear(6, 10))
    return nn.Sequential(nn.Conv2d(1, 4, 3), image(4, **how), nn.ReLU(), nn.Flatten(), hidden)


class Frozen(nn.Module):
    """One BatchNorm stays in evaluation mode while the model trains; the other trains."""

    def __init__(self):
        super().__init__()
        self.fixed, self.moving, self.head = nn.BatchNorm2d(1), nn.BatchNorm1d(64), nn.Linear(64, 10)
        self.fixed.running_mean.fill_(0.3)

    def train(self, mode=True):
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x):
        return self.head(self.moving(self.fixed(x).flatten(1)))


class OverTime(nn.Module):
    """BatchNorm over the rows of all samples, merged into one dimension: sample by sample, or row by row."""

    def __init__(self, by_row=False):
        super().__init__()
        self.norm, self.head, self.by_row = nn.BatchNorm1d(8), nn.Linear(64, 10), by_row

    def forward(self, x):
        x = x[:, 0].transpose(0, 1) if self.by_row else x[:, 0]
        x = self.norm(x.reshape(-1, 8)).view(x.shape)
        return self.head((x.transpose(0, 1) if self.by_row else x).flatten(1))


class Functional(nn.Module):
    """Calls the function, with keywords, and twice with the same running statistics."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("variance", torch.ones(1))

    def forward(self, x):
        for momentum in (0.2, 0.5):
            x = F.batch_norm(input=x + 1, running_mean=self.mean, running_var=self.variance, training=self.training, momentum=momentum)
        return self.head(x.flatten(1))


class Counter(nn.Module):
    """Counts its batches, besides a buffer that never changes and is not finite."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("constant", torch.tensor([-torch.inf, torch.nan]))

    def forward(self, x):
        if self.training:
            self.batches = self.batches + 1
        return self.head(x.flatten(1))


NORMS = {
    "batch norm": normalised,
    "cumulative": lambda: normalised(momentum=None),
    "no running statistics": lambda: normalised(track_running_stats=False),
    "not affine": lambda: normalised(affine=False),
    "momentum": lambda: normalised(momentum=0.7, eps=0.01),
    "frozen": Frozen,
    "over time": OverTime,
    "functional": Functional,
    "instance norm": lambda: normalised(nn.InstanceNorm2d, nn.LayerNorm),
    "running instance norm": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(108, 10)
    ),
    "group norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 10)),
    "counter": Counter,
}


class Recurrent(nn.Module):
    """Uses the outputs of all steps, and the last states."""

    def __init__(self, kind, **how):
        super().__init__()
        self.layer = kind(8, 6, **how)
        width = (how.get("proj_size") or 6) * (1 + how.get("bidirectional", False))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = x[:, 0] if self.layer.batch_first else x[:, 0].transpose(0, 1)
        outputs, states = self.layer(x)
        states = states if isinstance(states, tuple) else (states,)
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        return self.head(outputs.mean(1)) + sum(state.sum(dim=(0, 2))[:, None] for state in states)


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(8, 5), nn.Linear(5, 10)

    def forward(self, x):
        state = None
        for step in x[:, 0].unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


TWICE = {"batch_first": True, "num_layers": 2, "bidirectional": True}
RECURRENT = {
    **{kind.__name__: lambda kind=kind: Recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"{kind.__name__} twice": lambda kind=kind: Recurrent(kind, **TWICE) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "projected": lambda: Recurrent(nn.LSTM, proj_size=3, **TWICE),
    "no bias": lambda: Recurrent(nn.GRU, bias=False),
    "relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    **{kind.__name__: lambda kind=kind: Cells(kind) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
}


class Attending(nn.Module):
    """Attention of two heads over eight positions; `attend` gets query, key and value [B, 2, 8, 4]."""

    def __init__(self, attend):
        super().__init__()
        self.project, self.head, self.attend = nn.Linear(8, 24), nn.Linear(8, 10), attend

    def forward(self, x):
        parts = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x[:, 0]).chunk(3, -1)]
        return self.head(self.attend(*parts).transpose(1, 2).flatten(2).mean(1))


class Layered(nn.Module):
    """A layer of PyTorch on eight positions of eight features."""

    def __init__(self, layer, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.head, self.call = layer, nn.Linear(8, 10), call

    def forward(self, x):
        return self.head(self.call(self.layer, x[:, 0]).mean(1))


def lower(x):
    return torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()


def some_see_nothing(x):
    return torch.eye(8, dtype=torch.bool, device=x.device) & (torch.arange(8, device=x.device) > 2)


sdpa = F.scaled_dot_product_attention
ATTENTION = {
    "plain": lambda: Attending(sdpa),
    "causal": lambda: Attending(lambda q, k, v: sdpa(q, k, v, is_causal=True)),
    "boolean mask": lambda: Attending(lambda q, k, v: sdpa(q, k, v, attn_mask=lower(q))),
    "rows without keys": lambda: Attending(lambda q, k, v: sdpa(q, k, v, some_see_nothing(q))),
    "added mask": lambda: Attending(lambda q, k, v: sdpa(q, k, v, torch.sin(64.0 * lower(q).to(q.dtype).cumsum(1)), scale=0.3)),
    "grouped queries": lambda: Attending(lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True)),
    "multihead": lambda: Layered(
        nn.MultiheadAttention(8, 2, batch_first=True), lambda layer, x: layer(x, x, x, attn_mask=~lower(x), need_weights=False)[0]
    ),
    "multihead weights": lambda: Layered(nn.MultiheadAttention(8, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
    "encoder": lambda: Layered(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "decoder": lambda: Layered(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), lambda layer, x: layer(x, x)),
}


class Shortcut(nn.Module):
    """Leaves out a mask that has no effect unless it is compiled, as models of `transformers` do."""

    def __init__(self):
        super().__init__()
        self.attending = Attending(self.attend)

    def attend(self, q, k, v):
        mask = (self.x > -torch.inf).all(dim=-1)
        if not torch.compiler.is_compiling() and mask.all():
            return sdpa(q, k, v)
        return sdpa(q, k, v, attn_mask=mask[:, None, None])

    def forward(self, x):
        self.x = x[:, 0]
        return self.attending(x)


ATTENTION["shortcut"] = Shortcut
LAYERS = {**NORMS, **RECURRENT, **ATTENTION}
