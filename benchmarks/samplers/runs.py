"""The runs of the benchmark and their file: one record per sampler, posterior and repetition, written as it ends."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jax_client import PeerError
from benchmarks.samplers import measures, ours, settings
from benchmarks.samplers.peers import Peers
from benchmarks.samplers.posterior import Posterior, load
from credibly.errors import InputError, SamplingError

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The plan of a benchmark: which posteriors and samplers to run, for how long and how often."""

    root: Path
    sets: tuple[str, ...]
    ours: dict[str, dict[str, Any]]
    peers: dict[str, dict[str, Any]]
    device: str = "cpu"
    chains: int = 4
    budget: float = 60.0
    repeats: int = 3
    init: str = "fresh"
    out: Path | None = None

    def key(self, name: str, sampler: str, seed: int) -> str:
        """Return the key of a run in the file."""
        return f"{self.device}/{name}/{sampler}/{self.chains} chains/{self.budget:g} s/{self.init}/{seed}"


def read(path: Path | None) -> Record:
    """Return the record in a file, or an empty one."""
    if path is None or not path.is_file():
        return {"benchmark": "samplers", "machine": {}, "versions": {}, "runs": {}}
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(record: Record, path: Path | None) -> None:
    """Write the record under a temporary name and rename it into place."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def merge(paths: list[Path]) -> Record:
    """Return one record with the runs of several files; a later file replaces runs of an earlier one."""
    record = read(None)
    for path in paths:
        found = read(path)
        record["machine"] |= found["machine"]
        record["versions"] |= found["versions"]
        record["runs"] |= found["runs"]
    return record


def run_all(plan: Plan, record: Record, peers: Peers) -> None:
    """Run everything that the record does not have yet with these settings.

    A sampler that fails leaves the reason and is tried again.
    """
    for name in plan.sets:
        posterior = load(plan.root, name, plan.chains, init=plan.init, device=plan.device)
        for seed in range(plan.repeats):
            for sampler in (*plan.ours, *plan.peers):
                key, entry = plan.key(name, sampler, seed), {**plan.ours, **plan.peers}[sampler]
                known = record["runs"].get(key, {})
                if "seconds" in known and known["entry"] == entry:
                    continue
                record["runs"][key] = one_run(plan, posterior, sampler, seed, peers)
                record["versions"] |= peers.versions
                write(record, plan.out)
                print(line(record["runs"][key]), flush=True)


def one_run(plan: Plan, posterior: Posterior, sampler: str, seed: int, peers: Peers) -> Record:
    """Return the record of one run, or of its failure."""
    mine = sampler in plan.ours
    about: Record = {
        "data": posterior.name,
        "sampler": sampler,
        "side": "credibly" if mine else settings.library(sampler),
        "entry": {**plan.ours, **plan.peers}[sampler],
        "seed": seed,
        "device": plan.device,
        "chains": plan.chains,
        "budget": plan.budget,
        "init": plan.init,
        "start_seconds": posterior.start_seconds,
        "comparable": sampler not in settings.OTHER_DENSITY,
    }
    try:
        if mine:
            arrays, info = ours.run(plan.ours[sampler], posterior, seed, plan.budget)
        else:
            arrays, info = peers.run(sampler, plan.peers[sampler], posterior, seed, plan.budget)
    except (PeerError, InputError, SamplingError) as error:
        return {**about, "error": str(error).strip().splitlines()[0]}
    found = measures.measured(
        arrays["functions"], arrays["log_noise"], posterior.y_test, posterior.y_std, info["seconds"], info["gradients"]
    )
    return {**about, **info, **found}


def line(run: Record) -> str:
    """Return one line about a run for the terminal."""
    head = f"{run['data']:<10} {run['sampler']:<30} seed {run['seed']}: "
    if "error" in run:
        return head + f"left out ({run['error']})"
    if run["ess_worst"] is None:
        return head + f"{run['seconds']:.1f} s, {run['draws']} draws: too few, or not finite"
    rhat = "inf" if run["rhat_worst"] is None else f"{run['rhat_worst']:.3f}"
    return head + (
        f"{run['seconds']:.1f} s (+ {run['compile']:.1f} s compile), {run['gradients']:.3g} gradients, "
        f"{run['draws']} draws, ESS {run['ess_worst']:.0f} worst {run['ess_median']:.0f} median, "
        f"R-hat {rhat}, log-likelihood {run['log_likelihood']:.3f}"
    )
