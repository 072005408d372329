"""One cell of the UCI benchmark: a method on one split, by a protocol that looks at the training part alone.

Inputs and targets are standardised by the training rows; figures are in the target's own units. One hidden layer, 50 wide unless
the data set says otherwise. The prior's scale and the noise model are chosen by `credibly.tables.tuning` inside the training part, once
for a split and for all methods but two. A deep ensemble has rectified units and predicts the variance of every row, as its paper
has it. MC-Dropout has rectified units, a wide prior and a single noise scale, as its papers have it; its rates, of inputs and of
hidden units apart, and its precision are chosen by five folds of the training part: all pairs of rates by short fits, then the best
three by whole ones.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch

from credibly import data
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.dropout import DropoutPosterior
from credibly.predictive.rescaling import in_units
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import tune

METHODS = ("map", "dropout", "bbb", "ensemble", "sghmc", "hmc")
RATES = (0.005, 0.01, 0.05, 0.1)
PUBLISHED_NOISE = {"dropout": "learned", "ensemble": "heteroscedastic"}  # what these methods' papers have
PUBLISHED_ACTIVATION = {"dropout": "relu", "ensemble": "relu"}
PUBLISHED_SCALE = {"dropout": 100.0}  # the prior's length-scale of 0.01, which leaves the masks to regularise
PASSES = 1_000  # with a hundred the log of their mean is 0.015 nats too low on Boston
PAIRS = tuple({"0": inputs, "*": hidden} for inputs in (0.0, *RATES) for hidden in RATES)  # inputs may be spared
FINALISTS = 3  # pairs of rates that are compared by whole fits


def settings_of(method: str, rows: int, quick: bool = False) -> dict[str, Any]:
    """Settings of a method beside those of its recipe, by the number of training rows alone."""
    steps = max(5_000, 40 * max(1, rows // 128))
    training: dict[str, Any] = {"steps": 50 if quick else steps, "compile": False if quick else "auto"}
    few = {"chains": 2, "warmup": 20, "draws": 10, "thin": 1, "max_steps": 5, "compile": False}
    known: dict[str, dict[str, Any]] = {
        "map": training,
        # The noise of the masks slows the fit and, in small batches, holds it back: four times the steps, with up to 512 rows.
        "dropout": training
        | {
            "steps": 50 if quick else 4 * steps,
            "batch_size": min(max(1, rows // 2), 20 if quick else 512),
            "insert": "*",
            "rate": PAIRS[3:8] if quick else PAIRS,
            "tau": "held-out",
            "folds": 2 if quick else 5,
        },
        "bbb": training | {"steps": 50 if quick else 2 * steps},
        # As published: fresh starts, and a variance that the network predicts. Each member is told by a tenth of the rows when to
        # stop, the next member by the next tenth; so it may have steps to spare.
        "ensemble": training
        | {
            "steps": 50 if quick else 4 * steps,
            "members": 2 if quick else 20,
            "anchored": False,
            "init": "fresh",
            "validation": 0.1,
        },
        # Chains with noisy gradients go slowly: they begin where MAP ends, and half of the rows in a step keep the noise low.
        "sghmc": {"warmup": 30, "draws": 10, "thin": 2, "start_steps": 50, "compile": False}
        if quick
        else {
            "chains": 8,
            "warmup": 5_000,
            "draws": 200,
            "thin": 50,
            "start_steps": steps,
            "batch_size": min(max(1, rows // 2), 512),
        },
        "hmc": few if quick else {"chains": 4, "warmup": 100, "draws": 100, "max_steps": 400, "compile": True},
    }
    return known[method]


def short(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of MC-Dropout for fits that say which rates are worth a whole one: half the steps, of up to 128 rows."""
    return settings | {"steps": settings["steps"] // 2, "batch_size": min(settings["batch_size"], 128)}


def finalists(posterior: Posterior) -> tuple[Any, ...]:
    """The rates that held-out rows are most for, best first."""
    grid = sorted(posterior.record.history["grid"], key=lambda trial: -trial["held_out_log_density"])
    return tuple(trial["rate"] for trial in grid[:FINALISTS])


def choose(root: Path, name: str, split: int, *, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """The prior's scale and the noise for a split, as plain values."""
    known = data.uci(root, name, split)
    recipe = Recipe(hidden=(known.n_hidden or 50,))
    if quick:
        return {"prior_scale": recipe.scale, "noise": recipe.noise}
    chosen, trials = tune(recipe, known.x_train.numpy(), known.y_train.numpy()[:, 0], seed=seed)
    told = [dataclasses.asdict(trial) for trial in trials]
    return {"prior_scale": chosen.scale, "noise": chosen.noise, "trials": told}


def run_cell(
    root: Path,
    name: str,
    split: int,
    method: str,
    chosen: dict[str, Any],
    *,
    seed: int = 0,
    quick: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Fits and measures; plain values."""
    known = data.uci(root, name, split)
    noise = PUBLISHED_NOISE.get(method, chosen["noise"])
    scale = PUBLISHED_SCALE.get(method, chosen["prior_scale"])
    recipe = Recipe(
        hidden=(known.n_hidden or 50,),
        activation=PUBLISHED_ACTIVATION.get(method, "silu"),
        prior_scale=scale,
        noise=noise,
        method=method,
        settings=settings_of(method, len(known.x_train), quick),
    )
    problem = recipe.problem(known.x_train.numpy(), known.y_train.numpy()[:, 0], seed=seed, device=device)
    started = time.perf_counter()
    if method == "dropout":
        heat = dataclasses.replace(recipe, settings=short(dict(recipe.settings))).fitter(problem.n, problem.layout.dim)
        rates = finalists(heat.fit(problem, seed=seed, progress=False))
        recipe = dataclasses.replace(recipe, settings={**recipe.settings, "rate": rates})
    posterior = recipe.fitter(problem.n, problem.layout.dim).fit(problem, seed=seed, progress=False)
    seconds = time.perf_counter() - started
    options = {"passes": 20 if quick else PASSES} if isinstance(posterior, DropoutPosterior) else {}
    predictive = in_units(posterior.predict(known.x_test.to(device), **options), known.y_mean, known.y_std)
    y = (known.y_test[:, 0].double() * known.y_std + known.y_mean).to(device)
    errors, densities = predictive.mean - y, predictive.log_prob(y)
    lower, upper = predictive.interval(0.9)
    found: dict[str, Any] = {
        "data": name,
        "split": split,
        "method": method,
        "seed": seed,
        "rmse": float(errors.square().mean().sqrt()),
        "log_likelihood": float(densities.mean()),
        "coverage": float(((lower <= y) & (y <= upper)).double().mean()),
        "seconds": round(seconds, 2),
        "prior_scale": scale,
        "noise": noise,
    }
    if isinstance(posterior, SampledPosterior) and posterior.statistics:
        judged = posterior.diagnostics(known.x_test[:100].to(device)).functions
        assert judged is not None
        found |= {"rhat": float(judged.rhat_worst), "rhat_median": float(judged.rhat_median)}
    return {key: value for key, value in found.items() if not (isinstance(value, float) and not math.isfinite(value))}


def one_thread() -> None:
    """For a worker: networks of this size are quickest in one thread, a worker for each processor."""
    torch.set_num_threads(1)
