"""The loop around a sampler: draws, progress, checkpoints and Ctrl-C, the same for every sampler."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from credibly.core.interrupts import never, polite_interrupt
from credibly.core.progress import Progress
from credibly.core.threads import threads_for_native
from credibly.distributed.world import World
from credibly.inference.sampling.recording import EVERY_SECONDS, Recorder
from credibly.inference.sampling.sampler import Sampler, Stopped
from credibly.inference.sampling.until import Until
from credibly.inference.target import ProblemTarget, Target

# Values of all chains up to which torch's operations on them do not gain from several threads.
ONE_THREAD = 100_000
# Draws per chain in the running R-hat; older ones are thinned.
WATCHED = 256
# Training rows whose predictions it covers.
PROBES = 8


class Rendezvous:
    """When the processes of a run synchronise: every few seconds, all at the same iteration, to write a checkpoint.

    Once the step size is found they exchange nothing in between. A single process never synchronises.
    """

    def __init__(self, world: World, done: int) -> None:
        self.world, self.next, self.began, self.first = world, done + 1, time.monotonic(), done

    def due(self, done: int) -> bool:
        """Return whether the processes synchronise after this iteration."""
        return self.world.size > 1 and done >= self.next

    def meet(self, done: int, stop: bool, expired: bool) -> tuple[bool, bool]:
        """Return whether any process was asked to stop, and whether the budget is spent.

        The leader's clock decides whether the time is up, and when to synchronise next.
        """
        rate = (done - self.first) / max(1e-9, time.monotonic() - self.began)
        wait = max(1, round(min(EVERY_SECONDS * rate, 10 * (done - self.first))))
        gathered = self.world.gather([stop, expired, done + wait])
        _, time_out, self.next = gathered[0]
        return any(asked for asked, _, _ in gathered), time_out


def run_loop(
    sampler: Sampler, recorder: Recorder, *, title: str, progress: bool | None, until: Until | None = None
) -> float:
    """Run a sampler to its end, which `until` may postpone, and return the seconds it took.

    Ctrl-C raises `Stopped` after a last checkpoint.
    """
    began, first, monitor = time.monotonic(), sampler.done, Monitor(sampler.target)
    world = recorder.mesh.world
    rendezvous = Rendezvous(world, first)
    small = sampler.theta.numel() <= ONE_THREAD
    with (
        polite_interrupt() as asked,
        Progress(title, sampler.total, progress, first=first) as bar,
        threads_for_native(small and sampler.backend_name == "cpp"),
    ):
        # Several processes stop together, where they synchronise.
        stop = asked if world.size == 1 else never
        # A resumed run may have spent its iterations.
        expired = until is not None and not until.timed and until.expired(first)
        try:
            while not expired and (sampler.done < sampler.total or _prolonged(sampler, recorder, until, bar)):
                statistics = sampler.advance(stop)
                draw = _record(sampler, recorder, until, statistics) if sampler.keeps() else None
                expired = until is not None and (world.size == 1 or not until.timed) and until.expired(sampler.done)
                last = sampler.done == sampler.total
                if world.size == 1:
                    recorder.checkpoint(sampler)
                elif rendezvous.due(sampler.done) and not last:
                    expired = _synchronise(sampler, recorder, until, rendezvous, asked())
                if bar.show:
                    if draw is not None:
                        monitor.add(*draw)
                    if bar.due() or last:
                        rate = (sampler.done - first) / max(1e-9, time.monotonic() - began)
                        mixing = monitor.live_values() if until is None else until.live_values()
                        values = {**sampler.live_values(), **mixing, "it/s": rate}
                        bar.update(sampler.done, final=last, **values)
                if stop() and not last:
                    raise Stopped
            if expired:
                _prolonged(sampler, recorder, until, bar)
        except Stopped:
            recorder.checkpoint(sampler, force=True, status="interrupted")
            raise
    return time.monotonic() - began


def _record(
    sampler: Sampler, recorder: Recorder, until: Until | None, statistics: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Record the last iteration as a draw. Return its parameter vectors (C, D) and statistics."""
    theta = sampler.target.decode(sampler.theta)
    statistics = sampler.target.recorded(theta, statistics)
    recorder.add(theta, statistics)
    if until is not None:
        until.add(theta)
    return theta, statistics


def _synchronise(
    sampler: Sampler, recorder: Recorder, until: Until | None, rendezvous: Rendezvous, asked: bool
) -> bool:
    """Write a checkpoint of all processes, or stop them. Return whether the budget is spent.

    Each process has its own clock, and they agree on the time only here.
    """
    expired = until is not None and until.expired(sampler.done)
    asked_to_stop, expired = rendezvous.meet(sampler.done, asked, expired)
    if asked_to_stop:
        raise Stopped
    recorder.checkpoint(sampler, force=True)
    return expired


def _prolonged(sampler: Sampler, recorder: Recorder, until: Until | None, bar: Progress) -> bool:
    """Return whether the run continues after its last planned iteration, and allocate space for further draws."""
    if until is None:
        return False
    draws, recorder.rounds = until.extend(sampler, recorder.discard), until.table()
    if not draws:
        return False
    recorder.reserve(draws)
    recorder.checkpoint(sampler, force=True)
    bar.total = max(1, sampler.total)
    return True


class Monitor:
    """Running R-hat of the log likelihood and of predictions at a few training rows, in bounded memory."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.values: list[Tensor] = []
        self.every, self.seen = 1, 0
        self.probe: Any = None
        if isinstance(target, ProblemTarget):
            problem = target.problem
            held = len(problem.y)
            rows = torch.linspace(0, held - 1, min(PROBES, held)).round().long().to(problem.device)
            self.probe = problem.subset(rows)

    def add(self, theta: Tensor, statistics: dict[str, Tensor]) -> None:
        """Add a draw (C, D)."""
        self.seen += 1
        if self.seen % self.every:
            return
        with torch.no_grad():
            parts = [statistics["log_likelihood"].double().unsqueeze(1)]
            if self.probe is not None:
                output = self.probe.likelihood.arrange(self.probe.forward(theta, self.probe.x), 1)
                parts.append(self.probe.likelihood.moments(output, self.probe.extra(theta))[0].double().flatten(1))
            else:
                parts.append(theta[:, :PROBES].double())
        self.values.append(torch.cat(parts, -1))
        if len(self.values) >= WATCHED:
            self.values, self.every = self.values[1::2], 2 * self.every

    def live_values(self) -> dict[str, float]:
        """Return the largest split R-hat, once there are enough draws."""
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
