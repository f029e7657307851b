"""Versions and hardware of a run, so that its numbers can be traced to them."""

import functools
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._version import __version__

THEN = ", then "


def environment() -> dict[str, Any]:
    """The versions and hardware of this process."""
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), **_fixed(), "threads": torch.get_num_threads(), "gpu": _gpu()}


@functools.cache  # hundreds of runs may start together
def _fixed() -> dict[str, Any]:
    return {
        "mimicfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


@functools.cache
def _gpu() -> str | None:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def continued(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merge the environments of a run that started in `then` and resumed in `now`: `torch 2.11, then 2.13`."""
    found = dict(then)
    for key, value in now.items():
        before = str(then.get(key)).split(THEN)
        if key != "started" and before[-1] != str(value):
            found[key] = THEN.join([*before, str(value)])
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
