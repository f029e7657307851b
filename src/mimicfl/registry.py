"""Things with names: one small language for algorithms, availability, partitions, models and rates.

`bounded:20,phase=random` is a name, positional arguments and keyword arguments. The same text works on the
command line and in TOML; `Registry.make` turns it into the object, `describe` turns the object back into the text.
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
    """Names of one kind of thing, e.g. `Registry("algorithm")`.

    Where settings name such things, `settings` says which, and what they name may be given as an object that `is_one` says yes to.
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
        """`register("mine", Mine)`, or as a decorator: `@register("mine")`."""
        if factory is None:
            return lambda it: self.register(name, it)
        if not isinstance(name, str) or not name or not callable(factory):
            raise UsageError(f"register a {self.kind} as register('name', Class), got {name!r} and {factory!r}")
        if not re.fullmatch(r"[\w.+-]+", name) or name in ("auto", "local"):
            raise UsageError(
                f"{name!r} cannot be the name of a {self.kind}: use letters, digits, '_', '-', '.', and neither 'auto' nor 'local'"
            )
        there = self.factories.get(name)
        if there is not None and _ours(there) and _origin(there) != _origin(factory):  # reports would call it by the other's name
            raise UsageError(f"{self.kind} {name!r} is mimicfl's own: register yours under another name")
        self.factories[name] = factory
        return factory

    def find(self, name: str) -> Callable[..., T]:
        if not isinstance(name, str) or name not in self.factories:
            raise UsageError(f"{self.kind} {name!r} is unknown; {nearest(str(name), self.factories)}")
        return self.factories[name]

    def name_of(self, thing: object) -> str:
        """The name a thing's class (or the function itself) is registered under, else the class's own name."""
        for name, factory in self.factories.items():
            if factory is thing or factory is type(thing):
                return name
        return getattr(thing, "__name__", type(thing).__name__)

    def spell(self, thing: object) -> str:
        """The spec that makes a thing, or a thing of a class, again; what a run is kept by must mean the same in another process.

        A class that was not registered is from here on, under its own name.
        """
        if isinstance(thing, str):
            return thing
        if not self.is_one(thing):
            raise UsageError(f"{self.kind} must be {self.wanted}, got {thing!r}")
        kind = thing if isinstance(thing, type) else type(thing)
        name = self.name_of(thing)
        there = self.factories.get(name, kind)
        if there is not kind and _origin(there) != _origin(kind):  # the same origin: a class that was defined again, as in a notebook
            raise UsageError(f"another {self.kind} has the name {name!r}: register {kind.__qualname__} under a name of its own")
        self.register(name, kind)
        spec = describe(self, thing)
        try:
            complete = thing is kind or _settings(self.make(spec)) == _settings(thing)
        except Exception:  # an own class may do anything with what it reads
            complete = False
        if not complete:
            remedy = getattr(kind, "in_words", f"make {kind.__qualname__} a dataclass whose fields are numbers, lists and words")
            raise UsageError(f"{self.kind} {spec!r} does not say in words all that the object was made with: {remedy}")
        return spec

    def meaning(self, spec: str) -> str:
        """One text for all spellings of a thing: `fedau:20` and `fedau:cutoff=20` are the same. A name not known yet is its own."""
        return describe(self, self.make(spec)) if parse(spec)[0] in self.factories else spec

    def make(self, spec: str, **context: Any) -> T:
        """Build the thing that `spec` names.

        `context` holds what the caller knows (labels, a seed, ...); a factory is handed those it has parameters for,
        and the spec's positional arguments fill the remaining parameters in order.
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
                known = f"it has: {', '.join(free)}" if free else "it has none"
                raise UsageError(f"{self.kind} {name!r} has no option {key!r}; {known}")
        if spread:
            return factory(*args, **options, **given)
        if len(args) > len(in_order):
            raise UsageError(f"{self.kind} {spec!r} has too many values; {name} takes {', '.join(in_order) or 'none'}")
        named = dict(zip(in_order, args, strict=False))
        if twice := named.keys() & options.keys():
            raise UsageError(f"{self.kind} {spec!r} gives {twice.pop()!r} twice")
        missing = [p for p in free if parameters[p].default is inspect.Parameter.empty and p not in named | options]
        if missing:
            raise UsageError(f"{self.kind} {name!r} needs {missing[0]!r}, as in {name}:{missing[0]}=...")
        for key, value in (named | options).items():
            if parameters[key].annotation in (int, float, "int", "float") and (isinstance(value, (str, bool, list, dict)) or value is None):
                raise UsageError(f"{self.kind} {name!r} takes a number for {key!r}, got {value!r}")
            if parameters[key].annotation in (bool, "bool") and not isinstance(value, bool):
                raise UsageError(f"{self.kind} {name!r} takes true or false for {key!r}, got {value!r}")
        return factory(**named, **options, **given)


NAMED_BY: dict[str, Registry[Any]] = {}  # which registry's names a setting takes


def parse(spec: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `name:1,0.5,key=[1,2]` into its name, positional values and options."""
    name, _, rest = spec.strip().partition(":")
    args: list[Any] = []
    options: dict[str, Any] = {}
    for part in split_at_commas(rest):
        key, equals, text = part.partition("=")
        key = key.strip().replace("-", "_")
        if equals and key in options:
            raise UsageError(f"{spec!r} gives {key!r} twice")
        if equals:
            options[key] = _value(text)
        elif options:
            raise UsageError(f"in {spec!r} the bare value {part!r} follows a named one: write name=value")
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
        without_nul(f"the value {text!r}", value)  # it may name a file, and JSON can express characters that no file name allows
    return value


def describe(registry: Registry[Any], thing: object) -> str:
    """The spec of a thing; fields that still have their default value are left out."""
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
    """What JSON has no word for is told by its name: the same in every process."""
    try:
        return json.dumps(value, default=_named)
    except TypeError:  # keys that are no texts
        return _named(value)


def _named(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _equal(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _origin(factory: object) -> tuple[Any, Any]:
    return getattr(factory, "__module__", None), getattr(factory, "__qualname__", factory)


def _ours(factory: object) -> bool:
    return str(getattr(factory, "__module__", "")).partition(".")[0] == "mimicfl"


def _settings(thing: object) -> str:
    """What a thing was made with: all it holds but the fields it computes itself."""
    computed = {field.name for field in dataclasses.fields(thing) if not field.init} if dataclasses.is_dataclass(thing) else set()
    return json.dumps({key: value for key, value in vars(thing).items() if key not in computed}, sort_keys=True)
