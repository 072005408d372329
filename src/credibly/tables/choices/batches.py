"""Batch sizes of short fits, which have fewer rows than the fit that the settings are for."""

from __future__ import annotations

import dataclasses

from credibly.inference.method import Method
from credibly.methods import DeepEnsemble


def with_smaller_batch(method: Method, rows: int) -> Method:
    """Return an ensemble whose batches are no larger than what validation leaves of the given number of rows."""
    if not isinstance(method, DeepEnsemble) or method.batch_size is None:
        return method
    left = max(1, rows - round(rows * method.validation))
    return dataclasses.replace(method, batch_size=min(method.batch_size, left))
