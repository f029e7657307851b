"""The native cohort: a traced network becomes C++ with the batch in the vector lanes, compiled once and kept."""

from ..support import Unsupported

__all__ = ["Unsupported"]
