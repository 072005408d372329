"""The peers: which are installed, and their modules. None is a dependency; looking for them installs nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
import venv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Name of the distribution -> its module.
TORCH_PEERS = {
    "bayesian-torch": "bayesian_torch",
    "torch-uncertainty": "torch_uncertainty",
    "posteriors": "posteriors",
    "pyro-ppl": "pyro",
    "probly": "probly",
    "arviz-stats": "arviz_stats",
}
JAX_PEERS = {"jax": "jax", "blackjax": "blackjax", "numpyro": "numpyro"}


@dataclass(frozen=True)
class Found:
    """A peer with its version, or None and the reason why it is missing."""

    name: str
    version: str | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else f"{self.name}: left out ({self.reason})"


def find(names: dict[str, str] = TORCH_PEERS) -> list[Found]:
    """Return the peers of this environment from their metadata, without importing them."""
    return [_find_one(name, module) for name, module in names.items()]


def _find_one(name: str, module: str) -> Found:
    try:
        if importlib.util.find_spec(module) is None:
            return Found(name, None, "not installed")
        return Found(name, importlib.metadata.version(name))
    except (ImportError, ValueError) as error:
        return Found(name, None, str(error))


def find_jax(python: str | None) -> list[Found]:
    """Return the JAX peers of an interpreter; without one, why there are none."""
    if python is None:
        return [Found(name, None, "no interpreter given with --jax") for name in JAX_PEERS]
    code = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {list(JAX_PEERS)!r}:\n"
        "    try:\n        found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError:\n        pass\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        versions = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [Found(name, None, f"{python} does not respond: {type(error).__name__}") for name in JAX_PEERS]
    return [Found(name, versions.get(name), "not installed there") for name in JAX_PEERS]


def jax_interpreter(given: str | None) -> str | None:
    """Return the given interpreter, or this one if JAX is installed in it."""
    if given is not None:
        return given
    return sys.executable if all(one.version for one in find(JAX_PEERS)) else None


def make_jax(folder: Path) -> str:
    """Create a virtual environment with jax, blackjax and numpyro unless it exists; return its interpreter."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        print(f"creating an environment for the JAX peers in {folder}", flush=True)
        venv.create(folder, with_pip=True)
    if not all(one.version for one in find_jax(str(python))):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *JAX_PEERS], check=True)
    return str(python)


def module(name: str) -> Any:
    """Import a module of a peer without its warnings; None if it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        return None


def single_files(package: str, files: Sequence[str]) -> list[Any] | None:
    """Import modules of a package from their files, without the package's `__init__`; None if one is missing.

    torch-uncertainty and probly import lightning, torchvision and plotting at the top, which these files do not need.
    The folders in between become empty packages, so that the files can import one another.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    loaded = []
    for file in files:
        folders = file.split("/")[:-1]
        for depth in range(len(folders) + 1):
            name = ".".join(["alone", package, *folders[:depth]])
            if name not in sys.modules:
                stand_in = types.ModuleType(name)
                stand_in.__path__ = [str(root.joinpath(*folders[:depth]))]
                sys.modules[name] = stand_in
        try:
            sys.modules.setdefault("alone", types.ModuleType("alone")).__path__ = []  # type: ignore[attr-defined]
            loaded.append(importlib.import_module(".".join(["alone", package, *file.removesuffix(".py").split("/")])))
        except ImportError:
            return None
    return loaded
