"""The native cohort: a traced network becomes C++ with the batch in the vector lanes, compiled once and kept."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..support import Unsupported

__all__ = ["Unsupported", "preparing"]


@contextmanager
def preparing() -> Iterator[None]:
    """Any failure while the engine is prepared means that it cannot run this model. Out-of-memory errors pass through."""
    try:
        yield
    except (Unsupported, MemoryError):
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:120]
        raise Unsupported(f"it could not be prepared ({type(error).__name__}: {first})") from error
