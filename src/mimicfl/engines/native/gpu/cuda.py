"""Compiles CUDA code with NVRTC, which comes with PyTorch, and launches its kernels."""

import ctypes
import functools
import glob
import os
import sysconfig
from typing import Any

import torch

from ...capabilities import Unsupported

SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Find the compiler library: already loaded, in PyTorch's packages, or in the CUDA toolkit."""
    major = (torch.version.cuda or "12").split(".")[0]
    name = f"libnvrtc.so.{major}"
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [f"{sysconfig.get_paths()['purelib']}/nvidia/*/lib", f"{os.path.dirname(torch.__file__)}/lib"]
    folders += [f"{toolkit}/lib64", f"{toolkit}/targets/*/lib"]
    for path in [name, *[found for folder in folders for found in sorted(glob.glob(f"{folder}/{name}"))]]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unsupported(f"the CUDA compiler library {name} was not found")


def _check(status: int, what: str) -> None:
    if status:
        raise Unsupported(f"{what} failed with CUDA error {status}")


@functools.lru_cache(maxsize=16)
def compile_cuda(source: str, architecture: str) -> bytes:
    """Return the machine code of a source for an architecture such as sm_90."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    # No fast-math: the results must match those of PyTorch up to rounding.
    flags = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"mimicfl.cu", 0, None, None), "creating a CUDA program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if failed:
            raise Unsupported(f"the CUDA compiler refused the generated code ({_first_error(nvrtc, program)})")
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "compiling")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "compiling")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _first_error(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    lines = log.value.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), "no message")[:200]


def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one block can have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


class Kernels:
    """The kernels of a compiled source on one device, which stay loaded for the life of the process."""

    def __init__(self, source: str, device: torch.device) -> None:
        self.device = device
        torch.zeros(1, device=device)  # makes the device's context current
        properties = torch.cuda.get_device_properties(device)
        self.code = compile_cuda(source, f"sm_{properties.major}{properties.minor}")
        self.driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(self.driver.cuModuleLoadData(ctypes.byref(module), self.code), "loading the compiled code")
        self.module = module
        self.functions: dict[str, ctypes.c_void_p] = {}

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[Any]) -> None:
        """Launch a kernel on PyTorch's current stream; `arguments` are ctypes values."""
        if name not in self.functions:
            function = ctypes.c_void_p()
            _check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()), f"finding {name}")
            _check(self.driver.cuFuncSetAttribute(function, SHARED_MEMORY, shared), "reserving shared memory")
            self.functions[name] = function
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in arguments])
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = [blocks, 1, 1, threads, 1, 1, shared]
            _check(self.driver.cuLaunchKernel(self.functions[name], *sizes, stream, pointers, None), f"launching {name}")
