"""Where processes meet that a launcher may have started before: a store in which nothing of an earlier start is found.

`torchrun` keeps one store through all its restarts. What processes that are lost had written there (addresses to connect to,
word of an error) would be taken for that of the new ones, and its count of restarts differs from host to host. So the first
process makes up a name for this start and tells it to those who say hello now.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from credibly.errors import PeerError

PAUSE = 0.01  # seconds between two looks at who is there


def meeting_store(timeout: float) -> tuple[Any, int, int]:
    """A store of this start alone, the number of this process, and how many there are."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store, rank, size  # the first process has just made it
    return PrefixStore(f"credibly/{_agreed_name(store, rank, size, timeout)}", store), rank, size


def _agreed_name(store: Any, rank: int, size: int, timeout: float) -> str:
    """The same new name in all processes, whatever others of their numbers have left in the store."""
    mine, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        answered: dict[int, str] = {}
        there = [f"credibly/there/{mine}/{other}" for other in range(1, size)]
        while there and not store.check(there):
            for other in range(1, size):
                hello = (
                    store.get(f"credibly/hello/{other}").decode() if store.check([f"credibly/hello/{other}"]) else ""
                )
                if (
                    hello and answered.get(other) != hello
                ):  # one of an earlier start is answered too, and does not hear it
                    store.set(f"credibly/answer/{hello}", mine)
                    answered[other] = hello
            _still(until, timeout)
        return mine
    store.set(f"credibly/hello/{rank}", mine)
    while not store.check([f"credibly/answer/{mine}"]):
        _still(until, timeout)
    name = str(store.get(f"credibly/answer/{mine}").decode())
    store.set(f"credibly/there/{name}/{rank}", "")
    return name


def _still(until: float, timeout: float) -> None:
    if time.monotonic() > until:
        raise PeerError(f"the processes have not all come together within {timeout:g} s (CREDIBLY_TIMEOUT sets that)")
    time.sleep(PAUSE)
