"""How close default SGLD and SGHMC come to HMC, and with how many gradients: the demo's tasks and a linear model.

python -m benchmarks.sgmcmc_accuracy            # a few minutes; --seed S, --methods sghmc
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import credibly as cr
from credibly.demo import fits
from credibly.diagnostics import convergence
from credibly.posterior.draws import SampledPosterior

ROWS, INPUTS, CONDITION = 2000, 8, 7.0
LINE = "{:22s} {:6s} {:>7s} {:>7s} {:>12s} {:>7s}"


def gradients(posterior: SampledPosterior) -> float:
    """Return the gradients of a fit in units of full gradients, MAP starts included."""
    history = posterior.record.history
    return float(history["gradients"]) + float(history.get("start_gradients", 0.0))


def linear(seed: int) -> tuple[cr.Problem, torch.Tensor]:
    """Return a linear model of condition number 7 and its posterior's covariance."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator, dtype=torch.float64))[0]
    basis = torch.linalg.qr(torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64))[0] * math.sqrt(ROWS)
    x = basis @ torch.diag(torch.linspace(1, math.sqrt(CONDITION), INPUTS, dtype=torch.float64)) @ turn.T
    y = x.sum(1) + torch.randn(ROWS, generator=generator, dtype=torch.float64)
    net = nn.Linear(INPUTS, 1, bias=False).double()
    likelihood, prior = cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0)
    covariance = torch.linalg.inv(x.T @ x + torch.eye(INPUTS, dtype=torch.float64))
    return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=prior), covariance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default="sgld,sghmc")
    args = parser.parse_args()
    names = args.methods.split(",")
    print(LINE.format("task", "method", "TV", "R-hat", "gradients", "of HMC"))
    found = fits.run_demo(["hmc", *names], seed=args.seed)
    for task in fits.TASKS:
        for name in ("hmc", *names):
            functions = found.diagnostics[task][name].functions
            spent = {method: int(count or 0) for method, count in found.gradients[task].items()}
            assert functions is not None
            distance = found.against[task][name]["total_variation"]
            row = (
                f"{distance:.4f}",
                f"{functions.rhat_worst:.3f}",
                f"{spent[name]:,}",
                f"{spent[name] / spent['hmc']:.2f}",
            )
            print(LINE.format(task, name, *row))
    problem, covariance = linear(args.seed)
    reference = 0.0
    print("linear model: instead of TV, the largest relative error of a posterior variance")
    for name in ("hmc", *names):
        posterior = cr.METHODS[name]().fit(problem, seed=args.seed, progress=False)
        draws, spent_here = posterior.draws, gradients(posterior)
        reference = reference or spent_here
        error = float((draws.flatten(0, 1).var(0) / covariance.diagonal() - 1).abs().max())
        rhat = float(convergence.rhat(draws).max())
        row = f"{error:.3f}", f"{rhat:.3f}", f"{spent_here:,.0f}", f"{spent_here / reference:.2f}"
        print(LINE.format("linear", name, *row))


if __name__ == "__main__":
    main()
