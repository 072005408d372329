"""Progress in Jupyter: one HTML line per bar, updated in place. IPython is used only if it is already loaded."""

from __future__ import annotations

import html
import importlib
import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return _shell() is not None


class NotebookLine:
    """A progress bar as an HTML element that the notebook shows below the cell and updates in place."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.handle: Any = None

    def draw(self, done: int, metrics: list[str], time_text: str) -> None:
        """Show the number of steps done, the metrics and the time."""
        text = "  ".join([f"{done}/{self.total}", *metrics, time_text])
        bar = f'<progress value="{done}" max="{self.total}" style="width: 12em"></progress>'
        line = f"{html.escape(self.title)} {bar} {html.escape(text)}"
        bundle = {
            "text/html": f'<div style="white-space: pre; font-family: monospace">{line}</div>',
            "text/plain": f"{self.title}  {text}",
        }
        if self.handle is None:
            display = importlib.import_module("IPython.display").display
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def close(self) -> None:
        """Leave the last line where it is."""


def _shell() -> Any:
    """Return IPython's shell if it serves a kernel, else None."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = found() if found is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
