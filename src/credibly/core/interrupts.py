"""Ctrl-C on the command line at any moment: exit code 130 and one line, from the first import to the last.

Python raises KeyboardInterrupt wherever the program happens to be. Within a command that is right: it cleans up and
says what became of the work. Before and after there is nothing to clean up, and the process ends at once. In the
middle of an import the exception would be lost, or break a module that is half loaded: the process ends at once, too,
or, where a folder or a file is being written, after the import.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPPED = 130
# Seconds between two checks whether an import has ended.
AGAIN = 0.02
IMPORTS = "<frozen importlib._bootstrap>"
_commands = 0
_outputs = 0


def install() -> None:
    """Handle Ctrl-C in this process from here on, unless a shell or another program has turned it off."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


@contextmanager
def within_command() -> Iterator[None]:
    """Raise KeyboardInterrupt in this block, which reports it itself."""
    global _commands
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


@contextmanager
def holding_output() -> Iterator[None]:
    """Keep the process from ending at once in this block, which has a folder or an unfinished file to clean up."""
    global _outputs
    _outputs += 1
    try:
        yield
    finally:
        _outputs -= 1


def handle(number: int, frame: FrameType | None) -> None:
    """Handle the signal: end the process, wait for an import, or raise KeyboardInterrupt."""
    importing = _imports(frame)
    if not _commands or (importing and not _outputs):
        _end()
    if importing:
        again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    signal.default_int_handler(number, frame)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS:
            return True
        frame = frame.f_back
    return False


def _end() -> None:
    """Report that the process was stopped, and exit without running anything else."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    line = "credibly: stopped\n"
    if "--json" in sys.argv:
        error = '{"type": "Interrupted", "argument": null, "message": "stopped", "advice": "", "exit_code": 130}'
        line = f'{{"error": {error}}}\n'
    with suppress(OSError):
        os.write(1 if "--json" in sys.argv else 2, line.encode())
    os._exit(STOPPED)


def never() -> bool:
    """Return False: no stop was requested."""
    return False


@contextmanager
def polite_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request that the loop checks between two steps; a second one interrupts at once."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)
    # A surrounding program has its own handler, or a shell runs this in the background.
    not_ours = before in (None, signal.SIG_IGN)
    if not_ours or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:
        # An interpreter embedded in another program: that program's handler stays.
        yield asked.is_set
        return
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
