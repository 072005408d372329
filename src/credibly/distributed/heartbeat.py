"""Heartbeats, for processes whose work takes different times, such as ensemble members that stop early.

A collective call times out, because a process that does not answer may hang. So processes that still work send
heartbeats, and those that have finished wait as long as heartbeats arrive. Only then do all enter the collective call.
"""

from __future__ import annotations

import time

from credibly.distributed.world import FAILURE_KEY, World

# Number of heartbeats within the time limit.
BEATS = 20
# The longest pause between two polls, in seconds.
PAUSE = 0.5
_ARRIVALS, _BEATS = "credibly/arrived", "credibly/heartbeats"


class Heartbeat:
    """The heartbeat of this process and of its peers. In a single process all methods return at once."""

    def __init__(self, world: World) -> None:
        self.world, self.every = world, world.timeout / BEATS
        self.next = 0.0

    def tick(self) -> None:
        """Send a heartbeat if one is due; most calls return at once."""
        if self.world.size == 1 or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + self.every
        self._beat()

    def wait(self) -> None:
        """Wait until all processes have called this, one has failed, or no heartbeat arrived within the time limit.

        In the last two cases the collective call that follows raises the error.
        """
        if self.world.size == 1:
            return
        store = self.world.store
        round_of_all = (store.add(_ARRIVALS, 1) - 1) // self.world.size + 1
        self._beat()
        seen, since, pause = self._count(), time.monotonic(), 0.005
        while store.add(_ARRIVALS, 0) < round_of_all * self.world.size and not store.check([FAILURE_KEY]):
            now = self._count()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.world.timeout:
                return
            time.sleep(pause)
            pause = min(PAUSE, 1.5 * pause)

    def _beat(self) -> None:
        self.world.store.add(_BEATS, 1)

    def _count(self) -> int:
        """Return the heartbeats of all processes so far; a waiting process sends none."""
        return int(self.world.store.add(_BEATS, 0))
