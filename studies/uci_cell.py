"""One cell of the UCI benchmark: one method on one split, with everything chosen on the training part alone.

Inputs and targets are standardised with the training rows; metrics are in the units of the target. The network has one
hidden layer of 50 units unless the data set specifies another width. The prior scale and the noise model are chosen by
`credibly.tables.tuning` inside the training part, once per split, for all methods but two. The deep ensemble has ReLU
units and predicts a variance per row, as in its paper. MC-Dropout has ReLU units, a wide prior and a single noise
scale, as in its papers; its rates (separate for inputs and hidden units) and its precision are chosen by five-fold
cross-validation on the training part: all pairs of rates with short fits, then the best three with full ones.
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
PUBLISHED_NOISE = {"dropout": "learned", "ensemble": "heteroscedastic"}  # as in the papers of these methods
PUBLISHED_ACTIVATION = {"dropout": "relu", "ensemble": "relu"}
PUBLISHED_SCALE = {"dropout": 100.0}  # a prior length-scale of 0.01, which leaves the regularisation to the masks
PASSES = 1_000  # with 100 passes the log of their mean is 0.015 nats too low on Boston
PAIRS = tuple(
    {"0": inputs, "*": hidden} for inputs in (0.0, *RATES) for hidden in RATES
)  # no dropout on the inputs is allowed
FINALISTS = 3  # pairs of rates that are compared by full fits


def settings_of(method: str, rows: int, quick: bool = False) -> dict[str, Any]:
    """Return the settings of a method that its recipe does not set; they depend only on the number of training rows."""
    steps = max(5_000, 40 * max(1, rows // 128))
    training: dict[str, Any] = {"steps": 50 if quick else steps, "compile": False if quick else "auto"}
    few = {"chains": 2, "warmup": 20, "draws": 10, "thin": 1, "max_steps": 5, "compile": False}
    known: dict[str, dict[str, Any]] = {
        "map": training,
        # Mask noise slows training and, in small batches, hurts the fit: four times the steps, up to 512 rows per
        # batch.
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
        # As published: random initialisation and a predicted variance. Each member stops early on its own tenth of the
        # rows, so the number of steps may be generous.
        "ensemble": training
        | {
            "steps": 50 if quick else 4 * steps,
            "members": 2 if quick else 20,
            "anchored": False,
            "init": "fresh",
            "validation": 0.1,
        },
        # Chains with noisy gradients move slowly: start them at MAP fits, and use half of the rows per step to keep the
        # noise low.
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
    """Return the settings of the MC-Dropout fits that preselect rates: half the steps, batches of up to 128 rows."""
    return settings | {"steps": settings["steps"] // 2, "batch_size": min(settings["batch_size"], 128)}


def finalists(posterior: Posterior) -> tuple[Any, ...]:
    """Return the rates with the highest held-out log density, best first."""
    grid = sorted(posterior.record.history["grid"], key=lambda trial: -trial["held_out_log_density"])
    return tuple(trial["rate"] for trial in grid[:FINALISTS])


def choose(root: Path, name: str, split: int, *, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Choose the prior scale and the noise model for a split; plain values."""
    known = data.uci(root, name, split)
    recipe = Recipe(hidden=(known.n_hidden or 50,))
    if quick:
        return {"prior_scale": recipe.scale, "noise": recipe.noise}
    chosen, trials = tune(recipe, known.x_train.numpy(), known.y_train.numpy()[:, 0], seed=seed)
    tried = [dataclasses.asdict(trial) for trial in trials]
    return {"prior_scale": chosen.scale, "noise": chosen.noise, "trials": tried}


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
    """Fit one method on one split and evaluate it; plain values."""
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
        preselection = dataclasses.replace(recipe, settings=short(dict(recipe.settings))).fitter(
            problem.n, problem.layout.dim
        )
        rates = finalists(preselection.fit(problem, seed=seed, progress=False))
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
    """Limit a worker to one thread: networks of this size are fastest with one thread and one worker per core."""
    torch.set_num_threads(1)
