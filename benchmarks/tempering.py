"""Whether parallel tempering helps on networks: predictions of test rows at equal gradients, against plain HMC.

python -m benchmarks.tempering --root FOLDER            # UCI data sets; --names yacht, --temperatures 6, --hottest 2

Three runs per data set take the same number of gradients, warm-up included: ladders of parallel tempering, HMC with as
many chains as there are replicas, and HMC with as many chains as there are ladders, each that many times as long.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import credibly as cr
from credibly.posterior.draws import SampledPosterior
from credibly.predictive.rescaling import in_units
from credibly.tables.recipe import Recipe

LINE = "| {} | {} | {} | {} | {} | {} | {} | {} |"
HEAD = ("data", "run", "gradients", "R-hat, worst row", "median", "ESS, worst row", "median", "test log density")
# Trajectories of all runs.
PATH: dict[str, Any] = {"trajectory_length": 0.5, "refresh": 0.3, "jitter": 0.2, "init": "fresh", "max_steps": 64}


def describe(name: str, run: str, posterior: SampledPosterior, known: Any) -> str:
    """Return the row of a run."""
    found = posterior.diagnostics(known.x_test).functions
    assert found is not None
    y = known.y_test[:, 0].double() * known.y_std + known.y_mean
    density = in_units(posterior.predict(known.x_test), known.y_mean, known.y_std).log_prob(y).mean()
    spent = f"{posterior.record.history['gradients'] / 1000:,.0f} k"
    rhat, ess = (found.rhat_worst, found.rhat_median), (found.ess_bulk_min, found.ess_bulk_median)
    return LINE.format(name, run, spent, *(f"{r:.3f}" for r in rhat), *(f"{e:,.0f}" for e in ess), f"{density:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--names", default="yacht,energy,concrete")
    parser.add_argument("--ladders", type=int, default=4)
    parser.add_argument("--temperatures", type=int, default=6)
    parser.add_argument("--hottest", type=float, default=None)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--draws", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(LINE.format(*HEAD))
    for name in args.names.split(","):
        known = cr.data.uci(args.root, name, 0)
        recipe = Recipe(hidden=(50,), noise="learned")
        problem = recipe.problem(known.x_train.numpy(), known.y_train.numpy()[:, 0], seed=args.seed)
        chains, times = args.ladders, args.temperatures
        short, length = {"warmup": args.warmup, "draws": args.draws}, {"warmup": times * args.warmup}
        runs = {
            "tempering": cr.ParallelTempering(chains=chains, temperatures=times, hottest=args.hottest, **short, **PATH),
            f"HMC, {chains * times} chains": cr.HMC(chains=chains * times, **short, **PATH),
            f"HMC, {chains} chains": cr.HMC(chains=chains, draws=args.draws, thin=times, **length, **PATH),
        }
        for run, method in runs.items():
            posterior = method.fit(problem, seed=args.seed, progress=False)
            print(describe(name, run, posterior, known), flush=True)
            history = posterior.record.history
            if "temperatures" in history:
                ladder = ", ".join(f"{t:.2f}" for t in history["temperatures"])
                swaps = ", ".join(f"{a:.2f}" for a in history["swap_acceptance"])
                barrier = f"barrier {history['communication_barrier']:.1f}"
                print(f"  T {ladder}; swaps {swaps}; {barrier}; round trips {history['round_trips']}", flush=True)


if __name__ == "__main__":
    main()
