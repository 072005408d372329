"""Write data.npz and references.json from a copy of posteriordb (only needed when a posterior is added).

    python -m benchmarks.posteriordb.prepare DIR --jax PYTHON

DIR has posterior_database/. Where it has no reference draws they are recomputed with --jax: ten chains of NumPyro's
NUTS, 1,000 draws each, thinned from 5,000, with the split R-hat of every parameter below 1.01.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.jax_client import JaxSide
from benchmarks.posteriordb.models import POSTERIORS
from benchmarks.posteriordb.reference import DATA, SUMMARIES, Reference, read_data, summarise, to_json
from benchmarks.posteriordb.torch_arrays import TorchArrays
from credibly.diagnostics.convergence import measure

# The same posterior of the same parameters.
SAME = {"eight_schools-eight_schools_centered": "eight_schools-eight_schools_noncentered"}
# Two modes that no sampler crosses: the reference is the mode with mu1 < mu2, mirrored to both.
MIRRORED = ("low_dim_gauss_mix_collapse-low_dim_gauss_mix_collapse",)
LONG = {"warmup": 1500, "draws": 1000, "thin": 5, "target_accept": 0.9}
WORST_RHAT = 1.01


def _json_of(path: Path) -> Any:
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read(file.namelist()[0]))


def data_of(folder: Path, posterior: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the data of a posterior; those of diamonds as a triangular factor, which has the same squares."""
    raw = _json_of(folder / f"data/data/{posterior.rsplit('-', 1)[0]}.json.zip")
    if posterior.startswith("diamonds"):
        x = np.asarray(raw["X"], float)[:, 1:]
        rows = np.column_stack([x - x.mean(0), np.ones(len(x)), raw["Y"]])
        return {"rows": np.asarray(np.linalg.qr(rows, mode="r")), "N": np.asarray(len(x))}
    return {k: _small(np.asarray(v)) for k, v in raw.items()}


def _small(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    whole = values.dtype.kind in "iu" and np.abs(values).max(initial=0) < 2**31
    return values.astype(np.int32) if whole else values.astype(np.float64)


def published(folder: Path, posterior: str) -> Reference | None:
    """Return the summary of posteriordb's reference draws, or None if it has none."""
    path = folder / f"reference_posteriors/draws/draws/{SAME.get(posterior, posterior)}.json.zip"
    if not path.is_file():
        return None
    chains = _json_of(path)
    names = POSTERIORS[posterior](TorchArrays(), read_data(posterior)).names
    draws = torch.tensor([[chain[name] for name in names] for chain in chains], dtype=torch.float64).transpose(1, 2)
    return summarise(draws, names, "posteriordb")


def recomputed(posterior: str, side: JaxSide) -> Reference:
    """Return the summary of a long run of NumPyro's NUTS."""
    data = read_data(posterior)
    model = POSTERIORS[posterior](TorchArrays(), data)
    start = 0.5 * torch.randn(10, model.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if posterior in MIRRORED:
        start[:, 0], start[:, 1] = -start[:, 0].abs() - 1, start[:, 1].abs() + 1
    case = {"sample": "posterior_nuts", "posterior": posterior, "library": "numpyro", "seed": 0, **LONG}
    _, found = side.fetch(**case, theta=start, **{f"data_{k}": v for k, v in data.items()})
    draws = torch.from_numpy(found["draws"])
    quality = measure(draws)
    text = f"R-hat up to {float(quality.rhat.max()):.4f}, ESS from {float(quality.bulk.min()):.0f}"
    print(f"{posterior}: {text}, {int(found['divergent'].sum())} divergences", flush=True)
    if float(quality.rhat.max()) >= WORST_RHAT:
        raise SystemExit(f"{posterior}: the reference has not mixed, {text}")
    if posterior in MIRRORED:
        other = torch.cat([draws[..., [1, 0, 3, 2]], 1 - draws[..., 4:]], -1)
        draws = torch.cat([draws, other], 1)
    return summarise(draws, model.names, f"recomputed: NumPyro {side.versions['numpyro']} NUTS, {text}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a copy of posteriordb")
    parser.add_argument("--jax", required=True, help="interpreter with jax, blackjax and numpyro")
    parser.add_argument("--again", default="", help="posteriors to recompute although there is a summary")
    args = parser.parse_args(argv)
    folder = args.folder / "posterior_database"
    data = {p.rsplit("-", 1)[0]: data_of(folder, p) for p in POSTERIORS}
    flat: dict[str, Any] = {f"{name}/{k}": v for name, arrays in data.items() for k, v in arrays.items()}
    np.savez_compressed(DATA, **flat)
    known = json.loads(SUMMARIES.read_text()) if SUMMARIES.is_file() else {}
    for posterior in POSTERIORS:
        if (found := published(folder, posterior)) is not None:
            known[posterior] = to_json(found)
    _write(known)
    side = JaxSide(args.jax, threads=1)
    for posterior in POSTERIORS:
        if posterior not in known or posterior in args.again.split(","):
            known[posterior] = to_json(recomputed(posterior, side))
            _write(known)
    side.close()


def _write(known: dict[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(p)}: {json.dumps(known[p])}" for p in POSTERIORS if p in known)
    SUMMARIES.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
