"""What of a model travels: trainable parameters and buffers. Frozen parameters stay where they are, tied ones are sent once.

In an app of your own, `trained_arrays(model)` replaces `ArrayRecord(model.state_dict())`, and `load_arrays(model, record)` its counterpart.
"""

import hashlib

import torch
from flwr.app import ArrayRecord
from torch import nn

from ..clients.params import travelling
from ..errors import UsageError
from .wire import ArraySpec, Refused, as_array, checked


def trained_arrays(module: nn.Module) -> ArrayRecord:
    """The trainable parameters and the buffers of a module as a record, in any floating-point type."""
    parameters, buffers = travelling(module)
    return ArrayRecord({name: as_array(value) for name, value in (parameters | buffers).items()})


def load_arrays(module: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Load what `trained_arrays` returned into a module, by name. Raises `UsageError` if names, shapes or types differ."""
    parameters, buffers = travelling(module)
    own = parameters | buffers
    if wrong := own.keys() ^ arrays.keys():
        raise UsageError(
            f"the server's model differs from this client's: only one of them trains or holds {min(wrong)!r}; use the same model function"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            try:
                tensor.copy_(checked(arrays[name], ArraySpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))))
            except Refused as why:
                raise UsageError(f"the server's model differs from this client's: {why}") from None
    return module


def frozen_digest(module: nn.Module) -> str:
    """A hash of the frozen parameters; empty if there are none. Server and clients must have the same, since they do not travel."""
    digest, any_ = hashlib.blake2b(digest_size=16), False
    for name, value in module.named_parameters():
        if not value.requires_grad:
            any_ = True
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if any_ else ""
