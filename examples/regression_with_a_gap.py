"""A wave with a gap in the data: the predictions of four methods where there is none.

    python examples/regression_with_a_gap.py --out gap.png          # a minute or two
    python examples/regression_with_a_gap.py --quick --out gap.png  # seconds, with rougher bands

All methods get the same network, prior and noise. A point estimate (MLE, MAP) draws one line through the gap and is as
confident there as anywhere; the epistemic uncertainty of an ensemble and of posterior draws grows where the data stop.
"""

import argparse

import matplotlib.pyplot as plt
import torch

import credibly as cr


def main(argv: list[str] | None = None) -> None:
    """Fit the methods, print their epistemic uncertainty on the data and in the gap, and plot the bands."""
    parser = argparse.ArgumentParser(description="Bands of four methods on a regression with a gap.")
    parser.add_argument("--out", default="regression_with_a_gap.png", help="output figure (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="short runs, for a quick check")
    args = parser.parse_args(argv)

    # x, y, a grid that extends beyond the data, and the true function on it.
    toy = cr.data.gap_regression(seed=args.seed)
    torch.manual_seed(args.seed)
    net = cr.zoo.mlp(1, (50,), 1)
    problem = cr.Problem(
        net,
        data=(toy.x, toy.y),
        likelihood=cr.likelihoods.Gaussian(scale=toy.noise),
        prior=cr.priors.Normal(scale=3.0, fan_in=True),
    )

    steps = 400 if args.quick else 3000
    length = {"warmup": 40, "draws": 30, "max_steps": 60} if args.quick else {"warmup": 100, "draws": 100, "thin": 2}
    methods = {
        "MLE": cr.MLE(steps=steps),
        "MAP": cr.MAP(steps=steps),
        # Anchored members, each regularised towards its own draw of the prior, differ more than members that differ
        # only in their initialisation.
        "deep ensemble": cr.DeepEnsemble(members=10, anchored=True, init="prior", steps=steps),
        # Short trajectories with partial momentum refreshment explore more per gradient here.
        "HMC": cr.HMC(chains=8, trajectory_length=0.5, refresh=0.3, jitter=0.2, init="fresh", compile=False, **length),
    }

    in_gap = ((toy.grid > toy.gap[0]) & (toy.grid < toy.gap[1])).flatten()
    print("epistemic standard deviation (what the model does not know)")
    print(f"{'':14} {'on the data':>12} {'in the gap':>12}")
    with cr.plot.style():
        figure, panels = plt.subplots(2, 2, figsize=(9.5, 6.5), sharex=True, sharey=True, layout="constrained")
        for panel, (name, method) in zip(panels.flat, methods.items()):
            posterior = method.fit(problem, seed=args.seed)
            grid = posterior.predict(toy.grid)
            on_data = posterior.predict(toy.x).epistemic.sqrt().mean()
            print(f"{name:14} {on_data:12.3f} {grid.epistemic.sqrt().flatten()[in_gap].mean():12.3f}")
            cr.plot.bands(grid, toy.grid, data=(toy.x, toy.y), truth=toy.truth, legend=False, ax=panel)
            panel.set(title=name, ylim=(-4, 4))
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.savefig(args.out, facecolor="white")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
