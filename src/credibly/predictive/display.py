"""The first rows of a predictive as a table for notebooks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from credibly.core.html import fact_table

# Number of rows that are shown, and of targets or classes per row.
ROWS, COLUMNS = 5, 6
# Number of activations of all rows and draws up to which predictions are computed just for display.
SHOWN_VALUES = 2**26


def predictive_table(predictive: Any) -> str:
    """Return facts about a predictive, and the predictions of its first rows if they are known or quick to compute."""
    facts = {"rows": f"{predictive.rows:,}", "draws": f"{predictive.draws:,}"}
    facts["likelihood"] = type(predictive.likelihood).__name__
    kind = type(predictive).__name__
    work = predictive.rows * predictive.draws * max(1, predictive.source.row_width())
    if "_summary" not in vars(predictive) and work > SHOWN_VALUES:
        return fact_table(kind, facts, note="Not computed yet: mean, std, interval(level), log_prob(y) compute it.")
    support = predictive.likelihood.support
    columns = _labels(predictive) if support in ("class", "binary") else _numbers(predictive)
    if any(column.ndim != 1 for column in columns.values()):
        facts["shape of the mean"] = str(tuple(predictive.mean.shape))
        return fact_table(kind, facts)
    rows = [[str(i), *(_shown(column[i]) for column in columns.values())] for i in range(min(ROWS, predictive.rows))]
    more = f"The first {ROWS} of {predictive.rows:,} rows." if predictive.rows > ROWS else ""
    return fact_table(kind, facts, head=["row", *columns], rows=rows, note=more)


def _numbers(predictive: Any) -> dict[str, Tensor]:
    parts = {
        "mean": predictive.mean,
        "std": predictive.std,
        "aleatoric std": predictive.aleatoric.sqrt(),
        "epistemic std": predictive.epistemic.clamp_min(0).sqrt(),
    }
    if predictive.mean.ndim != 2 or predictive.mean.shape[1] > COLUMNS:
        return parts
    return {f"{name} {k}": value[:, k] for k in range(predictive.mean.shape[1]) for name, value in parts.items()}


def _labels(predictive: Any) -> dict[str, Tensor]:
    probability, label = predictive.probabilities.max(-1)
    return {
        "label": label,
        "probability": probability,
        "entropy": predictive.total,
        "aleatoric": predictive.aleatoric,
        "epistemic": predictive.epistemic,
    }


def _shown(value: Tensor) -> str:
    return f"{float(value):.4g}" if value.is_floating_point() else str(int(value))
