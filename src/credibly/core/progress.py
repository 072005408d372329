"""Progress bars: by rich on a terminal, as HTML in a notebook, and elsewhere only on request.

Updates are shown at most a few times per second. rich is imported on the first one, and no thread is started. Of the
processes that `torchrun` started only the first shows anything.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from credibly.core.notebooks import NotebookLine, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

# Seconds between two updates.
EVERY = 0.2
BAR_WIDTH, LEAST_BAR = 24, 8


class Progress:
    """A progress bar: `with Progress("MAP", total) as line: line.update(done, loss=...)`.

    It shows nothing while another rich display is live on the same terminal: the two would overwrite each other.

    Args:
        title: what is running.
        total: the number of steps.
        show: True, False, or None to show it on a terminal and in a notebook.
        stream: where to write; standard error by default.
        first: steps already done before, excluded from the estimate of the time left.
    """

    def __init__(
        self, title: str, total: int, show: bool | None = None, stream: TextIO | None = None, *, first: int = 0
    ) -> None:
        self.title = title
        self.total = max(1, total)
        self.first = first
        self.stream = stream or sys.stderr
        self.notebook = stream is None and in_notebook()
        wanted = (self.notebook or self.stream.isatty()) if show is None else show
        self.show = wanted and not _is_taken(self.stream) and _is_leader()
        self.started = time.monotonic()
        self._last = 0.0
        self._display: _Display | NotebookLine | None = None

    def due(self) -> bool:
        """Return whether an update would be shown now, so that expensive metrics are computed only then."""
        return self.show and time.monotonic() - self._last >= EVERY

    def update(self, done: int, *, final: bool = False, **metrics: float | str) -> None:
        """Show the number of steps done and the metrics. Most calls return at once."""
        if not self.show:
            return
        now = time.monotonic()
        if now - self._last < EVERY and not final:
            return
        self._last = now
        spent = now - self.started
        texts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items()]
        if self.first < done < self.total:
            left = spent * (self.total - done) / (done - self.first)
            time_text = f"{spent:.0f}s, {left:.0f}s left"
        else:
            time_text = f"{spent:.1f}s"
        if self._display is None:
            self._display = NotebookLine(self.title, self.total) if self.notebook else _Display(self)
        self._display.draw(done, texts, time_text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if self._display is not None:
            self._display.close()
            self._display = None


class _Display:
    """A rich progress bar, drawn only on updates. On a narrow terminal the bar shrinks, then the last metrics are cut.

    If the cursor cannot be moved (a file, a dumb terminal), each update follows a carriage return.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.bar = _rich_bar(progress.stream)
        self.live = progress.stream.isatty() and self.bar.console.is_terminal and not self.bar.console.is_dumb_terminal
        self.task = self.bar.add_task(progress.title, total=progress.total, metrics="", time="")
        self.written = 0
        if self.live:
            self.bar.start()

    def draw(self, done: int, metrics: list[str], time_text: str) -> None:
        console, title, total = self.bar.console, self.progress.title, self.progress.total
        # Room for the metrics beside the title, the counts, the time, the shortest bar and the gaps.
        room = console.width - len(title) - 2 * len(f"/{total}") - len(time_text) - LEAST_BAR - 4
        while metrics and len("  ".join(metrics)) > room:
            metrics = metrics[:-1]
        shown = "  ".join(metrics)
        self.bar.update(self.task, completed=done, total=total, metrics=shown, time=time_text, refresh=self.live)
        if not self.live:
            with console.capture() as captured:
                console.print(self.bar.get_renderable())
            line = captured.get().rstrip()
            self.progress.stream.write("\r" + line.ljust(self.written))
            self.progress.stream.flush()
            self.written = len(line)

    def close(self) -> None:
        if self.live:
            self.bar.stop()
        else:
            self.progress.stream.write("\n")
            self.progress.stream.flush()


def _is_taken(stream: TextIO) -> bool:
    """Return whether a live rich display has replaced the stream by its proxy. Does not import rich."""
    return type(stream).__module__ == "rich.file_proxy"


def _is_leader() -> bool:
    """Return whether this process is the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "") in ("", "0") or os.environ.get("WORLD_SIZE", "1") == "1"


def _rich_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    fixed = Column(no_wrap=True)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=fixed),
        BarColumn(bar_width=BAR_WIDTH),
        MofNCompleteColumn(table_column=fixed.copy()),
        TextColumn("{task.fields[metrics]}", markup=False, table_column=fixed.copy()),
        TextColumn("{task.fields[time]}", style="progress.remaining", markup=False, table_column=fixed.copy()),
        # A file has no width limit, so it gets all metrics.
        console=Console(file=stream, force_jupyter=False, width=None if stream.isatty() else 1000),
        auto_refresh=False,
    )
