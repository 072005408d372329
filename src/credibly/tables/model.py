"""A fitted table: its preparation and its posterior, and predictions in the units of the target, row by row or as a stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.distributed import world
from credibly.errors import InputError
from credibly.posterior.base import DrawsPosterior, Posterior
from credibly.predictive.base import CACHE_VALUES, Predictive
from credibly.predictive.rescaling import in_units
from credibly.tables.parallel_writer import shared_writer
from credibly.tables.preparation import Preparation
from credibly.tables.reading import batches, header

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

Array = npt.NDArray[Any]

LEVEL = 0.9
BLOCK = 65_536  # rows predicted at a time, at most: as many as fit so that every draw passes them once
LEAST = 256  # and at least
EXAMPLES = 3  # remarks that are told
OOD_POINTS = 201  # quantiles of the reference rows that are kept


@dataclass(frozen=True, eq=False)
class TableModel:
    """What predicts from a table.

    Attributes:
        preparation: from columns to network inputs.
        posterior: of the network, on standardised inputs and targets.
        ood_levels: quantiles of the epistemic uncertainty over rows like the training ones; None where the method has none.
    """

    preparation: Preparation
    posterior: Posterior
    ood_levels: Array | None = None

    def predict(self, inputs: Array, *, draws: int | None = None) -> Predictive:
        """The predictive at prepared inputs (N, P), in the units of the target; of some of the draws where that is asked."""
        x = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))
        if draws is not None and isinstance(self.posterior, DrawsPosterior):
            found = self.posterior.predict(x, draws=draws)
        else:
            found = self.posterior.predict(x)
        if self.preparation.task == "classification":
            return found
        return in_units(found, self.preparation.y_mean, self.preparation.y_std)

    def predict_table(self, table: Table | RecordBatch) -> Predictive:
        """The predictive at the rows of a table that has the columns of the training one."""
        return self.predict(self.preparation.transform(table)[0])

    def ood(self, predictive: Predictive) -> Array | None:
        """For each row the share of the reference rows whose epistemic uncertainty is lower: near 1 is unlike any of them."""
        return None if self.ood_levels is None else share_below(doubt(predictive), self.ood_levels)

    def columns(self, predictive: Predictive) -> dict[str, Any]:
        """The columns of a file of predictions, without remarks on rows."""
        found: dict[str, Any] = {}
        if self.preparation.task == "classification":
            classes = self.preparation.classes
            assert classes is not None
            probabilities = predictive.probabilities.double().numpy()
            best = probabilities.argmax(-1)
            found["prediction"] = np.asarray(classes, dtype=object)[best]
            found |= {f"p_{name}": _short(probabilities[:, k]) for k, name in enumerate(classes)}
            found["total"] = _short(predictive.total.numpy())
        else:
            lower, upper = predictive.interval(LEVEL)
            found["mean"], found["std"] = _numbers(predictive.mean), _short(predictive.std.numpy())
        # Variances, whose sum is std squared; nats for labels.
        found["aleatoric"], found["epistemic"] = (
            _short(part.numpy()) for part in (predictive.aleatoric, predictive.epistemic)
        )
        if self.preparation.task == "regression":
            found["lower_90"], found["upper_90"] = _numbers(lower), _numbers(upper)
        score = self.ood(predictive)
        found["ood"] = [None] * len(predictive) if score is None else _short(score)
        return found

    def predict_file(
        self, table: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False, draws: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Streamed:  # fmt: skip
        """Predicts the rows of a file into another one, block by block: memory does not grow with the number of rows.

        Many processes take the blocks in turn; the file is the same as that of one.
        Rows with something to say about them (an unknown category, a missing value) have it in the column `notes`.
        """
        block_rows = max(
            LEAST, min(BLOCK, CACHE_VALUES // (self._draws(draws) * max(1, len(self.preparation.classes or ()))))
        )
        absent = self.preparation.missing_columns(header(table))
        if len(absent) == len(self.preparation.names):
            listed = ", ".join(absent[:5]) + (" and others" if len(absent) > 5 else "")
            raise InputError(
                "table",
                f"{Path(table).name} has none of the columns that were fitted ({listed})",
                "Pass a table like it",
            )
        rows = noted = blocks = 0
        found: list[tuple[int, int, str]] = []  # (block, place in it, remark)
        known, everyone = self.preparation, world.current()
        own = batches(table, known.names, known.numeric_names, block_rows, (everyone.rank, everyone.size))
        with shared_writer(out, everyone, force=force) as writer, world.alone():
            for block, notes in own:
                inputs, more = known.transform(block)
                columns = self.columns(self.predict(inputs, draws=draws))
                remarks = _remarks(len(inputs), [*notes, *more])
                columns["notes"] = remarks
                writer.write(columns)
                some = [text for text in remarks if text] if notes or more else []
                rows, noted = rows + len(inputs), noted + len(some)
                seen = {text for _, _, text in found}
                new = [text for text in dict.fromkeys(some) if text not in seen][: EXAMPLES - len(found)]
                found += [(blocks * everyone.size + everyone.rank, place, text) for place, text in enumerate(new)]
                blocks += 1
                if progress is not None:
                    progress(rows * everyone.size)
        told = everyone.gather([rows, noted, found])
        examples = dict.fromkeys(text for _, _, text in sorted(tuple(one) for _, _, each in told for one in each))
        return Streamed(
            Path(out), sum(n for n, _, _ in told), sum(n for _, n, _ in told), tuple(examples)[:EXAMPLES], tuple(absent)
        )

    def _draws(self, wanted: int | None) -> int:
        one = self.predict(np.zeros((1, self.preparation.inputs), np.float32), draws=wanted)
        return one.draws


@dataclass(frozen=True)
class Streamed:
    """What became of a file: rows, rows with remarks, a few of those remarks, and columns that the file did not have."""

    out: Path
    rows: int
    noted: int
    examples: tuple[str, ...]
    absent: tuple[str, ...]


def doubt(predictive: Predictive) -> Array:
    """The epistemic uncertainty of each row."""
    found: Array = predictive.epistemic.double().numpy()
    return found


def quantile_levels(values: Array) -> Array | None:
    """What is kept of the reference rows' doubt; None where there is none to tell rows apart by."""
    if not np.isfinite(values).all() or float(values.max()) <= 0:
        return None
    levels: Array = np.quantile(values, np.linspace(0, 1, OOD_POINTS))
    return levels


def share_below(values: Array, levels: Array) -> Array:
    """The share of the reference below each value, from its quantiles."""
    # Equal quantiles would leave several shares for one value: the last of them is the one that lies below.
    points, first = np.unique(levels[::-1], return_index=True)
    shares = np.linspace(0, 1, len(levels))[::-1][first]
    # By fractions of a step, which stay between 0 and 1 where its slope would overflow.
    after = np.clip(np.searchsorted(points, values, side="right"), 1, max(1, len(points) - 1))
    low, high = points[after - 1], points[np.minimum(after, len(points) - 1)]
    fraction = np.where(high > low, (np.clip(values, low, high) - low) / np.where(high > low, high - low, 1.0), 1.0)
    between = shares[after - 1] + fraction * (shares[np.minimum(after, len(points) - 1)] - shares[after - 1])
    found: Array = np.where(values < points[0], 0.0, np.where(values >= points[-1], shares[-1], between))
    return found


def _numbers(values: torch.Tensor) -> Array:
    found: Array = values.double().numpy()
    return found


def _short(values: Array) -> Array:
    return values.astype(np.float32)


def _remarks(rows: int, notes: list[tuple[int, str]]) -> list[str]:
    found = [""] * rows
    for row, text in notes:
        found[row] = f"{found[row]}; {text}" if found[row] else text
    return found
