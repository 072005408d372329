"""HMC on a GPU: the full-batch gradient of ResNet-20-FRN on 50,000 images, and leapfrog steps of small networks.

    python -m benchmarks.hmc_gpu [--images 50000] [--quick]

Reports milliseconds per full-batch gradient (tf32 and bf16; plain layers, compiled, own kernels; by micro-batch) and
microseconds per leapfrog step for 1 to 512 chains.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import credibly as cr
from credibly.inference.backend import Backend
from credibly.inference.kernels.hmc import LEAPFROG
from credibly.inference.sampling.trajectory import Trajectory
from credibly.inference.target import ProblemTarget
from credibly.networks import fused_unit, zoo


def timed(function: Callable[[], object], repeats: int) -> float:
    function()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def resnet(images: int, quick: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(images, 3, 32, 32, generator=generator, device="cuda")
    y = torch.randint(10, (images,), generator=generator, device="cuda")
    print(f"\n## ResNet-20-FRN (274,042 parameters), {images} images of 3 x 32 x 32: one full-batch gradient\n")
    print("| precision | run by | micro-batch | ms | first call s | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    has_triton = fused_unit.HAS_TRITON
    ways = ("plain layers", "compiled", "own kernels")
    cases = [(p, way, None) for p in (None, "bf16") for way in ways]
    if not quick:
        cases += [(p, ways[2], rows) for p in (None, "bf16") for rows in (1000, 2000, 5000)]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for precision, way, rows in cases:
        torch.cuda.reset_peak_memory_stats()
        net = zoo.resnet20_frn().cuda()
        fused_unit.HAS_TRITON = has_triton and way == "own kernels"
        problem = cr.Problem(
            net, (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(0.3), precision=precision, micro_batch=rows
        )
        target = ProblemTarget(problem)
        target.compile_parts(way == "compiled", 10**6, 1)
        theta = problem.layout.read(net).unsqueeze(0)
        start = time.perf_counter()
        try:
            with torch.no_grad():
                target.likelihood_and_grad(theta)
                torch.cuda.synchronize()
                first = time.perf_counter() - start
                ms = 1e3 * timed(lambda: target.likelihood_and_grad(theta), 5)  # noqa: B023
        except torch.cuda.OutOfMemoryError:
            print(f"| {precision or 'tf32'} | {way} | {rows} | out of memory | | |", flush=True)
            continue
        peak = torch.cuda.max_memory_allocated() / 2**30
        shown = rows or problem.block_rows(1)
        print(f"| {precision or 'tf32'} | {way} | {shown} | {ms:.1f} | {first:.1f} | {peak:.1f} |", flush=True)


def small(sizes: tuple[int, ...], rows: int) -> None:
    print(f"\n## {'-'.join(map(str, sizes))} on {rows} rows: one leapfrog step of all chains\n")
    print("| chains | eager us | eager, graph us | compiled, graph us | us per chain |")
    print("| --- | --- | --- | --- | --- |")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, sizes[0], generator=generator, device="cuda")
    net = zoo.mlp(sizes[0], sizes[1:-1], sizes[-1]).cuda()
    problem = cr.Problem(net, (x, x.sum(1)), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0))
    target = ProblemTarget(problem)
    for chains in (1, 16, 128, 512):
        times = []
        theta = torch.randn(chains, problem.dim, generator=generator, device="cuda") * 0.1
        momentum, size = torch.randn_like(theta), torch.full((chains,), 1e-4, device="cuda")
        gradient = target.likelihood_and_grad(theta)[1]
        for compile, graph in ((False, False), (False, True), (True, True)):
            target.backend = Backend("torch", compile)
            path = Trajectory(target, LEAPFROG, chains, 10**6)
            path.graphed = graph
            times.append(1e6 / 64 * timed(lambda: path.run((theta, momentum, gradient), size, None, 64), 5))  # noqa: B023
        each = times[2] / chains
        print(f"| {chains} | {times[0]:.0f} | {times[1]:.1f} | {times[2]:.1f} | {each:.2f} |", flush=True)


def run_hmc(images: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(images, 3, 32, 32, generator=generator, device="cuda")
    y = (x.mean((1, 2, 3)) > 0).long()
    problem = cr.Problem(
        zoo.resnet20_frn(2).cuda(), (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(0.3), precision="bf16"
    )
    start = time.perf_counter()
    method = cr.HMC(chains=1, draws=3, warmup=0, step_size=1e-4, trajectory_length=2e-3, init="network")
    history = method.fit(problem, seed=0).record.history
    seconds = time.perf_counter() - start
    print(f"\nHMC, ResNet-20-FRN, {images} images, bf16: 3 draws of 20 steps in {seconds:.1f} s", end="; ")
    print(f"acceptance {history['acceptance']}")
    print({k: history[k] for k in ("chains_at_once", "one_piece", "compiled", "cuda_graph", "plan", "seconds")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--quick", action="store_true", help="fewer micro-batch sizes")
    parser.add_argument("--only", choices=("small", "resnet", "run"), help="one part")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if options.only in (None, "small"):
        small((13, 50, 1), 455)
        small((8, 50, 50, 1), 7000)
    if options.only in (None, "resnet"):
        resnet(options.images, options.quick)
    if options.only in (None, "run"):
        run_hmc(options.images)


if __name__ == "__main__":
    main()
