"""Compiles one library per network and stores it under a hash of everything that determines it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..capabilities import Unsupported
from .cache import OTHER_FOLDER, Cache, compile_cache

# No -ffast-math: sums keep their order, so that results do not depend on the compiler's optimisations.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread", "-w"]
TIMEOUT = 300


def compiler() -> str:
    """Find the system's C++ compiler: $CXX, g++ or clang++."""
    if sys.platform not in ("linux", "darwin"):
        raise Unsupported(f"the native engine does not support {sys.platform}")
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return os.path.abspath(found)  # absolute, since the compiler runs in another folder
    raise Unsupported("no C++ compiler was found (install g++ or clang++)")


def _run(command: list[str], timeout: float, source: str = "", **settings: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, input=source, timeout=timeout, capture_output=True, encoding="utf-8", errors="replace", **settings)


@functools.cache
def identity(program: str) -> str:
    """Return the compiler's version and the processor features that -march=native enables."""
    try:
        version = _run([program, "--version"], 30).stdout.splitlines()[:1]
        command = [program, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        macros = _run(command, 30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"the C++ compiler {program} does not run ({error})") from None
    target = sorted(line for line in macros.splitlines() if any(word in line for word in ("AVX", "FMA", "SSE", "NEON", "SVE", "__tune")))
    return "\n".join([*version, platform.machine(), *target])


def library(source: str) -> Path:
    """Return the path of the compiled library of this source; compile it if it is not in the cache."""
    program = compiler()
    with compile_cache() as cache:
        return cache.path / _compiled(cache, program, source, ())


def load(source: str, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library of this source; compile it first if it is not in the cache."""
    program = compiler()
    with compile_cache() as cache:
        name = _compiled(cache, program, source, extra)
        try:
            return ctypes.CDLL(cache.reach(name))
        except OSError as error:
            raise Unsupported(f"the compiled library {cache.path / name} cannot be loaded ({error}); {OTHER_FOLDER}") from None


def _compiled(cache: Cache, program: str, source: str, extra: tuple[str, ...]) -> str:
    """Return the name of the library in the cache; compile it if it is missing."""
    flags = [*FLAGS, *(extra or ("-march=native",))]
    key = hashlib.sha256("\n".join([source, *flags, identity(program)]).encode()).hexdigest()[:24]
    if name := cache.find(key):
        return name
    with cache.compiling(key) as locks:
        return cache.find(key) or _compile(cache, [program, *flags], source, key, locks)


def _compile(cache: Cache, command: list[str], source: str, key: str, locks: tuple[int, ...]) -> str:
    partial = cache.partial(key)
    try:
        # The compiler inherits the locks: if the parent is killed, they must last until the compiler ends.
        command = [*command, "-x", "c++", "-", "-o", partial]
        done = _run(command, TIMEOUT, source, cwd=cache.reach(), pass_fds=locks)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise Unsupported(f"the compiler refused the generated code ({first[:160]})")
        return cache.keep(key, partial)
    except subprocess.TimeoutExpired:
        raise Unsupported(f"compiling took more than {TIMEOUT} s") from None
    finally:
        cache.drop(partial)


def open_library(source: str, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library of a whole network and declare its functions."""
    opened = load(source, extra)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    opened.mimicfl_train.argtypes = [pointer] * 18 + [number, number]
    opened.mimicfl_outputs.argtypes = [pointer] * 3 + [ctypes.c_int64, pointer, number]
    return opened
