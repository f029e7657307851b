"""The connection to a Ray cluster."""

import os
from typing import Any

from ...errors import UsageError, shown


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("training on a cluster needs Ray: pip install 'mimicfl[ray]'") from None
    return ray


def connect(ray: Any, address: str) -> None:
    """Connect to the cluster at `address`: "auto", a Ray address, or "local" for one on the cores of this machine."""
    if not isinstance(address, str):
        raise UsageError(f"ray must be the address of a cluster, 'auto' or 'local', got {shown(address)}")
    where = {"num_cpus": os.cpu_count(), "include_dashboard": False} if address == "local" else {"address": address}
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or ["no answer"])[0]
        raise UsageError(f"no Ray cluster at {address!r} ({first}): start one with 'ray start --head', or use --ray local") from None


def count_workers(ray: Any, device: str) -> int:
    """How many workers the cluster has room for: one per core, or one per GPU."""
    held = ray.cluster_resources()
    found = int(held.get("CPU" if device == "cpu" else "GPU", 0))
    if not found:
        raise UsageError(f"the cluster has no {'CPU' if device == 'cpu' else 'GPU'}: use device {'cuda' if device == 'cpu' else 'cpu'}")
    return found
