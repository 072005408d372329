"""Summarise a finished run: the values behind its page, its results file and the output of the command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from credibly.errors import InputError
from credibly.posterior.draws import SampledPosterior
from credibly.tables.fit_summary import Array, FitSummary, View
from credibly.tables.model import TableModel
from credibly.tables.recipe import Recipe
from credibly.tables.run import TableRun

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

# The 95 % quantile of the standard normal, half the width of its central 90 % interval.
Z_90 = 1.6448536269514722
# Maximum number of rows at which chains are diagnosed.
DIAGNOSED_ROWS = 200


def summarise(run: TableRun) -> FitSummary:
    """Summarise a finished run. Predictions on the held-out rows are recomputed."""
    model, stored = run.model, run.facts
    rows, on = run.rows()
    inputs = model.inputs(rows)[0]
    predictive = model.predict(inputs)
    y = model.preparation.target_values(rows)
    recipe = run.config.recipe(model.preparation.task)
    return FitSummary(
        table=run.config.table.replace("\\", "/").rsplit("/", 1)[-1],
        target=run.config.target,
        task=model.preparation.task,
        classes=model.preparation.classes,
        columns=model.preparation.columns,
        rows=stored["rows"],
        held_out=stored["held_out"],
        seed=run.config.seed,
        method=run.config.method,
        why=stored["why"],
        settings=dict(run.config.settings),
        network=_network(recipe, model),
        prior=f"Normal with standard deviation {recipe.scale:g}, divided by the square root of each layer's fan-in",
        noise=_noise(recipe, model),
        parameters=stored["parameters"],
        seconds=stored["seconds"],
        on=on,
        predictive=predictive,
        y=y,
        figures=run.figures,
        baseline=baseline(model, y, run.sample()),
        ood=model.ood(predictive),
        ood_far=_shuffled(model, inputs, run.config.seed),
        diagnostics=_diagnostics(model, model.preparation.transform(rows)[0], y),
        posterior=model.posterior,
        view=_view(model, run.sample()),
    )


def baseline(model: TableModel, y: Array, training: Table) -> dict[str, float]:
    """Return metrics of a constant prediction: training mean and standard deviation, or training class frequencies."""
    prepared = model.preparation
    if prepared.classes is None:
        error, std = y - prepared.y_mean, prepared.y_std
        density = -0.5 * (error / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        inside = np.abs(error) <= Z_90 * std
        return {
            "log_density": float(density.mean()),
            "rmse": float(np.sqrt(np.mean(error**2))),
            "coverage": float(inside.mean()),
            "width": 2 * Z_90 * std,
        }
    counts = np.bincount(prepared.target_values(training), minlength=len(prepared.classes)) + 1.0
    frequency = counts / counts.sum()
    truth = np.eye(len(frequency))[y]
    return {
        "log_density": float(np.log(frequency[y]).mean()),
        "accuracy": float((y == frequency.argmax()).mean()),
        "brier": float(((frequency - truth) ** 2).sum(-1).mean()),
    }


def _network(recipe: Recipe, model: TableModel) -> str:
    inputs = model.preparation.inputs
    if not recipe.hidden:
        return f"linear model of {inputs} inputs"
    widths = " and ".join(str(w) for w in recipe.hidden)
    layers = "one hidden layer" if len(recipe.hidden) == 1 else f"{len(recipe.hidden)} hidden layers"
    return f"{inputs} inputs, {layers} of {widths} units ({recipe.activation})"


def _noise(recipe: Recipe, model: TableModel) -> str:
    if recipe.task == "classification":
        return "labels drawn from the predicted probabilities"
    known = {
        "learned": "normal, with one learned standard deviation",
        "heteroscedastic": "normal, with a standard deviation that depends on the inputs",
        "student": "Student's t, with a learned scale: heavy tails",
    }
    if isinstance(recipe.noise, str):
        return known[recipe.noise]
    return f"normal, with a known standard deviation of {recipe.noise * model.preparation.y_std:.4g}"


def _shuffled(model: TableModel, inputs: Array, seed: int) -> Array | None:
    """Return OOD scores of rows with every input column shuffled independently."""
    if model.ood_levels is None or inputs.shape[1] < 2 or len(inputs) < 2:
        return None
    rng = np.random.default_rng([seed, 0xF42])
    return model.ood(model.predict(np.stack([rng.permutation(column) for column in inputs.T], 1)))


def _diagnostics(model: TableModel, inputs: Array, y: Array) -> Any:
    posterior, prepared = model.posterior, model.preparation
    if not isinstance(posterior, SampledPosterior) or not posterior.statistics:
        return None
    some = np.linspace(0, len(inputs) - 1, min(DIAGNOSED_ROWS, len(inputs))).round().astype(int)
    # The posterior is that of the standardised target.
    seen = y[some] if prepared.classes is not None else (y[some] - prepared.y_mean) / prepared.y_std
    try:
        return posterior.diagnostics(torch.from_numpy(np.ascontiguousarray(inputs[some])), torch.from_numpy(seen))
    except InputError:
        # Too few draws to diagnose.
        return None


def _view(model: TableModel, training: Table) -> View | None:
    prepared = model.preparation
    names = tuple(prepared.names)
    if len(names) not in (1, 2) or set(names) != set(prepared.numeric_names):
        return None
    raw = np.stack([training[name].to_numpy(zero_copy_only=False).astype(float) for name in names], 1)
    known = np.isfinite(raw).all(-1)

    def predict(x: Array) -> Predictive:
        import pyarrow as pa

        return model.predict_table(pa.table({name: np.asarray(x)[:, i] for i, name in enumerate(names)}))

    return View(names, raw[known], prepared.target_values(training)[known], predict)
