"""mimicfl on Flower: strategies, ready-made apps, and a round loop for clients that drop out.

Flower is an optional dependency: `pip install mimicfl[flower]`. No other part of mimicfl imports this package. Names are imported on
first use: every message starts a new ClientApp process, which must not load what only the server needs.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..algorithms import ALGORITHMS
from ..errors import UsageError


class MissingFlower(UsageError, ImportError):
    """Flower is not installed."""


if importlib.util.find_spec("flwr") is None:
    raise MissingFlower("Flower is not installed: pip install 'mimicfl[flower]'")

if TYPE_CHECKING:
    from .app import server_app
    from .client import client_app, hello, identify
    from .client_form import ClientForm
    from .command import try_app
    from .failed_rounds import NothingLearned
    from .in_process import Federation, simulate
    from .models import load_arrays, trained_arrays
    from .secure_form import SecureForm
    from .server_form import ServerForm
    from .strategy import Federated

_MODULES = {
    "app": ["server_app"],
    "client": ["client_app", "hello", "identify"],
    "in_process": ["Federation", "simulate"],
    "client_form": ["ClientForm"],
    "models": ["load_arrays", "trained_arrays"],
    "failed_rounds": ["NothingLearned"],
    "secure_form": ["SecureForm"],
    "server_form": ["ServerForm"],
    "strategy": ["Federated"],
    "command": ["try_app"],
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ClientForm",
    "Federated",
    "Federation",
    "MissingFlower",
    "NothingLearned",
    "SecureForm",
    "ServerForm",
    "client_app",
    "hello",
    "identify",
    "load_arrays",
    "server_app",
    "simulate",
    "trained_arrays",
    "try_app",
    *[kind.__name__ for kind in ALGORITHMS.factories.values()],
]


def __getattr__(name: str) -> Any:
    """The public names, and one strategy per registered algorithm: `mimicfl.flower.MimiC`, ..."""
    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    for kind in ALGORITHMS.factories.values():
        if getattr(kind, "__name__", "") == name and isinstance(kind, type):
            return importlib.import_module(".strategy", __name__).strategy_for(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
