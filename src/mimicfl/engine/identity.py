"""What a run is, part by part, as numbers: a folder made by one must not be taken for another's."""

import functools
import json
import types
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms
from ..config import CAME_LATER
from ..data.dataset import Data
from ..registry import describe

if TYPE_CHECKING:
    from .run import Run

DEEPEST = 8  # objects within objects; below that, its kind is all that is told of one


def identity(run: "Run", rounds: int) -> dict[str, str]:
    """A number for each part of what the result of so many rounds depends on. Named code is known by its name alone."""
    available = run.available[:rounds]
    busy = [(t, m) for t, m in enumerate(available.sum(axis=1).tolist()) if m]
    parts = {
        "data": [run.data.checksum(), run.data.facts()],
        "split": told(run.split),
        "availability": told(available),
        "weighting": told(run.share),
        "model": [str(run.template), told(run.template), told(run.template.state_dict())],
        "loss": told(run.loss),
        "algorithm": [describe(algorithms.ALGORITHMS, run.algorithm), told(run.algorithm)],
        "local work": [run.local.epochs, run.local.steps, run.local.batch_size]
        + [(key, value) for key in CAME_LATER if (value := getattr(run.local, key))],
        "rates": [[rate(t, m) for rate in (run.local_lr, run.global_lr)] for t, m in busy],
        "settings": [run.update, run.seed, run.eval_every, run.device.type, run.precision],
    }
    return {name: f"{zlib.crc32(json.dumps(part).encode()):08x}" for name, part in parts.items()}


def told(thing: Any, depth: int = 0) -> Any:
    """A thing by its values, in lists and texts; a function by its name, one that has none of its own by its code."""
    if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        return repr(thing)
    if isinstance(thing, Tensor):
        thing = thing.detach().cpu().contiguous()
        return [str(thing.dtype), list(thing.shape), zlib.crc32(thing.reshape(-1).view(torch.uint8).numpy().data)]
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return [str(thing.dtype), list(thing.shape), zlib.crc32(np.ascontiguousarray(thing).reshape(-1).view(np.uint8).data)]
    if isinstance(thing, Data):
        return [thing.checksum(), thing.facts()]
    kind = thing if isinstance(thing, type) else type(thing)
    named = kind.__qualname__  # without its module: a file may be imported as a plugin, run as a program, or moved
    if depth == DEEPEST or isinstance(thing, (type, types.ModuleType)):
        return named
    within = functools.partial(told, depth=depth + 1)
    if isinstance(thing, (list, tuple, np.ndarray)):
        return [named, *map(within, thing)]
    if isinstance(thing, (set, frozenset)):
        return [named, *sorted(json.dumps(within(each)) for each in thing)]
    if isinstance(thing, Mapping):
        return [named, *([str(key), within(value)] for key, value in thing.items())]
    if isinstance(thing, functools.partial):
        return [named, within(thing.func), within(thing.args), within(thing.keywords)]
    if isinstance(thing, types.MethodType):
        return [within(thing.__func__), within(thing.__self__)]
    if isinstance(thing, types.FunctionType):
        held = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        nameless = "<" in thing.__qualname__  # <lambda>, or a local function
        code = _code(thing.__code__) if nameless else ""
        return [thing.__qualname__, code, within(thing.__defaults__), within(thing.__kwdefaults__), within(held)]
    if isinstance(thing, nn.Module):  # its layers' settings; its weights are in the state_dict
        own = {key: value for key, value in vars(thing).items() if not key.startswith("_") and key != "training"}
        return [named, within(own), *([name, within(child)] for name, child in thing.named_children()), within(dict(thing.named_buffers()))]
    return [named, within(getattr(thing, "__dict__", {}))]


def _code(code: types.CodeType) -> list[Any]:
    consts = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return [zlib.crc32(code.co_code), list(code.co_names), consts]
