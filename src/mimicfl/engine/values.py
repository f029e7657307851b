"""Any Python object as plain lists and strings that depend only on its value: the same in every process.

Tensors and arrays are given by dtype, shape and a hash of their bytes; objects by their class and attributes; the user's functions and
classes by their source code and that of the user's functions they call. Code of libraries is given by its name.
"""

import functools
import hashlib
import inspect
import json
import logging
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.dataset import Data
from . import source

DEEPEST = 16  # levels of nested objects; below that only the class counts
SIMPLE = (bool, int, float, complex, str, bytes, np.generic, types.NoneType)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
USUAL = {*vars(nn.Module()), "training"}  # attributes that every module has


def hashed(raw: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


class Values:
    """Turns objects into values. `unreadable` collects the names of functions whose source could not be used."""

    def __init__(self, weights: bool = True) -> None:
        self.weights = weights  # False: parameters and buffers of modules count by shape only
        self.unreadable: set[str] = set()
        self._inside: set[int] = set()  # functions and classes in progress: they may refer to each other

    def of(self, thing: Any, depth: int = 0) -> Any:
        kind = thing if isinstance(thing, type) else type(thing)
        try:
            return self._of(thing, kind.__qualname__, depth)
        except Exception:  # tensors without memory, objects that forbid inspection: only the class is known
            return kind.__qualname__

    def _of(self, thing: Any, named: str, depth: int) -> Any:
        if isinstance(thing, SIMPLE):
            return [named, repr(thing.item())] if isinstance(thing, np.generic) else repr(thing)
        if isinstance(thing, Tensor):
            data = thing.detach().cpu().contiguous()
            return [str(data.dtype), list(data.shape), thing.requires_grad, hashed(data.reshape(-1).view(torch.uint8).numpy())]
        if isinstance(thing, np.ndarray) and thing.dtype != object:
            return [str(thing.dtype), list(thing.shape), hashed(thing)]
        if isinstance(thing, Data):
            return [thing.checksum(), thing.facts()]
        if depth >= DEEPEST:
            return named
        within = functools.partial(self.of, depth=depth + 1)
        for kinds, describe in self._ways(within):
            if isinstance(thing, kinds):
                return [named, describe(thing)]
        return [named, self._class(type(thing), within), *self._held(thing, within)]

    def _ways(self, within: Callable[[Any], Any]) -> list[tuple[Any, Callable[[Any], Any]]]:
        """How objects that are not plain values are described, by type."""
        return [
            (type, lambda it: self._class(it, within)),
            (types.ModuleType, lambda it: source.of_module(it)),
            (np.ndarray, lambda it: within(it.tolist())),
            ((list, tuple), lambda it: [self._class(type(it), within), *map(within, it)]),
            ((set, frozenset), lambda it: sorted(json.dumps(within(each)) for each in it)),
            (Mapping, lambda it: [[within(key), within(value)] for key, value in it.items()]),
            (functools.partial, lambda it: [within(it.func), within(it.args), within(it.keywords)]),
            (types.MethodType, lambda it: [within(it.__func__), within(it.__self__)]),
            (types.FunctionType, lambda it: self._function(it, within)),
            (types.BuiltinFunctionType, lambda it: [it.__qualname__, within(it.__self__)]),
            (logging.Logger, lambda it: it.name),
            (nn.Module, lambda it: self._module(it, within)),
        ]

    def _held(self, thing: Any, within: Callable[[Any], Any]) -> list[Any]:
        """An object's attributes; for an object without any (a path, a date, a range), its repr."""
        slots = {key: getattr(thing, key) for base in type(thing).__mro__ for key in getattr(base, "__slots__", ()) if hasattr(thing, key)}
        held = vars(thing) if hasattr(thing, "__dict__") else {}
        return [ADDRESS.sub("", repr(thing)) if not held and not slots else "", within(held), within(slots)]

    def _module(self, module: nn.Module, within: Callable[[Any], Any]) -> list[Any]:
        """A module's code, settings, weights and hooks. Private attributes count only if they are plain values; others are caches."""
        plain = {key: value for key, value in vars(module).items() if key not in USUAL}
        own = {key: value for key, value in plain.items() if not key.startswith("_") or isinstance(value, (*SIMPLE, tuple))}
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        weights = [[name, within(p) if self.weights else [str(p.dtype), list(p.shape), p.requires_grad]] for name, p in tensors]
        children = [[name, within(child)] for name, child in module.named_children()]
        return [self._class(type(module), within), within(own), within(hooks), weights, children]

    def _class(self, kind: type, within: Callable[[Any], Any]) -> Any:
        """The code and constants of a user's class and its bases."""
        if not source.is_custom(kind) or id(kind) in self._inside:
            return kind.__qualname__
        self._inside.add(id(kind))
        try:
            body = {key: value for key, value in vars(kind).items() if _counts(key, value)}
            return [kind.__qualname__, [self._class(base, within) for base in kind.__bases__], within(body)]
        finally:
            self._inside.discard(id(kind))

    def _function(self, function: types.FunctionType, within: Callable[[Any], Any]) -> Any:
        """A user's function by its code and the values it holds; a library's by its name and the values it holds."""
        values = [function.__qualname__, *map(within, (function.__defaults__, function.__kwdefaults__, source.held_by(function)))]
        if not source.is_custom(function) or id(function) in self._inside:
            return values
        self._inside.add(id(function))
        try:
            text, readable = source.of_code(function.__code__)
            if not readable:
                self.unreadable.add(function.__qualname__)
            return [*values, text, within(source.globals_used(function))]
        finally:
            self._inside.discard(id(function))


USUAL_OF_CLASSES = ("__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__slots__")
USUAL_OF_DATACLASSES = ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotations__")


def _counts(key: str, value: object) -> bool:
    """Does this attribute of a class define what its objects do? Methods generated by `dataclass` do not."""
    generated = key.startswith("__") and inspect.isfunction(value) and inspect.unwrap(value).__code__.co_filename == "<string>"
    return not (generated or key in USUAL_OF_CLASSES or key in USUAL_OF_DATACLASSES)
