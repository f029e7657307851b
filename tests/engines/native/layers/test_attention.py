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
    (3, 5, 6, 6, 24, True),
    (1, 2, 11, 4, 17, True),
    (2, 3, 8, 13, 32, False),
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


def self_attention(net, causal):
    """`net` on one input, as `nn.TransformerEncoderLayer` calls it."""

    def call(x, *_):
        length = x.shape[1 if net.batch_first else 0]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
        return net(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0]

    return call


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("samples_first", [False, True])
@pytest.mark.parametrize("frozen", [(), ("in_proj",), ("out_proj",), ("in_proj", "out_proj")])
def test_self_attention_with_its_projections_equals_pytorch(samples_first, causal, bias, frozen):
    torch.manual_seed(0)
    net = nn.MultiheadAttention(24, 4, batch_first=samples_first, bias=bias)
    for name, p in net.named_parameters():
        p.data += 0.1 * torch.randn_like(p)  # PyTorch's biases begin at zero
        p.requires_grad_(not name.startswith(frozen))
    call, trained = self_attention(net, causal), [p for p in net.parameters() if p.requires_grad]
    layers = compiled(lambda: call(torch.zeros(5, 7, 24)))
    for layout in (torch.clone, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x.repeat(1, 1, 2)[..., ::2]):
        x = layout(torch.randn(5, 7, 24))
        for leaves in ([x.clone().requires_grad_(), *trained], [x, *trained]):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                true = grads(call, leaves)
                twice = penalty(call, leaves) if leaves[0].requires_grad else []
            with LayerOverrides(layers):
                y = call(*leaves)
                assert "SelfAttention" in names_of(y.grad_fn) or not y.requires_grad
                assert_close((true, grads(call, leaves)))
                assert_close((twice, penalty(call, leaves) if leaves[0].requires_grad else []))


def names_of(node):
    """The operations that made a tensor, in one word."""
    return "" if node is None else type(node).__name__ + "".join(names_of(before) for before, _ in node.next_functions)


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x: net(x, x, x),  # with weights as a result
        lambda net, x: net(x, x, x.clone(), need_weights=False),
        lambda net, x: net(x, x, x, need_weights=False, attn_mask=torch.zeros(7, 7)),
        lambda net, x: net(x, x, x, need_weights=False, key_padding_mask=torch.zeros(5, 7, dtype=torch.bool)),
        lambda net, x: net(x[0], x[0], x[0], need_weights=False),
        lambda net, x: nn.MultiheadAttention(24, 4, dropout=0.1, batch_first=True)(x, x, x, need_weights=False),
        lambda net, x: nn.MultiheadAttention(24, 4, add_bias_kv=True, batch_first=True)(x, x, x, need_weights=False),
        lambda net, x: nn.MultiheadAttention(24, 4, add_zero_attn=True, batch_first=True)(x, x, x, need_weights=False),
        lambda net, x: net.double()(x.double(), x.double(), x.double(), need_weights=False),
    ],
)
def test_other_forms_are_not_one_call(call, monkeypatch):
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(24, 4, batch_first=True), torch.randn(5, 7, 24)
    layers = compiled(lambda: net(x, x, x, need_weights=False))
    with LayerOverrides(layers):
        assert "SelfAttention" in names_of(net(x, x, x, need_weights=False)[0].grad_fn)
        assert "SelfAttention" not in names_of(call(net, x)[0].grad_fn)


def test_dropout_counts_in_training_only():
    net, x = nn.MultiheadAttention(24, 4, dropout=0.1, batch_first=True), torch.randn(5, 7, 24)
    with LayerOverrides(compiled(lambda: F.scaled_dot_product_attention(*3 * [torch.zeros(5, 4, 7, 6)]))):
        assert "SelfAttention" not in names_of(net(x, x, x, need_weights=False)[0].grad_fn)
        net.eval()
        assert "SelfAttention" in names_of(net(x, x, x, need_weights=False)[0].grad_fn)
