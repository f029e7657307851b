"""Many runs: a comparison, a grid from a file, on one machine or on a cluster."""

from .fuse import carry_out, compare

__all__ = ["carry_out", "compare"]
