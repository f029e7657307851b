"""Imports the whole package before trials are forked: its modules load on first use, which would otherwise cost every trial seconds."""

import importlib
import pkgutil
from contextlib import suppress

import torch

import mimicfl

OTHERS = ("matplotlib.pyplot", "pandas", "torch._dynamo")  # imported on first use by pictures, tables and the batched engine


def preload() -> None:
    for module in pkgutil.walk_packages(mimicfl.__path__, "mimicfl."):
        with suppress(ModuleNotFoundError):  # an optional package is missing
            if module.name != "mimicfl.__main__":
                importlib.import_module(module.name)
    for name in OTHERS:
        importlib.import_module(name)
    torch.set_num_threads(1)
