"""What a run of HMC tells of itself: while it goes on, and in the record that is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from credibly.inference.sampling.hmc import HMCRun


def progress_report(run: HMCRun) -> dict[str, Any]:
    """Per chain: draws, acceptance, divergences, step size."""
    sums, sizes = run.of_all(run.sums, 1), run.of_all(run.size)
    counted = sums[3].clamp(min=1)
    acceptance, divergent = (sums[0] / counted).tolist(), sums[1].tolist()
    after = max(0, run.done - run.warmup)
    return {
        "iteration": run.done,
        "of": run.total,
        "phase": run.phase()[0] if run.done < run.total else "done",
        "chains": [
            {"draws": after // run.options.thin, "acceptance": a, "divergences": int(d), "step_size": float(s)}
            for a, d, s in zip(acceptance, divergent, sizes)
        ],
    }


def run_history(run: HMCRun) -> dict[str, Any]:
    """Phases, step sizes, acceptance, divergences and how the chains were laid out."""
    sums, sizes = run.of_all(run.sums, 1), run.of_all(run.size)
    counted = sums[3].clamp(min=1)
    wanted = torch.ceil(run.length / sizes - 1e-9)
    shortened = run.options.step_size is None and bool((wanted > run.options.max_steps).any())
    path = next(iter(run.trajectories.values()))
    mass = run.inverse_mass
    return {
        "phases": [{"name": n, "first": a, "end": b} for n, a, b in [*run.phases, ("sampling", run.warmup, run.total)]],
        "step_size": sizes.tolist(),
        "trajectory_length": run.length,
        "steps": int(wanted.clamp(max=run.options.max_steps).max()) if run.options.step_size is None else int(wanted.max()),
        "trajectory_shortened": shortened,
        "mass": run.kind,
        "inverse_mass_range": None if mass is None else [float(mass.min()), float(mass.max())],
        "acceptance": (sums[0] / counted).tolist(),
        "divergences": [int(d) for d in sums[1].tolist()],
        "warmup_divergences": [int(d) for d in sums[2].tolist()],
        "gradients": run.gradients,
        "chains_at_once": max(run.trajectories),
        "mesh": list(run.mesh.shape),
        "one_piece": run.target.whole(max(run.trajectories)),
        "compiled": path.compiled,
        "native": path.native is not None,
        "cuda_graph": path.graphed,
        "plan": f"{'looped' if run.target.looped else 'batched'}: {run.target.reason}",
    }  # fmt: skip
