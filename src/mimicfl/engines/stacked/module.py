"""Copies of a model that can be called with tensors in place of their own parameters and buffers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...clients.params import copy_sharing_frozen, mix_in
from ...data.samples import Samples, arguments, as_tensor


def stackable_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the model whose layers use only tensors that `functional_call` can replace."""
    module = copy_sharing_frozen(model, device)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is None:
            mix_in(layer, CumulativeMomentum)
        if isinstance(layer, nn.RNNBase):
            mix_in(layer, CurrentWeights)
    return module


def call_with(module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Samples) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the module with these parameters and buffers; return its output and the buffers after the call."""
    given = params | {name: value.clone() for name, value in buffers.items()}
    output = as_tensor(functional_call(module, given, *arguments(x)))  # puts buffers that the module replaced into `given`
    return output, {name: given[name].detach() for name in buffers}


class CumulativeMomentum:
    """The momentum of BatchNorm(momentum=None), 1 / number of batches so far, as a tensor: the layer itself would need its value."""

    num_batches_tracked: Tensor

    @property
    def momentum(self) -> Tensor:
        return 1.0 / self.num_batches_tracked.double()

    @momentum.setter
    def momentum(self, value: Any) -> None:
        """Nothing to set."""


class CurrentWeights:
    """A recurrent layer that reads its weights in every call; PyTorch's keeps a list of the parameters that it was made with."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: Any) -> None:
        """Nothing to set."""

    def flatten_parameters(self) -> None:
        """Nothing to do: the weights are parts of a lane's vector."""
