"""What a run is, part by part, as numbers: a folder made by one must not be taken for another's."""

import functools
import json
import logging
import re
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

DEEPEST = 16  # objects within objects; below that, its kind is all that is told of one
SIMPLE = (bool, int, float, complex, str, bytes, np.generic, types.NoneType)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def identity(run: "Run", rounds: int) -> dict[str, str]:
    """A number for each part of what the result of so many rounds depends on. Named code is known by its name alone."""
    available = run.available[:rounds]
    busy = [(t, m) for t, m in enumerate(available.sum(axis=1).tolist()) if m]
    parts = {
        "data": [run.data.checksum(), run.data.facts()],
        "split": told(run.split),
        "availability": told(available),
        "weighting": told(run.share),
        "model": [ADDRESS.sub("", str(run.template)), told(run.template), told(run.template.state_dict())],
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
    kind = thing if isinstance(thing, type) else type(thing)
    named = kind.__qualname__  # without its module: a file may be imported as a plugin, run as a program, or moved
    try:
        return _told(thing, named, depth)
    except Exception:  # tensors without memory, objects that forbid looking: their kind is what can be told
        return named


def _told(thing: Any, named: str, depth: int) -> Any:
    if isinstance(thing, SIMPLE):
        return [named, repr(thing.item())] if isinstance(thing, np.generic) else repr(thing)
    if isinstance(thing, Tensor):
        data = thing.detach().cpu().contiguous()
        return [str(data.dtype), list(data.shape), thing.requires_grad, zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().data)]
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return [str(thing.dtype), list(thing.shape), zlib.crc32(np.ascontiguousarray(thing).reshape(-1).view(np.uint8).data)]
    if isinstance(thing, Data):
        return [thing.checksum(), thing.facts()]
    if depth >= DEEPEST or isinstance(thing, (type, types.ModuleType)):
        return named
    within = functools.partial(told, depth=depth + 1)
    if isinstance(thing, np.ndarray):
        return [named, within(thing.tolist())]
    if isinstance(thing, (list, tuple)):
        return [named, *map(within, thing)]
    if isinstance(thing, (set, frozenset)):
        return [named, *sorted(json.dumps(within(each)) for each in thing)]
    if isinstance(thing, Mapping):
        return [named, *([within(key), within(value)] for key, value in thing.items())]
    if isinstance(thing, functools.partial):
        return [named, within(thing.func), within(thing.args), within(thing.keywords)]
    if isinstance(thing, types.MethodType):
        return [within(thing.__func__), within(thing.__self__)]
    if isinstance(thing, types.FunctionType):
        return [thing.__qualname__, *map(within, (thing.__defaults__, thing.__kwdefaults__)), *_body(thing, within)]
    if isinstance(thing, types.BuiltinFunctionType):
        return [thing.__qualname__, within(thing.__self__)]
    if isinstance(thing, logging.Logger):
        return [named, thing.name]
    if isinstance(thing, nn.Module):
        return [named, within(_attributes(thing)), *([name, within(child)] for name, child in thing.named_children())]
    slots = {key: getattr(thing, key) for base in type(thing).__mro__ for key in getattr(base, "__slots__", ()) if hasattr(thing, key)}
    held = vars(thing) if hasattr(thing, "__dict__") else {}
    text = repr(thing) if not held and not slots else ""  # a path, a date, a range
    return [named, ADDRESS.sub("", text), within(held), within(slots)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own settings, weights and hooks. Of attributes that are nobody else's business only plain values: the rest are caches."""
    plain = {key: value for key, value in vars(module).items() if key not in USUAL}
    own = {key: value for key, value in plain.items() if not key.startswith("_") or isinstance(value, (*SIMPLE, tuple))}
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return own | {"": [dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False)), hooks]}


USUAL = {*vars(nn.Module()), "training"}


def _body(function: types.FunctionType, within: Any) -> list[Any]:
    """What a function holds, and, where it has no name of its own, what it does."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    if "<" not in function.__qualname__:  # neither <lambda> nor <locals>
        return [within(held)]
    outside = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    values = {name: value for name, value in outside.items() if isinstance(value, (*SIMPLE, tuple, Tensor, np.ndarray))}
    return [within(held), within(values), _code(function.__code__, within)]


def _code(code: types.CodeType, within: Any) -> list[Any]:
    consts = [_code(each, within) if isinstance(each, types.CodeType) else within(each) for each in code.co_consts]
    return [zlib.crc32(code.co_code), list(code.co_names), consts]
