"""Recurrent layers as matrix products, step by step: `vmap` cannot stack PyTorch's own kernels for LSTM, GRU and RNN."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]  # h, and c of an LSTM
Cell = Callable[[Tensor, State, Tensor], State]  # from the input's and the state's part of the gates


def _lstm(x: Tensor, state: State, h: Tensor) -> State:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, state: State, h: Tensor) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + (xz + hz).sigmoid() * (state[0] - n),)


def _tanh(x: Tensor, state: State, h: Tensor) -> State:
    return ((x + h).tanh(),)


def _relu(x: Tensor, state: State, h: Tensor) -> State:
    return ((x + h).relu(),)


LAYERS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
CELLS: dict[Any, Cell] = {torch.lstm_cell: _lstm, torch.gru_cell: _gru, torch.rnn_tanh_cell: _tanh, torch.rnn_relu_cell: _relu}


def cell(
    function: Any, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor | State:
    """One step of `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`."""
    state = _as_state(hx)
    after = CELLS[function](F.linear(input, w_ih, b_ih), state, F.linear(state[0], w_hh, b_hh))
    return after if len(after) > 1 else after[0]


def layers(
    function: Any,
    drop: Callable[[Tensor, float, bool], Tensor],
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The layers of `nn.LSTM`, `nn.GRU` or `nn.RNN`: the outputs of all steps, and the last states of all layers."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    x, first, ends = input.transpose(0, 1) if batch_first else input, _as_state(hx), []
    for layer in range(num_layers):
        if layer:
            x = drop(x, dropout, train)
        found = []
        for direction in range(directions):
            k = layer * directions + direction
            outputs, end = _layer(
                LAYERS[function], x, tuple(s[k] for s in first), params[k * each : (k + 1) * each], has_biases, bool(direction)
            )
            found.append(outputs)
            ends.append(end)
        x = torch.cat(found, dim=-1)
    return (x.transpose(0, 1) if batch_first else x), *(torch.stack(states) for states in zip(*ends, strict=True))


def _layer(cell: Cell, x: Tensor, state: State, params: Sequence[Tensor], has_biases: bool, backwards: bool) -> tuple[Tensor, State]:
    """One layer in one direction over x [T, B, I]."""
    w_ih, w_hh, *others = params
    b_ih, b_hh = others[:2] if has_biases else (None, None)
    projection = others[2 * has_biases :]  # of an LSTM with proj_size
    gates = F.linear(x, w_ih, b_ih)  # of all steps at once: only the state's part must wait for the step before
    outputs = []
    for now in reversed(gates.unbind(0)) if backwards else gates.unbind(0):
        h, *c = cell(now, state, F.linear(state[0], w_hh, b_hh))
        state = (F.linear(h, projection[0]) if projection else h, *c)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _as_state(hx: Any) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)
