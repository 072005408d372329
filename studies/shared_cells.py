"""Cells of a table shared out over processes: whoever is free takes the next one, so that a long cell holds nobody up.

A process whose cell fails waits for the others before it says so: what they have begun is worth keeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from credibly.distributed import world
from credibly.distributed.world import World
from credibly.errors import PeerError

Cell = TypeVar("Cell")
PAUSE = 0.2  # seconds between two looks at whether the others have ended


def share_out(
    everyone: World,
    cells: Sequence[Cell],
    work: Callable[[Cell], None],
    progress: Callable[[Cell, int], None] | None = None,
) -> None:
    """Does every cell once, in some process, and ends in all of them when the last is done.

    Args:
        everyone: the processes; all of them pass the same cells.
        cells: what there is to do.
        work: does one of them, by itself: other processes take no part in it.
        progress: called with a cell and its number when it is begun here.
    """
    everyone.barrier()
    place = f"credibly/cells/{everyone.collective_calls}"  # as many meetings have been held by all, so the name is new and the same for all
    failure: Exception | None = None
    try:
        while failure is None and (number := everyone.store.add(f"{place}/next", 1) - 1) < len(cells):
            if progress is not None:
                progress(cells[number], number)
            with world.alone():
                work(cells[number])
    except PeerError:
        raise
    except Exception as error:
        failure = error
    everyone.store.set(f"{place}/{everyone.rank}", "ended" if failure is None else "failed")
    ends = [f"{place}/{rank}" for rank in range(everyone.size)]
    while not everyone.store.check(
        ends
    ):  # without a limit: a cell may take long, and the launcher ends us if one is lost
        time.sleep(PAUSE)
    if failure is not None:
        raise failure
    failed = [rank for rank, end in enumerate(ends) if everyone.store.get(end) == b"failed"]
    if failed:
        raise PeerError(f"process {failed[0]} failed; cells that have ended are kept, and the same command goes on")
