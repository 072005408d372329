"""A run of `credibly fit` behind one call on a data frame, for MLflow's pyfunc flavour and other model servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from credibly.core.levels import LEVELS, check_levels
from credibly.errors import InputError
from credibly.tables.cells.parsing import whole_column
from credibly.tables.files.reading import typed_batch
from credibly.tables.guarantee import guaranteed
from credibly.tables.run import TableRun


class RunModel:
    """The predictions of a run for data frames; the columns are those of `credibly predict`, without the notes.

    Args:
        path: the run folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.run = TableRun.load(path)

    def predict(self, frame: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return a pandas data frame of predictions, with the index of the given one.

        Cells are read as those of a file by `credibly predict`, with the markers of missing values, decimal marks and
        date formats of the training table.

        Args:
            frame: a pandas data frame with the columns of the training data; absent ones count as missing.
            params: {"levels": [0.8, 0.95]} sets the levels of the intervals or prediction sets.
        """
        import pandas as pd

        if not isinstance(frame, pd.DataFrame):
            raise InputError("frame", f"must be a pandas DataFrame, got {type(frame).__name__}")
        unknown = sorted(set(params or {}) - {"levels"})
        if unknown:
            raise InputError("params", f"must hold nothing but levels, got {', '.join(unknown)}")
        levels = check_levels("levels", (params or {}).get("levels", LEVELS))
        model = self.run.model
        inputs = model.inputs(self._cells(frame))[0]
        predictive = model.predict(inputs)
        promised = guaranteed(model, inputs, predictive)
        return pd.DataFrame(model.columns(predictive, levels, promised), index=frame.index)

    def _cells(self, frame: Any) -> Any:
        """Return the columns of the training data in a frame as a pyarrow batch."""
        import pyarrow as pa

        known = self.run.model.preparation
        given = [str(name) for name in frame.columns]
        absent = known.missing_columns(given)
        if len(absent) == len(known.names):
            raise InputError("frame", f"has none of the columns of the training data ({', '.join(absent[:5])})")
        names = [name for name in known.names if name not in absent]
        twice = next((name for name in names if given.count(name) > 1), None)
        if twice is not None:
            raise InputError("frame", f"has more than one column named {twice!r}")
        try:
            table = pa.Table.from_pandas(frame.set_axis(given, axis=1)[names], preserve_index=False)
        except (pa.ArrowException, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError("frame", f"has a column of several types ({reason})", "Convert it to text") from error
        batch = pa.RecordBatch.from_pydict({name: whole_column(table, name) for name in names})
        return typed_batch(batch, known.numeric_names, known.conventions)[0]
