"""Errors as one line and an exit code, or with --json as one JSON object on standard output.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a failure during the run: training diverged, the disk is full, a run folder is corrupt |
| 2 | an invalid request: a missing file or folder, an unknown column, a value that cannot be used |
| 130 | stopped by Ctrl-C |
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import typer

from credibly.cli.output import echo
from credibly.cli.processes import all_processes, is_distributed, is_leader, leader_only
from credibly.core.allocation import allocation_failure
from credibly.core.interrupts import handle, within_command
from credibly.errors import InputError, PeerError, SamplingError, StoreError, TrainingError

FAILED, INVALID, STOPPED = 1, 2, 130


class JsonErrors:
    """Whether the error of a command that was called with --json has been written."""

    written = False


_JSON: ContextVar[JsonErrors | None] = ContextVar("json_errors", default=None)


@contextmanager
def json_errors() -> Iterator[JsonErrors]:
    """Report errors as JSON within this block."""
    state = JsonErrors()
    token = _JSON.set(state)
    try:
        yield state
    finally:
        _JSON.reset(token)


def json_is_written() -> None:
    """Record that a command has written its JSON object, which already describes the error."""
    state = _JSON.get()
    if state is not None:
        state.written = True


@contextmanager
def handle_errors(*, shared: bool = False) -> Iterator[None]:
    """Turn errors that the user can act on into a message and an exit code.

    Under a launcher, a `shared` command runs in all processes, any other only in the leader.
    """
    try:
        scope = all_processes() if shared and is_distributed() else nullcontext() if shared else leader_only()
        with within_command(), scope:
            yield
    except InputError as error:
        _end_invalid(error)
    except (StoreError, TrainingError, SamplingError, PeerError) as error:
        # All processes reject an invalid request, but only the leader writes JSON, and another process may have
        # failed first.
        own = error.__context__ if isinstance(error, PeerError) and _JSON.get() is not None else None
        if isinstance(own, InputError):
            _end_invalid(own)
        notes = [] if isinstance(error, PeerError) else getattr(error, "__notes__", [])
        end(". ".join([str(error), *notes]), FAILED, kind=type(error).__name__)
    except BrokenPipeError:
        # The reader of the output has closed it; typer exits quietly.
        raise
    except OSError as error:
        if (lack := allocation_failure(error)) is not None:
            end(lack, FAILED, kind="MemoryError")
        where = f" ({error.filename})" if error.filename else ""
        code = INVALID if isinstance(error, FileNotFoundError) else FAILED
        end(f"{error.strerror or error}{where}", code, kind=type(error).__name__)
    except KeyboardInterrupt:
        end("stopped", STOPPED, kind="Interrupted")
    except Exception as error:
        if (lack := allocation_failure(error)) is None:
            raise
        end(lack, FAILED, kind="MemoryError")


def _end_invalid(error: InputError) -> NoReturn:
    message = str(error).removesuffix(f". {error.advice}") if error.advice else str(error)
    end(message, INVALID, kind="InputError", argument=error.argument, advice=error.advice)


def end(message: str, code: int, *, kind: str, argument: str | None = None, advice: str = "") -> NoReturn:
    """Report an error and exit."""
    report_error(message, code, kind=kind, argument=argument, advice=advice)
    raise typer.Exit(code)


def report_error(message: str, code: int, *, kind: str, argument: str | None = None, advice: str = "") -> None:
    """Write an error: a line on standard error, or with --json an object on standard output."""
    text, advice = " ".join(message.split()), " ".join(advice.split())
    state = _JSON.get()
    if state is not None:
        if state.written:
            return
        state.written = True
    # Only the leader writes to standard output.
    if state is None or not is_leader():
        echo(f"credibly: {text}" + (f". {advice}" if advice else ""), err=True)
    else:
        error = {"type": kind, "argument": argument, "message": text, "advice": advice, "exit_code": code}
        echo(json.dumps({"error": error}, indent=2))


def exit_stopped(what: str) -> NoReturn:
    """Exit after Ctrl-C with a message on what was kept."""
    end(f"stopped; {what}", STOPPED, kind="Interrupted")


@contextmanager
def persistent_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt again if Ctrl-C was pressed and the exception was lost.

    Python drops exceptions raised while an object is being finalised, and the work would continue. Call the function
    between blocks of work.
    """
    pressed = threading.Event()

    def handler(number: int, frame: Any) -> None:
        pressed.set()
        before(number, frame)  # type: ignore[operator, misc]

    def raise_again() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and before in (signal.default_int_handler, handle)
    # Another handler is installed, or the signal is ignored.
    if not ours:
        yield raise_again
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield raise_again
    finally:
        signal.signal(signal.SIGINT, before)
