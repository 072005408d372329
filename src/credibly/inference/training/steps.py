"""One training step over flat (M, P) tensors: gather, loss, gradient and update as one function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.cuda_graphs import Branches, Replayed
from credibly.core.inputs import Inputs
from credibly.inference.backend import Backend
from credibly.inference.kernels.optimisers import Adam, UpdateRule, clip_rows, learning_rates
from credibly.inference.module_leaves import LARGE
from credibly.inference.training.batches import Batches
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.problem import Problem

# Number of steps whose controls are split into views at once: a view per step would cost more than a small step.
CHUNK = 1024


class Step:
    """A training step in torch: the same function compiled or eager, batched or one member at a time.

    Attributes:
        table: the controls of every step: learning rate, two bias corrections, step number, and those of the objective.
        parts: terms of the last loss, (M, parts).
        first_bad: the first step at which the loss of each member was not finite, (M,).
    """

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        options: Training,
        steps: int,
        theta: Tensor,
        backend: Backend | None = None,
    ) -> None:
        self.problem, self.objective, self.clip = problem, objective, options.clip_norm
        # Compiled code cannot use the kernels of fused units; a CUDA graph of the eager step can.
        how = False if problem.fused and options.compile == "auto" else options.compile
        self.backend = backend or Backend("torch", how)
        self.rule: UpdateRule = objective.rule or options.rule
        rates = learning_rates(options.schedule, options.learning_rate, steps, min(options.warmup, steps - 1))
        table = [
            (rate, *self.rule.corrections(t + 1), float(t), *objective.controls(t)) for t, rate in enumerate(rates)
        ]
        # Float64 scalars do not change the dtype of what they multiply.
        self.table = torch.tensor(table, dtype=torch.float64, device=theta.device)
        self._views: tuple[int, tuple[Tensor, ...]] = (-1, ())
        self.run = self.backend.compile_step(self._step, steps, theta.device, theta.numel())
        self.state = self.rule.init(theta)
        # Adam in one pass over the parameters of one large member, if nothing is compiled.
        large = theta.device.type == "cpu" and len(theta) == 1 and theta.numel() >= LARGE
        self.one_pass = large and isinstance(self.rule, Adam) and self.run == self._step
        self.parts = torch.zeros(len(theta), len(objective.part_names), dtype=theta.dtype, device=theta.device)
        self.first_bad = torch.full((len(theta),), math.inf, dtype=torch.float64, device=theta.device)
        self.replayed = Replayed(self._in_place, theta.device) if theta.device.type == "cuda" else None
        self.branches = Branches(theta.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides theta, as tensors that steps change in place."""
        state = {f"state.{i}": tensor for i, tensor in enumerate(self.state)}
        return {**state, "parts": self.parts, "first_bad": self.first_bad}

    @property
    def backend_facts(self) -> dict[str, Any]:
        """The backend of the steps, and whether torch compiles them."""
        return {"name": self.backend.name, "compiled": not self.backend.fused and self.run != self._step}

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take one step or more from step t on, none beyond `limit`, and return the number of the next."""
        self.advance(theta, batches.at(t), t, active)
        return t + 1

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on theta (M, P), in place; members whose `active` is 0 do not change."""
        with torch.no_grad():
            controls, noise = self._controls_at(t), self.objective.noise(t)
            if self.replayed is not None:
                fixed = (theta, *self.state, self.parts, self.first_bad)
                self.replayed(fixed, (rows, controls, active, *noise))
                return
            own, buffers = self.objective.own, (self.parts, self.first_bad)
            for call in self._calls(theta, self.state, own, *buffers, rows, noise, controls, active):
                call()

    def _controls_at(self, t: int) -> Tensor:
        chunk, position = divmod(t, CHUNK)
        if chunk != self._views[0]:
            self._views = (chunk, self.table[chunk * CHUNK : (chunk + 1) * CHUNK].unbind(0))
        return self._views[1][position]

    def _in_place(self, theta: Tensor, *rest: Tensor) -> None:
        """Take a step on tensors that keep their addresses, as a CUDA graph requires."""
        count = len(self.state)
        state, noise = rest[:count], rest[count + 5 :]
        parts, first_bad, rows, controls, active = rest[count : count + 5]
        calls = self._calls(theta, state, self.objective.own, parts, first_bad, rows, noise, controls, active)
        calls[0]() if len(calls) == 1 else self.branches(calls)

    def _calls(
        self,
        theta: Tensor,
        state: tuple[Tensor, ...],
        own: tuple[Tensor, ...],
        parts: Tensor,
        first_bad: Tensor,
        rows: Tensor | None,
        noise: tuple[Tensor, ...],
        controls: Tensor,
        active: Tensor,
    ) -> list[Callable[[], None]]:
        """Return the calls of one step: a single one, or one per member if members are evaluated in turn."""
        x, y = self.problem.x, self.problem.y
        if not self.objective.looped or len(theta) == 1:
            return [lambda: self.run(theta, state, own, parts, first_bad, x, y, rows, noise, controls, active)]

        def call_of(m: int) -> Callable[[], None]:
            one = slice(m, m + 1)
            mine, member, drawn = (tuple(tensor[one] for tensor in some) for some in (state, own, noise))
            batch = rows[one] if rows is not None and rows.ndim == 2 else rows
            buffers = (theta[one], mine, member, parts[one], first_bad[one])
            return lambda: self.run(*buffers, x, y, batch, drawn, controls, active[one])

        return [call_of(m) for m in range(len(theta))]

    def _step(
        self,
        theta: Tensor,
        state: tuple[Tensor, ...],
        own: tuple[Tensor, ...],
        parts: Tensor,
        first_bad: Tensor,
        x: Inputs,
        y: Tensor,
        rows: Tensor | None,
        noise: tuple[Tensor, ...],
        controls: Tensor,
        active: Tensor,
    ) -> None:
        value, gradient = self.objective.evaluate(theta, own, x, y, rows, noise, controls[4:])
        self._update(theta, state, parts, first_bad, value, gradient, controls, active)

    def _update(
        self,
        theta: Tensor,
        state: tuple[Tensor, ...],
        parts: Tensor,
        first_bad: Tensor,
        value: Tensor,
        gradient: Tensor,
        controls: Tensor,
        active: Tensor,
    ) -> None:
        if self.clip is not None:
            gradient = clip_rows(gradient, self.clip)
        if self.one_pass and isinstance(self.rule, Adam):
            rate, count = float(controls[0] * active[0]), controls[3].float() + 1
            self.rule.update_at_once(theta, state, gradient, rate, count)
        else:
            self.rule.update(theta, state, gradient, controls[0] * active.unsqueeze(1), controls[1], controls[2])
        parts.copy_(value)
        finite = torch.isfinite(value).all(-1)
        first_bad.copy_(torch.where(finite, first_bad, torch.minimum(first_bad, controls[3])))
