"""Checks that a problem is the one a run folder was started with: data, parts, and what its network computes."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch

from credibly.core.inputs import map_inputs, row_count
from credibly.core.rng import stream
from credibly.core.specs import to_spec
from credibly.errors import StoreError
from credibly.inference.density import Density
from credibly.networks.layout import layout_mismatch
from credibly.posterior.model import Model
from credibly.posterior.saving import header
from credibly.problem import Problem
from credibly.storage.record import Record

# Rows and outputs that distinguish networks of the same shape.
ROWS, VALUES = 4, 16
# Relative tolerances: tensor cores and other machines round differently.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}


def identity(problem: Problem | Density) -> dict[str, Any]:
    """Return the entries of a manifest that identify a problem, in addition to its model."""
    if isinstance(problem, Density):
        scale = hashlib.sha256(problem.scale.cpu().numpy().tobytes()).hexdigest()[:16]
        facts: dict[str, Any] = {
            "density": {"name": problem.name, "dim": problem.dim, "scale": scale},
            "dtype": str(problem.dtype),
        }
    else:
        facts = {"plan": "looped" if problem.forward.looped else "batched", "micro_batch": problem.micro_batch}
    return {**facts, "arithmetic": arithmetic(problem), "probe": probe(problem)}


def arithmetic(problem: Problem | Density) -> dict[str, Any]:
    """Return everything besides the problem that rounding depends on."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(problem.device)}
    if problem.device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    if problem.device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(problem.device)
        found["float32 products"] = torch.get_float32_matmul_precision()
    return found


def probe(problem: Problem | Density) -> list[float]:
    """Return a few outputs of the network, or values of the density, at fixed points."""
    with torch.no_grad():
        if isinstance(problem, Density):
            points = (
                torch.randn(4, problem.dim, generator=stream(0, "probe"), dtype=torch.float64) * problem.scale.cpu()
            )
            values = problem(points.to(problem.device, problem.dtype))
        else:
            layout, rows = problem.layout, min(ROWS, row_count(problem.sample.x))
            width = torch.cat([torch.full((e.stop - e.start,), e.fan_in, dtype=torch.float64) for e in layout.entries])
            theta = torch.randn(layout.dim, generator=stream(0, "probe"), dtype=torch.float64) / width.sqrt()
            values = problem.forward(
                theta.to(problem.device, layout.dtype).unsqueeze(0), map_inputs(lambda t: t[:rows], problem.sample.x)
            )
    return [float(v) for v in values.flatten()[:VALUES].double().cpu()]


def check_same(problem: Problem | Density, manifest: dict[str, Any], name: str) -> None:
    """Raise, listing the differences, unless this is the problem that the folder was started with."""
    differs = (
        _density_differs(problem, manifest) if isinstance(problem, Density) else _problem_differs(problem, manifest)
    )
    if differs is not None:
        raise StoreError(
            f"path: {name!r} was started with another problem: {differs}. Pass the original problem, or choose another "
            "folder"
        )


def check_fixed(problem: Problem, stored: dict[str, torch.Tensor], name: str) -> None:
    """Raise if fixed parameters or buffers of the network differ from those stored in the folder."""
    for key, tensor in problem.layout.fixed().items():
        if not torch.equal(stored[f"fixed/{key}"], tensor.cpu()):
            raise StoreError(
                f"path: {name!r} was started with another problem: the values of {key}, which is not random, differ. "
                "Pass the network with its original values"
            )


def _problem_differs(problem: Problem, manifest: dict[str, Any]) -> str | None:
    if manifest["kind"] == "density":
        return "the folder holds a run on a plain density, this problem has a network"
    stored, facts = manifest["record"], identity(problem)
    record = Record(
        n=problem.n,
        fingerprint=problem.fingerprint(),
        prior=to_spec(problem.prior_spec),
        tempering={"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior},
    )
    now = header(Model.of(problem), "draws", record)
    if now["layout"] != manifest["layout"]:
        return layout_mismatch(now["layout"], manifest["layout"])
    pairs = [
        ("dtype", now["dtype"], manifest["dtype"]),
        ("likelihood", now["likelihood"], manifest["likelihood"]),
        ("prior", record.prior, stored["prior"]),
        ("temperature", record.tempering, stored["tempering"]),
        ("rows", record.n, stored["n"]),
        ("plan", facts["plan"], manifest["plan"]),
        ("micro_batch", facts["micro_batch"], manifest["micro_batch"]),
        ("precision", now["precision"], manifest["precision"]),
    ]
    for name, mine, theirs in pairs:
        if _plain(mine) != _plain(theirs):
            return f"{name} is {_short(mine)}, in the folder {_short(theirs)}"
    if record.fingerprint != stored["fingerprint"]:
        return "the data differ (same number of rows, different values)"
    if not _close(facts["probe"], manifest["probe"], problem.layout.dtype):
        return "the network computes a different function (same shapes, another activation or forward)"
    return None


def _density_differs(density: Density, manifest: dict[str, Any]) -> str | None:
    if manifest["kind"] != "density":
        return "the folder holds a run on a network, this problem is a plain density"
    facts = identity(density)
    for name in ("name", "dim", "scale"):
        if facts["density"][name] != manifest["density"][name]:
            if name == "scale":
                return "the scale of the density differs"
            return (
                f"the {name} of the density is {facts['density'][name]!r}, in the folder {manifest['density'][name]!r}"
            )
    if facts["dtype"] != manifest["dtype"]:
        return f"dtype is {facts['dtype']}, in the folder {manifest['dtype']}"
    if not _close(facts["probe"], manifest["probe"], density.dtype):
        return "the density has different values at the same points"
    return None


def _close(mine: list[float], stored: list[float], dtype: torch.dtype) -> bool:
    if len(mine) != len(stored):
        return False
    a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(stored, dtype=torch.float64)
    reach = float(b[torch.isfinite(b)].abs().max()) if bool(torch.isfinite(b).any()) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=CLOSE.get(dtype, 0.05) * reach, equal_nan=True)


def _plain(value: Any) -> Any:
    """Return the value as JSON, without the memory addresses in the repr of a user's objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
