"""Further encodings of network inputs, chosen by folds: normal scores of skewed columns and integers as categories.

With times there are inputs clipped to their training range too: predictions stay where they were at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.errors import StoreError

Array = npt.NDArray[Any]

KINDS = ("standard", "quantile", "categories", "clipped")
# Most knots of a quantile scale, and rows for each of them.
KNOTS, ROWS_EACH = 100, 15
# A standardised column with this few distinct values is left as it is by "quantile".
FEW = 10
# A numeric column with this many distinct values has an input for each by "categories", if it has enough rows for that;
# columns with the fewest come first, as long as there are at most MOST_ADDED inputs in all.
LEVELS = (3, 150)
MOST_ADDED = 200


@dataclass(frozen=True)
class InputScaling:
    """Encoding of standardised inputs, (N, P) -> (N, outputs).

    Attributes:
        kind: "standard" (unchanged), "quantile" (numeric columns become normal scores of their ranks in the training
            rows), "categories" (numeric columns with few distinct values get an input for each value beside their own)
            or "clipped" (every input stays within its range in the training rows).
        columns: indices of the columns that it changes or adds to.
        points: for each of them, the knots of the quantile scale, the values with an input, or the range.
    """

    kind: str = "standard"
    columns: tuple[int, ...] = ()
    points: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def fit(cls, kind: str, x: Array, numeric: tuple[int, ...]) -> InputScaling:
        """Fit to standardised training inputs, of which those in `numeric` are numeric columns."""
        columns, points, added = [], [], 0
        if kind == "clipped":
            ends = np.stack([x.min(0), x.max(0)], 1).astype(np.float64)
            return cls(kind, tuple(range(len(ends))), tuple((low, high) for low, high in ends.tolist()))
        distinct = {j: np.unique(x[:, j].astype(np.float64)) for j in (numeric if kind != "standard" else ())}
        for j, values in sorted(distinct.items(), key=lambda item: len(item[1])):
            if kind == "quantile" and len(values) > FEW:
                count = int(np.clip(len(x) // ROWS_EACH, 10, KNOTS))
                knots = np.unique(np.quantile(x[:, j].astype(np.float64), (np.arange(count) + 0.5) / count))
                if len(knots) > 2:
                    columns.append(j)
                    points.append(tuple(knots.tolist()))
            elif kind == "categories" and LEVELS[0] <= len(values) <= LEVELS[1] and len(x) >= 10 * len(values):
                added += len(values)
                if added > MOST_ADDED:
                    break
                columns.append(j)
                points.append(tuple(values.tolist()))
        return cls(kind, tuple(columns), tuple(points)) if columns else cls()

    def outputs(self, inputs: int) -> int:
        """Return the number of outputs."""
        return inputs + (sum(map(len, self.points)) if self.kind == "categories" else 0)

    def origins(self, inputs: int) -> Array:
        """Return for each output the index of the input that it is a function of."""
        added = zip(self.columns, self.points) if self.kind == "categories" else ()
        return np.array([*range(inputs), *(j for j, values in added for _ in values)], dtype=np.int64)

    def names(self, features: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the outputs from those of the inputs."""
        if self.kind != "categories":
            return features
        added = (f"{features[j]} is level {i + 1}" for j, p in zip(self.columns, self.points) for i in range(len(p)))
        return (*features, *added)

    def __call__(self, x: Array) -> Array:
        """Return the encoded inputs in float32."""
        if self.kind == "standard":
            return x
        if self.kind == "clipped":
            low, high = np.array(self.points, dtype=np.float32).T
            return np.clip(np.asarray(x, dtype=np.float32), low, high)
        if self.kind == "quantile":
            out = np.array(x, dtype=np.float32)
            for j, knots in zip(self.columns, self.points):
                out[:, j] = _normal_scores(x[:, j].astype(np.float64), np.array(knots))
            return out
        parts = [np.asarray(x, dtype=np.float32)]
        for j, values in zip(self.columns, self.points):
            levels = np.array(values)
            near = np.abs(x[:, j, None].astype(np.float64) - levels)
            # Equal up to the rounding of float32.
            parts.append((near <= 1e-4 * np.diff(levels).min()).astype(np.float32))
        return np.concatenate(parts, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON."""
        return {"kind": self.kind, "columns": list(self.columns), "points": [list(p) for p in self.points]}

    @classmethod
    def from_dict(cls, plain: Any) -> InputScaling:
        """Restore a result of `to_dict`."""
        try:
            points = tuple(tuple(float(v) for v in p) for p in plain["points"])
            made = cls(str(plain["kind"]), tuple(int(c) for c in plain["columns"]), points)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"preparation: the input scaling is incomplete ({error!r})") from error
        if made.kind not in KINDS or len(made.columns) != len(made.points):
            raise StoreError(f"preparation: the input scaling is of kind {made.kind!r} with {len(made.points)} scales")
        return made


STANDARD = InputScaling()


def _normal_scores(values: Array, knots: Array) -> Array:
    """Interpolate normal scores between the knots, linearly also beyond them with the slope of the outermost pair."""
    ranks = torch.from_numpy((np.arange(len(knots)) + 0.5) / len(knots))
    scores = torch.special.ndtri(ranks).numpy()
    inside = np.interp(values, knots, scores)
    low, high = values < knots[0], values > knots[-1]
    # No steeper than the standardised column itself, so that one outlier cannot reach far.
    first = min((scores[1] - scores[0]) / (knots[1] - knots[0]), 1.0)
    last = min((scores[-1] - scores[-2]) / (knots[-1] - knots[-2]), 1.0)
    inside = np.where(low, scores[0] + first * (values - knots[0]), inside)
    found: Array = np.where(high, scores[-1] + last * (values - knots[-1]), inside)
    return found
