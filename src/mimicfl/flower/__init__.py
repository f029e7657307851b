"""mimicfl on Flower: strategies, a ready app, and a round loop made for clients that come and go.

Flower is an extra: `pip install mimicfl[flower]`. Nothing else in mimicfl imports this room. Names are imported when they are
used: a ClientApp is a new process for every message, and must not load what only a server needs.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import UsageError


class MissingFlower(UsageError, ImportError):
    """Flower is not installed."""


if importlib.util.find_spec("flwr") is None:
    raise MissingFlower("Flower is not installed: pip install 'mimicfl[flower]'")

if TYPE_CHECKING:
    from .app import server_app
    from .client import client_app, hello, identify
    from .inline import Federation, simulate
    from .ledger import ClientForm
    from .secure import SecureForm
    from .server import ServerForm
    from .strategy import MIFA, SCAFFOLD, FedAU, FedAvg, FedAvgM, Federated, FedProx, FedVARP, MimiC

_ROOMS = {
    "app": ["server_app"],
    "client": ["client_app", "hello", "identify"],
    "inline": ["Federation", "simulate"],
    "ledger": ["ClientForm"],
    "secure": ["SecureForm"],
    "server": ["ServerForm"],
    "strategy": ["MIFA", "SCAFFOLD", "FedAU", "FedAvg", "FedAvgM", "FedProx", "FedVARP", "Federated", "MimiC"],
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "MIFA",
    "SCAFFOLD",
    "ClientForm",
    "FedAU",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedVARP",
    "Federated",
    "Federation",
    "MimiC",
    "MissingFlower",
    "SecureForm",
    "ServerForm",
    "client_app",
    "hello",
    "identify",
    "server_app",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
