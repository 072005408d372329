"""The values behind a picture of one prediction: its distribution on a grid, and how unusual each input is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from credibly.predictive.base import Predictive
from credibly.predictive.one_target import one_target
from credibly.web.serve.columns import unusual_inputs
from credibly.web.serve.rows import Rows

if TYPE_CHECKING:
    from credibly.web.serve.runs import ServedRun

# Points of a curve; maximum number of counts that are shown one by one.
POINTS = 161
# Probability outside the range of a curve, on either side.
TAIL = 0.001


def picture(run: ServedRun, rows: Rows) -> dict[str, Any]:
    """Return the distribution of each target of the first row, and what is unusual about its inputs."""
    assert rows.cells is not None
    known = run.model.preparation
    found: dict[str, Any] = {"target": known.target, "task": known.task, "curves": []}
    if known.classes is None:
        one = run.model.predict(rows.inputs[:1])
        for k, target in enumerate(known.targets):
            own = one if len(known.targets) == 1 else one_target(one, k)
            many = run.model.predict(np.repeat(rows.inputs[:1], POINTS, 0))
            many = many if len(known.targets) == 1 else one_target(many, k)
            found["curves"].append({"target": target} | curve(own, many, known.task))
    found["classes"] = None if known.classes is None else list(known.classes)
    found["inputs"] = unusual_inputs(run, rows.cells)
    return found


def curve(one: Predictive, many: Predictive, task: str) -> dict[str, Any]:
    """Return points of a distribution: a density, the probabilities of counts, or those of surviving times.

    Args:
        one: predictions of one row.
        many: predictions of the same row, `POINTS` times.
        task: task of the table.
    """
    low, high = (float(end.reshape(-1)[0]) for end in one.quantile((TAIL, 1 - TAIL)))
    if task == "counts":
        x = np.unique(np.linspace(low, high, min(POINTS, round(high - low) + 1)).round())
        x = np.concatenate([x, np.full(POINTS - len(x), x[-1])])
        kind, values = "probability", many.log_prob(torch.from_numpy(x)).double().exp().numpy()
    elif task == "survival":
        x = np.linspace(max(high, 1e-12) / POINTS, max(high, 1e-12), POINTS)
        kind, values = "survival", 1 - many.cdf(torch.from_numpy(x)).double().numpy()
    else:
        margin = 0.05 * (high - low)
        ends = (low, high) if task == "proportion" else (low - margin, high + margin)
        x = np.linspace(*ends, POINTS)
        kind, values = "density", many.log_prob(torch.from_numpy(x)).double().exp().numpy()
    values = np.nan_to_num(np.asarray(values).reshape(-1), nan=0.0, posinf=0.0)
    x, first = np.unique(x, return_index=True)
    return {"kind": kind, "x": x.tolist(), "y": values[first].tolist()}
