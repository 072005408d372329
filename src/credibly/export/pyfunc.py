"""A run of `credibly fit` behind one call on a data frame, for MLflow's pyfunc flavour and other model servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from credibly.core.levels import LEVELS, check_levels
from credibly.errors import InputError
from credibly.tables.files.reading import table_batch
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

        Args:
            frame: a pandas data frame with the columns of the training data; absent ones count as missing.
            params: {"levels": [0.8, 0.95]} sets the levels of the intervals or prediction sets.
        """
        import pandas as pd
        import pyarrow as pa

        if not isinstance(frame, pd.DataFrame):
            raise InputError("frame", f"must be a pandas DataFrame, got {type(frame).__name__}")
        unknown = sorted(set(params or {}) - {"levels"})
        if unknown:
            raise InputError("params", f"must hold nothing but levels, got {', '.join(unknown)}")
        levels = check_levels("levels", (params or {}).get("levels", LEVELS))
        model = self.run.model
        absent = model.preparation.missing_columns([str(name) for name in frame.columns])
        if len(absent) == len(model.preparation.names):
            raise InputError("frame", f"has none of the columns of the training data ({', '.join(absent[:5])})")
        prepared = model.preparation
        table = pa.Table.from_pandas(
            frame[[name for name in prepared.names if name not in absent]], preserve_index=False
        )
        inputs = model.inputs(table_batch(table, prepared.numeric_names, prepared.conventions)[0])[0]
        predictive = model.predict(inputs)
        promised = guaranteed(model, inputs, predictive)
        return pd.DataFrame(model.columns(predictive, levels, promised), index=frame.index)
