"""The overhead of a run: the outer loop of a streamed HMC run, and memory against the number of draws.

    python -m benchmarks.sampling_cost           # about a minute

The outer loop is progress, records of every draw, shards and checkpoints. The baseline is the same iterations without
it. Memory is the peak of a process that streams the given number of draws to a folder.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
import tempfile
import time

import torch

import credibly as cr
from benchmarks.timing import Goal, Row, options, report, show, table
from credibly.distributed.world import Mesh, World
from credibly.inference.sampling.folder import create_folder
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.loop import run_loop
from credibly.inference.sampling.recording import FolderRecorder
from credibly.inference.target import ProblemTarget


def problem() -> cr.Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(455, 13, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * torch.randn(455, 1, generator=generator)
    return cr.Problem(cr.zoo.mlp(13, (50,), 1), (x, y), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0))


def method(draws: int, steps: int, compile: bool) -> cr.HMC:
    return cr.HMC(
        chains=8, draws=draws, warmup=0, step_size=1e-3, trajectory_length=1e-3 * steps, init="network", compile=compile
    )


def started(known: cr.Problem, options: cr.HMC) -> HMCSampler:
    process = options.sampler(ProblemTarget(known), 0)
    process.start(known.layout.read(known.layout.module).expand(8, -1).clone())
    return process


def outer_loop(args: argparse.Namespace, results: dict[str, object]) -> None:
    known = problem()
    trial = started(known, method(10**6, 50, True))
    for _ in range(20):
        trial.advance(lambda: False)
    start = time.perf_counter()
    for _ in range(50):
        trial.advance(lambda: False)
    count = max(10, round(args.length * 50 / (time.perf_counter() - start)))
    bare_times, streamed_times = [], []
    streamed, bare = started(known, method(10**6, 50, True)), trial
    streamed.trajectories = bare.trajectories  # compiled once
    for repetition in range(args.repeats):
        start = time.perf_counter()
        for _ in range(count):
            bare.advance(lambda: False)
        bare_times.append((time.perf_counter() - start) / count)
        with tempfile.TemporaryDirectory() as folder:
            options = method(count, 50, True)
            path, record = os.path.join(folder, f"run{repetition}"), options.record(known, 0, {}, "running")
            out = create_folder(options, known, 0, path, streamed, record, World())
            shape = (8, count, known.dim, streamed.names, Mesh(World()))
            recorder = FolderRecorder(out, *shape, dtype=torch.float32, device=known.device, layout_dtype=torch.float32)
            streamed.total = streamed.done + count
            sys.stderr, before = io.StringIO(), sys.stderr
            try:
                seconds = run_loop(streamed, recorder, title="HMC", progress=True)
            finally:
                sys.stderr = before
            streamed_times.append(seconds / count)
            out.close()
    what = f"streamed run of {args.length:g} s / bare iterations, 8 chains of 13-50-1, 50 steps"
    show([Row(what, streamed_times, bare_times, Goal("<=", 1.03))], results)


def memory(record: dict[str, object]) -> None:
    lines = []
    for draws in (1_000, 5_000, 20_000):
        command = [sys.executable, "-m", "benchmarks.sampling_cost", "--child", str(draws)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, size = int(done.stdout) / 1024, 8 * draws * problem().dim * 4 / 2**20
        lines.append([f"{draws:,}", f"{peak:.0f} MiB", f"{size:.0f} MiB"])
    print(table(["draws of 8 chains", "peak of the process", "the draws themselves"], lines) + "\n")
    record["memory"] = lines


def child(draws: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        method(draws, 1, False).fit(problem(), seed=0, out=os.path.join(folder, "run"), progress=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--length", type=float, default=10.0, help="duration of a streamed run in seconds (default 10)")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    parser.set_defaults(repeats=3)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    with report("sampling_cost", args) as record:
        outer_loop(args, record)
        memory(record)


if __name__ == "__main__":
    main()
