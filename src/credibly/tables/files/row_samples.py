"""Tables larger than a fit can use: a random sample of their rows, drawn while they are read, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Bytes of cells that a fit reads, about 10 million numbers or short texts. A compressed file of a few megabytes can
# hold a thousand times as much.
MOST_BYTES = 2**27
# Rows are ordered by this multiple of their number, modulo 2^64: consecutive rows are far apart (Fibonacci hashing).
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def sample_rows(blocks: Iterable[pa.RecordBatch], most: int | None) -> tuple[list[pa.RecordBatch], int, int]:
    """Return all rows of a stream, or every 2^k-th of them at random if all take more than `most` bytes, in order.

    Returns:
        The blocks, the number of rows in them, and the number of rows of the stream. Which rows are kept depends on
        their number alone.
    """
    kept: list[pa.RecordBatch] = []
    numbers: list[npt.NDArray[np.uint64]] = []
    seen, level = 0, 0
    for block in blocks:
        own = np.arange(seen, seen + block.num_rows, dtype=np.uint64)
        seen += block.num_rows
        kept.append(_thinned(block, own, level))
        numbers.append(own[_chosen(own, level)])
        while most is not None and sum(part.nbytes for part in kept) > most and sum(map(len, numbers)) > 1:
            level += 1
            kept = [_thinned(part, number, level) for part, number in zip(kept, numbers)]
            numbers = [number[_chosen(number, level)] for number in numbers]
    return kept, sum(map(len, numbers)), seen


def _chosen(numbers: npt.NDArray[np.uint64], level: int) -> npt.NDArray[np.bool_]:
    """Return which rows are among the fraction 2^-level; those of a higher level are among those of a lower one."""
    if not level:
        return np.ones(len(numbers), dtype=bool)
    chosen: npt.NDArray[np.bool_] = (numbers * MULTIPLIER) >> np.uint64(64 - level) == 0
    return chosen


def _thinned(block: pa.RecordBatch, numbers: npt.NDArray[np.uint64], level: int) -> pa.RecordBatch:
    return block.filter(pa.array(_chosen(numbers, level))) if level else block
