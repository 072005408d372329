"""Steps replayed as CUDA graphs: the kernel launches of a small step cost more than its arithmetic; a graph has one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("credibly")
# Calls on a side stream before a capture, as torch's documentation requires.
WARM = 3
# Values of a buffer from which a second copy on the device is avoided.
LARGE = 1_000_000


def capture(call: Callable[[], Any], buffers: Sequence[Tensor], device: torch.device, count: int = 1) -> Any:
    """Return a graph of `count` calls that work in place on the buffers, or None if capture fails.

    The values in the buffers are restored.
    """
    # The weights of a large network and moments of their gradients are kept in the host's memory meanwhile.
    before = [b.cpu() if b.numel() >= LARGE else b.clone() for b in buffers]
    graph = None
    # A graph that the garbage collector frees during a capture would break it off.
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
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
    except Exception as error:  # capture failures have no common type
        log.info("no CUDA graph (%s: %s)", type(error).__name__, str(error).splitlines()[0][:200])
        graph = None
    finally:
        if collecting:
            gc.enable()
    for mine, old in zip(buffers, before):
        mine.copy_(old)
    return graph


class Replayed:
    """A function captured as a CUDA graph on its first call, run eagerly if capture fails.

    It updates the `fixed` tensors in place; these must be the same tensors in every call. The `changing` tensors are
    new in every call and are copied to static buffers that the graph reads.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function, self.device = function, device
        self.buffers: tuple[Tensor | None, ...] = ()
        self.graph: Any = None
        self.failed = False

    def __call__(self, fixed: tuple[Tensor, ...], changing: tuple[Tensor | None, ...]) -> None:
        """Run one step."""
        if self.graph is None and not self.failed:
            self.buffers = tuple(None if c is None else c.clone() for c in changing)
            self.graph = capture(lambda: self.function(*fixed, *self.buffers), fixed, self.device)
            self.failed = self.graph is None
        if self.failed:
            self.function(*fixed, *changing)
            return
        for buffer, value in zip(self.buffers, changing):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        self.graph.replay()
