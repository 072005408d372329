"""CUDA code compiled while the program runs, by the compiler that comes with torch, and its kernels launched on torch's streams."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("credibly")
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BLOCKS_KNOWN = "cuOccupancyMaxActiveBlocksPerMultiprocessor"


class CudaError(RuntimeError):
    """What the compiler or the driver could not do."""


@functools.cache
def _compiler() -> Any:
    """NVRTC: from where the system finds it, or from the package that torch brings."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    candidates = [name, *(os.fspath(found) for folder in folders for found in sorted(folder.glob(f"*/lib/{name}")))]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaError(f"{name} was not found")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """Machine code for GPUs of that compute capability."""
    nvrtc, program = _compiler(), ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"credibly.cu", 0, None, None), "compiler")
    try:
        flags = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
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
    """A kernel of compiled code, for blocks of so many threads with so much shared memory, on the current device."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        self.threads, self.shared = threads, shared
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # makes torch's context current
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "loading")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "loading")
        _check(driver.cuFuncSetAttribute(self._function, DYNAMIC_SHARED, ctypes.c_int(shared)), "shared memory")

    def blocks_at_once(self) -> int:
        """Blocks that one multiprocessor holds at a time."""
        count = ctypes.c_int()
        ask = getattr(_driver(), BLOCKS_KNOWN)
        _check(
            ask(ctypes.byref(count), self._function, ctypes.c_int(self.threads), ctypes.c_size_t(self.shared)), "asking"
        )
        return count.value

    def launch(self, blocks: int, arguments: Sequence[Any], *, together: bool) -> None:
        """On torch's current stream. `together`: all blocks run at the same time, or the launch fails."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        dimensions = [ctypes.c_uint(v) for v in (blocks, 1, 1, self.threads, 1, 1, self.shared)]
        if together:
            failed = _driver().cuLaunchCooperativeKernel(self._function, *dimensions, stream, places)
        else:
            failed = _driver().cuLaunchKernel(self._function, *dimensions, stream, places, None)
        _check(failed, "launch")


def _text(nvrtc: Any, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, held)
    return held.value.decode(errors="replace")


def _check(failed: int, doing: str) -> None:
    if failed:
        raise CudaError(f"{doing} failed with CUDA error {failed}")
