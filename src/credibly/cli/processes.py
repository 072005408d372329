"""The command line in many processes: each of them has the same words to carry out, and the first one speaks for all.

`torchrun -m credibly ...` starts them. A command that all take part in runs in `taking_part`; one that is the work of a single
process runs in `one_of_many`, and the others end at once. Asking how many there are loads nothing.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from credibly.errors import PeerError

if TYPE_CHECKING:
    from credibly.distributed.world import World

NAMES = ("RANK", "WORLD_SIZE")  # by which a process knows that it was started with others


def several() -> bool:
    """Whether this process was started with others."""
    rank, size = (os.environ.get(name, "") for name in NAMES)
    return rank.isdigit() and size.isdigit() and int(size) > 1


def speaks() -> bool:
    """Whether this process is the one that writes what all of them share, and is heard."""
    return not several() or int(os.environ["RANK"]) == 0


@contextmanager
def taking_part() -> Iterator[None]:
    """A command that all processes carry out: one's error ends it for all, and only the first is heard meanwhile."""
    from credibly.distributed import world

    everyone = world.current()
    with ExitStack() as stack:
        if not everyone.leader:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(_told_to_stop())
        try:
            with everyone.propagate_errors():
                yield
        except typer.Exit:  # by Ctrl-C, which all of them get
            raise
        except KeyboardInterrupt:
            if everyone.leader:
                raise
            raise typer.Exit(130) from None
        except Exception as error:
            word = _first_word(everyone)
            if isinstance(error, PeerError) or (word and word["rank"] != everyone.rank):
                raise PeerError(_short(everyone, word, error)) from None
            raise


@contextmanager
def one_of_many() -> Iterator[None]:
    """A command that the first process carries out as if it were alone; the others have nothing to do, and end."""
    if not several():
        yield
        return
    if not speaks():
        raise typer.Exit(0)
    from credibly.distributed import world

    there = {name: os.environ.pop(name) for name in NAMES}  # so that what is started from here is alone too
    try:
        with world.alone():
            yield
    finally:
        os.environ.update(there)


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """The launcher's word that another process is lost, as an error, so that what was begun is put away or kept whole."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise PeerError("the launcher stopped this process: another one failed, or it was told to")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_word(everyone: World) -> dict[str, Any]:
    """What the process has left whose error is shown; nothing where one was lost without a word."""
    from credibly.distributed.world import FAILURE_KEY

    try:
        found: dict[str, Any] = (
            json.loads(everyone.store.get(FAILURE_KEY)) if everyone.store.check([FAILURE_KEY]) else {}
        )
    except (RuntimeError, ValueError):  # the store is gone with its host
        return {}
    return found


def _short(everyone: World, word: dict[str, Any], error: BaseException) -> str:
    """Whose error ended it: that process shows it. What can be done with the work so far stands in the notes of the error."""
    notes = getattr(error, "__notes__", []) if everyone.leader else []
    if word:
        end = "was stopped" if word["kind"] in ("Exit", "KeyboardInterrupt", "Interrupted") else "failed"
        said = f"process {word['rank']} {end}"
    else:
        said = str(error) if everyone.leader else "another process was lost"
    return "; ".join([f"process {everyone.rank} stops: {said}", *notes])
