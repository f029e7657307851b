"""`Problem`: what is trained, and on what; checked when it is created."""

from .problem import Problem, find_device

__all__ = ["Problem", "find_device"]
