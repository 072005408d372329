"""Fits of all panels of a request: short drafts first, then each method's own fit, streamed while it runs.

A draft starts at the panel's previous posterior, so that a moved point or slider shows at once. The fit that follows
starts from fresh weights: its result depends on the request alone, and it is what the panel's code computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from credibly.distributed.world import Mesh, World
from credibly.errors import InputError, SamplingError, TrainingError
from credibly.gaussians.families import MeanField
from credibly.inference.method import Method
from credibly.inference.sampling.run import SamplingMethod
from credibly.inference.sampling.starts import starts
from credibly.inference.training.callbacks import TrainingState
from credibly.inference.training.method import TrainingMethod
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.storage.record import Record
from credibly.web.playground.bands import band, finite, grid_points
from credibly.web.playground.models import draft, make_method, make_problem
from credibly.web.playground.protocol import FitRequest

# Seconds between two bands of a running fit, at least; and how much longer to compute than to show.
EVERY, WORK_PER_BAND = 0.08, 3.0
# Inputs at which the verdict looks at functions.
DIAGNOSED = 160
# The cheapest drafts come first.
ORDER = ("map", "mle", "laplace", "dropout", "ensemble", "hmc", "bbb", "sghmc")

Send = Callable[[dict[str, Any]], None]


class Cancelled(Exception):
    """Raised inside a fit once a newer request has arrived."""


@dataclass
class Panel:
    """A panel's latest posterior, its method and network shape, and the progress of its fit."""

    posterior: Posterior
    key: tuple[Any, ...]
    classes: bool
    stage: str
    # The id of its request: one that is still running uses the same network.
    request: int


class Rhythm:
    """The schedule of bands of a running fit: frequent, unless bands take longer than the work in between."""

    def __init__(self) -> None:
        self.next = time.monotonic() + EVERY

    def due(self) -> bool:
        """Return whether the next band is due."""
        return time.monotonic() >= self.next

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Measure how long a band takes, and plan the next."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.next = now + max(EVERY, WORK_PER_BAND * (now - began))


class FitRun:
    """A running fit request, on the engine's panels.

    Args:
        request: what to fit.
        panels: the latest posteriors, which it starts from and replaces.
        send: receives the messages.
        cancelled: whether a newer request has arrived.
        pause: called whenever no library call is running, so that the engine can answer probes: networks
            are not safe to use from two threads at once.
    """

    def __init__(
        self,
        request: FitRequest,
        panels: dict[int, Panel],
        send: Send,
        cancelled: Callable[[], bool],
        pause: Callable[[], None],
    ) -> None:
        self.request, self.panels, self.send, self.cancelled, self.pause = request, panels, send, cancelled, pause
        self.classes = request.scene == "classification"
        self.problem = make_problem(request.data, request.model, classes=self.classes)
        self.grid = grid_points(request)
        self.began = time.monotonic()

    def run(self) -> None:
        """Send a draft of every panel, then every panel's own fit."""
        methods = {i: make_method(p, len(self.request.model.hidden)) for i, p in enumerate(self.request.panels)}
        order = sorted(methods, key=lambda i: ORDER.index(methods[i].name))
        for stage in (self.draft, self.fit):
            for index in order:
                self.pause()
                if self.cancelled():
                    return
                try:
                    stage(index, methods[index])
                except (InputError, TrainingError, SamplingError) as error:
                    message = {"type": "failed", "id": self.request.id, "panel": index, "message": str(error)}
                    self.send(message)
                except Cancelled:
                    return

    def draft(self, index: int, method: Method) -> None:
        """Fit a short version from where the panel's last fit ended, and send its band."""
        before = self.panels.get(index)
        previous = before.posterior if before is not None and before.key == self.key(method) else None
        short = draft(method, previous, self.problem.dim)
        self.show(index, method, short.fit(self.problem, seed=self.request.seed, progress=False), "draft", 0, 1)

    def fit(self, index: int, method: Method) -> None:
        """Run the method itself and send bands while it runs; the last one is final."""
        if isinstance(method, SamplingMethod):
            self.sample(index, method)
            return
        steps, rhythm = int(getattr(method, "steps", 0) or 1), Rhythm()

        def watch(state: TrainingState) -> bool:
            self.pause()
            # In the first half of the fit, the draft is the better picture.
            if state.step > state.steps / 2 and rhythm.due() and not self.cancelled():
                so_far = self.trained(method, state.parameters.detach().clone())
                if so_far is not None:
                    loss = finite(sum(state.loss) / len(state.loss))
                    with rhythm.showing():
                        self.show(index, method, so_far, "running", state.step, state.steps, loss=loss)
            return self.cancelled()

        assert isinstance(method, TrainingMethod)
        posterior = replace(method, callback=watch).fit(self.problem, seed=self.request.seed, progress=False)
        history = posterior.record.history
        if history.get("steps", steps) < steps:
            raise Cancelled
        loss = finite(sum(history["loss"][-1]) / len(history["loss"][-1])) if history.get("loss") else None
        self.show(index, method, posterior, "final", steps, steps, loss=loss)

    def trained(self, method: Method, values: Tensor) -> Posterior | None:
        """Return the posterior of a training that is still running, where its parameters define one."""
        model, record = Model.of(self.problem), Record(method=method.name)
        if method.name == "bbb":
            return GaussianPosterior(model, MeanField(), values, record)
        return DrawsPosterior(model, values.unsqueeze(1), record) if method.name in ("mle", "map", "ensemble") else None

    def sample(self, index: int, method: SamplingMethod) -> None:
        """Advance the chains one draw at a time. The draws are those of `method.fit`."""
        seed, mesh = self.request.seed, Mesh(World())
        target = method.target(self.problem, mesh if method.shards_rows else None)
        sampler = method.sampler(target, seed, mesh)
        begin = starts(self.problem, method.start_points(self.problem), method.chains, seed, False)
        sampler.start(target.encode(begin))
        draws: list[Tensor] = []
        statistics: list[dict[str, Tensor]] = []
        rhythm = Rhythm()

        def so_far() -> DrawsPosterior:
            kept = {name: torch.stack([s[name] for s in statistics], 1) for name in statistics[0]}
            return DrawsPosterior(Model.of(self.problem), torch.stack(draws, 1), Record(method=method.name), kept)

        while sampler.done < sampler.total:
            self.pause()
            if self.cancelled():
                raise Cancelled
            found = sampler.advance(self.cancelled)
            if sampler.keeps():
                draws.append(target.decode(sampler.theta).clone())
                statistics.append({name: value.clone() for name, value in found.items()})
            if len(draws) > 1 and rhythm.due() and sampler.done < sampler.total:
                with rhythm.showing():
                    self.show(index, method, so_far(), "running", sampler.done, sampler.total)
        self.show(index, method, so_far(), "final", sampler.total, sampler.total)

    def show(
        self,
        index: int,
        method: Method,
        posterior: Posterior,
        stage: str,
        done: int,
        total: int,
        loss: float | None = None,
    ) -> None:
        """Keep a posterior as the panel's latest and send its band."""
        message: dict[str, Any] = {"type": "band", "id": self.request.id, "panel": index, "stage": stage}
        message |= {"done": done, "total": total, "loss": loss, **self.sampling(posterior)}
        message |= band(posterior, self.grid, classes=self.classes)
        message["diagnosis"] = self.diagnosis(posterior) if stage == "final" else None
        message["seconds"] = time.monotonic() - self.began
        if self.cancelled():
            raise Cancelled
        self.panels[index] = Panel(posterior, self.key(method), self.classes, stage, self.request.id)
        self.send(message)

    def sampling(self, posterior: Posterior) -> dict[str, Any]:
        """Return acceptance and divergences of a sampler's draws."""
        kept = posterior.statistics if isinstance(posterior, DrawsPosterior) else {}
        acceptance = finite(kept["acceptance"].double().mean()) if "acceptance" in kept else None
        divergences = int(kept["divergent"].sum()) if "divergent" in kept else None
        return {"acceptance": acceptance, "divergences": divergences}

    def diagnosis(self, posterior: Posterior) -> str | None:
        """Return the library's verdict on the chains as text; None for methods without chains."""
        if not isinstance(posterior, DrawsPosterior) or posterior.record.method not in ("hmc", "sghmc"):
            return None
        some = self.grid[:: max(1, len(self.grid) // DIAGNOSED)]
        return str(posterior.diagnostics(some).verdict)

    def key(self, method: Method) -> tuple[Any, ...]:
        """Return what must match between two fits for one to start where the other ended."""
        model = self.request.model
        return method.name, self.request.scene, model.hidden, model.activation, model.noise == "predicted"
