"""Progress on the terminal: a bar by rich, a plain line where rich is missing, and quiet where there is no terminal.

Nothing is shown more than a few times a second, nothing is imported before it is shown, and no thread is started. Of many
processes that `torchrun` started only the first shows anything.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

EVERY = 0.2  # seconds between two updates that are shown
BAR_WIDTH, LEAST_BAR = 24, 8


class Progress:
    """`with Progress("MAP", total) as line: line.update(done, loss=...)`.

    While another display of rich is at work on the same terminal this one stays quiet: two would write over each other.

    Args:
        title: what is running.
        total: the number of steps.
        show: True, False, or None for "if standard error is a terminal".
        stream: where to; standard error by default. A bar needs a terminal there, anything else gets the plain line.
        first: steps that had been done before, which the time left is not judged by.
    """

    def __init__(
        self, title: str, total: int, show: bool | None = None, stream: TextIO | None = None, *, first: int = 0
    ) -> None:
        self.title = title
        self.total = max(1, total)
        self.first = first
        self.stream = stream or sys.stderr
        self.show = (self.stream.isatty() if show is None else show) and not _is_taken(self.stream) and _is_first()
        self.started = time.monotonic()
        self._last = 0.0
        self._display: _Bar | _Line | None = None

    def due(self) -> bool:
        """Whether an update would be shown now: what costs something to find out can wait until then."""
        return self.show and time.monotonic() - self._last >= EVERY

    def update(self, done: int, *, final: bool = False, **figures: float | str) -> None:
        """Shows how far it is, with the figures that matter; most calls return at once."""
        if not self.show:
            return
        now = time.monotonic()
        if now - self._last < EVERY and not final:
            return
        self._last = now
        spent = now - self.started
        texts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()]
        if self.first < done < self.total:
            left = spent * (self.total - done) / (done - self.first)
            time_text = f"{spent:.0f}s, {left:.0f}s left"
        else:
            time_text = f"{spent:.1f}s"
        if self._display is None:
            bar = _rich_bar(self.stream)
            self._display = _Line(self) if bar is None else _Bar(self, bar)
        self._display.draw(done, texts, time_text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if self._display is not None:
            self._display.close()
            self._display = None


class _Bar:
    """A bar by rich, drawn when there is something new. On a narrow terminal it is shorter, and then the last figures go."""

    def __init__(self, progress: Progress, bar: RichProgress) -> None:
        self.progress = progress
        self.bar = bar
        self.task = bar.add_task(progress.title, total=progress.total, figures="", time="")

    def draw(self, done: int, figures: list[str], time_text: str) -> None:
        room = self.bar.console.width - len(self.progress.title) - 2 * len(f"/{self.progress.total}") - len(time_text)
        room -= LEAST_BAR + 4  # and the gaps
        while figures and len("  ".join(figures)) > room:
            figures = figures[:-1]
        self.bar.update(self.task, completed=done, figures="  ".join(figures), time=time_text, refresh=True)

    def close(self) -> None:
        self.bar.stop()


class _Line:
    """One line of plain text that is written over."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.width = 0

    def draw(self, done: int, figures: list[str], time_text: str) -> None:
        title, total, stream = self.progress.title, self.progress.total, self.progress.stream
        filled = min(BAR_WIDTH, round(BAR_WIDTH * done / total))
        bar = "=" * filled + " " * (BAR_WIDTH - filled)
        text = f"{title} [{bar}] {done}/{total}  {'  '.join(figures)}  {time_text}"
        if stream.isatty():  # a line that wraps could not be written over
            text = text[: max(20, shutil.get_terminal_size().columns - 1)]
        stream.write("\r" + text.ljust(self.width))
        stream.flush()
        self.width = len(text)

    def close(self) -> None:
        self.progress.stream.write("\n")
        self.progress.stream.flush()


def _is_taken(stream: TextIO) -> bool:
    """Whether a display of rich that is at work has put itself in the stream's place; asked without importing rich."""
    return type(stream).__module__ == "rich.file_proxy"


def _is_first() -> bool:
    """Whether this process is the one of many that speaks, or alone."""
    return os.environ.get("RANK", "") in ("", "0") or os.environ.get("WORLD_SIZE", "1") == "1"


def _rich_bar(stream: TextIO) -> RichProgress | None:
    """A bar that has been started, or None where there is no terminal that can show one, or no rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column
    except ImportError:
        return None
    console = Console(file=stream)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    whole = Column(no_wrap=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=whole),
        BarColumn(bar_width=BAR_WIDTH),
        MofNCompleteColumn(table_column=whole.copy()),
        TextColumn("{task.fields[figures]}", markup=False, table_column=whole.copy()),
        TextColumn("{task.fields[time]}", style="progress.remaining", markup=False, table_column=whole.copy()),
        console=console,
        auto_refresh=False,  # no thread: what there is to show comes with `update`
    )
    try:
        bar.start()
    except LiveError:
        return None
    return bar
