"""Summaries of small fits for tests of pages: embedded data and toys, with few draws and steps."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import torch

import credibly as cr
from credibly.posterior.draws import SampledPosterior
from credibly.predictive.rescaling import in_units
from credibly.tables.fit_summary import FitSummary, View
from credibly.tables.recipe import Recipe

TINY: dict[str, dict[str, Any]] = {
    "map": {"steps": 60},
    "ensemble": {"members": 4, "steps": 60},
    "bbb": {"steps": 150},
    "dropout": {"steps": 60},
    "hmc": {"chains": 2, "warmup": 30, "draws": 30, "thin": 1},
}


def facts_of(
    name: str, method: str = "ensemble", *, noise: str = "learned", settings: dict[str, Any] | None = None
) -> FitSummary:
    """Summarise a fit to "diabetes", "breast_cancer", "wine", or the toys "wave", "plane", "moons" and "steps".

    A fit is made once in a process: facts cannot be changed.
    """
    chosen = TINY.get(method, {}) if settings is None else settings
    return _made(name, method, noise, tuple(chosen.items()))


@cache
def _made(name: str, method: str, noise: str, chosen: tuple[tuple[str, Any], ...]) -> FitSummary:
    x, y, test, names, classes = _data(name)
    train = ~test
    task = "regression" if classes is None else "classification"
    low, wide = x[train].mean(0), x[train].std(0)
    at, scale = (float(y[train].mean()), float(y[train].std())) if classes is None else (0.0, 1.0)
    z = (y - at) / scale if classes is None else y
    recipe = Recipe(task, (8,), noise=noise, method=method, settings=dict(chosen))
    problem = recipe.problem((x[train] - low) / wide, z[train], classes=None if classes is None else len(classes))
    fitter = recipe.fitter(problem.n, problem.layout.dim)
    posterior = fitter.fit(problem, seed=0)

    def standardised(rows: Any) -> torch.Tensor:
        return torch.as_tensor((np.asarray(rows, float) - low) / wide, dtype=torch.float32)

    def predict(rows: Any) -> cr.Predictive:
        found = posterior.predict(standardised(rows))
        return in_units(found, at, scale) if classes is None else found

    predictive, seen = predict(x[test]), y[test]
    shuffled = np.stack([np.random.default_rng(i).permutation(c) for i, c in enumerate(x[test].T)], 1)
    usual, strange = (np.asarray(predict(rows).epistemic.double()) for rows in (x[test], shuffled))
    has_doubt = bool(usual.max() > 0)
    ood = [(np.sort(usual).searchsorted(v) / len(usual)) if has_doubt else None for v in (usual, strange)]
    chains = method in ("hmc", "sgld", "sghmc") and isinstance(posterior, SampledPosterior)
    return FitSummary(
        table=f"{name}.csv",
        target="y" if classes is None else "kind",
        task=task,
        classes=classes,
        columns=tuple((n, "numeric", "standardised") for n in names),
        rows=int(train.sum()),
        held_out=int(test.sum()),
        seed=0,
        method=method,
        why="requested",
        settings={f.name: getattr(fitter, f.name) for f in dataclasses.fields(fitter)},
        network=f"{x.shape[1]} inputs, a hidden layer of 8 units (silu)",
        prior="Normal with standard deviation 1",
        noise=noise,
        parameters=problem.layout.dim,
        seconds=1.25,
        on="held-out",
        predictive=predictive,
        y=seen,
        figures=cr.evaluate(predictive, seen),
        baseline=_baseline(y[train], seen, classes),
        ood=ood[0],
        ood_far=ood[1] if x.shape[1] > 1 else None,
        diagnostics=posterior.diagnostics(standardised(x[test])) if chains else None,
        posterior=posterior,
        view=View(names, x[train], y[train], predict) if x.shape[1] <= 2 else None,
    )


def _data(name: str) -> tuple[Any, Any, Any, tuple[str, ...], tuple[str, ...] | None]:
    """Return inputs, targets, a mask of held-out rows, names of the inputs and names of the classes."""
    if name in cr.data.EMBEDDED:
        known = cr.data.embedded(name)
        x = torch.cat([known.x_train, known.x_test]).double() * known.x_std + known.x_mean
        y = torch.cat([known.y_train, known.y_test]).double().numpy().reshape(-1) * known.y_std + known.y_mean
        test = np.arange(len(y)) >= len(known.y_train)
        labels = None if known.n_classes is None else tuple(f"kind {i}" for i in range(known.n_classes))
        return x.numpy(), y if labels is None else y.astype(int), test, known.feature_names, labels
    rng = np.random.default_rng(0)
    two = name != "wave" and name != "steps"
    x = rng.uniform(-3, 3, size=(160, 2 if two else 1)) * 10 + 50
    z = (x - 50) / 10
    test = np.arange(len(x)) % 4 == 0
    names = ("width", "height") if two else ("age",)
    if name == "wave":
        return x, 100 * np.sin(z[:, 0]) + 20 * rng.normal(size=len(x)) + 500, test, names, None
    if name == "plane":
        return x, 100 * np.sin(z[:, 0]) * z[:, 1] + 20 * rng.normal(size=len(x)) + 500, test, names, None
    if name == "moons":
        return x, (z[:, 1] + 0.4 * rng.normal(size=len(x)) > np.sin(z[:, 0])).astype(int), test, names, ("no", "yes")
    assert name == "steps"
    return (
        x,
        np.clip(np.floor((z[:, 0] + 0.4 * rng.normal(size=len(x)) + 3) / 2), 0, 2).astype(int),
        test,
        names,
        ("low", "middle", "high"),
    )


def _baseline(train: Any, y: Any, classes: tuple[str, ...] | None) -> dict[str, float]:
    if classes is None:
        mean, deviation = float(train.mean()), float(train.std())
        density = -0.5 * ((y - mean) / deviation) ** 2 - math.log(deviation) - 0.5 * math.log(2 * math.pi)
        return {"log_density": float(density.mean()), "rmse": float(np.sqrt(((y - mean) ** 2).mean()))}
    share = np.bincount(train, minlength=len(classes)) / len(train)
    return {"log_density": float(np.log(share[y]).mean()), "accuracy": float((y == share.argmax()).mean())}
