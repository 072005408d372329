"""A model fitted to a table: predicts in the units of the target, in memory or streamed from file to file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.distributed import world
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.predictive.base import CACHE_VALUES, Predictive
from credibly.predictive.rescaling import in_units
from credibly.tables.completed import predict_gaps
from credibly.tables.imputation import Donors
from credibly.tables.parallel_writer import shared_writer
from credibly.tables.parsing import Notes
from credibly.tables.preparation import Preparation
from credibly.tables.reading import batches, header

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

Array = npt.NDArray[Any]

LEVEL = 0.9
# Maximum and minimum number of rows predicted at a time: as many as fit in the cache, so that each draw visits them
# once.
BLOCK = 65_536
LEAST = 256
# Number of distinct notes that are reported.
EXAMPLES = 3
# Number of quantiles stored of the reference rows.
OOD_POINTS = 201


@dataclass(frozen=True, eq=False)
class TableModel:
    """A model fitted to a table.

    Attributes:
        preparation: preprocessing from columns to network inputs.
        posterior: posterior of the network, on standardised inputs and targets.
        ood_levels: quantiles of the epistemic uncertainty over in-distribution rows; None if the method has none.
        training_sample: reads some of the training rows, from which missing cells are completed; None to impute them.
    """

    preparation: Preparation
    posterior: Posterior
    ood_levels: Array | None = None
    training_sample: Callable[[], Table] | None = None

    def inputs(self, table: Table | RecordBatch) -> tuple[Array, Notes]:
        """Return the inputs of a table for `predict`, with NaN for missing cells, and (row, note) for unusual cells."""
        return self.preparation.transform(table, gaps=self.training_sample is not None)

    def predict(self, inputs: Array, *, draws: int | None = None) -> Predictive:
        """Return the predictive at prepared inputs (N, P) in the units of the target, optionally with fewer draws.

        Rows with NaN are averaged over completions from similar training rows (see `credibly.tables.completed`).
        """
        if np.isnan(inputs).any():
            found = predict_gaps(lambda x: self._predict(x, draws), inputs, self.donors)
        else:
            found = self._predict(inputs, draws)
        if self.preparation.task == "classification":
            return found
        return in_units(found, self.preparation.y_mean, self.preparation.y_std)

    def predict_table(self, table: Table | RecordBatch) -> Predictive:
        """Return the predictive at the rows of a table with the columns of the training data."""
        return self.predict(self.inputs(table)[0])

    @cached_property
    def donors(self) -> Donors:
        """Training rows that missing cells are completed from, read on first use."""
        if self.training_sample is None:
            raise InputError("inputs", "has missing values, and the model no training rows to complete them from")
        return Donors(self.preparation.transform(self.training_sample(), gaps=True)[0])

    def _predict(self, inputs: Array, draws: int | None) -> Predictive:
        """Return the predictive of the standardised target at complete inputs."""
        x = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))
        if draws is not None and isinstance(self.posterior, DrawsPosterior):
            return self.posterior.predict(x, draws=draws)
        return self.posterior.predict(x)

    def ood(self, predictive: Predictive) -> Array | None:
        """Return per row the fraction of reference rows with lower epistemic uncertainty; near 1 is unlike them.

        Uncertainty about missing cells is epistemic, so rows with gaps score higher than the same rows without.
        """
        return None if self.ood_levels is None else fraction_below(epistemic_of(predictive), self.ood_levels)

    def columns(self, predictive: Predictive) -> dict[str, Any]:
        """Return the columns of a prediction file, without the notes."""
        found: dict[str, Any] = {}
        if self.preparation.task == "classification":
            classes = self.preparation.classes
            assert classes is not None
            probabilities = predictive.probabilities.double().numpy()
            best = probabilities.argmax(-1)
            found["prediction"] = np.asarray(classes, dtype=object)[best]
            found |= {f"p_{name}": _float32(probabilities[:, k]) for k, name in enumerate(classes)}
            found["total"] = _float32(predictive.total.numpy())
        else:
            lower, upper = predictive.interval(LEVEL)
            found["mean"], found["std"] = _float64(predictive.mean), _float32(predictive.std.numpy())
        # For regression variances, whose sum is std squared; for classification nats.
        found["aleatoric"], found["epistemic"] = (
            _float32(part.numpy()) for part in (predictive.aleatoric, predictive.epistemic)
        )
        if self.preparation.task == "regression":
            found["lower_90"], found["upper_90"] = _float64(lower), _float64(upper)
        score = self.ood(predictive)
        found["ood"] = [None] * len(predictive) if score is None else _float32(score)
        return found

    def predict_file(
        self,
        table: str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        force: bool = False,
        draws: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> PredictedFile:
        """Predict the rows of a file into another file, block by block in constant memory.

        With many processes the blocks are distributed over them; the file is the same as from one. Remarks on a row (an
        unknown category, a missing value) are in the column `notes`.
        """
        block_rows = max(
            LEAST, min(BLOCK, CACHE_VALUES // (self._draws(draws) * max(1, len(self.preparation.classes or ()))))
        )
        absent = self.preparation.missing_columns(header(table))
        if len(absent) == len(self.preparation.names):
            listed = ", ".join(absent[:5]) + (" and others" if len(absent) > 5 else "")
            raise InputError(
                "table",
                f"{Path(table).name} has none of the columns of the training data ({listed})",
            )
        rows = noted = blocks = 0
        # (block, position in it, note)
        found: list[tuple[int, int, str]] = []
        known, everyone = self.preparation, world.current()
        own = batches(table, known.names, known.numeric_names, block_rows, (everyone.rank, everyone.size))
        with shared_writer(out, everyone, force=force) as writer, world.alone():
            for block, notes in own:
                inputs, more = self.inputs(block)
                columns = self.columns(self.predict(inputs, draws=draws))
                texts = _notes_by_row(len(inputs), [*notes, *more])
                columns["notes"] = texts
                writer.write(columns)
                some = [text for text in texts if text] if notes or more else []
                rows, noted = rows + len(inputs), noted + len(some)
                seen = {text for _, _, text in found}
                new = [text for text in dict.fromkeys(some) if text not in seen][: EXAMPLES - len(found)]
                found += [(blocks * everyone.size + everyone.rank, position, text) for position, text in enumerate(new)]
                blocks += 1
                if progress is not None:
                    progress(rows * everyone.size)
        parts = everyone.gather([rows, noted, found])
        examples = dict.fromkeys(text for _, _, text in sorted(tuple(one) for _, _, each in parts for one in each))
        rows, noted = sum(n for n, _, _ in parts), sum(n for _, n, _ in parts)
        return PredictedFile(Path(out), rows, noted, tuple(examples)[:EXAMPLES], tuple(absent))

    def _draws(self, wanted: int | None) -> int:
        one = self.predict(np.zeros((1, self.preparation.inputs), np.float32), draws=wanted)
        return one.draws


@dataclass(frozen=True)
class PredictedFile:
    """Outcome of predicting a file.

    Attributes:
        out: the file of predictions.
        rows: number of rows.
        noted: number of rows with notes.
        examples: a few of those notes.
        absent: columns of the training data that the file did not have.
    """

    out: Path
    rows: int
    noted: int
    examples: tuple[str, ...]
    absent: tuple[str, ...]


def epistemic_of(predictive: Predictive) -> Array:
    """Return the epistemic uncertainty of each row in float64."""
    found: Array = predictive.epistemic.double().numpy()
    return found


def quantile_levels(values: Array) -> Array | None:
    """Return quantiles of the epistemic uncertainty of reference rows; None if it is zero or not finite."""
    if not np.isfinite(values).all() or float(values.max()) <= 0:
        return None
    levels: Array = np.quantile(values, np.linspace(0, 1, OOD_POINTS))
    return levels


def fraction_below(values: Array, levels: Array) -> Array:
    """Return the fraction of the reference below each value, interpolated from its quantiles."""
    # Tied quantiles give several fractions for one value: the largest is right.
    points, first = np.unique(levels[::-1], return_index=True)
    fractions = np.linspace(0, 1, len(levels))[::-1][first]
    # Interpolate by weights, which stay between 0 and 1 where the slope would overflow.
    after = np.clip(np.searchsorted(points, values, side="right"), 1, max(1, len(points) - 1))
    low, high = points[after - 1], points[np.minimum(after, len(points) - 1)]
    weight = np.where(high > low, (np.clip(values, low, high) - low) / np.where(high > low, high - low, 1.0), 1.0)
    between = fractions[after - 1] + weight * (fractions[np.minimum(after, len(points) - 1)] - fractions[after - 1])
    found: Array = np.where(values < points[0], 0.0, np.where(values >= points[-1], fractions[-1], between))
    return found


def _float64(values: torch.Tensor) -> Array:
    found: Array = values.double().numpy()
    return found


def _float32(values: Array) -> Array:
    return values.astype(np.float32)


def _notes_by_row(rows: int, notes: list[tuple[int, str]]) -> list[str]:
    found = [""] * rows
    for row, text in notes:
        found[row] = f"{found[row]}; {text}" if found[row] else text
    return found
