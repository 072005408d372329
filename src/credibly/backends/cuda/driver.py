"""CUDA kernels compiled by the NVRTC that comes with torch, cached on disk, and launched on torch's streams."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from credibly.backends.cuda.code_cache import cached_code

DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    """A failure of the CUDA compiler or driver."""


@functools.cache
def _compiler() -> Any:
    """Return NVRTC, from the system or from the package that torch depends on."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    candidates = [name, *(os.fspath(found) for folder in folders for found in sorted(folder.glob(f"*/lib/{name}")))]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaError(f"cannot find {name}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def compile_kernel(source: str, capability: tuple[int, int]) -> bytes:
    """Return the machine code for GPUs of a compute capability, from the cache on disk if it was compiled before."""
    flags = (f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17")
    version = (ctypes.c_int(), ctypes.c_int())
    _check(_compiler().nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1])), "compiler")
    compiler = f"nvrtc {version[0].value}.{version[1].value}"
    return cached_code((source, *flags, compiler), lambda: _compile(source, flags))


def _compile(source: str, flags: tuple[str, ...]) -> bytes:
    nvrtc, program = _compiler(), ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"credibly.cu", 0, None, None), "compiler")
    try:
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), given)
        if failed:
            raise CudaError(_text(nvrtc, "ProgramLog", program))
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "compiler")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "compiler")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """A kernel on the current device, with the threads and bytes of shared memory per block."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        self.threads, self.shared = threads, shared
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # initialises torch's context
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "loading")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "loading")
        _check(driver.cuFuncSetAttribute(self._function, DYNAMIC_SHARED, ctypes.c_int(shared)), "shared memory")

    def launch(self, blocks: int, arguments: ctypes.Structure, *, cooperative: bool) -> None:
        """Launch on torch's current stream. If `cooperative`, all blocks run at the same time or the launch fails.

        The struct is the only parameter of the kernel, passed by value.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        dimensions = [ctypes.c_uint(v) for v in (blocks, 1, 1, self.threads, 1, 1, self.shared)]
        if cooperative:
            failed = _driver().cuLaunchCooperativeKernel(self._function, *dimensions, stream, parameters)
        else:
            failed = _driver().cuLaunchKernel(self._function, *dimensions, stream, parameters, None)
        _check(failed, "launch")


def _text(nvrtc: Any, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode(errors="replace")


def _check(error: int, action: str) -> None:
    if error:
        raise CudaError(f"CUDA {action} failed with error {error}")
