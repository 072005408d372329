"""Memory and speed of predicting with many draws for many rows.

    python -m benchmarks.prediction_memory                             # 1,000 draws x 1,000,000 rows: about ten minutes
    python -m benchmarks.prediction_memory --rows 20000 --draws 200    # a small one, as a smoke test
    python -m benchmarks.prediction_memory --json out.json

The outputs of 1,000 draws for a million rows of a two-output network are 8 GB: too large to hold, so every quantity
streams over the rows. A fresh process creates the inputs and draws, records its memory as the baseline, then computes
the moments with their decomposition, a 90 % interval and the log predictive density; reported is its peak above the
baseline. The speed is compared with a plain loop over the draws on some of the rows, which gives the same results
(checked).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import credibly as cr
from benchmarks.timing import Row, duration, interleaved, options, report, show, table
from credibly.posterior.model import Model
from credibly.storage.record import Record

LIMIT = 2 * 2**30  # bytes that predicting may take on top of its inputs and results
STATUS = Path("/proc/self/status")


def setup(rows: int, draws: int) -> tuple[cr.DrawsPosterior, Tensor, Tensor]:
    """Return a posterior of random draws, and the inputs and targets to predict; nothing is fitted."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 2))  # a mean and a log-variance
    x = torch.randn(rows, 13, generator=generator)
    y = torch.randn(rows, generator=generator)
    problem = cr.Problem(
        net, (x[:100], y[:100]), cr.likelihoods.HeteroscedasticGaussian(), cr.priors.Normal(1.0, fan_in=True)
    )
    theta = problem.layout.read(problem.layout.module) + 0.1 * torch.randn(1, draws, problem.dim, generator=generator)
    return cr.DrawsPosterior(Model.of(problem), theta, Record(method="benchmark")), x, y


# -- memory, in a fresh process ----------------------------------------------------------------------------------------
def resident() -> int:
    """Return the resident bytes of this process; if the system does not report them, the peak."""
    return _status("VmRSS") or peak()


def peak() -> int:
    """Return the peak resident bytes of this process since the last successful `reset_peak`."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Reset the peak on Linux. Elsewhere the peak of an earlier part may count for a later one, an overestimate."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    if not STATUS.exists():
        return 0
    line = next((line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:")), f"{key}: 0")
    return int(line.split()[1]) * 1024


def child(rows: int, draws: int, threads: int | None) -> dict[str, Any]:
    """Run in the fresh process: return seconds and peak above the baseline per quantity, as plain values."""
    if threads is not None:
        torch.set_num_threads(threads)
    posterior, x, y = setup(rows, draws)
    posterior.predict(x[:10]).interval(0.9)  # allocate torch's own buffers and threads before the baseline
    posterior.predict(x[:10]).log_prob(y[:10])
    p = posterior.predict(x)
    baseline = resident()
    work: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "mean, variance, aleatoric, epistemic": lambda: (p.mean, p.variance, p.aleatoric, p.epistemic),
        "interval(0.9)": lambda: p.interval(0.9),
        "log_prob(y)": lambda: (p.log_prob(y),),
    }
    parts, kept = [], []
    for name, call in work.items():
        reset_peak()
        start = time.perf_counter()
        kept.append(call())  # keep the results, as a caller would
        seconds = time.perf_counter() - start
        parts.append({"what": name, "seconds": seconds, "peak_bytes": peak() - baseline})
        assert all(len(r) == rows and bool(torch.isfinite(r).all()) for r in kept[-1])
    return {"baseline_bytes": baseline, "parts": parts}


# -- speed, against a loop over the draws ------------------------------------------------------------------------------
def loop_outputs(posterior: cr.DrawsPosterior, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield location and log-variance (rows,) of each draw from the plain network."""
    layout = posterior.layout
    for theta in posterior.draws[0]:
        output = functional_call(layout.module, layout.split(theta)[0], (x,))
        yield output[:, 0], output[:, 1]


@torch.no_grad()
def loop_moments(posterior: cr.DrawsPosterior, x: Tensor) -> tuple[Tensor, ...]:
    """Compute mean, aleatoric and epistemic variance by running sums over the draws, in float64 like ours."""
    mean, square, noise = (torch.zeros(len(x), dtype=torch.float64) for _ in range(3))
    for location, log_variance in loop_outputs(posterior, x):
        mean += location
        square += location.double() ** 2
        noise += log_variance.exp()
    mean, square, noise = (total / posterior.draws.shape[1] for total in (mean, square, noise))
    return mean.float(), noise.float(), (square - mean**2).float()


@torch.no_grad()
def loop_log_prob(posterior: cr.DrawsPosterior, x: Tensor, y: Tensor) -> Tensor:
    """Compute the log predictive density by a running logaddexp over the draws."""
    total = torch.full((len(x),), -math.inf, dtype=torch.float64)
    for location, log_variance in loop_outputs(posterior, x):
        log_prob = -0.5 * (log_variance + (y - location) ** 2 * torch.exp(-log_variance) + math.log(2 * math.pi))
        total = torch.logaddexp(total, log_prob.double())
    return (total - math.log(posterior.draws.shape[1])).float()


def our_moments(posterior: cr.DrawsPosterior, x: Tensor) -> tuple[Tensor, ...]:
    p = posterior.predict(x)  # a new one each time, since it caches results
    return p.mean, p.aleatoric, p.epistemic


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--subset", type=int, default=20_000, help="rows for the comparison with a loop")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.rows, args.draws, args.threads)))
        return
    with report("prediction_memory", args) as record:
        print(f"## {args.draws:,} draws x {args.rows:,} rows of 13-50-2\n", flush=True)
        command = [sys.executable, "-m", "benchmarks.prediction_memory", "--child"]
        command += ["--rows", str(args.rows), "--draws", str(args.draws)]
        command += ["--threads", str(args.threads)] if args.threads is not None else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        lines = []
        for part in found["parts"]:
            part["pairs_per_second"] = args.rows * args.draws / part["seconds"]
            part["met"] = part["peak_bytes"] <= LIMIT
            speed = [duration(part["seconds"]), f"{part['pairs_per_second']:.3g}"]
            memory = [f"{part['peak_bytes'] / 2**20:.0f} MiB", f"<= {LIMIT / 2**20:.0f} MiB"]
            lines.append([part["what"], *speed, *memory, "met" if part["met"] else "MISSED"])
        header = ["what", "time", "rows x draws a second", "peak above the inputs", "goal", "verdict"]
        print(table(header, lines) + "\n")
        print(f"Baseline (torch, inputs, draws): {found['baseline_bytes'] / 2**20:.0f} MiB.\n", flush=True)
        record |= {"rows_predicted": args.rows, "draws": args.draws, "memory": found}

        subset = min(args.subset, args.rows)
        posterior, x, y = setup(subset, args.draws)
        implementations: dict[str, Callable[[], Any]] = {
            "our moments": lambda: our_moments(posterior, x),
            "loop moments": lambda: loop_moments(posterior, x),
            "our log_prob": lambda: posterior.predict(x).log_prob(y),
            "loop log_prob": lambda: loop_log_prob(posterior, x, y),
        }
        for what in ("moments", "log_prob"):
            ours, loop = (torch.stack(tuple(implementations[f"{who} {what}"]())) for who in ("our", "loop"))
            assert torch.allclose(ours, loop, rtol=1e-4, atol=1e-4), f"{what} of the loop and of credibly differ"
        times = interleaved(implementations, repeats=args.repeats, seconds=args.seconds)
        print(f"## {args.draws:,} draws x {subset:,} rows against a loop over the draws\n")
        show([Row(what, times[f"our {what}"], times[f"loop {what}"]) for what in ("moments", "log_prob")], record)


if __name__ == "__main__":
    main()
