"""A progress line on the terminal: quiet where there is none, and never more than a few updates a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO


class Progress:
    """`with Progress("MAP", total) as line: line.update(done, loss=...)`.

    Args:
        title: what is running.
        total: the number of steps.
        show: True, False, or None for "if standard error is a terminal".
        first: steps that had been done before, which the time left is not judged by.
    """

    def __init__(
        self, title: str, total: int, show: bool | None = None, stream: TextIO | None = None, *, first: int = 0
    ) -> None:
        self.title = title
        self.total = max(1, total)
        self.first = first
        self.stream = stream or sys.stderr
        self.show = self.stream.isatty() if show is None else show
        self.started = time.monotonic()
        self._last = 0.0
        self._width = 0

    def due(self) -> bool:
        """Whether an update would be shown now: what costs something to find out can wait until then."""
        return self.show and time.monotonic() - self._last >= 0.2

    def update(self, done: int, *, final: bool = False, **figures: float | str) -> None:
        """Shows how far it is, with the figures that matter; most calls return at once."""
        now = time.monotonic()
        if not self.show or (now - self._last < 0.2 and not final):
            return
        self._last = now
        spent = now - self.started
        left = spent * (self.total - done) / (done - self.first) if done > self.first else 0.0
        filled = round(24 * done / self.total)
        numbers = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        time_text = f"{spent:.1f}s" if done >= self.total else f"{spent:.0f}s, {left:.0f}s left"
        text = f"{self.title} [{'=' * filled}{' ' * (24 - filled)}] {done}/{self.total}  {numbers}  {time_text}"
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._width = len(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if self.show and self._width:
            self.stream.write("\n")
            self.stream.flush()
