"""The command line under `torchrun -m credibly ...`: every process gets the same arguments, and only the leader prints.

A distributed command runs within `all_processes`. Any other runs within `leader_only`, where the other processes exit
at once. `is_distributed` and `is_leader` load nothing.
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

# Set by the launcher.
NAMES = ("RANK", "WORLD_SIZE")


def is_distributed() -> bool:
    """Return whether a launcher started this process together with others."""
    rank, size = (os.environ.get(name, "") for name in NAMES)
    return rank.isdigit() and size.isdigit() and int(size) > 1


def is_restarted() -> bool:
    """Return whether the launcher has restarted this process, which may be the only one."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return count.isdigit() and int(count) > 0


def is_leader() -> bool:
    """Return whether this process prints and writes for all of them."""
    return not is_distributed() or int(os.environ["RANK"]) == 0


@contextmanager
def all_processes() -> Iterator[None]:
    """Run a command in all processes. An error in one ends all of them, and only the leader prints."""
    from credibly.distributed import world

    everyone = world.current()
    with ExitStack() as stack:
        if not everyone.leader:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(_sigterm_as_error())
        try:
            with everyone.propagate_errors():
                yield
        except typer.Exit:
            # Raised after Ctrl-C, which reaches all processes.
            raise
        except KeyboardInterrupt:
            if everyone.leader:
                raise
            raise typer.Exit(130) from None
        except Exception as error:
            failure = _first_failure(everyone)
            if isinstance(error, PeerError) or (failure and failure["rank"] != everyone.rank):
                raise PeerError(_describe_failure(everyone, failure, error)) from None
            raise


@contextmanager
def leader_only() -> Iterator[None]:
    """Run a command in the leader as if it were the only process; the other processes exit."""
    if not is_distributed():
        yield
        return
    if not is_leader():
        raise typer.Exit(0)
    from credibly.distributed import world

    # Child processes must not join the other processes either.
    removed = {name: os.environ.pop(name) for name in NAMES}
    try:
        with world.alone():
            yield
    finally:
        os.environ.update(removed)


@contextmanager
def _sigterm_as_error() -> Iterator[None]:
    """Turn SIGTERM from the launcher into an error, so that unfinished work is cleaned up or kept intact."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise PeerError("the launcher stopped this process: another one failed, or the job was cancelled")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_failure(everyone: World) -> dict[str, Any]:
    """Return the record of the first process that failed; empty if one was lost without leaving any."""
    from credibly.distributed.world import FAILURE_KEY

    try:
        found: dict[str, Any] = (
            json.loads(everyone.store.get(FAILURE_KEY)) if everyone.store.check([FAILURE_KEY]) else {}
        )
    except (RuntimeError, ValueError):
        # The store is gone with its host.
        return {}
    return found


def _describe_failure(everyone: World, failure: dict[str, Any], error: BaseException) -> str:
    """Return a message that names the failed process (which prints its own error) and how to resume."""
    notes = getattr(error, "__notes__", []) if everyone.leader else []
    if failure:
        end = "was stopped" if failure["kind"] in ("Exit", "KeyboardInterrupt", "Interrupted") else "failed"
        reason = f"process {failure['rank']} {end}"
    else:
        reason = str(error) if everyone.leader else "another process was lost"
    return "; ".join([f"process {everyone.rank} stops: {reason}", *notes])
