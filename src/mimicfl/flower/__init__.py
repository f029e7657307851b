"""mimicfl on Flower: strategies, a ready app, and a round loop made for clients that come and go.

Flower is an extra: `pip install mimicfl[flower]`. Nothing else in mimicfl imports this room.
"""

import importlib.util

from ..errors import UsageError


class MissingFlower(UsageError, ImportError):
    """Flower is not installed."""


if importlib.util.find_spec("flwr") is None:
    raise MissingFlower("Flower is not installed: pip install 'mimicfl[flower]'")

from .app import server_app  # noqa: E402
from .client import client_app, hello, identify  # noqa: E402
from .inline import Federation, simulate  # noqa: E402
from .ledger import ClientForm  # noqa: E402
from .secure import SecureForm  # noqa: E402
from .server import ServerForm  # noqa: E402
from .strategy import MIFA, SCAFFOLD, FedAvg, Federated, FedProx, MimiC  # noqa: E402

__all__ = [
    "MIFA",
    "SCAFFOLD",
    "ClientForm",
    "FedAvg",
    "FedProx",
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
