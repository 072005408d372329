"""How close SGLD and SGHMC come to HMC, and with how many gradients.

python -m benchmarks.sgmcmc_accuracy            # defaults on the demo's tasks and a linear model; --methods sghmc
python -m benchmarks.sgmcmc_accuracy --root FOLDER --medium protein,naval       # minibatches of medium data
python -m benchmarks.sgmcmc_accuracy --root FOLDER --digits                     # minibatches of MNIST

Medium data are the first 5,000 training rows of a UCI set: all rows against minibatches, without and with a control
variate and a preconditioner. Total variation is that of predictions for 300 test rows, and the floor that of one half
of HMC's chains from the other. Digits are the first 12,000 training images of MNIST, 14 by 14 pixels, 196-50-10, and
2,000 test images.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import credibly as cr
from credibly.core.rng import global_stream
from credibly.demo import fits
from credibly.diagnostics import convergence
from credibly.metrics import evaluation
from credibly.posterior.draws import DrawsPosterior, SampledPosterior
from credibly.tables.recipe import Recipe

ROWS, INPUTS, CONDITION = 2000, 8, 7.0
# Rows for training and testing of medium data, rows per minibatch, and chains.
TRAINING, TESTING, BATCH, CHAINS = 5000, 300, 250, 8
IMAGES = 12_000
LINE = "{:22s} {:6s} {:>7s} {:>7s} {:>12s} {:>7s}"
DIGITS = "{:22s} {:>7s} {:>7s} {:>7s} {:>12s} {:>12s}"
MEDIUM = "{:22s} {:>7s} {:>7s} {:>7s} {:>12s} {:>12s} {:>12s}"


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


def medium(root: Path, name: str, seed: int, steps: int) -> None:
    """Print the distance of minibatch variants from HMC on medium data."""
    known = cr.data.uci(root, name, 0)
    x, y = known.x_train[:TRAINING], known.y_train[:TRAINING, 0]
    problem = Recipe(hidden=(50,), noise="learned").problem(x.numpy(), y.numpy(), seed=seed)
    inputs, targets = known.x_test[:TESTING], known.y_test[:TESTING, 0]
    few: dict[str, Any] = {"chains": CHAINS, "max_steps": steps, "init": "ensemble"}
    small = {**few, "batch_size": BATCH}
    variate = {**small, "control_variate": True}
    runs: dict[str, cr.HMC | cr.SGHMC | cr.SGLD] = {
        "hmc": cr.HMC(
            chains=CHAINS, warmup=150, draws=150, thin=2, trajectory_length=0.5, refresh=0.3, jitter=0.2, max_steps=100
        ),
        "sghmc, all rows": cr.SGHMC(**few),
        "sghmc": cr.SGHMC(**small),
        "sghmc, variate": cr.SGHMC(**variate),
        "sghmc, variate, rms": cr.SGHMC(**variate, preconditioner="rmsprop"),
        "sgld, variate": cr.SGLD(**variate, draws=100),
    }
    print(f"{name}, {len(x)} rows, {problem.dim} parameters, minibatches of {BATCH}")
    print(MEDIUM.format("run", "TV", "shift", "R-hat", "gradients", "step size", "log density"))
    reference = None
    for run, method in runs.items():
        posterior = method.fit(problem, seed=seed, progress=False)
        assert isinstance(posterior, DrawsPosterior)
        found, history = posterior.predict(inputs), posterior.record.history
        if reference is None:
            model, record = posterior.model, posterior.record
            halves = (DrawsPosterior(model, half, record).predict(inputs) for half in posterior.draws.tensor_split(2))
            distance = evaluation.compare(*halves)
            reference = found
        else:
            distance = evaluation.compare(found, reference)
        functions = posterior.diagnostics(inputs).functions
        assert functions is not None
        size = history["step_size"]
        row = (
            f"{distance['total_variation']:.4f}",
            f"{distance['mean_shift']:.3f}",
            f"{functions.rhat_worst:.3f}",
            f"{gradients(posterior):,.0f}",
            f"{size[0] if isinstance(size, list) else size:.2g}" + (" cut" if history.get("shortened") else ""),
            f"{float(found.log_prob(targets).mean()):.4f}",
        )
        print(MEDIUM.format(run, *row), flush=True)


def digits(root: Path, seed: int, limits: tuple[int, ...]) -> None:
    """Print the distance of SGHMC and SGLD with different numbers of steps from HMC on images."""
    with np.load(root / "mnist.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}

    def inputs(name: str, rows: int) -> torch.Tensor:
        pixels = torch.from_numpy(arrays[name][:rows].astype(np.float32) / 255).unsqueeze(1)
        return nn.functional.avg_pool2d(pixels, 2).flatten(1)

    x, y = inputs("x_train", IMAGES), torch.from_numpy(arrays["y_train"][:IMAGES].astype(np.int64))
    x_test, y_test = inputs("x_test", 2000), torch.from_numpy(arrays["y_test"][:2000].astype(np.int64))
    with global_stream(seed, "digits"):
        net = cr.zoo.mlp(196, (50,), 10)
    problem = cr.Problem(net, data=(x, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal(scale=0.3))
    few: dict[str, Any] = {"chains": 4, "draws": 40}
    runs: dict[str, Any] = {
        "hmc": cr.HMC(chains=4, draws=60, warmup=60, until="mixed", budget="10min"),
        "map": cr.DeepEnsemble(members=1, epochs=20),
    }
    for limit in limits:
        runs[f"sghmc, {limit:,} steps"] = cr.SGHMC(**few, max_steps=limit)
        runs[f"sgld, {limit:,} steps"] = cr.SGLD(chains=16, draws=10, max_steps=limit)
    print(DIGITS.format("run", "TV", "agree", "heat", "step size", "log density"))
    reference = None
    for run, method in runs.items():
        posterior = method.fit(problem, seed=seed, progress=False)
        found, history = posterior.predict(x_test), posterior.record.history
        probabilities = found.probabilities
        if reference is None:
            halves = (
                DrawsPosterior(posterior.model, half, posterior.record) for half in posterior.draws.tensor_split(2)
            )
            one, probabilities = (half.predict(x_test).probabilities for half in halves)
            reference, compared = found.probabilities, one
        else:
            compared = reference
        heat, size = history.get("temperature", {}).get("configurational"), history.get("step_size")
        row = (
            f"{float(0.5 * (probabilities - compared).abs().sum(-1).mean()):.4f}",
            f"{float((probabilities.argmax(-1) == compared.argmax(-1)).float().mean()):.4f}",
            "" if heat is None else f"{sum(heat) / len(heat):.2f}",
            f"{size:.2g}" if isinstance(size, float) else "",
            f"{float(found.log_prob(y_test).mean()):.4f}",
        )
        print(DIGITS.format(run, *row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default="sgld,sghmc")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--medium", default="", help="UCI sets of medium size instead of the demo's tasks")
    parser.add_argument("--steps", type=int, default=20_000, help="most steps per chain on medium data")
    parser.add_argument("--digits", action="store_true", help="minibatches of MNIST")
    args = parser.parse_args()
    if args.digits:
        digits(args.root or Path("."), args.seed, (4_000, 20_000))
        return
    if args.medium:
        torch.set_num_threads(1)
        for name in args.medium.split(","):
            medium(args.root or Path("."), name, args.seed, args.steps)
        return
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
