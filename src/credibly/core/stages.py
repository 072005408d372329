"""The stages of a task in one progress line, named by the code that does the work, independent of the display.

with show_stages("report", ("predictions", "pictures")):
    ...                                         # somewhere below: stage("pictures", "reliability diagram")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from credibly.core.progress import Progress


class _Stages:
    """A progress line that counts the stages done and names the current one."""

    def __init__(self, title: str, names: Sequence[str], show: bool | None) -> None:
        self.names = tuple(names)
        self.done = 0
        # All stages are `first`, so no estimate is shown: the time of one stage does not predict that of the next.
        self.line = Progress(title, len(self.names), show, first=len(self.names))

    def enter(self, name: str, detail: str) -> None:
        # Work of an earlier stage, or of another task, counts as part of the current one.
        if name in self.names[self.done :]:
            self.done = self.names.index(name)
            self.line.update(self.done, final=True, **{name: detail})


_CURRENT: ContextVar[_Stages | None] = ContextVar("stages", default=None)


@contextmanager
def show_stages(title: str, names: Sequence[str], show: bool | None = None) -> Iterator[None]:
    """Show a progress line for the stages that code within this block enters, beginning with the first.

    Args:
        title: what is running.
        names: all stages, in order.
        show: True, False, or None to show it if standard error is a terminal.
    """
    stages = _Stages(title, names, show)
    token = _CURRENT.set(stages)
    try:
        with stages.line:
            stages.enter(stages.names[0], "")
            yield
            stages.line.update(len(stages.names), final=True)
    finally:
        _CURRENT.reset(token)


def stage(name: str, detail: str = "") -> None:
    """Enter a stage, which the nearest `show_stages` shows if it has one of that name."""
    current = _CURRENT.get()
    if current is not None:
        current.enter(name, detail)
