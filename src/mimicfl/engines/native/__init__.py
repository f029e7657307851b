"""The native engine: generates C++ for a traced network, with the samples of a batch in vector lanes, and caches the compiled code."""

from ..capabilities import Unsupported as Unsupported
