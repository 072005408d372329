"""The C++ beside this file as a library: compiled once on a machine with its own compiler, kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger("credibly")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast")
LIMIT = 300  # seconds that the compiler may take


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had: without a compiler, or with CREDIBLY_NATIVE=0. Asked for once a process."""
    if os.environ.get("CREDIBLY_NATIVE", "1") == "0":
        return None
    compiler = next((found for name in _names() if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(os.fspath(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("without compiled code for small networks: %s", str(error).splitlines()[0][:200])
        return None


def _names() -> list[str]:
    own = shlex.split(os.environ.get("CXX", ""))
    return [*own[:1], "g++", "c++", "clang++"]


def _built(compiler: str) -> Path:
    """The compiled file; made where these sources, compiler and processor have none yet."""
    folder = _folder()
    target = folder / f"mlp-{_key(compiler)}.so"
    if target.exists():
        return target
    # Under a name of its own first: several processes may be at it, and a half-written file must not be found.
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _compile(compiler, name)
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


def _compile(compiler: str, out: str) -> None:
    """Every source by a compiler of its own, all at once, and then the library of them."""
    with tempfile.TemporaryDirectory(prefix="credibly-") as folder:
        parts = {os.path.join(folder, f"{source.stem}.o"): source for source in sorted(FOLDER.glob("*.cpp"))}
        running: list[subprocess.Popen[bytes]] = []
        try:
            for part, source in parts.items():
                words = [compiler, *FLAGS, "-c", "-o", part, os.fspath(source)]
                running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            for one in running:
                one.wait(LIMIT)
        finally:
            for one in running:
                one.kill()
                one.wait()
        failed = next((one.returncode for one in running if one.returncode), 0)
        if failed:
            raise subprocess.CalledProcessError(failed, compiler)
        subprocess.run([compiler, *FLAGS, "-o", out, *parts], capture_output=True, timeout=LIMIT, check=True)


def _folder() -> Path:
    """A folder that only the user can write to; refused otherwise, since what lies there is run."""
    given = os.environ.get("CREDIBLY_CACHE")
    try:
        base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credibly"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a home that cannot be written, or none: for this process alone
        return Path(tempfile.mkdtemp(prefix="credibly-"))
    found = base.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Path(tempfile.mkdtemp(prefix="credibly-"))
    return base


def _key(compiler: str) -> str:
    """Of the sources, the flags, the compiler's version and the processor's abilities."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=LIMIT).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        abilities = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        abilities = platform.processor()
    sources = [path.read_text() for ending in ("cpp", "h") for path in sorted(FOLDER.glob(f"*.{ending}"))]
    text = "\n".join([*sources, *FLAGS, version, platform.machine(), abilities])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
