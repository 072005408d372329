"""The data of a problem as rows that its network takes, with their weights; or the first rows of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from credibly.core.inputs import Inputs, row_count, to_tensor
from credibly.core.loading import unpack_data
from credibly.core.placement import exact_dtype
from credibly.core.rows import Rows, weigh
from credibly.core.stream import Stream, as_stream
from credibly.errors import InputError
from credibly.networks.layout import Layout

Bound = TypeVar("Bound")


def read_rows(
    layout: Layout, data: Any, sample_weight: Any, convert: bool, bind: Callable[[Inputs, Any], tuple[Bound, Any]]
) -> tuple[Rows, Stream | None, Bound]:
    """Return the rows on the network's device, the stream if they are the first of one, and the bound likelihood.

    `bind(x, y)` returns the likelihood for such rows and their targets as one array.
    """
    stream = as_stream(data)
    raw_x, raw_y = unpack_data(data) if stream is None else stream.head
    x = layout.inputs(raw_x, convert or stream is not None)
    bound, raw_y = bind(x, raw_y)
    # In half precision labels and counts would be rounded here, before the likelihood sees them.
    y = to_tensor(raw_y, "y", layout.device, exact_dtype(layout.dtype), convert=True)
    if y.ndim == 0 or len(y) != row_count(x):
        rows = len(y) if y.ndim else "no"
        advice = "Pass one target per row of x"
        if isinstance(raw_x, list) and raw_x and isinstance(raw_x[0], Tensor):
            advice += "; several inputs are a tuple (x1, x2), not a list"
        raise InputError("y", f"has {rows} rows, x has {row_count(x)}", advice)
    if sample_weight is not None and stream is not None:
        raise InputError("sample_weight", "must be None for a stream", "Keep the rows in memory, see in_memory()")
    return weigh(Rows(x, y), sample_weight, layout.device, layout.dtype), stream, bound
