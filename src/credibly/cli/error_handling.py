"""Errors as one line and an exit code: 2 for an invalid request, 1 for a runtime error, 130 for Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import typer

from credibly.cli.processes import all_processes, is_distributed, leader_only
from credibly.errors import InputError, PeerError, SamplingError, StoreError, TrainingError


@contextmanager
def handle_errors(*, shared: bool = False) -> Iterator[None]:
    """Turn errors that the user can act on into a line on standard error and an exit code.

    Under a launcher, a `shared` command runs in all processes and any other in the leader alone.
    """
    try:
        with all_processes() if shared and is_distributed() else nullcontext() if shared else leader_only():
            yield
    except InputError as error:
        _end(str(error), 2)
    except (StoreError, TrainingError, SamplingError, PeerError) as error:
        _end(str(error), 1)
    except BrokenPipeError:
        # The reader of the output has closed it; typer exits quietly.
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _end(f"{error.strerror or error}{where}", 1)
    except MemoryError:
        _end("out of memory", 1)
    except KeyboardInterrupt:
        _end("stopped", 130)


def _end(message: str, code: int) -> NoReturn:
    typer.echo(f"credibly: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def exit_stopped(what: str) -> NoReturn:
    """Exit after Ctrl-C, with a message on what became of the work."""
    _end(f"stopped; {what}", 130)


@contextmanager
def persistent_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt again if Ctrl-C was pressed and the exception was lost.

    Python drops exceptions raised while an object is being finalised, and the work would continue. Call the function
    between blocks of work.
    """
    pressed = threading.Event()

    def handler(number: int, frame: Any) -> None:
        pressed.set()
        signal.default_int_handler(number, frame)

    def raise_again() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Another handler is installed, or the signal is ignored.
    if not ours:
        yield raise_again
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield raise_again
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
