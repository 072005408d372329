"""The loop around a sampler: draws, progress, checkpoints, Ctrl-C; the same for every kernel, in memory or in a folder."""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from credibly.core.progress import Progress
from credibly.distributed.world import World
from credibly.inference.sampling.recording import EVERY_SECONDS, Recorder
from credibly.inference.sampling.trajectory import Stopped
from credibly.inference.target import ProblemTarget, Target

WATCHED = 256  # draws of each chain that the running R-hat looks at; older ones are thinned
PROBES = 8  # training rows whose predictions it looks at


class Process(ABC):
    """A sampler of C chains that goes on one iteration at a time and can be written down between any two.

    Attributes:
        theta: where the chains stand, (C, D).
        done: iterations so far.
        total: iterations in all.
        names: what is noted of every draw.
    """

    target: Target
    theta: Tensor
    done: int = 0
    total: int
    names: tuple[str, ...]

    @abstractmethod
    def start(self, theta: Tensor) -> None:
        """Begins at theta (C, D); refuses points where the density is not finite."""

    @abstractmethod
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """One iteration; what was noted of it, (C,) each. Raises `Stopped`, with the state as before, when asked to stop."""

    @abstractmethod
    def keeps(self) -> bool:
        """Whether the iteration just done gives a draw."""

    @abstractmethod
    def figures(self) -> dict[str, float | str]:
        """What the progress line shows."""

    @abstractmethod
    def history(self) -> dict[str, Any]:
        """What the record keeps, in plain JSON values."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that the next iteration depends on, `done` among it."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """How far each chain is, in plain JSON values."""

    @abstractmethod
    def chain_axis(self, name: str) -> int | None:
        """The axis of a tensor of the state along which the chains lie; None where it is of all of them."""


class Meetings:
    """When the processes of a run meet: every few seconds, all at the same iteration, to make safe what there is.

    Between two meetings they have nothing to say to one another once the step size is found. Alone there are no meetings.
    """

    def __init__(self, world: World, done: int) -> None:
        self.world, self.next, self.began, self.first = world, done + 1, time.monotonic(), done

    def due(self, done: int) -> bool:
        """Whether this iteration ends in a meeting."""
        return self.world.size > 1 and done >= self.next

    def meet(self, done: int, stop: bool) -> bool:
        """Whether anybody was asked to stop; the leader's clock says when to meet again."""
        rate = (done - self.first) / max(1e-9, time.monotonic() - self.began)
        told = self.world.gather([stop, done + max(1, round(min(EVERY_SECONDS * rate, 10 * (done - self.first))))])
        self.next = told[0][1]
        return any(asked for asked, _ in told)


def run(process: Process, recorder: Recorder, *, title: str, progress: bool | None) -> float:
    """Goes on to the end, or to Ctrl-C, which raises `Stopped` after a last checkpoint. Returns the seconds it took."""
    began, first, monitor, drawn = time.monotonic(), process.done, Monitor(process.target), 0
    world = recorder.mesh.world
    meetings = Meetings(world, first)
    if not world.leader:
        progress = False
    with _polite_interrupt() as asked, Progress(title, process.total, progress, first=first) as line:
        stop = asked if world.size == 1 else never  # several processes stop together, at a meeting
        try:
            while process.done < process.total:
                noted = process.advance(stop)
                if process.keeps():
                    recorder.add(process.theta, noted)
                    drawn += 1
                last = process.done == process.total
                if world.size == 1:
                    recorder.checkpoint(process)
                elif meetings.due(process.done) and not last:
                    if meetings.meet(process.done, asked()):
                        raise Stopped
                    recorder.checkpoint(process, force=True)
                if line.show:
                    if process.keeps():
                        monitor.note(process.theta, noted)
                    if line.due() or last:
                        rate = (process.done - first) / max(1e-9, time.monotonic() - began)
                        line.update(
                            process.done, final=last, **process.figures(), **monitor.figures(), **{"it/s": rate}
                        )
                if stop() and not last:
                    raise Stopped
        except Stopped:
            recorder.checkpoint(process, force=True, status="interrupted")
            raise
    return time.monotonic() - began


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Monitor:
    """R-hat so far, of the log likelihood and of predictions at a few training rows: cheap, and of fixed size."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.values: list[Tensor] = []
        self.every, self.seen = 1, 0
        self.probe: Any = None
        if isinstance(target, ProblemTarget):
            problem = target.problem
            rows = torch.linspace(0, problem.n - 1, min(PROBES, problem.n)).round().long().to(problem.device)
            self.probe = problem.subset(rows)

    def note(self, theta: Tensor, noted: dict[str, Tensor]) -> None:
        """Takes in a draw (C, D)."""
        self.seen += 1
        if self.seen % self.every:
            return
        with torch.no_grad():
            parts = [noted["log_likelihood"].double().unsqueeze(1)]
            if self.probe is not None:
                output = self.probe.likelihood.arrange(self.probe.forward(theta, self.probe.x), 1)
                parts.append(self.probe.likelihood.moments(output, self.probe.extra(theta))[0].double().flatten(1))
            else:
                parts.append(theta[:, :PROBES].double())
        self.values.append(torch.cat(parts, -1))
        if len(self.values) >= WATCHED:
            self.values, self.every = self.values[1::2], 2 * self.every

    def figures(self) -> dict[str, float]:
        """The largest split R-hat, once there are enough draws."""
        if len(self.values) < 8:
            return {}
        draws = torch.stack(self.values[len(self.values) % 2 :], 1)
        halves = torch.cat(draws.chunk(2, 1))
        n = halves.shape[1]
        within = halves.var(1).mean(0)
        between = halves.mean(1).var(0)
        rhat = torch.sqrt((n - 1) / n + between / within.clamp(min=1e-300))
        value = float(rhat[within > 0].max()) if bool((within > 0).any()) else math.nan
        return {"R-hat": round(value, 3)}


@contextmanager
def _polite_interrupt() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a request that the loop looks at between two steps; a second one ends at once."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)
    in_place = before in (None, signal.SIG_IGN)  # by another program around this one, or by a shell for a job behind
    if in_place or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    try:
        signal.signal(signal.SIGINT, handle)
    except ValueError:  # an interpreter inside another program: its own handler stays
        yield asked.is_set
        return
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
