"""A work queue of table cells over processes: a free process takes the next cell, so a long cell blocks nobody.

A process whose cell fails waits for the others before it raises: the cells they have started are worth keeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from credibly.distributed import world
from credibly.distributed.world import World
from credibly.errors import PeerError

Cell = TypeVar("Cell")
PAUSE = 0.2  # seconds between two checks whether the other processes have finished


def share_out(
    everyone: World,
    cells: Sequence[Cell],
    work: Callable[[Cell], None],
    progress: Callable[[Cell, int], None] | None = None,
) -> None:
    """Process every cell once, in any of the processes. Returns in all of them when the last cell is done.

    Args:
        everyone: the processes; all of them pass the same cells.
        cells: the work items.
        work: processes one cell within a single process.
        progress: called with a cell and its index when this process starts it.
    """
    everyone.barrier()
    # The number of collective calls is the same in all processes and grows, so this key prefix is shared and unused.
    prefix = f"credibly/cells/{everyone.collective_calls}"
    failure: Exception | None = None
    try:
        while failure is None and (number := everyone.store.add(f"{prefix}/next", 1) - 1) < len(cells):
            if progress is not None:
                progress(cells[number], number)
            with world.alone():
                work(cells[number])
    except PeerError:
        raise
    except Exception as error:
        failure = error
    everyone.store.set(f"{prefix}/{everyone.rank}", "ended" if failure is None else "failed")
    ends = [f"{prefix}/{rank}" for rank in range(everyone.size)]
    # No timeout: a cell may take long, and the launcher ends this process if another one is lost.
    while not everyone.store.check(ends):
        time.sleep(PAUSE)
    if failure is not None:
        raise failure
    failed = [rank for rank, end in enumerate(ends) if everyone.store.get(end) == b"failed"]
    if failed:
        raise PeerError(f"process {failed[0]} failed; finished cells are kept, and the same command resumes")
