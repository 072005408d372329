"""The columns of a table as inputs of a graph: `Preparation` in traceable operations.

Numbers are float64 tensors (rows,), with NaN for missing cells. Categories reach this module as int64 tensors (rows,)
with the position of the level's own input, or -1 for a cell that has none; an ONNX file takes them as text and finds
the positions by a LabelEncoder. Missing numbers are imputed by the median of the training rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from credibly.errors import InputError
from credibly.tables.cells.parsing import MISSING
from credibly.tables.columns.dates import Date
from credibly.tables.columns.encoders import LIMIT, Categorical, Numeric
from credibly.tables.columns.scaling import InputScaling
from credibly.tables.preparation import Preparation

BOOLEANS = {"true": ("true", "True", "TRUE"), "false": ("false", "False", "FALSE")}


def check_columns(preparation: Preparation) -> None:
    """Raise on columns that a graph cannot handle."""
    dates = [column.name for column in preparation.used if isinstance(column, Date)]
    if dates:
        found = f"has columns of dates ({', '.join(map(repr, dates))}), and ONNX has no calendar"
        advice = "Replace them by numbers such as days since a start before the fit, or --drop them"
        raise InputError("run", found, advice)


def level_positions(column: Categorical, na: Sequence[str]) -> tuple[dict[str, int], int]:
    """Return the input of every known text of a categorical column, and that of all other texts; -1 for none."""
    other = len(column.levels) if column.rare else -1
    missing = len(column.features) - 1 if column.missing else -1
    found = dict.fromkeys((*MISSING, *na), missing)
    labels = [*column.levels, *column.rare]
    lower = [label.lower() for label in labels]
    # As when a table is read: texts of booleans are compared without case.
    boolean = set(lower) <= set(BOOLEANS) and len(set(lower)) == len(lower)
    for place, label in enumerate(labels):
        for text in BOOLEANS[label.lower()] if boolean else (label,):
            found[text] = min(place, len(column.levels))
    return found, other


class ColumnsGraph(nn.Module):
    """Prepared inputs (rows, P) of a network, and how many cells of each row were imputed."""

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self.columns = preparation.used
        self.codes = tuple(value for value in map(_as_float, preparation.conventions.na) if value is not None)
        self.scaling = ScalingGraph(preparation.scaling)

    def forward(self, cells: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs in float32, and the number of imputed cells per row."""
        parts, imputed = [], torch.zeros_like(cells[0], dtype=torch.int64)
        for column, values in zip(self.columns, cells):
            if isinstance(column, Categorical):
                width = len(column.features)
                parts.append((values.unsqueeze(1) == torch.arange(width)).to(torch.float32))
                imputed = imputed + (values < 0).to(torch.int64)
            else:
                assert isinstance(column, Numeric)
                part, missing = self._number(column, values)
                parts.append(part)
                imputed = imputed + missing.to(torch.int64)
        return self.scaling(torch.cat(parts, 1)), imputed

    def _number(self, column: Numeric, values: Tensor) -> tuple[Tensor, Tensor]:
        known = values.abs() < torch.inf
        for code in self.codes:
            known = known & (values != code)
        parts = []
        if column.scale > 0:
            fill = float(np.clip((column.fill - column.mean) / column.scale, -LIMIT, LIMIT))
            scaled = ((values - column.mean) / column.scale).clamp(-LIMIT, LIMIT)
            parts.append(torch.where(known, scaled, fill).to(torch.float32))
        if column.indicator:
            parts.append((~known).to(torch.float32))
        return torch.stack(parts, 1), ~known


class ScalingGraph(nn.Module):
    """`InputScaling` of standardised inputs."""

    def __init__(self, scaling: InputScaling) -> None:
        super().__init__()
        self.scaling = scaling
        for number, points in enumerate(scaling.points):
            self.register_buffer(f"points{number}", torch.tensor(points, dtype=torch.float64))
            if scaling.kind == "quantile":
                ranks = (torch.arange(len(points), dtype=torch.float64) + 0.5) / len(points)
                self.register_buffer(f"scores{number}", torch.special.ndtri(ranks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoded inputs."""
        if self.scaling.kind == "standard":
            return x
        parts = list(x.unbind(1))
        for number, column in enumerate(self.scaling.columns):
            values, points = x[:, column].double(), getattr(self, f"points{number}")
            if self.scaling.kind == "quantile":
                parts[column] = _normal_scores(values, points, getattr(self, f"scores{number}")).to(torch.float32)
            elif self.scaling.kind == "clipped":
                parts[column] = values.clamp(points[0], points[1]).to(torch.float32)
            else:
                reach = 1e-4 * float(np.diff(np.array(self.scaling.points[number])).min())
                parts += ((values.unsqueeze(1) - points).abs() <= reach).to(torch.float32).unbind(1)
        return torch.stack(parts, 1)


def _normal_scores(values: Tensor, knots: Tensor, scores: Tensor) -> Tensor:
    """Interpolate between knots, and linearly beyond them with a slope of at most 1."""
    right = (knots < values.unsqueeze(1)).sum(1).clamp(1, len(knots) - 1)
    slopes = (scores[1:] - scores[:-1]) / (knots[1:] - knots[:-1])
    inside = scores[right - 1] + slopes[right - 1] * (values - knots[right - 1])
    below = scores[0] + slopes[0].clamp_max(1.0) * (values - knots[0])
    above = scores[-1] + slopes[-1].clamp_max(1.0) * (values - knots[-1])
    return torch.where(values < knots[0], below, torch.where(values > knots[-1], above, inside))


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
