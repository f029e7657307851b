"""Compares calls of PyTorch with the layers that replace them."""

import torch

from mimicfl.engines.native.layers import LayerOverrides, Layers

TOLERANCE = 1e-4


def assert_close(found, tolerance=TOLERANCE):
    """Compare pairs of lists: PyTorch's tensors, then ours."""
    for true, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=tolerance * float(true.abs().max().clamp_min(1.0)))


def seen(call):
    """Return the shapes of the replaceable calls inside, without a repetition."""
    recorded = LayerOverrides(None)
    with recorded:
        call()
    return list(dict.fromkeys(recorded.shapes))


def compiled(call):
    """Compile the layers of everything called inside; at least one call can be replaced."""
    shapes = seen(call)
    assert shapes
    return Layers([shape for shape in shapes if shape])


def both(build, x, layers=None):
    """Return the output and gradients of a model, with PyTorch and with `LayerOverrides`."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        net, inputs = build(), x.clone().requires_grad_()
        if ours:
            with LayerOverrides(layers or compiled(lambda net=net, inputs=inputs: net(inputs))):
                y = net(inputs)
        else:
            y = net(inputs)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append([y.detach(), inputs.grad, *[p.grad for p in net.parameters()]])
    return found


def layouts(x):
    """Return the same tensor in different memory layouts."""
    wide = torch.zeros(*x.shape[:3], 2 * x.shape[3])
    wide[..., ::2] = x
    return {"plain": x, "channels last": x.contiguous(memory_format=torch.channels_last), "strided": wide[..., ::2]}


def grads(call, leaves):
    """Return the result of a call and the gradients of its tensors that require one."""
    y = call(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y.detach(), *(torch.autograd.grad((y * y.detach().cos()).sum(), wanted) if wanted else [])]


def penalty(call, leaves):
    """Return second derivatives of a call: the gradients of the squared norm of its gradients."""
    first = torch.autograd.grad(call(*leaves).sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True, materialize_grads=True)
