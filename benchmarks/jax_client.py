"""Client of the JAX peers: a process in another environment that builds and times implementations on request."""

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
    """A request that the JAX process could not serve."""


class JaxSide:
    """The JAX process; `close` ends it. `Setting.jax_side` provides one for the duration of a block.

    Args:
        python: its interpreter.
        devices: number of XLA devices to create on the CPU.
        threads: cores that it may use; None for all.
        wheels: a folder of unpacked packages that the interpreter lacks.
        platform: "cpu" or "cuda"; None leaves the choice to JAX.
    """

    def __init__(
        self,
        python: str | Path,
        *,
        devices: int = 1,
        threads: int | None = None,
        wheels: str | Path | None = None,
        platform: str | None = None,
    ) -> None:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
        environment.pop("PYTHONPATH", None)
        if threads is not None:
            environment["BENCHMARK_THREADS"] = str(threads)
        if wheels is not None:
            environment["BENCHMARK_WHEELS"] = str(Path(wheels).resolve())
        if platform is not None:
            environment["JAX_PLATFORMS"] = platform
            # By default JAX takes most of the memory of a GPU, which torch and a second process share with it.
            environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
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
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()
        self.folder.cleanup()

    def has(self, name: str) -> bool:
        return name in self.versions

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Send a request and return the response; tensors travel in a file."""
        assert self.process.stdin is not None
        arrays = {k: _to_numpy(v) for k, v in fields.items() if isinstance(v, (Tensor, np.ndarray))}
        request = {k: v for k, v in fields.items() if k not in arrays}
        if arrays:
            self.count += 1
            request["arrays"] = f"{self.folder.name}/{self.count}.npz"
            np.savez(request["arrays"], **arrays)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def fetch(self, **fields: Any) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Send a request whose response includes arrays."""
        out = f"{self.folder.name}/out.npz"
        response = self.ask(**fields, out=out)
        return response, dict(np.load(out, allow_pickle=False))

    def build(self, kind: str, case: Mapping[str, Any], **arrays: Any) -> RemoteCall:
        """Build an implementation for `timing.interleaved` that is timed in the JAX process."""
        self.count += 1
        name = f"{kind} {self.count}"
        info = self.ask(build=kind, name=name, **case, **arrays)
        return RemoteCall(self, name, info)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError("the JAX interpreter exited; is jax installed there?")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(found["error"])
        return found


class RemoteCall:
    """An implementation in the JAX process; `info` is what building it returned."""

    def __init__(self, side: JaxSide, name: str, info: dict[str, Any]) -> None:
        self.side, self.name, self.info = side, name, info

    def __call__(self) -> None:
        self.time_calls(1)

    def time_calls(self, calls: int) -> float:
        """Return the seconds per call."""
        return float(self.side.ask(run=self.name, calls=calls)["seconds"]) / calls


def _to_numpy(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def check_density(
    side: JaxSide, case: Mapping[str, Any], problem: Any, theta: Tensor, *, module: str = "networks", **arrays: Tensor
) -> None:
    """Exit unless both sides give the same gradient and the same differences of the log density at the given points.

    `module` is the one of the JAX side that defines the density, `arrays` are what it needs beside the data.
    """
    theta = torch.cat([theta, 0.5 * theta])
    _, found = side.fetch(density=module, **case, x=problem.x, y=problem.y, theta=theta, **arrays)
    ours = problem.log_density_and_grad(theta)
    value, gradient = ours.log_density, ours.gradient
    theirs = torch.from_numpy(found["gradient"].astype(np.float64))
    gradient_error = float((theirs - gradient.cpu().double()).norm() / gradient.double().norm())
    # The JAX side omits constants, so differences are compared.
    both = torch.from_numpy(found["log_density"].astype(np.float64)), value.cpu().double()
    changes = [v - v[0] for v in both]
    value_error = float((changes[0] - changes[1]).abs().max() / both[1].abs().max())
    if not (gradient_error < 1e-3 and value_error < 1e-4):
        errors = f"relative error {gradient_error:.2g} of the gradient, {value_error:.2g} of the value"
        raise SystemExit(f"JAX computes another density ({errors}): nothing to compare")
