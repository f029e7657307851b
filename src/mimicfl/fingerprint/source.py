"""Describe the user's functions by their source code, or by their bytecode if the source has changed since the import."""

import argparse
import ast
import dis
import functools
import hashlib
import inspect
import linecache
import random
import sys
import textwrap
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .installed import is_installed

LIBRARIES = {"mimicfl", "torch", "numpy", "builtins", *sys.stdlib_module_names}

PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, Tensor, np.ndarray, np.generic)
SETTINGS = (list, tuple, dict, set, frozenset, argparse.Namespace, types.SimpleNamespace, functools.partial, types.MethodType)
RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
CODE = (type, types.FunctionType, type(functools.cache(len)))
VALUES = (*PLAIN, *SETTINGS, *RANDOM, nn.Module)


def is_custom(thing: Any) -> bool:
    """Return whether a class or function is the user's code, not part of an installed library."""
    module = str(getattr(thing, "__module__", None) or "builtins")
    if module == "__main__":  # even if the program is an installed tool, such as a test runner
        return True
    return module.partition(".")[0] not in LIBRARIES and not is_installed(getattr(sys.modules.get(module), "__file__", None))


def of_module(module: types.ModuleType) -> str:
    """Return a hash of the source for a module of the user, and the name for any other module."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in LIBRARIES or is_installed(file):
        return module.__name__
    return hashlib.sha256("".join(linecache.getlines(file)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def of_code(code: types.CodeType) -> tuple[str, bool]:
    """Return a description of a function's code, and whether its source is available.

    The description is the syntax tree, or a hash of the bytecode if the source is missing or has been edited since the import.
    """
    if code.co_filename == "<string>":  # made by exec: since Python 3.13, inspect would find the text of a program given with -c instead
        return _compiled(code), False
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return _compiled(code), False
    exact = code.co_name != "<lambda>" and _matches_source(code)  # one line may hold several lambdas
    return _without_comments(text) if exact else _compiled(code), True


def _without_comments(text: str) -> str:
    """Return the source as a syntax tree, without comments, layout and docstrings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # part of a longer statement
        return text
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return repr(_outline(tree))


def _outline(node: Any) -> Any:
    """A syntax tree as nested lists. Empty fields are left out: which of them exist differs between versions of Python."""
    if isinstance(node, ast.AST):
        return [type(node).__name__, *[[name, _outline(value)] for name, value in ast.iter_fields(node) if value not in (None, [])]]
    return [_outline(each) for each in node] if isinstance(node, list) else repr(node)


def _matches_source(code: types.CodeType) -> bool:
    """Return whether the code was compiled from the current source. The file may have been edited after the import."""
    lines = linecache.getlines(code.co_filename)
    compiled = _functions("".join(lines), code.co_filename) if lines else None
    return compiled is None or _compiled(code) in compiled.get((code.co_qualname, code.co_firstlineno), ())


@functools.lru_cache(maxsize=64)
def _functions(text: str, file: str) -> dict[tuple[str, int], list[str]] | None:
    """Return the functions in a source by name and line, or None if it is not plain Python (a notebook cell with magic commands)."""
    try:
        pending = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None
    found: dict[tuple[str, int], list[str]] = {}
    while pending:
        code = pending.pop()
        found.setdefault((code.co_qualname, code.co_firstlineno), []).append(_compiled(code))
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _compiled(code: types.CodeType) -> str:
    """Hash the instructions, the names they use and their constants."""
    consts = [_compiled(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    text = repr([code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, consts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def held_by(function: types.FunctionType) -> list[Any]:
    """Return the values in a function's closure."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def globals_used(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function's result may depend on: values, and other code of the user."""
    names = dict.fromkeys(name for code in _with_inner(function.__code__) for name in _globals_of(code))
    outside = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in outside.items() if _affects_results(value)}


def named_in_modules(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what the code names in modules of the user, whose values a program may set: after `settings.rate = 2` no source shows it."""
    names = dict.fromkeys(name for code in _with_inner(function.__code__) for name in code.co_names)
    modules = [value for value in globals_used(function).values() if isinstance(value, types.ModuleType)]
    found = []
    for module in modules:  # it grows: a package holds modules
        for name in names:
            if name not in vars(module) or not _affects_results(value := vars(module)[name]):
                continue
            if isinstance(value, types.ModuleType):
                modules += [value] if value not in modules else []
            else:
                found.append((name, value))
    return found


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    """Return a function's code and that of the functions inside it."""
    found = [code]
    for each in found:
        found += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]
    return found


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> list[str]:
    """Return the names of the globals that the code loads; `co_names` also contains attribute names."""
    return [str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def _affects_results(value: Any) -> bool:
    """Return True for values, containers of settings and the user's own code and objects; False for library objects (a log, a file)."""
    if isinstance(value, types.ModuleType):
        return of_module(value) != value.__name__
    if isinstance(value, CODE):
        return is_custom(value)
    return isinstance(value, VALUES) or is_custom(type(value))
