"""The effect of bf16 on HMC: acceptance and energy error of the same trajectories in float32 and in bf16.

    python -m benchmarks.precision [--device cuda] [--rows 500] [--sizes 2.5e-4 1e-3]

A convolutional network on synthetic images. Gradients in bf16 are off by a few per cent. Energies at the ends of a
trajectory are evaluated in the network's own precision, so the draws are exact for it; the gradient error only lowers
the acceptance rate.
"""

from __future__ import annotations

import argparse
import time

import torch

import credibly as cr
from credibly.inference.target import to_target

STEPS = 10


def problem(rows: int, precision: str | None, device: str) -> cr.Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 28, 28, generator=generator)
    y = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, :, :14].mean((1, 2, 3)) > 0).long()
    torch.manual_seed(0)
    net = cr.zoo.lenet(classes=4, channels=1, activation="silu")
    return cr.Problem(
        net, (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(0.2), device=device, precision=precision
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--sizes", type=float, nargs="+", default=[2.5e-4, 5e-4, 1e-3, 2e-3], help="step sizes")
    options = parser.parse_args()
    fitted = cr.MAP(steps=300, lr=1e-3).fit(problem(options.rows, None, options.device), seed=0, progress=False)
    start = fitted.sample(1, seed=0)
    print("| step size | precision | acceptance | energy error: median | its 90th percentile | ms per gradient |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in options.sizes:
        for precision in (None, "bf16"):
            method = cr.HMC(
                chains=1,
                draws=10**6,
                warmup=0,
                step_size=size,
                trajectory_length=STEPS * size,
                init="network",
                mass="identity",
                compile=False,
            )
            run = method.sampler(to_target(problem(options.rows, precision, options.device)), 0)
            run.start(start.clone())
            accepted, errors, first = [], [], time.perf_counter()
            for _ in range(options.draws):
                acceptance = run.advance(lambda: False)["acceptance"]
                accepted.append(float(acceptance))
                errors.append(-torch.log(acceptance).item())  # max(0, energy error), as in the Metropolis test
            seconds = (time.perf_counter() - first) / (options.draws * STEPS)
            found = torch.tensor(errors)
            values = (
                f"{sum(accepted) / len(accepted):.3f} | {float(found.median()):.3f} | {float(found.quantile(0.9)):.3f}"
            )
            print(f"| {size:g} | {precision or 'float32'} | {values} | {1e3 * seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
