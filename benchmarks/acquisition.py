"""BALD over a large pool: cost of the scores relative to the bare forward passes, and peak memory.

    python -m benchmarks.acquisition                                   # 60,000 images, 50 draws: some minutes
    python -m benchmarks.acquisition --rows 4000 --draws 20            # a small one, as a smoke test
    python -m benchmarks.acquisition --json out.json

The outputs of 50 draws for 60,000 images of ten classes are 120 MB, and the activations far more; scores stream over
the rows. The baseline is the same forward passes in the same blocks, with outputs discarded: the ratio shows what
softmax, entropies and sums add. For the MLP there is also a plain loop over the draws with `functional_call` and
running sums, which gives the same scores (checked). Memory is the peak of a fresh process above what it holds with the
pool and the draws loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import credibly as cr
from benchmarks.prediction_memory import peak, reset_peak, resident
from benchmarks.timing import Goal, Row, duration, interleaved, options, report, show, table
from credibly.posterior.model import Model
from credibly.predictive import base as predictive_module
from credibly.storage.record import Record

LIMIT = 2**29  # bytes that scores may take on top of the pool and the draws
NETWORKS = ("mlp", "dropout", "cnn")
WHAT = {
    "mlp": "784-400-400-10, draws of all weights",
    "dropout": "784-400-400-10, MC-Dropout before the last layer",
    "cnn": "two convolutions and two layers, draws of all weights",
}
GOAL = Goal("<=", 1.3)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


def setup(name: str, rows: int, draws: int) -> tuple[Callable[[], cr.Predictive], cr.Posterior, Tensor]:
    """Return a function that makes a new predictive of the pool, the posterior, and the pool; nothing is fitted."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 784, generator=generator)
    net = network(name)
    data = (x[:20], torch.arange(20) % 10)
    if name == "dropout":
        dropped = cr.MCDropout.from_trained(net, data, cr.likelihoods.Categorical(), rate=0.5, insert="4")
        return lambda: dropped.predict(x, passes=draws), dropped, x
    problem = cr.Problem(net, data, cr.likelihoods.Categorical(), cr.priors.Normal(1.0, fan_in=True))
    theta = problem.prior.sample(draws, generator).reshape(1, draws, problem.dim)
    posterior = cr.DrawsPosterior(Model.of(problem), theta, Record())
    return lambda: posterior.predict(x), posterior, x


def passes(predictive: cr.Predictive) -> int:
    """Run the forward passes alone, in the blocks of the scores."""
    return sum(predictive.map_blocks(lambda output, extra, start: output.shape[1]))


@torch.no_grad()
def loop(posterior: cr.DrawsPosterior, x: Tensor) -> Tensor:
    """Compute BALD by running sums over the draws, each a forward pass over the whole pool."""
    layout = posterior.layout
    mean, each = torch.zeros(len(x), 10, dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
    for theta in posterior.draws[0]:
        p = torch.softmax(functional_call(layout.module, layout.split(theta)[0], (x,)), -1)
        mean += p
        each += torch.special.entr(p).sum(-1)
    count = posterior.draws.shape[1]
    return (torch.special.entr(mean / count).sum(-1) - each / count).float()


def child(name: str, rows: int, draws: int, threads: int | None) -> dict[str, Any]:
    """Run in the fresh process: return seconds and peak memory above the baseline."""
    if threads is not None:
        torch.set_num_threads(threads)
    make, posterior, x = setup(name, rows, draws)
    cr.active.bald(posterior.predict(x[:100]))  # allocate torch's own buffers and threads before the baseline
    predictive = make()
    baseline = resident()
    reset_peak()
    start = time.perf_counter()
    scores = cr.active.bald(predictive)
    seconds = time.perf_counter() - start
    assert scores.shape == (rows,)
    assert bool(torch.isfinite(scores).all())
    return {"what": WHAT[name], "seconds": seconds, "peak_bytes": peak() - baseline, "baseline_bytes": baseline}


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=3, seconds=0.1)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument(
        "--timed", type=int, default=10_000, help="rows of the pool in timed repetitions (default 10,000)"
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--child", choices=NETWORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.rows, args.draws, args.threads)))
        return
    names = [name for name in NETWORKS if name in args.networks.split(",")]
    with report("acquisition", args) as record:
        print(f"## BALD over {args.rows:,} rows with {args.draws} draws: memory\n", flush=True)
        lines, record["memory"] = [], []
        for name in names:
            command = [sys.executable, "-m", "benchmarks.acquisition", "--child", name, "--rows", str(args.rows)]
            command += ["--draws", str(args.draws), *(["--threads", str(args.threads)] if args.threads else [])]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            found["met"] = found["peak_bytes"] <= LIMIT
            record["memory"].append(found)
            size = f"{found['peak_bytes'] / 2**20:.0f} MiB"
            verdict = "met" if found["met"] else "MISSED"
            lines.append([WHAT[name], duration(found["seconds"]), size, f"<= {LIMIT / 2**20:.0f} MiB", verdict])
        print(table(["what", "time", "peak above the pool", "goal", "verdict"], lines) + "\n", flush=True)

        rows = min(args.timed, args.rows)
        print(f"## Against the bare passes, {rows:,} rows\n", flush=True)
        # Timed like a large pool: in blocks, without caching.
        predictive_module.CACHE_VALUES = 0
        for name in names:
            make, posterior, x = setup(name, rows, args.draws)
            implementations: dict[str, Callable[[], Any]] = {
                "bald": lambda make=make: cr.active.bald(make()),
                "passes": lambda make=make: passes(make()),
            }
            if name == "mlp":
                assert isinstance(posterior, cr.DrawsPosterior)
                implementations["loop"] = lambda posterior=posterior, x=x: loop(posterior, x)
                worst = float((implementations["bald"]() - implementations["loop"]()).abs().max())
                assert worst < 1e-5, f"scores by the loop and by credibly differ by {worst}"
            times = interleaved(implementations, repeats=args.repeats, seconds=args.seconds)
            found_rows = [Row(f"{WHAT[name]}: scores / bare passes", times["bald"], times["passes"], GOAL)]
            if "loop" in times:
                found_rows.append(Row(f"{WHAT[name]}: scores / loop over draws", times["bald"], times["loop"]))
            show(found_rows, record)


if __name__ == "__main__":
    main()
