"""Compiling once: a library per network, kept by the hash of everything that went into it.

Two processes that need the same library wait for each other; a killed compile leaves nothing that looks like a result.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...data.download import cache_dir
from ...files import WriteFailed, explained, replacing
from ..support import Unsupported

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# -ffast-math is not used: sums keep their order, so a result does not depend on the compiler's mood.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread", "-w"]
TIMEOUT = 300


def compiler() -> str:
    """The system's C++ compiler: $CXX, g++ or clang++."""
    if sys.platform not in ("linux", "darwin"):
        raise Unsupported(f"the native engine is not made for {sys.platform}")
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise Unsupported("no C++ compiler was found (install g++ or clang++)")


@functools.cache
def identity(program: str) -> str:
    """The compiler's version and what `native` means to it on this processor."""
    try:
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout.splitlines()[:1]
        command = [program, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        macros = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"the C++ compiler {program} does not answer ({error})") from None
    target = sorted(line for line in macros.splitlines() if any(word in line for word in ("AVX", "FMA", "SSE", "NEON", "SVE", "__tune")))
    return "\n".join([*version, platform.machine(), *target])


def library(source: str, extra: tuple[str, ...] = ()) -> Path:
    """The compiled library of this source, from the cache or made now."""
    program = compiler()
    flags = [*FLAGS, *(extra or ("-march=native",))]
    key = hashlib.sha256("\n".join([source, *flags, identity(program)]).encode()).hexdigest()[:24]
    folder = cache_dir() / "native"
    target = folder / f"{key}.so"
    if target.is_file():
        return target
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{key}.lock"):
            if not target.is_file():
                _compile(program, flags, source, target)
    except WriteFailed as error:
        raise Unsupported(f"the library cannot be kept ({error})") from None
    return target


def _compile(program: str, flags: list[str], source: str, target: Path) -> None:
    with replacing(target) as partial:
        try:
            command = [program, *flags, "-x", "c++", "-", "-o", str(partial)]
            done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Unsupported(f"compiling took more than {TIMEOUT} s") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise Unsupported(f"the compiler refused the generated code ({first[:160]})")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its holder, however that ends."""
    if fcntl is None:
        yield
        return
    with explained(lock), lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)


def load(source: str, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile if need be, and load; a library that was damaged in the cache is made anew, once."""
    path = library(source, extra)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(library(source, extra)))
    except OSError as error:
        raise Unsupported(f"the compiled library cannot be loaded ({error})") from None


def open_library(source: str, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a whole network."""
    opened = load(source, extra)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    opened.mimicfl_train.argtypes = [pointer] * 17 + [number, number]
    opened.mimicfl_outputs.argtypes = [pointer] * 3 + [ctypes.c_int64, pointer, number]
    return opened
