"""Hash any Python object by its value, so that the hash is the same in every process.

Tensors and arrays are hashed by dtype, shape and bytes; objects by class and attributes; the user's functions and classes by their
source code, including the user's functions that they call. Library code is hashed by name only.
"""

import functools
import hashlib
import inspect
import logging
import random
import re
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.dataset import Data
from . import digest, source

DEEPEST = 60  # levels of nested objects; deeper objects are hashed by their class only
SIMPLE = (bool, int, float, complex, str, bytes, np.generic, types.NoneType)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
USUAL = {*vars(nn.Module()), "training"}  # attributes that every module has
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hashed(raw: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class Values:
    """Hashes objects. `unreadable` collects the names of functions whose source text is not available.

    Tensors in `by_shape` are hashed by dtype and shape only.
    """

    def __init__(self, by_shape: Collection[Tensor] = ()) -> None:
        self.by_shape = {id(tensor): tensor for tensor in by_shape}
        self.unreadable: set[str] = set()
        self._known: dict[int, tuple[Any, str]] = {}  # objects hashed so far; kept alive, so that no id is reused

    def of(self, thing: Any, depth: int = 0) -> str:
        kind = thing if isinstance(thing, type) else type(thing)
        if isinstance(thing, SIMPLE):
            return f"{kind.__qualname__} {thing.item()!r}" if isinstance(thing, np.generic) else repr(thing)
        if depth == 0:
            self._known.clear()
        if depth >= DEEPEST:
            return kind.__qualname__
        if id(thing) not in self._known:
            self._known[id(thing)] = thing, f"level {depth}"  # used if the object refers to itself
            try:
                value = digest(self._of(thing, kind.__qualname__, functools.partial(self.of, depth=depth + 1)))
            except Exception:  # tensors without memory or objects that forbid inspection: hash the class only
                value = kind.__qualname__
            self._known[id(thing)] = thing, value
        return self._known[id(thing)][1]

    def _of(self, thing: Any, named: str, within: Callable[[Any], str]) -> Any:
        if isinstance(thing, Tensor):
            data = thing.detach().cpu().contiguous()
            if id(thing) in self.by_shape:
                return [str(data.dtype), list(data.shape), thing.requires_grad]
            return [str(data.dtype), list(data.shape), thing.requires_grad, hashed(data.reshape(-1).view(torch.uint8).numpy())]
        if isinstance(thing, np.ndarray) and thing.dtype != object:
            return [str(thing.dtype), list(thing.shape), hashed(thing)]
        if isinstance(thing, Data):
            return [thing.checksum(), thing.facts()]
        for kinds, describe in self._rules(within):
            if isinstance(thing, kinds):
                return [named, describe(thing)]
        return [named, within(type(thing)), *self._attribute_values(thing, within)]

    def _rules(self, within: Callable[[Any], str]) -> list[tuple[Any, Callable[[Any], Any]]]:
        """Return, by type, how to describe objects that hold more than their attributes."""
        return [
            (type, lambda it: self._class(it, within)),
            (types.ModuleType, lambda it: source.of_module(it)),
            (np.ndarray, lambda it: within(it.tolist())),
            ((list, tuple), lambda it: [*self._container(it, within), *map(within, it)]),
            ((set, frozenset), lambda it: [*self._container(it, within), *sorted(map(within, it))]),
            (Mapping, lambda it: [*self._container(it, within), [[within(key), within(value)] for key, value in it.items()]]),
            (functools.partial, lambda it: [within(it.func), within(it.args), within(it.keywords)]),
            (property, lambda it: [within(it.fget), within(it.fset), within(it.fdel)]),
            ((staticmethod, classmethod), lambda it: within(it.__func__)),
            (types.MethodType, lambda it: [within(it.__func__), within(it.__self__)]),
            (types.FunctionType, lambda it: self._function(it, within)),
            (types.BuiltinFunctionType, lambda it: [it.__qualname__, within(it.__self__)]),
            (random.Random, lambda it: within(it.getstate())),
            (np.random.Generator, lambda it: within(it.bit_generator.state)),
            (np.random.RandomState, lambda it: within(it.get_state(legacy=False))),
            (torch.Generator, lambda it: within(it.get_state())),
            (logging.Logger, lambda it: it.name),
            (weakref.ref, lambda it: None),
            (nn.Module, lambda it: self._module(it, within)),
        ]

    def _container(self, thing: Any, within: Callable[[Any], str]) -> list[Any]:
        """Return the class and attributes of a container that is not a built-in type."""
        return [within(type(thing)), within(getattr(thing, "__dict__", None))] if type(thing).__module__ != "builtins" else []

    def _attribute_values(self, thing: Any, within: Callable[[Any], str]) -> list[Any]:
        """Return the attributes of an object, or its repr if it has none (a path, a date, a range)."""
        slots, held = _slots(thing), _attributes(thing)
        return [ADDRESS.sub("", repr(thing)) if not held and not slots else "", within(held), within(slots)]

    def _module(self, module: nn.Module, within: Callable[[Any], str]) -> list[Any]:
        """Return a module's code, settings, weights and hooks. Private attributes of library classes count only if they are simple."""
        custom = source.is_custom(type(module))
        plain = {key: value for key, value in _attributes(module).items() if key not in USUAL}
        own = {key: value for key, value in plain.items() if custom or not key.startswith("_") or isinstance(value, (*SIMPLE, tuple))}
        hooks = [list(getattr(module, name).values()) for name in HOOKS]
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        named = [[name, within(each)] for name, each in (*tensors, *module.named_children())]
        return [within(type(module)), within(own), within(hooks), named]

    def _class(self, kind: type, within: Callable[[Any], str]) -> Any:
        """Return the code and constants of a user's class, its bases and its metaclass; for a library class, its name."""
        if not source.is_custom(kind):
            return kind.__qualname__
        body = {key: value for key, value in vars(kind).items() if _counts(key, value)}
        return [kind.__qualname__, [within(base) for base in (*kind.__bases__, type(kind))], within(body)]

    def _function(self, function: types.FunctionType, within: Callable[[Any], str]) -> Any:
        """Return a user's function as its code, defaults, closure and globals; a library function as its name, defaults and closure."""
        values = [function.__qualname__, *map(within, (function.__defaults__, function.__kwdefaults__, source.held_by(function)))]
        if not source.is_custom(function):
            return values
        text, readable = source.of_code(function.__code__)
        if not readable:
            self.unreadable.add(function.__qualname__)
        reached = [[name, within(value)] for name, value in source.named_in_modules(function)]
        return [*values, within(vars(function)), text, within(source.globals_used(function)), *([reached] if reached else [])]


def attribute_values(thing: Any) -> dict[str, str]:
    """The value of every attribute of an object, by name, to compare with those at another time."""
    values = Values()
    return {key: values.of(value) for key, value in (_attributes(thing) | _slots(thing)).items()}


def _slots(thing: Any) -> dict[str, Any]:
    return {key: getattr(thing, key) for base in type(thing).__mro__ for key in getattr(base, "__slots__", ()) if hasattr(thing, key)}


def _attributes(thing: Any) -> dict[str, Any]:
    """Return an object's attributes, sorted by name, since a copy may hold them in another order than the original.

    Values stored by `cached_property` are omitted: they follow from the other attributes and exist only after the first use.
    """
    found = sorted(getattr(thing, "__dict__", {}).items(), key=lambda item: str(item[0]))
    return {key: value for key, value in found if not isinstance(getattr(type(thing), key, None), functools.cached_property)}


USUAL_OF_CLASSES = ("__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__slots__")
USUAL_OF_GENERICS = ("__parameters__", "__orig_bases__")
USUAL_OF_DATACLASSES = ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__replace__")
USUAL_OF_ANNOTATIONS = ("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__")  # Python 3.14 adds three


def _counts(key: str, value: object) -> bool:
    """Return whether a class attribute defines the behaviour of its objects. Methods generated by `dataclass` do not count."""
    generated = key.startswith("__") and inspect.isfunction(value) and inspect.unwrap(value).__code__.co_filename == "<string>"
    return not (generated or key in (*USUAL_OF_CLASSES, *USUAL_OF_DATACLASSES, *USUAL_OF_ANNOTATIONS, *USUAL_OF_GENERICS))
