"""The SG-MCMC sampler: minibatch steps of all chains, schedules, preconditioner and control variates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.chain_noise import ChainNoise, LargeNoise
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.inference.backend import Backend, select_for_minibatches, select_noise, wide_stack
from credibly.inference.kernels.langevin import adapted_root, langevin
from credibly.inference.sampling.module_langevin import ModuleLangevin, module_step
from credibly.inference.sampling.sampler import Sampler, Stopped
from credibly.inference.sampling.sgmcmc_native import fused_steps, replayed_step
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.sampling.sgmcmc_temperature import Temperatures
from credibly.inference.sampling.sgmcmc_warmup import MOST_HALVINGS, Warmup
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import SMALL, UNROLLED
from credibly.inference.target import ProblemTarget, Target
from credibly.inference.training.batches import Batches

# Steps between two checks of the clock and of Ctrl-C.
BLOCK = 100
# Decay of the running mean of squared gradients.
DECAY = 0.99
# Number of minibatch gradients that initialise the preconditioner.
FIRST_GRADIENTS = 16
# Number of weights per chain from which a CPU advances the chains one after another.
LARGE = 2**17


class SGMCMCSampler(Sampler):
    """C chains of SGLD or SGHMC. An iteration is one minibatch step, and `advance` takes several."""

    names = ("log_likelihood", "step_size")

    def __init__(self, target: Target, plan: SGMCMCPlan, seed: int, mesh: Mesh) -> None:
        self.target, self.plan, self.seed, self.mesh = target, plan, seed, mesh
        self.own = mesh.chains(plan.chains)
        self.chains = len(self.own)
        shape = (self.chains, target.dim)
        self.theta = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.momentum, self.gradient = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.adapts_root = plan.preconditioner == "rmsprop"
        self.squares = self.theta.new_zeros(shape if self.adapts_root else (self.chains, 1))
        self.anchor = self.theta.new_zeros(shape if plan.control_variate else (self.chains, 1))
        self.anchor_gradient = torch.zeros_like(self.anchor)
        self.value = torch.zeros(self.chains, dtype=torch.float64, device=target.device)
        self.heat = Temperatures(target, self.chains, overdamped=plan.overdamped)
        # Chains evaluated one by one stay in the caches during a step. Independent of how chains are distributed.
        self.one_by_one = target.looped or (target.device.type == "cpu" and target.dim >= LARGE)
        # The gradient function of a step, and N / B.
        self.stepped, self.scale = target, 1.0
        self.batches = self._make_batches()
        self.warm = Warmup(target, plan, seed, mesh, self.batches)
        self._select_backend()
        self._compile()

    def _make_batches(self) -> Batches | None:
        """Return the rows of every step, different ones for each chain; None for a density without rows."""
        if not isinstance(self.target, ProblemTarget):
            return None
        n, batch = self.target.problem.n, self.plan.batch_size or self.target.problem.n
        self.scale = n / batch
        first, device = self.own.start, self.target.device
        return Batches(n, batch, seed=self.seed, members=self.chains, first=first, device=device)

    @property
    def total(self) -> int:  # type: ignore[override]
        """Total number of steps of the run, as far as warm-up has determined it."""
        return self.warm.schedule.steps

    @property
    def warmup(self) -> int:
        """Number of steps before the first draw, as far as it is known."""
        return self.warm.schedule.warmup

    def _select_backend(self) -> None:
        """Select noise and backend; the C++ steps support neither an adapted preconditioner nor control variates."""
        target, each, how = self.target, self.one_by_one, self.plan.compile
        problem = target.problem if isinstance(target, ProblemTarget) and not target.sharded else None
        if problem is not None and problem.fused and how == "auto":
            # Compiled code cannot use the kernels of fused units; a CUDA graph of the eager step can.
            how = False
        if self.adapts_root or self.plan.control_variate or self.stepped is not target:
            problem = None
        wide = None if problem is None else wide_stack(problem)
        what: dict[str, Any] = {"device": target.device, "dtype": target.dtype, "one_by_one": each, "compile": how}
        self.noise = select_noise(self.seed, "diffusion", self.own, target.dim, **what, inside=wide is not None)
        self.backend = Backend("torch", how)
        large = isinstance(self.noise, LargeNoise)
        if problem is not None and (wide is not None or not large):
            inside = wide if large else None
            self.backend = select_for_minibatches(problem, target.weights, how, wide=inside, one_by_one=each)

    def _compile(self) -> None:
        """Compile the step of the torch backend, or capture it as a CUDA graph, where that pays off."""
        target, plan, backend = self.target, self.plan, self.backend
        calls = self.total * (plan.chains if self.one_by_one else 1)
        # Computed from all chains, so that results do not depend on the number of processes.
        values = target.dim if self.one_by_one else target.dim * plan.chains
        own = module_step(self.stepped, plan, self.scale) if self.one_by_one and not backend.fused else None
        self.step: Any = own or backend.compile_step(self._step, calls, target.device, values)
        self.compiled = (own is None and self.step != self._step) or backend.fused
        small = plan.chains * target.dim <= SMALL and not target.looped and target.device.type == "cpu"
        self.several: Any = None
        if self.compiled and small and isinstance(self.noise, ChainNoise) and not backend.fused:
            self.several = backend.compile_step(self._unrolled, self.total, target.device, always=True)
        self.replayed = replayed_step(self.step, self.chains, target.device, one_by_one=self.one_by_one)

    # -- one step ------------------------------------------------------------------------------------------------------
    def _step(self, *tensors: Any) -> None:
        """Take one step in place: the buffers, then rows (C, B), noise (C, D) and controls (4,)."""
        buffers, (rows, noise, controls) = tensors[:-3], tensors[-3:]
        for buffer, new in zip(buffers, self._after(buffers, rows, noise, controls)):
            buffer.copy_(new)

    def _unrolled(self, *tensors: Any) -> None:
        """Take K steps per call, if a step takes no longer than a call: rows (K, C, B), noise (C, K, D)."""
        buffers, (rows, noise, controls) = tensors[:-3], tensors[-3:]
        after = buffers
        for k in range(len(controls)):
            after = (*self._after(after, None if rows is None else rows[k], noise[:, k], controls[k]), *buffers[5:])
        for buffer, new in zip(buffers[:5], after):
            buffer.copy_(new)

    def _after(
        self, state: tuple[Tensor, ...], rows: Tensor | None, noise: Tensor, controls: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the state after a step; parts that a method does not use stay unchanged."""
        theta, momentum, gradient, squares, value, anchor, anchor_gradient = state
        size, heat, kept, learning = controls.unbind(0)
        root = adapted_root(squares) if self.adapts_root else self.plan.root

        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            found, slope = self.stepped.minibatch_and_grad(point, rows, self.scale)
            if self.plan.control_variate:
                slope = slope - self.target.minibatch_and_grad(anchor, rows, self.scale)[1] + anchor_gradient
            return found, slope

        theta, momentum, gradient, value = langevin(theta, momentum, gradient, noise, size, kept, heat, root, evaluate)
        if self.adapts_root:
            squares = squares + learning * (torch.square(gradient) - squares)
        return theta, momentum, gradient, squares, value

    # -- many steps ----------------------------------------------------------------------------------------------------
    def _controls(self, t: int) -> list[float]:
        """Return step size, noise scale, kept momentum and learning rate of the preconditioner at step t."""
        return [*self.warm.controls(t), (1 - DECAY) if t < self.warmup else 0.0]

    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Take the steps up to the next draw, but at most a hundred."""
        if stop():
            raise Stopped
        upto = min(self.warm.schedule.next_draw(self.done), self.done + BLOCK, self.warm.stage_end)
        with torch.no_grad():
            self._advance_safely(upto)
        self.done = upto
        self.warm.check_finite(self.theta, self.value, self.done, self.own.start)
        if self.done == self.warm.stage_end and self.done <= self.warmup:
            with torch.no_grad():
                self.warm.next_stage(self.theta, self._root(), self.done)
        if self.keeps():
            self.heat.add(self.theta, self.momentum, self.gradient)
        size = torch.full((self.chains,), self.warm.reported(upto - 1), dtype=torch.float64)
        return {"log_likelihood": self.value, "step_size": size.to(self.value.device)}

    def _advance_safely(self, upto: int) -> None:
        """Take steps; in warm-up, repeat them with half the size while they are unstable."""
        adapting = self.warm.adapts and self.done < self.warmup
        before = [buffer.clone() for buffer in self._buffers()] if adapting else []
        for trial in range(MOST_HALVINGS + 1):
            table = torch.tensor([self._controls(t) for t in range(self.done, upto)], dtype=torch.float64)
            self._advance_to(upto, table.to(self.target.device))
            if not adapting or trial == MOST_HALVINGS or not self.warm.unstable(before, self._buffers()):
                break
            self.warm.slow_down(upto - self.done)
            for buffer, old in zip(self._buffers(), before):
                buffer.copy_(old)
        if adapting:
            self.warm.moved(upto - self.done)

    def _root(self) -> Tensor | None:
        return adapted_root(self.squares) if self.adapts_root else self.plan.root

    def _advance_to(self, upto: int, table: Tensor) -> None:
        """Take one step at a time, or several per call where their rows and noise are contiguous."""
        t = self.done
        while t < upto:
            controls = table[t - self.done :]
            if self.plan.control_variate and t % self._epoch == 0:
                self._move_anchor()
            if self.backend.fused:
                state = (self.theta, self.momentum, self.gradient, self.plan.root, self.value)
                t += fused_steps(self.backend.density, state, self.noise, self.batches, self.scale, t, controls)
            elif self.several is not None and upto - t >= UNROLLED and self._contiguous(t):
                rows = self.batches.span(t, UNROLLED) if self.batches is not None else None
                noise = self.noise.span(t, UNROLLED)  # type: ignore[union-attr]
                self.several(*self._buffers(), rows, noise, controls[:UNROLLED])
                t += UNROLLED
            else:
                self._advance_one(t, controls[0])
                t += 1

    @property
    def _epoch(self) -> int:
        return 1 if self.batches is None else self.batches.per_epoch

    def _move_anchor(self) -> None:
        """Place the anchor of the control variate at the current points, with the gradient of all rows there."""
        self.anchor.copy_(self.theta)
        length = 1 if self.target.looped else max(1, self.target.chains_at_once(self.chains))
        for first in range(0, self.chains, length):
            part = slice(first, first + length)
            self.anchor_gradient[part] = self.target.likelihood_and_grad(self.theta[part])[1]

    def _contiguous(self, t: int) -> bool:
        assert isinstance(self.noise, ChainNoise)
        if self.plan.control_variate and t // self._epoch != (t + UNROLLED - 1) // self._epoch:
            return False
        return self.noise.holds(t, UNROLLED) and (self.batches is None or self.batches.holds(t, UNROLLED))

    def _buffers(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _STATE)

    def _advance_one(self, t: int, controls: Tensor) -> None:
        buffers, rows = self._buffers(), self.batches.at(t) if self.batches is not None else None
        if self.replayed is not None or not self.one_by_one:
            changing = (rows, self.noise.at(t), controls)
            self.step(*buffers, *changing) if self.replayed is None else self.replayed(buffers, changing)
            return
        for c in range(self.chains):
            one = slice(c, c + 1)
            own = rows[one] if rows is not None else None
            self.step(*(b[one] for b in buffers), own, self._noise_of(c, t), controls)

    def _noise_of(self, c: int, t: int) -> Any:
        """Return the noise of one chain's step, in chunks for a step on the module."""
        return self.noise.chunks(c, t) if isinstance(self.step, ModuleLangevin) else self.noise.of(c, t)

    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add draws; with `discard`, take twice as many steps per draw."""
        self.warm.prolong(self.done, draws, discard)
        if discard:
            self.heat.sums.zero_()

    def keeps(self) -> bool:
        """Return whether the point after the last step is a draw."""
        return self.warm.schedule.is_draw(self.done)

    # -- start ---------------------------------------------------------------------------------------------------------
    def start(self, theta: Tensor) -> None:
        """Check the starting points, initialise the preconditioner, and choose a step size unless one is given."""
        if isinstance(self.step, ModuleLangevin) and isinstance(self.target, ProblemTarget):
            self.warm.probe.module = self.step
            self.value.copy_(self.step.start(self.target.problem, theta, self.own.start))
        else:
            length = 1 if self.target.looped else max(1, self.target.chains_at_once(self.chains))
            slices = [slice(a, min(a + length, self.chains)) for a in range(0, self.chains, length)]
            self.value.copy_(evaluate_start(self.target, theta, slices, self.own.start)[0])
        self.theta.copy_(theta)
        device = self.target.device
        with torch.no_grad():
            for trial in range(FIRST_GRADIENTS if self.adapts_root else 1):
                gradient = self.warm.first_gradient(theta, trial)
                if self.adapts_root:
                    self.squares += torch.square(gradient) / FIRST_GRADIENTS
            self.gradient.copy_(gradient)
            del gradient
            streams = [stream(self.seed, "first momentum", c, device=device) for c in self.own]
            for own, momentum in zip(streams, self.momentum):
                momentum.normal_(generator=own)
            self.warm.begin(theta, self._root())

    # -- state and reporting -------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Return positions, momenta, gradients, preconditioner, anchors and counts."""
        counts = torch.tensor([self.done, *self.warm.state()], dtype=torch.float64)
        return {"counts": counts, "heat": self.heat.sums, **{name: getattr(self, name) for name in _STATE}}

    def chain_axis(self, name: str) -> int | None:
        """Return 0: all tensors but the counts have a row per chain."""
        return None if name == "counts" else 0

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        done, *found = tensors["counts"].tolist()
        self.done = int(done)
        self.warm.restore(found)
        self.heat.sums.copy_(tensors["heat"])
        for name in _STATE:
            getattr(self, name).copy_(tensors[name])

    def live_values(self) -> dict[str, float | str]:
        """Return phase, step size and a minibatch estimate of the log likelihood."""
        phase = "warm-up" if self.done < self.warmup else "sampling"
        return {"phase": phase, "step size": self.warm.reported(self.done - 1), "log lik": float(self.value.mean())}

    def report(self) -> dict[str, Any]:
        """Return draws and the last log likelihood per chain."""
        draws, values = self.warm.schedule.drawn(self.done), self.mesh.all_chains(self.value, self.plan.chains)
        return {
            "iteration": self.done,
            "of": self.total,
            "phase": "warm-up" if self.done < self.warmup else "sampling" if self.done < self.total else "done",
            "chains": [{"draws": draws, "log_likelihood": float(v)} for v in values],
        }

    @property
    def gradients(self) -> float:
        """Gradients so far of all chains, in units of full gradients: a minibatch counts as B/N."""
        each = (2 if self.plan.control_variate else 1) / self.scale
        anchors = math.ceil(self.done / self._epoch) if self.plan.control_variate else 0
        return self.plan.chains * (self.done * each + anchors) + self.warm.gradients

    def history(self) -> dict[str, Any]:
        """Return the step size and its origin, the batch size, and how the chains were evaluated."""
        phases = (("warm-up", 0, self.warmup), ("sampling", self.warmup, self.total))
        plan = f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}"
        if self.one_by_one and not self.target.looped and not self.backend.fused:
            plan += "; large, so chains take their steps one after another"
        return {
            "phases": [{"name": name, "first": first, "end": end} for name, first, end in phases],
            **self.warm.history(),
            **self.heat.history(self.mesh.all_chains(self.heat.sums, self.plan.chains)),
            "preconditioner": self.plan.preconditioner,
            "batch_size": None if self.batches is None else self.batches.batch,
            "steps": self.total,
            "gradients": round(self.gradients, 2),
            "mesh": list(self.mesh.shape),
            "compiled": self.compiled,
            "native": self.backend.fused,
            "cuda_graph": self.replayed is not None and not self.replayed.failed,
            **({"no_cuda_graph": self.replayed.reasons[0]} if self.replayed and self.replayed.failed else {}),
            "plan": plan,
        }


_STATE = ("theta", "momentum", "gradient", "squares", "value", "anchor", "anchor_gradient")
