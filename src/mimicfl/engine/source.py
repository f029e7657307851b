"""The source code of the user's functions, if it is what really runs."""

import argparse
import ast
import dis
import functools
import hashlib
import inspect
import linecache
import random
import sys
import sysconfig
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIBRARIES = {"mimicfl", "torch", "numpy", "builtins", *sys.stdlib_module_names}
INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, Tensor, np.ndarray, np.generic)
SETTINGS = (list, tuple, dict, set, frozenset, argparse.Namespace, types.SimpleNamespace, functools.partial, types.MethodType)
RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
CODE = (type, types.FunctionType, type(functools.cache(len)))
VALUES = (*PLAIN, *SETTINGS, *RANDOM, nn.Module)


def is_custom(thing: Any) -> bool:
    """Is this class or function the user's, not from an installed library?"""
    module = str(getattr(thing, "__module__", None) or "builtins")
    if module == "__main__":  # also if the program is an installed tool, such as a test runner
        return True
    return module.partition(".")[0] not in LIBRARIES and not _installed(getattr(sys.modules.get(module), "__file__", None))


def _installed(file: str | None) -> bool:
    return file is not None and str(Path(file).resolve()).startswith(INSTALLED)


def of_module(module: types.ModuleType) -> str:
    """The hash of the source of a user's module, the name of any other."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in LIBRARIES or _installed(file):
        return module.__name__
    return hashlib.sha256("".join(linecache.getlines(file)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def of_code(code: types.CodeType) -> tuple[str, bool]:
    """What a function does, and whether its source is known; if the source is not what runs, by its bytecode."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return _compiled(code), False
    exact = code.co_name != "<lambda>" and _is_what_runs(code)  # one line may hold several lambdas
    return _without_comments(text) if exact else _compiled(code), True


def _without_comments(text: str) -> str:
    """The source as a syntax tree, without comments, layout and docstrings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # part of a longer statement
        return text
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _is_what_runs(code: types.CodeType) -> bool:
    """Is the source what the code was compiled from? The file may have been edited after it was imported."""
    lines = linecache.getlines(code.co_filename)
    compiled = _functions("".join(lines), code.co_filename) if lines else None
    return compiled is None or _compiled(code) in compiled.get((code.co_qualname, code.co_firstlineno), ())


@functools.lru_cache(maxsize=64)
def _functions(text: str, file: str) -> dict[tuple[str, int], list[str]] | None:
    """The functions in a source by name and line; None if it is not plain Python (a notebook cell with commands)."""
    try:
        waiting = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None
    found: dict[tuple[str, int], list[str]] = {}
    while waiting:
        code = waiting.pop()
        found.setdefault((code.co_qualname, code.co_firstlineno), []).append(_compiled(code))
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _compiled(code: types.CodeType) -> str:
    """A hash of the instructions, the names they use and their constants."""
    consts = [_compiled(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    text = repr([code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, consts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def held_by(function: types.FunctionType) -> list[Any]:
    """The values of a function's closure."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def globals_used(function: types.FunctionType) -> dict[str, Any]:
    """Globals that a function's result may depend on: values, and other code of the user."""
    names: dict[str, None] = {}
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        names |= dict.fromkeys(_globals_of(code))
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    outside = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in outside.items() if _matters(value)}


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> list[str]:
    """Not all of `co_names`: attributes are named there as well."""
    return [str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def _matters(value: Any) -> bool:
    """Values and settings do, in whatever they are kept, and the user's own objects. Other objects of libraries (a log, a file) do not."""
    if isinstance(value, types.ModuleType):
        return of_module(value) != value.__name__
    if isinstance(value, CODE):
        return is_custom(value)
    return isinstance(value, VALUES) or is_custom(type(value))
