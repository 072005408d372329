"""Summarise a finished run: the values behind its page, its results file and the output of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from credibly.core.stages import stage
from credibly.errors import InputError
from credibly.posterior.draws import SampledPosterior
from credibly.predictive.one_target import one_target
from credibly.tables.column_effects import column_effects, effects_of_target, guarantee_of
from credibly.tables.fit_summary import Array, Candidate, FitSummary, View
from credibly.tables.model import TableModel
from credibly.tables.recipe import Recipe
from credibly.tables.run import TableRun
from credibly.tables.targets.metrics import constant_density, constant_metrics, target_metrics

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

# Metrics of one of several targets.
METRICS = ("log_density", "rmse", "crps", "coverage", "width", "calibration_error")
# What tasks predict, if not numbers.
PREDICTED = {"classification": "classification", "ordinal": "classification", "survival": "survival"}
NOISES = {
    "classification": "labels drawn from the predicted probabilities",
    "ordinal": "labels drawn from the predicted probabilities, with learned cut points between the levels",
    "counts": "negative binomial counts, with a learned dispersion",
    "poisson": "Poisson counts, whose variance is their mean",
    "proportion": "beta-distributed proportions, with a learned precision",
    "survival": "Weibull times, with a learned shape; a censored row counts by its probability of survival",
}
# Maximum number of rows at which chains are diagnosed.
DIAGNOSED_ROWS = 200


def summarise_targets(run: TableRun) -> tuple[FitSummary, ...]:
    """Summarise a finished run for each of its targets."""
    facts = summarise(run)
    return _by_target(facts, run.model.preparation.targets) or (facts,)


def summarise_on(run: TableRun, rows: Table, name: str) -> tuple[FitSummary, ...]:
    """Summarise a finished run on other rows with a target, of the table with this name.

    All targets together come first, followed by each of several targets.
    """
    model = run.model
    inputs = model.inputs(rows)[0]
    predictive, y = model.predict(inputs), model.preparation.target_values(rows)
    metrics = target_metrics(predictive, torch.from_numpy(y), model.preparation.targets, seed=run.config.seed)
    facts = dataclasses.replace(_summary(run, rows, "new", inputs, predictive, y), figures=metrics, evaluated=name)
    return (facts, *_by_target(facts, model.preparation.targets))


def _by_target(facts: FitSummary, targets: Sequence[str]) -> tuple[FitSummary, ...]:
    """Return the summary of each of several targets; none for a single one."""
    if len(targets) < 2:
        return ()

    def own(metrics: dict[str, float], name: str) -> dict[str, float]:
        return {key: metrics[f"{key}_{name}"] for key in METRICS if f"{key}_{name}" in metrics}

    return tuple(
        dataclasses.replace(
            facts,
            target=name,
            predictive=one_target(facts.predictive, k),
            y=facts.y[:, k],
            figures=own(facts.figures, name),
            baseline=own(facts.baseline, name),
            importance=facts.target_importance[k] if facts.target_importance else None,
            effects=effects_of_target(facts.effects, k),
            target_importance=(),
        )
        for k, name in enumerate(targets)
    )


def summarise(run: TableRun) -> FitSummary:
    """Summarise a finished run, all targets together. Predictions on the held-out rows are recomputed."""
    rows, on = run.rows()
    inputs = run.model.inputs(rows)[0]
    y = run.model.preparation.target_values(rows)
    found = _summary(run, rows, on, inputs, run.predict_rows(inputs), y)
    importance, effects = column_effects(run, rows, y)
    alone = importance[0] if len(importance) == 1 else None
    several = importance if len(importance) > 1 else ()
    return dataclasses.replace(found, importance=alone, target_importance=several, effects=effects)


def _summary(run: TableRun, rows: Table, on: str, inputs: Array, predictive: Predictive, y: Array) -> FitSummary:
    model, stored = run.model, run.facts
    recipe = run.config.recipe(model.preparation.task)
    return FitSummary(
        table=run.config.table.replace("\\", "/").rsplit("/", 1)[-1],
        target=run.config.target,
        task=PREDICTED.get(model.preparation.task, "regression"),
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
        kind=model.preparation.task,
        options=_options(run),
        group=run.config.group,
        time=run.config.time,
        baseline_density=constant_density(model.preparation, y, model.preparation.target_values(run.sample())),
        class_weight=run.config.class_weight,
        guarantee=None if on == "new" else guarantee_of(stored.get("guarantee"), len(y)),
        warnings=() if on == "new" else tuple(stored.get("warnings", ())),
        refitted=stored["folds"] > 0,
        choices=() if on == "new" else tuple(Candidate(**one) for one in stored.get("candidates", ())),
    )


def baseline(model: TableModel, y: Array, training: Table) -> dict[str, float]:
    """Return metrics of a constant prediction: the best one of its kind for the training rows."""
    likelihood = model.predict(np.zeros((1, model.preparation.inputs), np.float32)).likelihood
    return constant_metrics(model.preparation, likelihood, y, model.preparation.target_values(training))


def _options(run: TableRun) -> tuple[str, ...]:
    """Return the options of `fit` and `compare` that describe the data, unless they are defaults or inferred."""
    config = run.config
    inferred = run.facts.get("requested", {}).get("task", "auto") == "auto"
    values = {
        "--task": None if inferred and config.task in ("regression", "classification") else config.task,
        "--transform": None if config.transform == "none" else config.transform,
        "--order": ",".join(config.order),
        "--event": config.event,
        "--drop": ",".join(config.drop),
        "--na": ",".join(config.na),
        "--weight": config.weight,
        "--class-weight": config.class_weight,
        "--group": config.group,
        "--time": config.time,
    }
    return tuple(word for option, value in values.items() if value for word in (option, value))


def _network(recipe: Recipe, model: TableModel) -> str:
    inputs = model.preparation.inputs
    if not recipe.hidden:
        return f"linear model of {inputs} inputs"
    widths = " and ".join(str(w) for w in recipe.hidden)
    layers = "one hidden layer" if len(recipe.hidden) == 1 else f"{len(recipe.hidden)} hidden layers"
    return f"{inputs} inputs, {layers} of {widths} units ({recipe.activation})"


def _noise(recipe: Recipe, model: TableModel) -> str:
    if recipe.task != "regression":
        return NOISES["poisson" if recipe.noise == "poisson" else recipe.task]
    known = {
        "learned": "normal, with one learned standard deviation",
        "heteroscedastic": "normal, with a standard deviation that depends on the inputs",
        "student": "Student's t, with a learned scale: heavy tails",
        "heteroscedastic-student": "Student's t, with a scale that depends on the inputs: heavy tails",
    }
    scale = model.preparation.scale
    kinds = {t.kind.replace("_", "-") for t in scale.transforms} - {"none"}
    moved = f", on the {' and '.join(sorted(kinds))} scale of the target" if kinds else ""
    if isinstance(recipe.noise, str):
        return known[recipe.noise] + moved
    return f"normal, with a known standard deviation of {_known_noise(recipe.noise, model)}"


def _known_noise(noise: float, model: TableModel) -> str:
    return ", ".join(f"{noise * std:.4g}" for std in model.preparation.scale.std)


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
    stage("diagnostics")
    some = np.linspace(0, len(inputs) - 1, min(DIAGNOSED_ROWS, len(inputs))).round().astype(int)
    # The posterior is that of the standardised target.
    seen = prepared.standardise(y[some])
    try:
        x = torch.from_numpy(np.ascontiguousarray(prepared.scaling(inputs[some])))
        return posterior.diagnostics(x, torch.from_numpy(seen))
    except InputError:
        # Too few draws to diagnose.
        return None


def _view(model: TableModel, training: Table) -> View | None:
    prepared = model.preparation
    names = tuple(prepared.names)
    single = len(prepared.targets) < 2 and prepared.task != "survival"
    if not single or len(names) not in (1, 2) or set(names) != set(prepared.numeric_names):
        return None
    raw = np.stack([training[name].to_numpy(zero_copy_only=False).astype(float) for name in names], 1)
    known = np.isfinite(raw).all(-1)

    def predict(x: Array) -> Predictive:
        import pyarrow as pa

        return model.predict_table(pa.table({name: np.asarray(x)[:, i] for i, name in enumerate(names)}))

    return View(names, raw[known], prepared.target_values(training)[known], predict)
