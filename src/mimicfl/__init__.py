"""mimicfl: federated learning when clients drop out."""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from ._version import __version__ as __version__

_RENAMED = {"Task": "Instructions", "Moment": "RoundInfo"}  # after version 0.2

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .algorithms import *  # noqa: F403  (type checkers do not follow the sum of two lists of names)
else:  # PyTorch takes a second or more to import: `mimicfl --version`, `runs` and the shell's completion must not wait for it

    def __getattr__(name: str) -> _typing.Any:
        """Import a module of the package when it is used, or all public names when the first of them is used."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'mimicfl' has no attribute {name!r}")
        if name != "__all__" and _util.find_spec(f"mimicfl.{name}") is not None:
            return _importlib.import_module(f"mimicfl.{name}")
        public = _importlib.import_module("mimicfl._public")
        globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
        if name not in globals():
            hint = f"; it is now called {_RENAMED[name]}" if name in _RENAMED else ""
            raise AttributeError(f"module 'mimicfl' has no attribute {name!r}{hint}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_importlib.import_module("mimicfl._public").__all__})
