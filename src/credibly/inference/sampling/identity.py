"""Whether a problem is the one that a run folder was begun with: its data, its parts, and what its network computes."""

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
from credibly.posterior.loading import layout_mismatch
from credibly.posterior.model import Model
from credibly.posterior.saving import header
from credibly.problem import Problem
from credibly.storage.record import Record

ROWS, VALUES = 4, 16  # rows and outputs that tell one network from another of the same shape
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative; tensor cores and other machines round in other ways


def identity(problem: Problem | Density) -> dict[str, Any]:
    """What a manifest notes of a problem beside its model, to know it again."""
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
    """What the last bits of a result depend on, beside the problem."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(problem.device)}
    if problem.device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    if problem.device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(problem.device)
        found["float32 products"] = torch.get_float32_matmul_precision()
    return found


def probe(problem: Problem | Density) -> list[float]:
    """A few outputs of the network, or values of the density, at points that are always the same."""
    with torch.no_grad():
        if isinstance(problem, Density):
            points = (
                torch.randn(4, problem.dim, generator=stream(0, "probe"), dtype=torch.float64) * problem.scale.cpu()
            )
            values = problem(points.to(problem.device, problem.dtype))
        else:
            layout, rows = problem.layout, min(ROWS, row_count(problem.x))
            width = torch.cat([torch.full((e.stop - e.start,), e.fan_in, dtype=torch.float64) for e in layout.entries])
            theta = torch.randn(layout.dim, generator=stream(0, "probe"), dtype=torch.float64) / width.sqrt()
            values = problem.forward(
                theta.to(problem.device, layout.dtype).unsqueeze(0), map_inputs(lambda t: t[:rows], problem.x)
            )
    return [float(v) for v in values.flatten()[:VALUES].double().cpu()]


def check_same(problem: Problem | Density, manifest: dict[str, Any], name: str) -> None:
    """Refuses a problem other than the one the folder was begun with, and says what differs."""
    differs = (
        _density_differs(problem, manifest) if isinstance(problem, Density) else _problem_differs(problem, manifest)
    )
    if differs is not None:
        raise StoreError(
            f"path: {name!r} was begun with another problem: {differs}. Pass the problem it was begun with, or begin anew in another "
            "folder"
        )


def check_fixed(problem: Problem, stored: dict[str, torch.Tensor], name: str) -> None:
    """Refuses a network whose fixed parameters or buffers have other values than the folder's."""
    for key, tensor in problem.layout.fixed().items():
        if not torch.equal(stored[f"fixed/{key}"], tensor.cpu()):
            raise StoreError(
                f"path: {name!r} was begun with another problem: the values of {key}, which is not random, differ. Pass the "
                "network with the values it had"
            )


def _problem_differs(problem: Problem, manifest: dict[str, Any]) -> str | None:
    if manifest["kind"] == "density":
        return "it is of a plain density, and this is a network's"
    stored, facts = manifest["record"], identity(problem)
    record = Record(
        n=problem.n, fingerprint=problem.fingerprint(), prior=to_spec(problem.prior_spec),
        tempering={"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior},
    )  # fmt: skip
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
            return f"{name}: found {_short(mine)}, the folder has {_short(theirs)}"
    if record.fingerprint != stored["fingerprint"]:
        return "the data differ (same number of rows, other values)"
    if not _close(facts["probe"], manifest["probe"], problem.layout.dtype):
        return "the network computes something else (same shapes, another activation or forward)"
    return None


def _density_differs(density: Density, manifest: dict[str, Any]) -> str | None:
    if manifest["kind"] != "density":
        return "it is a network's, and this is a plain density"
    facts = identity(density)
    for name in ("name", "dim", "scale"):
        if facts["density"][name] != manifest["density"][name]:
            shown = (
                f": found {facts['density'][name]!r}, the folder has {manifest['density'][name]!r}"
                if name != "scale"
                else ""
            )
            return f"the {name} of the density differs{shown}"
    if facts["dtype"] != manifest["dtype"]:
        return f"dtype: found {facts['dtype']}, the folder has {manifest['dtype']}"
    if not _close(facts["probe"], manifest["probe"], density.dtype):
        return "the density has other values"
    return None


def _close(mine: list[float], stored: list[float], dtype: torch.dtype) -> bool:
    if len(mine) != len(stored):
        return False
    a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(stored, dtype=torch.float64)
    reach = float(b[torch.isfinite(b)].abs().max()) if bool(torch.isfinite(b).any()) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=CLOSE.get(dtype, 0.05) * reach, equal_nan=True)


def _plain(value: Any) -> Any:
    """As JSON has it, without the addresses that Python shows of objects of a user's own class."""
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
