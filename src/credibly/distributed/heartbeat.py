"""Processes whose work takes different times, such as members that stop early, wait for each other here.

A collective call gives up after a time limit, because one that does not answer may hang. Those who are still at work say so every
now and then, and those who have come to the end wait as long as they hear it. Only then do they meet.
"""

from __future__ import annotations

import time

from credibly.distributed.world import WORD, World

SIGNS = 20  # of life within the time limit
PAUSE = 0.5  # seconds at most between two looks


class Heartbeat:
    """The other processes of a run, as one of them works and waits; alone there is nothing to say or to wait for."""

    def __init__(self, world: World) -> None:
        self.world, self.every = world, world.timeout / SIGNS
        self.next = 0.0

    def tick(self) -> None:
        """Says that this process is at work; most calls return at once."""
        if self.world.size == 1 or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + self.every
        self._say()

    def wait(self) -> None:
        """Returns when all have come here, when one has failed, or when one is silent for longer than the time limit.

        The call in which they meet next says who is missing and why.
        """
        if self.world.size == 1:
            return
        store, arrivals = self.world.store, "credibly/arrived"
        round_of_all = (store.add(arrivals, 1) - 1) // self.world.size + 1
        self._say()
        heard, since, pause = self._heard(), time.monotonic(), 0.005
        while store.add(arrivals, 0) < round_of_all * self.world.size and not store.check([WORD]):
            now = self._heard()
            if now != heard:
                heard, since = now, time.monotonic()
            elif time.monotonic() - since > self.world.timeout:
                return
            time.sleep(pause)
            pause = min(PAUSE, 1.5 * pause)

    def _say(self) -> None:
        self.world.store.add("credibly/signs", 1)

    def _heard(self) -> int:
        """Signs of life of all so far: a process that waits gives none."""
        return int(self.world.store.add("credibly/signs", 0))
