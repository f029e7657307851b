"""Fast layers for any module on a CPU, compiled for the shapes that a model uses.

PyTorch's layers are optimised for large inputs; for small ones, setup and memory traffic take most of the time. While `LayerOverrides` is
active, calls with a compiled shape use our kernels, and everything else uses PyTorch.
"""

from .overrides import LayerOverrides, Layers, compile_layers

__all__ = ["LayerOverrides", "Layers", "compile_layers"]
