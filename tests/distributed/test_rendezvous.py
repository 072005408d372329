"""Restarted processes agree on a new name, whatever earlier ones left in the store."""

import threading

import pytest
import torch.distributed as dist

from credibly.distributed import rendezvous
from credibly.errors import PeerError


def start(store, size, timeout=20.0):
    """Return the names that `size` processes, as threads, agree on."""
    found = {}

    def one(rank):
        found[rank] = rendezvous._agreed_name(store, rank, size, timeout)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert sorted(found) == list(range(size))
    return set(found.values())


def test_every_start_has_one_name_and_a_new_one():
    store = dist.HashStore()
    names = [start(store, 3) for _ in range(5)]
    assert all(len(each) == 1 for each in names)
    assert len(set.union(*names)) == 5


def test_keys_of_a_lost_start_are_ignored():
    store = dist.HashStore()
    store.set("credibly/hello/1", "dead")
    store.set("credibly/answer/dead", "a name of the dead")
    assert len(start(store, 3)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_process_is_waited_for_until_the_time_limit(rank):
    with pytest.raises(PeerError, match=r"not all processes connected within 0\.1 s\. CREDIBLY_TIMEOUT"):
        rendezvous._agreed_name(dist.HashStore(), rank, 2, 0.1)
