"""The data of a problem as rows that its network takes, with their weights; or the first rows of a stream."""

from __future__ import annotations

from typing import Any

from credibly.core.inputs import row_count, to_tensor
from credibly.core.loading import unpack_data
from credibly.core.rows import Rows, weigh
from credibly.core.stream import Stream, as_stream
from credibly.errors import InputError
from credibly.networks.layout import Layout


def read_rows(layout: Layout, data: Any, sample_weight: Any, convert: bool) -> tuple[Rows, Stream | None]:
    """Return the rows on the network's device, and the stream if they are the first of one."""
    stream = as_stream(data)
    raw_x, raw_y = unpack_data(data) if stream is None else stream.head
    x = layout.inputs(raw_x, convert or stream is not None)
    y = to_tensor(raw_y, "y", layout.device, layout.dtype, convert=True)
    if y.ndim == 0 or len(y) != row_count(x):
        rows = len(y) if y.ndim else "no"
        raise InputError("y", f"has {rows} rows, x has {row_count(x)}", "Pass one target per row of x")
    if sample_weight is not None and stream is not None:
        raise InputError("sample_weight", "must be None for a stream", "Keep the rows in memory, see in_memory()")
    return weigh(Rows(x, y), sample_weight, layout.device, layout.dtype), stream
