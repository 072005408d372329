"""A step replayed as a CUDA graph: the launches of a small step cost more than its arithmetic, and a graph has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("credibly")
WARM = 3  # calls on a side stream before a capture, as it asks for


def capture(call: Callable[[], Any], buffers: Sequence[Tensor], device: torch.device, count: int = 1) -> Any:
    """A graph of so many calls that work in place on the buffers, which are left as they were; None where that fails."""
    before = [b.clone() for b in buffers]
    graph = None
    try:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM):
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except Exception as error:  # what cannot be captured has no common type
        log.info("no CUDA graph (%s: %s)", type(error).__name__, str(error).splitlines()[0][:200])
        graph = None
    for mine, old in zip(buffers, before):
        mine.copy_(old)
    return graph


class Replayed:
    """A function that changes some tensors in place and takes others that are new in every call.

    The first must be the same tensors in every call. The others are copied to places of their own, which the graph reads.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function, self.device = function, device
        self.places: tuple[Tensor | None, ...] = ()
        self.graph: Any = None
        self.failed = False

    def __call__(self, fixed: tuple[Tensor, ...], changing: tuple[Tensor | None, ...]) -> None:
        """One step."""
        if self.graph is None and not self.failed:
            self.places = tuple(None if c is None else c.clone() for c in changing)
            self.graph = capture(lambda: self.function(*fixed, *self.places), fixed, self.device)
            self.failed = self.graph is None
        if self.failed:
            self.function(*fixed, *changing)
            return
        for place, value in zip(self.places, changing):
            if place is not None and value is not None:
                place.copy_(value)
        self.graph.replay()
