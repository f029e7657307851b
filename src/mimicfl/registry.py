"""Registries: algorithms, availability patterns, partitions, models and learning rates by name.

A spec such as `bounded:20,phase=random` holds a name, positional arguments and keyword arguments. The same spec works on the
command line and in TOML. `Registry.make` builds the object from its spec; `describe` returns the spec of an object.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from .errors import UsageError, nearest, shown
from .text import without_nul

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Named factories for objects of one kind, e.g. `Registry("algorithm")`.

    `settings` lists the settings whose values are specs of this registry. Such a setting also accepts an object for which `is_one`
    returns True. `wanted` describes valid values in error messages.
    """

    def __init__(
        self, kind: str, settings: tuple[str, ...] = (), is_one: Callable[[object], bool] | None = None, wanted: str = "a string"
    ) -> None:
        self.kind, self.is_one, self.wanted = kind, is_one or (lambda thing: False), wanted
        self.factories: dict[str, Callable[..., T]] = {}
        NAMED_BY.update(dict.fromkeys(settings, self))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.factories))

    @overload
    def register(self, name: str) -> Callable[[F], F]: ...

    @overload
    def register(self, name: str, factory: F) -> F: ...

    def register(self, name: str, factory: Any = None) -> Any:
        """Register a factory under a name: `register("mine", Mine)`, or as a decorator, `@register("mine")`."""
        if factory is None:
            return lambda it: self.register(name, it)
        if not isinstance(name, str) or not name or not callable(factory):
            raise UsageError(f"register a {self.kind} with register('name', Class), got {name!r} and {factory!r}")
        if not re.fullmatch(r"[\w.+-]+", name) or name in ("auto", "local"):
            raise UsageError(
                f"{name!r} cannot be the name of a {self.kind}: use letters, digits, '_', '-', '.', and neither 'auto' nor 'local'"
            )
        existing = self.factories.get(name)
        if existing is not None and is_built_in(existing) and _origin(existing) != _origin(factory):  # reports could not distinguish them
            raise UsageError(f"{self.kind} {name!r} is built in: register yours under another name")
        self.factories[name] = factory
        return factory

    def find(self, name: str) -> Callable[..., T]:
        if not isinstance(name, str) or name not in self.factories:
            hint = nearest(str(name), self.factories)
            if hint.startswith("known") and self in NAMED_BY.values():
                hint += "; to use your own, import the file that registers it (--plugin FILE; on Flower: in server_app.py)"
            raise UsageError(f"{self.kind} {name!r} is unknown; {hint}")
        return self.factories[name]

    def examples(self) -> list[str]:
        """Return one spec per name, with the first option at its default value."""
        return [f"{name}{_first_option(factory)}" for name, factory in self.factories.items()]

    def name_of(self, thing: object) -> str:
        """Return the name under which the object's class (or the function itself) is registered, else the name of the class."""
        for name, factory in self.factories.items():
            if factory is thing or factory is type(thing):
                return name
        return getattr(thing, "__name__", type(thing).__name__)

    def spell(self, thing: object) -> str:
        """Return a spec that recreates the object (or an object of the class) in another process.

        Registers the class under its own name if it is not registered yet. Raises a `UsageError` if a spec cannot hold all settings
        of the object.
        """
        if isinstance(thing, str):
            return thing
        if not self.is_one(thing):
            remedy = "" if type(thing).__module__ == "builtins" else "; register it under a name, or pass the object to mf.simulate"
            raise UsageError(f"{self.kind} must be {self.wanted}, got {shown(thing)}{remedy}")
        kind = thing if isinstance(thing, type) else type(thing)
        name = self.name_of(thing)
        existing = self.factories.get(name, kind)
        if existing is not kind and _origin(existing) != _origin(kind):  # with the same origin, the class was redefined, as in a notebook
            raise UsageError(f"another {self.kind} has the name {name!r}: register {kind.__qualname__} under a different name")
        self.register(name, kind)
        spec = describe(self, thing)
        try:
            complete = thing is kind or _settings(self.make(spec)) == _settings(thing)
        except Exception:  # a custom class may raise anything
            complete = False
        if not complete:
            remedy = getattr(kind, "spec_hint", f"make {kind.__qualname__} a dataclass whose fields are numbers, lists and strings")
            raise UsageError(f"{self.kind} {spec!r} does not contain all settings of the object: {remedy}")
        return spec

    def meaning(self, spec: str) -> str:
        """Normalise a spec: `fedau:20` and `fedau:cutoff=20` give the same text. A spec with an unknown name is returned unchanged."""
        return describe(self, self.make(spec)) if parse(spec)[0] in self.factories else spec

    def make(self, spec: str, **context: Any) -> T:
        """Build the object that `spec` describes.

        `context` holds values that the caller can provide (labels, a seed, ...); a factory receives those that match its parameters.
        The positional arguments of the spec fill the remaining parameters in order.
        """
        if not isinstance(spec, str):
            raise UsageError(f"{self.kind} must be given by name, as a string, got {shown(spec)}")
        name, args, options = parse(spec)
        factory = self.find(name)
        parameters = inspect.signature(factory).parameters
        given = {key: value for key, value in context.items() if key in parameters}
        spread = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        free = [p.name for p in parameters.values() if p.name not in given and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        in_order = [key for key in free if parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY]
        for key in options:
            if key not in free:
                known = (
                    f"it has: {', '.join(free)}"
                    if free
                    else "it has none: options are the arguments of its constructor, such as the fields of a dataclass"
                )
                raise UsageError(f"{self.kind} {name!r} has no option {key!r}; {known}")
        if spread:
            return factory(*args, **options, **given)
        if len(args) > len(in_order):
            raise UsageError(f"{self.kind} {spec!r} has too many values; {name} takes {', '.join(in_order) or 'no values'}")
        named = dict(zip(in_order, args, strict=False))
        if twice := named.keys() & options.keys():
            raise UsageError(f"{self.kind} {spec!r} gives {twice.pop()!r} twice; remove one of them")
        missing = [p for p in free if parameters[p].default is inspect.Parameter.empty and p not in named | options]
        if missing:
            raise UsageError(f"{self.kind} {name!r} needs {missing[0]!r}, as in {name}:{missing[0]}=...")
        for key, value in (named | options).items():
            if parameters[key].annotation in (int, float, "int", "float") and (isinstance(value, (str, bool, list, dict)) or value is None):
                raise UsageError(f"{self.kind} {name!r} takes a number for {key!r}, got {value!r}")
            if parameters[key].annotation in (bool, "bool") and not isinstance(value, bool):
                raise UsageError(f"{self.kind} {name!r} takes true or false for {key!r}, got {value!r}")
        return factory(**named, **options, **given)


NAMED_BY: dict[str, Registry[Any]] = {}  # the registry of each setting whose values are specs


def parse(spec: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `name:1,0.5,key=[1,2]` into its name, positional values and options."""
    name, _, rest = spec.strip().partition(":")
    args: list[Any] = []
    options: dict[str, Any] = {}
    for part in split_at_commas(rest):
        key, equals, text = part.partition("=")
        key = key.strip().replace("-", "_")
        if equals and key in options:
            raise UsageError(f"{spec!r} gives {key!r} twice; remove one of them")
        if equals:
            options[key] = _value(text)
        elif options:
            raise UsageError(f"in {spec!r} the positional value {part!r} follows a named one: write name=value")
        else:
            args.append(_value(part))
    return name, args, options


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if text else []


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text.strip()
    if isinstance(value, str):
        without_nul(f"the value {text!r}", value)  # the value may be a file name, and JSON strings can contain NUL
    return value


def describe(registry: Registry[Any], thing: object) -> str:
    """Return the spec of an object, without the fields that have their default value."""
    if isinstance(thing, str):
        return thing
    name = registry.name_of(thing)
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return name
    parts = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if field.init and field.repr and not _equal(value, field.default):
            parts.append(f"{field.name}={value if isinstance(value, str) else _in_json(value)}")
    return name + (":" + ",".join(parts) if parts else "")


def _in_json(value: object) -> str:
    """Format a value as JSON. Values that JSON cannot hold are replaced by their names, which are the same in every process."""
    try:
        return json.dumps(value, default=_qualified_name)
    except TypeError:  # a dict whose keys are not strings
        return _qualified_name(value)


def _qualified_name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _equal(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _first_option(factory: Any) -> str:
    """Return e.g. `:mu=0.01`, the first option whose default is a number or a string; `:FILE` if it reads a file, else an empty string."""
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.default == "" or getattr(factory, "reads_file", False):
            return ":FILE"
        if isinstance(parameter.default, (int, float, str)) and not isinstance(parameter.default, bool):
            return f":{name}={parameter.default}" if name not in ("seed", "num_clients") else ""
    return ""


def _origin(factory: object) -> tuple[Any, Any]:
    return getattr(factory, "__module__", None), getattr(factory, "__qualname__", factory)


def is_built_in(factory: object) -> bool:
    return str(getattr(factory, "__module__", "")).partition(".")[0] == "mimicfl"


def _settings(thing: object) -> str:
    """Return all attributes of an object as JSON, except the fields that it computes itself."""
    computed = {field.name for field in dataclasses.fields(thing) if not field.init} if dataclasses.is_dataclass(thing) else set()
    return json.dumps({key: value for key, value in vars(thing).items() if key not in computed}, sort_keys=True)
