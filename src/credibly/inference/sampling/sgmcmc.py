"""SG-MCMC as a process: minibatch steps of all chains in one compiled function, schedules, preconditioner, step-size rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credibly.core.compilation import compiled
from credibly.core.cuda_graphs import Replayed
from credibly.core.inputs import map_inputs
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.kernels.langevin import langevin
from credibly.inference.kernels.sghmc import sghmc
from credibly.inference.sampling.loop import Process
from credibly.inference.sampling.native_chains import native_chains, wide_stack
from credibly.inference.sampling.noise import ChainNoise, diffusion
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import SMALL, UNROLLED, Stopped
from credibly.inference.target import ProblemTarget, Target
from credibly.inference.training.steps import Batches

if TYPE_CHECKING:
    from credibly.methods.sgmcmc import _SGMCMC

BLOCK = 100  # steps between two looks at the clock and at Ctrl-C
DECAY = 0.99  # of the running mean of squared gradients
FLOOR = 1e-5  # added to its root
POWER = 30  # iterations that look for the largest curvature
PROBE_ROWS = 1024
LARGE = 2**17  # weights of a chain from which on chains are taken in turn on a processor


class SGMCMCRun(Process):
    """C chains of SGLD or SGHMC; an iteration is one minibatch step, and `advance` takes some of them."""

    names = ("log_likelihood", "step_size")

    def __init__(self, target: Target, options: _SGMCMC, seed: int, mesh: Mesh) -> None:
        self.target, self.options, self.seed, self.mesh = target, options, seed, mesh
        self.own, self.total, self.warmup = mesh.chains(options.chains), options.steps(), options.warmup
        self.chains = len(self.own)
        shape = (self.chains, target.dim)
        self.theta = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.momentum = self.theta.new_zeros(shape if options.has_momentum else (self.chains, 1))
        self.gradient = torch.zeros_like(self.momentum)
        self.squares = self.theta.new_zeros(shape if options.preconditioned else (self.chains, 1))
        self.value = torch.zeros(self.chains, dtype=torch.float64, device=target.device)
        self.size = options.step_size or 0.0
        self.curvature = math.nan
        # The chains of a large network are taken in turn: a chain's state then stays in the caches from one part of a step to the
        # next. By the dimension alone, so that it does not depend on how chains are spread.
        self.apart = target.looped or (target.device.type == "cpu" and target.dim >= LARGE)
        calls = self.total * (options.chains if self.apart else 1)
        stack = wide_stack(target, options)
        self.noise = diffusion(
            seed, "diffusion", self.own, target.dim, device=target.device, dtype=target.dtype, apart=self.apart,
            compile=options.compile, inside=stack is not None,
        )  # fmt: skip
        self.batches: Batches | None = None
        self.scale = 1.0
        if isinstance(target, ProblemTarget):
            n = target.problem.n
            batch = options.batch(n)
            self.batches = Batches(n, batch, seed=seed, members=self.chains, first=self.own.start, device=target.device)
            self.scale = n / batch
        self.native = native_chains(self, stack)
        values = target.dim if self.apart else target.dim * options.chains  # as one process would have it
        compile = options.compile if self.native is None else False
        self.step: Any = compiled(self._step, compile, calls, target.device, values)
        self.compiled = self.step != self._step or self.native is not None
        small = options.chains * target.dim <= SMALL and not target.looped and target.device.type == "cpu"
        self.several: Any = None
        if self.compiled and small and isinstance(self.noise, ChainNoise) and self.native is None:
            self.several = compiled(self._few, True, self.total, target.device)
        on_gpu = target.device.type == "cuda" and (not target.looped or self.chains == 1)
        self.replayed = Replayed(self.step, target.device) if on_gpu else None

    # -- one step --------------------------------------------------------------------------------------------------------
    def _step(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, squares: Tensor, value: Tensor, rows: Tensor | None, noise: Tensor, figures: Tensor
    ) -> None:  # fmt: skip
        buffers = (theta, momentum, gradient, squares, value)
        for mine, new in zip(buffers, self._after(*buffers, rows, noise, figures)):
            mine.copy_(new)

    def _few(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, squares: Tensor, value: Tensor, rows: Tensor | None, noise: Tensor, figures: Tensor
    ) -> None:  # fmt: skip
        """Some steps in one call, for networks whose step takes no longer than the call: rows (K, C, B), noise (C, K, D)."""
        buffers = after = (theta, momentum, gradient, squares, value)
        for k in range(len(figures)):
            after = self._after(*after, None if rows is None else rows[k], noise[:, k], figures[k])
        for mine, new in zip(buffers, after):
            mine.copy_(new)

    def _after(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, squares: Tensor, value: Tensor, rows: Tensor | None, noise: Tensor, figures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The state after a step; what a method does not have stays as it is."""
        size, heat, kept, learning = figures.unbind(0)
        preconditioner = self._preconditioner(squares) if self.options.preconditioned else None

        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            return self._minibatch(point, rows)

        if self.options.has_momentum:
            after, momentum, slope, value = sghmc(
                theta, momentum, gradient, noise, size, kept, heat, preconditioner, evaluate
            )
            gradient = slope
        else:
            value, slope = evaluate(theta)
            after = langevin(theta, slope, noise, size, heat, preconditioner)
        if self.options.preconditioned:
            squares = squares + learning * (torch.square(slope) - squares)
        return after, momentum, gradient, squares, value

    def _minibatch(self, theta: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log likelihood (C,), rescaled to all rows, and the gradient of the log density (C, D)."""
        if not isinstance(self.target, ProblemTarget):
            return self.target.likelihood_and_grad(theta)
        problem, weights = self.target.problem, self.target.weights
        if rows is None:
            x, y, shared = problem.x, problem.y, True
        else:
            x, y, shared = map_inputs(lambda t: t[rows], problem.x), problem.y[rows], rows.ndim == 1
        lik, _, gradient = problem.parts_and_grad(theta, x, y, self.scale * weights[0], weights[1], shared=shared)
        return (lik * self.scale).double(), gradient

    def _preconditioner(self, squares: Tensor) -> Tensor:
        """1 / (floor + root of the mean squared gradient), with a geometric mean of one in every chain."""
        scale = 1 / (FLOOR * squares.mean(-1, keepdim=True).sqrt() + squares.sqrt())
        return scale / scale.log().mean(-1, keepdim=True).exp()

    def _figures(self, t: int) -> list[float]:
        size, heat = self.options.schedule_at(t, self.size)
        return [size, heat, self.options.kept, (1 - DECAY) if t < self.warmup else 0.0]

    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Steps up to the next draw, or a hundred of them."""
        if stop():
            raise Stopped
        upto = min(self.options.next_draw(self.done), self.done + BLOCK)
        table = torch.tensor([self._figures(t) for t in range(self.done, upto)], dtype=torch.float64)
        with torch.no_grad():
            self._advance_to(upto, table.to(self.target.device))
        self.done = upto
        ends = torch.stack(self.theta.aminmax())  # not finite where any weight is not, and allocates nothing
        if not bool(torch.isfinite(self.value).all()) or not bool(torch.isfinite(ends).all()):
            chain = int((~(torch.isfinite(self.value) & torch.isfinite(self.theta).all(-1))).int().argmax())
            raise SamplingError(
                f"chain {self.own.start + chain} left the range of numbers by step {self.done} with step_size={self.size:.3g}. Try a tenth of "
                f"it{'' if self.options.step_size else ', or another start'}"
            )
        size = torch.full((self.chains,), float(table[-1, 0]), dtype=torch.float64)
        return {"log_likelihood": self.value, "step_size": size.to(self.value.device)}

    def _advance_to(self, upto: int, table: Tensor) -> None:
        """Step by step, or several at a time where their rows and noise lie side by side."""
        t = self.done
        while t < upto:
            here = table[t - self.done :]
            if self.native is not None:
                t += self.native.advance(t, here)
                continue
            if self.several is not None and upto - t >= UNROLLED and self._side_by_side(t):
                rows = self.batches.span(t, UNROLLED) if self.batches is not None else None
                noise = self.noise.span(t, UNROLLED)  # type: ignore[union-attr]
                self.several(*self._buffers(), rows, noise, here[:UNROLLED])
                t += UNROLLED
                continue
            self._advance_one(t, here[0])
            t += 1

    def _side_by_side(self, t: int) -> bool:
        assert isinstance(self.noise, ChainNoise)
        return self.noise.holds(t, UNROLLED) and (self.batches is None or self.batches.holds(t, UNROLLED))

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.theta, self.momentum, self.gradient, self.squares, self.value

    def _advance_one(self, t: int, figures: Tensor) -> None:
        buffers, rows = self._buffers(), self.batches.at(t) if self.batches is not None else None
        if self.replayed is not None or not self.apart:
            every = (rows, self.noise.at(t), figures)
            self.step(*buffers, *every) if self.replayed is None else self.replayed(buffers, every)
            return
        for c in range(self.chains):
            one = slice(c, c + 1)
            mine = rows[one] if rows is not None else None
            self.step(*(b[one] for b in buffers), mine, self.noise.of(c, t), figures)

    def keeps(self) -> bool:
        """Whether the step just done is one whose point is kept."""
        return self.options.is_draw(self.done)

    # -- the start -------------------------------------------------------------------------------------------------------
    def start(self, theta: Tensor) -> None:
        """Checks the starting points, fills the preconditioner, and chooses a step size where none is given."""
        length = 1 if self.target.looped else max(1, self.target.at_once(self.chains))
        slices = [slice(a, min(a + length, self.chains)) for a in range(0, self.chains, length)]
        evaluate_start(self.target, theta, slices, self.own.start)
        self.theta.copy_(theta)
        with torch.no_grad():
            for trial in range(16 if self.options.preconditioned else 1):
                _, gradient = self._probe(theta, trial)
                if self.options.preconditioned:
                    self.squares += torch.square(gradient) / 16
            if self.options.has_momentum:
                self.gradient.copy_(gradient)
                device, dim = self.target.device, self.target.dim
                streams = [stream(self.seed, "first momentum", c, device=device) for c in self.own]
                rows = [torch.randn(dim, generator=own, device=device, dtype=self.target.dtype) for own in streams]
                first = torch.stack(rows)
                self.momentum.copy_(
                    first * self._preconditioner(self.squares).rsqrt() if self.options.preconditioned else first
                )
            if self.options.step_size is None:
                self.curvature = self._curvature(theta)
                self.size = self.options.size_for(self.curvature, self.scale)

    def _probe(self, theta: Tensor, trial: int) -> tuple[Tensor, Tensor]:
        """A minibatch gradient at any point, outside the run's own batches."""
        rows = None
        if self.batches is not None and not self.batches.whole and isinstance(self.target, ProblemTarget):
            generator = stream(self.seed, "probe", trial)
            rows = torch.randint(self.target.problem.n, (self.batches.batch,), generator=generator).to(theta.device)
        return self._by_chain(theta, lambda point: self._minibatch(point, rows))

    def _by_chain(self, theta: Tensor, function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if not self.target.looped:
            return function(theta)
        parts = [function(theta[c : c + 1]) for c in range(len(theta))]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _curvature(self, theta: Tensor) -> float:
        """Largest eigenvalue of P^1/2 (-Hessian) P^1/2 over the chains, by power iteration on differences of gradients."""
        root = self._preconditioner(self.squares).sqrt() if self.options.preconditioned else torch.ones_like(theta)
        rows: Tensor | None = None
        scale, self.scale = self.scale, 1.0
        if isinstance(self.target, ProblemTarget) and self.target.problem.n > PROBE_ROWS:
            n = self.target.problem.n
            rows = torch.randperm(n, generator=stream(self.seed, "curvature rows"))[:PROBE_ROWS].to(theta.device)
            self.scale = n / PROBE_ROWS
        draws = [
            torch.randn(theta.shape[1], generator=stream(self.seed, "curvature", c), dtype=torch.float64)
            for c in self.own
        ]
        direction = torch.stack(draws).to(theta)
        value, reach = theta.new_zeros(self.chains), 0.01
        for _ in range(POWER):
            direction = direction / direction.norm(dim=-1, keepdim=True)
            offset = reach * root * direction
            ahead, behind = (
                self._by_chain(theta + sign * offset, lambda p: self._minibatch(p, rows))[1] for sign in (1, -1)
            )
            image = root * (behind - ahead) / (2 * reach)
            value, direction = (direction * image).sum(-1), image
        self.scale = scale
        found = float(self.mesh.all_chains(value, self.options.chains).max())
        if not math.isfinite(found):
            raise SamplingError(
                "step_size: the curvature at the start is not finite. Pass a step_size, or another init"
            )
        # Where the log density is not concave the prior's precision is what is sure to be there.
        least = (root.square() / self.target.scale.square().to(root)).amax(-1)
        return max(found, float(self.mesh.all_chains(least, self.options.chains).max()))

    # -- state and report ------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Positions, momenta, gradients, preconditioner, and where the run stands."""
        counts = torch.tensor([self.done, self.size, self.curvature], dtype=torch.float64)
        names = ("theta", "momentum", "gradient", "squares", "value")
        return {"counts": counts, **{name: getattr(self, name) for name in names}}

    def chain_axis(self, name: str) -> int | None:
        """All but the counts have a row for each chain."""
        return None if name == "counts" else 0

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        done, self.size, self.curvature = tensors["counts"].tolist()
        self.done = int(done)
        for name in ("theta", "momentum", "gradient", "squares", "value"):
            getattr(self, name).copy_(tensors[name])

    def figures(self) -> dict[str, float | str]:
        """Phase, step size and a minibatch estimate of the log likelihood."""
        phase = "warm-up" if self.done < self.warmup else "sampling"
        return {"phase": phase, "step size": self._figures(self.done - 1)[0], "log lik": float(self.value.mean())}

    def report(self) -> dict[str, Any]:
        """Per chain: draws and the last log likelihood."""
        drawn = self.options.drawn(self.done)
        return {
            "iteration": self.done,
            "of": self.total,
            "phase": "warm-up" if self.done < self.warmup else "sampling" if self.done < self.total else "done",
            "chains": [
                {"draws": drawn, "log_likelihood": float(v)}
                for v in self.mesh.all_chains(self.value, self.options.chains)
            ],
        }

    def history(self) -> dict[str, Any]:
        """Step size and where it came from, batch, and how the chains were laid out."""
        return {
            "phases": [
                {"name": "warm-up", "first": 0, "end": self.warmup},
                {"name": "sampling", "first": self.warmup, "end": self.total},
            ],
            "step_size": self.size,
            "curvature": None if math.isnan(self.curvature) else self.curvature,
            "batch_size": None if self.batches is None else self.batches.batch,
            "steps": self.total,
            "gradients": self.total * self.options.chains,
            "mesh": list(self.mesh.shape),
            "compiled": self.compiled,
            "native": self.native is not None,
            "cuda_graph": self.replayed is not None and not self.replayed.failed,
            "plan": f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}"
            + (
                "; large, so steps are taken by one chain after another"
                if self.apart and not self.target.looped and self.native is None
                else ""
            ),
        }
