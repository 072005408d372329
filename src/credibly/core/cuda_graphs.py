"""Steps replayed as CUDA graphs: the kernel launches of a small step cost more than its arithmetic; a graph has one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("credibly")
# Number of calls on a side stream before a capture, as torch's documentation requires.
WARM = 3
# Size of a buffer, in values, from which a second copy on the device is avoided.
LARGE = 1_000_000
# Maximum number of branches of a graph; more do not run faster.
MOST_BRANCHES = 8
# Fraction of the free memory that branches may fill.
MEMORY_SHARE = 0.5


def capture(
    call: Callable[[], Any],
    buffers: Sequence[Tensor],
    device: torch.device,
    count: int = 1,
    reasons: list[str] | None = None,
) -> Any:
    """Return a graph of `count` calls that work in place on the buffers, or None if capture fails.

    The values in the buffers are restored. The reason of a failure is logged, and appended to `reasons`.
    """
    # The weights of a large network and moments of their gradients are kept in the host's memory meanwhile.
    before = [b.cpu() if b.numel() >= LARGE else b.clone() for b in buffers]
    graph = None
    # If the garbage collector frees another graph during a capture, the capture fails.
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
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        log.info("no CUDA graph (%s)", reason)
        if reasons is not None:
            reasons.append(reason)
        graph = None
    finally:
        if collecting:
            gc.enable()
    for mine, old in zip(buffers, before):
        mine.copy_(old)
    return graph


class Branches:
    """Independent calls, one after another, but in a captured graph side by side.

    The kernels of a small minibatch fill a fraction of a GPU, so those of several chains or members run at the same
    time. Each branch holds the activations of one call; there are as many as half of the free memory has room for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.needed = 0

    def __call__(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run the calls."""
        if not torch.cuda.is_current_stream_capturing():
            self._in_turn(calls)
            return
        free = torch.cuda.mem_get_info(self.device)[0]
        count = int(max(1, min(MOST_BRANCHES, len(calls), MEMORY_SHARE * free // max(1, self.needed))))
        here = torch.cuda.current_stream(self.device)
        streams = [torch.cuda.Stream(self.device) for _ in range(count)]
        for stream in streams:
            stream.wait_stream(here)
        for index, call in enumerate(calls):
            with torch.cuda.stream(streams[index % count]):
                call()
        for stream in streams:
            here.wait_stream(stream)

    def _in_turn(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run the calls on the current stream, and record how much memory one takes."""
        held = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for call in calls:
            call()
        self.needed = torch.cuda.max_memory_allocated(self.device) - held


class Replayed:
    """A function captured as a CUDA graph on its first call, run eagerly if capture fails.

    It updates the `fixed` tensors in place; these must be the same tensors in every call. The `changing` tensors are
    new in every call and are copied to static buffers that the graph reads.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function, self.device = function, device
        self.buffers: tuple[Tensor | None, ...] = ()
        self.graph: Any = None
        self.reasons: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether the function runs eagerly; `reasons` explains why."""
        return bool(self.reasons)

    def __call__(self, fixed: tuple[Tensor, ...], changing: tuple[Tensor | None, ...]) -> None:
        """Run one step."""
        if self.graph is None and not self.failed:
            self.buffers = tuple(None if c is None else c.clone() for c in changing)
            call = lambda: self.function(*fixed, *self.buffers)  # noqa: E731
            self.graph = capture(call, fixed, self.device, reasons=self.reasons)
        if self.failed:
            self.function(*fixed, *changing)
            return
        for buffer, value in zip(self.buffers, changing):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        self.graph.replay()
