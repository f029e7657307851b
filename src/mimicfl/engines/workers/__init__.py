"""The workers engine, for any module on a CPU: about one single-threaded process per core, which takes the next client when it is free."""

from .engine import WorkersEngine
from .layers import WithLayers

__all__ = ["WithLayers", "WorkersEngine"]
