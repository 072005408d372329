"""A model fitted to a table: predicts in the units of the target, in memory or streamed from file to file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.conformal.calibration import Calibration
from credibly.core.levels import LEVELS, check_levels
from credibly.distributed import world
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.predictive.base import Predictive
from credibly.predictive.blocks import CACHE_VALUES
from credibly.predictive.transformed import near_limits, on_fitted_scale
from credibly.tables.cells.parsing import Notes
from credibly.tables.files.parallel_writer import shared_writer
from credibly.tables.files.reading import batches, header, verbatim_batches
from credibly.tables.files.sources import WRITTEN_AS_TEXT
from credibly.tables.missing.completed import predict_gaps
from credibly.tables.missing.imputation import Donors
from credibly.tables.prediction_columns import (
    NOTES,
    Promise,
    check_times,
    float32,
    kept_columns,
    prediction_columns,
    prediction_names,
)
from credibly.tables.preparation import Preparation

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
# Note on a row whose mean is close to where a transform clips it.
FAR_NOTE = "the mean is limited, as it is far beyond the training targets"
# Number of quantiles stored of the reference rows.
OOD_POINTS = 201


@dataclass(frozen=True, eq=False)
class TableModel:
    """A model fitted to a table.

    Attributes:
        preparation: preprocessing from columns to network inputs.
        posterior: posterior of the network, on standardised inputs and targets.
        ood_levels: quantiles of the epistemic uncertainty over in-distribution rows; None if the method has none.
        ood_fitted: whether they are of the target as it was fitted, or, in runs of earlier versions, of the target in
            its units, where transforms clip.
        folds: posteriors of fits to some of the rows, behind metrics and guarantee.
        calibration: scores of rows under fits that have not seen them, for intervals with a guarantee; None for none.
        training_sample: reads some of the training rows, from which missing cells are completed; None to impute them.
    """

    preparation: Preparation
    posterior: Posterior
    ood_levels: Array | None = None
    ood_fitted: bool = True
    folds: tuple[Posterior, ...] = ()
    calibration: Calibration | None = None
    training_sample: Callable[[], Table] | None = None

    def inputs(self, table: Table | RecordBatch) -> tuple[Array, Notes]:
        """Return the inputs of a table for `predict`, with NaN for missing cells, and (row, note) for unusual cells."""
        return self.preparation.transform(table, gaps=self.training_sample is not None)

    def predict(self, inputs: Array, *, draws: int | None = None) -> Predictive:
        """Return the predictive at prepared inputs (N, P) in the units of the target, optionally with fewer draws.

        Rows with NaN are averaged over completions from similar training rows (see `tables.missing.completed`).
        """
        if np.isnan(inputs).any():
            found = predict_gaps(lambda x: self._predict(x, draws), inputs, self.donors, self.preparation.scaling)
        else:
            found = self._predict(inputs, draws)
        return self.preparation.in_units(found)

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
        x = torch.from_numpy(np.ascontiguousarray(self.preparation.scaling(inputs), np.float32))
        if draws is not None and isinstance(self.posterior, DrawsPosterior):
            return self.posterior.predict(x, draws=draws)
        return self.posterior.predict(x)

    def ood(self, predictive: Predictive) -> Array | None:
        """Return per row the fraction of reference rows with lower epistemic uncertainty; near 1 is unlike them.

        Uncertainty about missing cells is epistemic, so rows with gaps score higher than the same rows without.
        """
        if self.ood_levels is None:
            return None
        found = fraction_below(self.epistemic(predictive), self.ood_levels)
        return np.where(self._near_limits(predictive), 1.0, found)

    def epistemic(self, predictive: Predictive) -> Array:
        """Return the epistemic uncertainty of each row that `ood` compares."""
        return epistemic_of(on_fitted_scale(predictive) if self.ood_fitted else predictive)

    def _near_limits(self, predictive: Predictive) -> Array:
        transforms = self.preparation.transforms
        if not transforms:
            return np.zeros(len(predictive), dtype=bool)
        found: Array = near_limits(predictive.mean, transforms).numpy()
        return found

    def columns(
        self,
        predictive: Predictive,
        levels: Sequence[float] = LEVELS,
        promised: Predictive | None = None,
        times: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return the columns of a prediction file, without the notes; see `prediction_columns`."""
        found = prediction_columns(predictive, self.preparation, levels, promised, times)
        score = self.ood(predictive)
        found["ood"] = [None] * len(predictive) if score is None else float32(score)
        return found

    def predict_columns(
        self,
        inputs: Array,
        notes: Notes,
        *,
        levels: Sequence[float] = LEVELS,
        times: Sequence[float] = (),
        promise: Promise | None = None,
        draws: int | None = None,
    ) -> dict[str, Any]:
        """Return all columns of a prediction file for prepared inputs (N, P), with the notes on their cells.

        See `predict_file` for the arguments.
        """
        predictive = self.predict(inputs, draws=draws)
        promised = None if promise is None else promise(inputs, predictive)
        found = self.columns(predictive, levels, promised, times)
        far = [(int(row), FAR_NOTE) for row in np.flatnonzero(self._near_limits(predictive))]
        found[NOTES] = _notes_by_row(len(inputs), [*notes, *far])
        return found

    def predict_file(
        self,
        table: str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        levels: Sequence[float] = LEVELS,
        keep: Sequence[str] = (),
        times: Sequence[float] = (),
        promise: Promise | None = None,
        force: bool = False,
        excel_safe: bool = False,
        draws: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> PredictedFile:
        """Predict the rows of a file into another file, block by block in constant memory.

        With many processes the blocks are distributed over them; the file is the same as from one. Remarks on a row (an
        unknown category, a missing value) are in the column `notes`.

        Args:
            table: file with the columns of the training data.
            out: file to write.
            levels: levels of the intervals, of all targets but classes.
            keep: columns of the table to copy to the front of the file unchanged; ("all",) for every column.
            times: of probabilities of survival, which are written as `survival_12` and so on; for censored times only.
            promise: maps prepared inputs and their predictions to predictions whose intervals are written in place of
                the Bayesian ones, which are then named `bayes_lower_90` and so on.
            force: replace an existing file once the new one is complete.
            excel_safe: write an apostrophe before texts that a spreadsheet would evaluate as formulas.
            draws: number of posterior draws to use; None for all.
            progress: called with the number of rows done.
        """
        absent, kept = self._checked_columns(Path(table), header(table), levels, keep, times)
        block_rows = self.block_rows(draws)
        rows = with_notes = blocks = 0
        # (block, row within it, note)
        found: list[tuple[int, int, str]] = []
        known, everyone = self.preparation, world.current()
        mine = everyone.rank, everyone.size
        own = batches(table, known.names, known.numeric_names, block_rows, mine, known.conventions)
        typed = not os.fspath(out).lower().endswith(WRITTEN_AS_TEXT)
        copies = verbatim_batches(table, kept, block_rows, mine, typed=typed) if kept else repeat(None)
        with shared_writer(out, everyone, force=force, excel_safe=excel_safe) as writer, world.alone():
            for (block, notes), copy in zip(own, copies):
                inputs, more = self.inputs(block)
                columns = {} if copy is None else {name: copy.column(name) for name in kept}
                columns |= self.predict_columns(
                    inputs, [*notes, *more], levels=levels, times=times, promise=promise, draws=draws
                )
                writer.write(columns)
                texts = columns[NOTES]
                some = [text for text in texts if text]
                rows, with_notes = rows + len(inputs), with_notes + len(some)
                seen = {text for _, _, text in found}
                each = [text for _, text in sorted([*notes, *more], key=lambda note: note[0])] or some
                new = [text for text in dict.fromkeys(each) if text not in seen][: EXAMPLES - len(found)]
                found += [(blocks * everyone.size + everyone.rank, position, text) for position, text in enumerate(new)]
                blocks += 1
                if progress is not None:
                    progress(rows * everyone.size)
        parts = everyone.gather([rows, with_notes, found])
        examples = dict.fromkeys(text for _, _, text in sorted(tuple(one) for _, _, each in parts for one in each))
        rows, with_notes = sum(n for n, _, _ in parts), sum(n for _, n, _ in parts)
        return PredictedFile(Path(out), rows, with_notes, tuple(examples)[:EXAMPLES], tuple(absent))

    def _checked_columns(
        self, table: Path, names: list[str], levels: Sequence[float], keep: Sequence[str], times: Sequence[float]
    ) -> tuple[list[str], list[str]]:
        """Return the columns of the training data that a file lacks, and those to copy from it."""
        absent = self.preparation.missing_columns(names)
        if len(absent) == len(self.preparation.names):
            listed = ", ".join(absent[:5]) + (" and others" if len(absent) > 5 else "")
            raise InputError("table", f"{table.name} has none of the columns of the training data ({listed})")
        if times and self.preparation.task != "survival":
            found = f"is for censored times, this is {self.preparation.task}"
            raise InputError("--at", found, "Leave it out, or fit with --event COLUMN")
        taken = prediction_names(self.preparation, check_levels("levels", levels), check_times("--at", times))
        return absent, kept_columns("--keep", keep, names, taken)

    def block_rows(self, draws: int | None = None) -> int:
        """Return the number of rows that are predicted at a time with the given number of draws."""
        one = self.predict(np.zeros((1, self.preparation.inputs), np.float32), draws=draws)
        return max(LEAST, min(BLOCK, CACHE_VALUES // (one.draws * max(1, len(self.preparation.classes or ())))))


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
    """Return the epistemic uncertainty of each row in float64; for several targets its geometric mean over them.

    Scores compare rows only, so the units of the targets do not matter.
    """
    found = predictive.epistemic.double()
    if found.ndim > 1:
        found = found.clamp_min(0).log().mean(-1).exp()
    values: Array = found.numpy()
    return values


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


def _notes_by_row(rows: int, notes: list[tuple[int, str]]) -> list[str]:
    found = [""] * rows
    for row, text in notes:
        found[row] = f"{found[row]}; {text}" if found[row] else text
    return found
