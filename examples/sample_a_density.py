"""Sample a density that is not a network: a curved ridge, with HMC and its diagnostics.

    python examples/sample_a_density.py --out density.png          # a few seconds
    python examples/sample_a_density.py --quick --out density.png

The density is a banana: theta1 is normal, and theta2 is normal around theta1 squared. Means and variances are known, so
the draws can be checked: E[theta1] = 0, Var[theta1] = 1, E[theta2] = 1, Var[theta2] = 2 + width^2.
"""

import argparse

import matplotlib.pyplot as plt
import torch

import credibly as cr

WIDTH = 0.5


def log_prob(theta: torch.Tensor) -> torch.Tensor:
    """Return the log density at one point (2,), up to a constant; gradients come from autograd."""
    return -0.5 * (theta[0] ** 2 + ((theta[1] - theta[0] ** 2) / WIDTH) ** 2)


def main(argv: list[str] | None = None) -> None:
    """Sample, compare the moments with the known ones, print the diagnostics and plot the chains."""
    parser = argparse.ArgumentParser(description="HMC on a curved two-dimensional density.")
    parser.add_argument("--out", default="sample_a_density.png", help="output figure (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer draws, for a quick check")
    args = parser.parse_args(argv)

    draws, warmup = (250, 150) if args.quick else (1500, 500)
    method = cr.HMC(chains=4, draws=draws, warmup=warmup, target_accept=0.95, jitter=0.5, compile=False)
    posterior = method.fit(cr.Density(log_prob, dim=2), seed=args.seed)

    flat = posterior.draws.reshape(-1, 2).double()
    found = posterior.diagnostics()
    known = {"mean": (0.0, 1.0), "variance": (1.0, 2 + WIDTH**2)}
    print(f"{'':10} {'theta1':>8} {'known':>6} {'theta2':>8} {'known':>6}")
    for name, values in {"mean": flat.mean(0), "variance": flat.var(0)}.items():
        print(f"{name:10} {values[0]:8.2f} {known[name][0]:6.2f} {values[1]:8.2f} {known[name][1]:6.2f}")
    print()
    print(found)

    with cr.plot.style():
        figure = plt.figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subfigures(1, 2)
        cloud = left.subplots()
        for chain, points in enumerate(posterior.draws):
            cloud.scatter(*points.T, s=4, alpha=0.5, linewidths=0, label=f"chain {chain}", rasterized=True)
        cloud.set(xlabel="theta1", ylabel="theta2", title="draws")
        cr.plot_chains.trace(posterior.draws, names=("theta1", "theta2"), axes=list(right.subplots(2, 1, sharex=True)))
        figure.savefig(args.out, facecolor="white")
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
