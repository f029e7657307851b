"""`Problem`: model, data, split, loss and local training; checked when it is created."""

from .problem import Problem, find_device

__all__ = ["Problem", "find_device"]
