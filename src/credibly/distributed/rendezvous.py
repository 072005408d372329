"""A store for one start of the processes, free of keys that an earlier start left behind.

`torchrun` keeps one store across all its restarts. Keys of lost processes (addresses to connect to, failure notices)
would be treated as those of the new ones, and its restart count differs between hosts. So the first process generates a
name for this start and sends it to every process that greets it now.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from credibly.errors import PeerError

# Seconds between two polls of the store.
PAUSE = 0.01


def rendezvous_store(timeout: float) -> tuple[Any, int, int]:
    """Return a store for this start only, the rank of this process, and the number of processes."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store, rank, size  # the first process has just created it
    return PrefixStore(f"credibly/{_agreed_name(store, rank, size, timeout)}", store), rank, size


def _agreed_name(store: Any, rank: int, size: int, timeout: float) -> str:
    """Return the same new name in all processes, whatever earlier processes of the same ranks left in the store."""
    mine, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        answered: dict[int, str] = {}
        there = [f"credibly/there/{mine}/{other}" for other in range(1, size)]
        while there and not store.check(there):
            for other in range(1, size):
                key = f"credibly/hello/{other}"
                hello = store.get(key).decode() if store.check([key]) else ""
                # A greeting of an earlier start is answered too; nobody reads that answer.
                if hello and answered.get(other) != hello:
                    store.set(f"credibly/answer/{hello}", mine)
                    answered[other] = hello
            _pause(until, timeout)
        return mine
    store.set(f"credibly/hello/{rank}", mine)
    while not store.check([f"credibly/answer/{mine}"]):
        _pause(until, timeout)
    name = str(store.get(f"credibly/answer/{mine}").decode())
    store.set(f"credibly/there/{name}/{rank}", "")
    return name


def _pause(until: float, timeout: float) -> None:
    if time.monotonic() > until:
        raise PeerError(f"not all processes connected within {timeout:g} s. CREDIBLY_TIMEOUT sets this limit")
    time.sleep(PAUSE)
