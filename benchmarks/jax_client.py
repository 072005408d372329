"""Our side of the JAX peers: a process in another environment that builds contestants and times them when asked."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDE = Path(__file__).parent / "jax_side"


class PeerError(RuntimeError):
    """The other side could not do what it was asked for."""


class JaxSide:
    """The process; `close` ends it. `Setting.jax_side` gives one for the length of a block."""

    def __init__(self, python: str | Path, *, devices: int = 1, threads: int | None = None) -> None:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
        environment.pop("PYTHONPATH", None)
        if threads is not None:
            environment["BENCHMARK_THREADS"] = str(threads)
        if devices > 1:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [str(python), str(SIDE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0
        try:
            self.versions: dict[str, str] = self._read()
        except PeerError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()
        self.folder.cleanup()

    def has(self, name: str) -> bool:
        return name in self.versions

    def ask(self, **what: Any) -> dict[str, Any]:
        """The answer to a request; tensors go along in a file."""
        assert self.process.stdin is not None
        arrays = {k: _plain(v) for k, v in what.items() if isinstance(v, (Tensor, np.ndarray))}
        words = {k: v for k, v in what.items() if k not in arrays}
        if arrays:
            self.count += 1
            words["arrays"] = f"{self.folder.name}/{self.count}.npz"
            np.savez(words["arrays"], **arrays)
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._read()

    def fetch(self, **what: Any) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """The answer to a request that also gives arrays."""
        out = f"{self.folder.name}/out.npz"
        told = self.ask(**what, out=out)
        return told, dict(np.load(out, allow_pickle=False))

    def build(self, kind: str, case: Mapping[str, Any], **arrays: Any) -> Elsewhere:
        """A contestant for `timing.interleaved`, which is timed over there."""
        self.count += 1
        name = f"{kind} {self.count}"
        told = self.ask(build=kind, name=name, **case, **arrays)
        return Elsewhere(self, name, told)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError("the interpreter with JAX ended; is jax installed there?")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(found["error"])
        return found


class Elsewhere:
    """A contestant in the other process; `turn` gives seconds a call, `told` what it said when it was built."""

    def __init__(self, side: JaxSide, name: str, told: dict[str, Any]) -> None:
        self.side, self.name, self.told = side, name, told

    def __call__(self) -> None:
        self.turn(1)

    def turn(self, calls: int) -> float:
        return float(self.side.ask(run=self.name, calls=calls)["seconds"]) / calls


def _plain(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def check_density(side: JaxSide, case: Mapping[str, Any], problem: Any, theta: Tensor) -> None:
    """Both sides give the same gradient, and the same differences of the log density, at the given points."""
    theta = torch.cat([theta, 0.5 * theta])
    _, found = side.fetch(density="networks", **case, x=problem.x, y=problem.y, theta=theta)
    ours = problem.log_density_and_grad(theta)
    value, gradient = ours.log_density, ours.gradient
    theirs = torch.from_numpy(found["gradient"].astype(np.float64))
    apart = float((theirs - gradient.cpu().double()).norm() / gradient.double().norm())
    # Constants are left out over there, so differences are compared.
    both = torch.from_numpy(found["log_density"].astype(np.float64)), value.cpu().double()
    rises = [v - v[0] for v in both]
    far = float((rises[0] - rises[1]).abs().max() / both[1].abs().max())
    if not (apart < 1e-3 and far < 1e-4):
        raise SystemExit(f"JAX has another density: gradient {apart:.2g}, value {far:.2g} away: nothing to compare")
