"""Outputs of the network for every draw, block by block of rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from credibly.core.autodiff import grad_for, requires_grad
from credibly.core.inputs import Inputs, map_inputs, row_count, tensors_of
from credibly.predictive.source import DrawSource

T = TypeVar("T")

BLOCK_VALUES = 2**22  # network activations in memory at a time: 16 MiB in float32, small enough for the CPU caches
GPU_BLOCK_VALUES = 2**28  # the same on a GPU, which needs large blocks and has the memory: 1 GiB in float32
MANY = 2**18  # rows times draws from which the C++ backend pays off: it may have to be compiled first
CACHE_VALUES = 2**24  # the outputs of all rows are cached up to this many values: 64 MiB in float32


class Blocks:
    """Outputs (S, rows, ...) of blocks of rows under all draws of a source.

    Attributes:
        rows, draws: number of rows and of draws.
    """

    _source: DrawSource
    _x: Inputs
    _cached: Tensor | None
    rows: int
    draws: int

    def map_blocks(self, function: Callable[[Tensor, dict[str, Tensor], int], T]) -> Iterator[T]:
        """Call `function(outputs, extra, start)` on consecutive blocks of rows and yield what it returns.

        Only one block of outputs is in memory at a time. Outputs small enough to cache make a single block of all rows.

        Args:
            function: receives the outputs of the block under every draw, (S, rows, ..., K); the likelihood's own
                parameters, each (S, ...); and the index of the block's first row. It must not modify them in place.
        """
        extra = self._source.extra(0, self.draws)
        with grad_for(self._x):
            if self._fits():
                outputs = self._outputs(self._x, 0) if self._cached is None else self._cached
                # An autograd graph can be traversed once, so each result has its own.
                self._cached = None if outputs.requires_grad else outputs
                yield function(outputs, extra, 0)
                return
            for start in range(0, self.rows, self._block_rows):
                rows = slice(start, start + self._block_rows)
                block = map_inputs(lambda t, rows=rows: t[rows], self._x)  # type: ignore[misc]
                yield function(self._outputs(block, start), extra, start)

    @cached_property
    def _block_rows(self) -> int:
        return max(1, self._block_values // (self.draws * self._outputs_per_row))

    @cached_property
    def _block_values(self) -> int:
        return GPU_BLOCK_VALUES if tensors_of(self._x)[0][1].device.type == "cuda" else BLOCK_VALUES

    @cached_property
    def _cpp_width(self) -> int | None:
        """Values per row that the C++ backend keeps; None if it cannot be used or there are too few rows and draws."""
        width: Callable[[], int | None] | None = getattr(self._source, "cpp_width", None)
        return width() if width and self.rows * self.draws >= MANY and not requires_grad(self._x) else None

    @cached_property
    def _outputs_per_row(self) -> int:
        known: int | None = getattr(self._source, "outputs_per_row", None)
        return known or self._source.outputs(map_inputs(lambda t: t[:1], self._x), 0, 1).numel()

    def _fits(self) -> bool:
        return self.rows * self.draws * self._outputs_per_row <= CACHE_VALUES

    def _outputs(self, x: Inputs, first: int) -> Tensor:
        """Return the outputs (S, rows, ...) of one block of rows, computed in small tiles of draws by rows."""
        rows = row_count(x)
        width = self._cpp_width or self._source.row_width()
        tile_rows = max(1, min(rows, self._block_values // width, 4096 if self._cpp_width is None else rows))
        tile_draws = max(1, min(self.draws, self._block_values // (tile_rows * width)))
        result: Tensor | None = None
        for row in range(0, rows, tile_rows):
            some = map_inputs(lambda t, r=row: t[r : r + tile_rows], x) if tile_rows < rows else x  # type: ignore[misc]
            for draw in range(0, self.draws, tile_draws):
                tile = self._source.outputs(some, draw, min(draw + tile_draws, self.draws), first + row)
                if tile.shape[:2] == (self.draws, rows):
                    return tile
                if result is None:
                    result = tile.new_empty((self.draws, rows, *tile.shape[2:]))
                result[draw : draw + tile.shape[0], row : row + tile.shape[1]] = tile
        assert result is not None
        return result
