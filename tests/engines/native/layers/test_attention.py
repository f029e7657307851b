"""Compiled attention equals PyTorch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mimicfl.engines.native.layers import LayerOverrides

from .compare import assert_close, compiled, grads, penalty, seen

# samples, heads, queries, keys, features, causal: fewer heads than lanes, several groups of them, odd sizes, more or fewer keys
SHAPES = [
    (2, 3, 5, 5, 4, False),
    (5, 4, 7, 7, 12, True),
    (1, 1, 1, 1, 1, True),
    (3, 7, 4, 9, 5, True),
    (2, 16, 9, 4, 13, True),
    (4, 8, 6, 3, 16, False),
]


def queries_keys_values(samples, heads, queries, keys, features, generator):
    sizes = (queries, keys, keys)
    return [torch.randn(samples, heads, n, features, generator=generator) for n in sizes]


def transposed(x):
    """The same tensor as a model stores it: heads next to features."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided(x):
    """The same tensor with gaps between features."""
    wide = torch.zeros(*x.shape[:3], 2 * x.shape[3])
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_and_its_derivatives_equal_pytorch(shape, scale):
    *sizes, causal = shape
    given = queries_keys_values(*sizes, torch.Generator().manual_seed(0))

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    layers = compiled(lambda: call(*given))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the one that has second derivatives
        for layout in (torch.clone, transposed, strided):
            leaves = [layout(x).requires_grad_() for x in given]
            true = grads(call, leaves), penalty(call, leaves)
            with LayerOverrides(layers):
                ours = grads(call, leaves), penalty(call, leaves)
            for pair in zip(true, ours, strict=True):
                assert_close(pair)


@pytest.mark.slow
def test_overlapping_windows_equal_pytorch():
    """Features of one window are those of the next, moved by one; there are fewer windows than features."""
    leaves = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(3)]

    def call(*leaves):
        return F.scaled_dot_product_attention(*(x.unfold(2, 5, 1) for x in leaves))

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the other one is wrong for them
        true = grads(call, leaves)
    with LayerOverrides(compiled(lambda: call(*leaves))):
        assert_close((true, grads(call, leaves)))


@pytest.mark.slow
def test_large_scores_and_numbers_that_are_not_finite():
    q, k, v = queries_keys_values(2, 3, 4, 4, 5, torch.Generator().manual_seed(1))
    layers = compiled(lambda: F.scaled_dot_product_attention(q, k, v))
    with LayerOverrides(layers):
        ours = F.scaled_dot_product_attention(1e4 * q, 1e4 * k, v)
    assert_close(([F.scaled_dot_product_attention(1e4 * q, 1e4 * k, v)], [ours]))
    q[0, 0, 0, 0] = float("nan")
    v[1, 1, 1, 1] = float("inf")
    with LayerOverrides(layers):
        ours = F.scaled_dot_product_attention(q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the other one returns zeros for NaN
        true = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(ours.isnan(), true.isnan())
    assert torch.equal(ours.isinf(), true.isinf())


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
        lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),  # broadcast over samples
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :3]),
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(*(x.repeat(1, 1, 200, 1) for x in (q, k, v))),  # too long
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.5),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.0),
    ],
)
def test_other_calls_use_pytorch(call):
    given = queries_keys_values(2, 3, 4, 4, 5, torch.Generator().manual_seed(0))
    assert seen(lambda: call(*given)) == []


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_transformers_of_pytorch_equal_plain(causal):
    """In PyTorch's own layers too, whose attention is a composed function."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7) if causal else None
    leaves = [torch.randn(5, 7, 24).requires_grad_(), *net.parameters()]

    def call(x, *_):
        return net(x, src_mask=mask, is_causal=causal)

    assert "Attention" in [shape[0] for shape in seen(lambda: call(leaves[0])) if shape]
    true = grads(call, leaves)
    with LayerOverrides(compiled(lambda: call(leaves[0]))):
        ours = grads(call, leaves)
    assert_close((true, ours))
