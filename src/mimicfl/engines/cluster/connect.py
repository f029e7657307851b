"""The connection to a Ray cluster."""

import os
import socket
from typing import Any

from ...errors import UsageError, first_line, shown

REACHED_S = 10.0


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("training on a cluster needs Ray: pip install 'mimicfl[ray]'") from None
    return ray


def check_address(address: str) -> None:
    """Raise `UsageError` if Ray is missing, or if nothing answers at HOST:PORT; Ray itself would wait for minutes."""
    if not isinstance(address, str):
        raise UsageError(f"ray must be the address of a cluster, 'auto' or 'local', got {shown(address)}")
    import_ray()
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, error) from None


def connect(ray: Any, address: str) -> None:
    """Connect to the cluster at `address`: "auto", a Ray address, or "local" for one on the cores of this machine."""
    check_address(address)
    where = {"num_cpus": os.cpu_count(), "include_dashboard": False} if address == "local" else {"address": address}
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise unreachable(address, error) from None


def unreachable(address: str, error: BaseException) -> UsageError:
    return UsageError(
        f"no Ray cluster at {address!r} ({first_line(error) or 'no answer'}): start one with 'ray start --head', or use --ray local"
    )


def count_workers(ray: Any, device: str) -> int:
    """How many workers the cluster has room for: one per core, or one per GPU."""
    held = ray.cluster_resources()
    found = int(held.get("CPU" if device == "cpu" else "GPU", 0))
    if not found:
        raise UsageError(f"the cluster has no {'CPU' if device == 'cpu' else 'GPU'}: use device {'cuda' if device == 'cpu' else 'cpu'}")
    return found
