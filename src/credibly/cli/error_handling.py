"""Errors as one clear line: exit code 2 for what was asked, 1 for what went wrong on the way, 130 for Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import typer

from credibly.cli.processes import one_of_many, several, taking_part
from credibly.errors import InputError, PeerError, SamplingError, StoreError, TrainingError


@contextmanager
def plainly(*, shared: bool = False) -> Iterator[None]:
    """Turns the errors that a user can do something about into a line on standard error and an exit code.

    Where many processes were started, all of them carry out a command that is `shared`, and the first one alone any other.
    """
    try:
        with taking_part() if shared and several() else nullcontext() if shared else one_of_many():
            yield
    except InputError as error:
        _end(str(error), 2)
    except (StoreError, TrainingError, SamplingError, PeerError) as error:
        _end(str(error), 1)
    except BrokenPipeError:  # who reads the output has seen enough; the command line's own frame ends quietly
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _end(f"{error.strerror or error}{where}", 1)
    except MemoryError:
        _end("there is not enough memory for this", 1)
    except KeyboardInterrupt:
        _end("stopped", 130)


def _end(message: str, code: int) -> NoReturn:
    typer.echo(f"credibly: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def stopped(what: str) -> NoReturn:
    """The end after Ctrl-C, with what became of the work."""
    _end(f"stopped; {what}", 130)


@contextmanager
def never_lost() -> Iterator[Callable[[], None]]:
    """Ctrl-C as ever, and a function for between two pieces of work that raises it again where it was lost.

    Python drops an exception that comes while an object is being finalised: the work would go on to its end.
    """
    pressed = threading.Event()

    def note(number: int, frame: Any) -> None:
        pressed.set()
        signal.default_int_handler(number, frame)

    def again() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:  # somebody else has it, or has turned it off
        yield again
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield again
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
