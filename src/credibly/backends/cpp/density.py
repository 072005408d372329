"""The log density of a small network in C++: values, gradients, trajectories, and minibatch and training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from credibly.backends.cpp import api
from credibly.backends.cpp.api import Scheme
from credibly.backends.cpp.likelihood import likelihood_struct, supports
from credibly.backends.cpp.mass import MassStructs
from credibly.backends.cpp.stack import Stack, padded_columns
from credibly.core.inputs import Tensors
from credibly.core.threads import native_threads
from credibly.gaussians.mass import InverseMass
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout

MAX_CALL = 5e9  # multiplications per call, about 0.1 s on one core: Ctrl-C is checked between calls
MIN_THREADED = 2e6  # rows times parameters per call, about 0.1 ms: below it, starting threads costs more than it saves


class NormalPrior(Protocol):
    """A Normal prior with independent coordinates."""

    @property
    def loc(self) -> Tensor:
        """Mean of every coordinate, (D,)."""

    @property
    def std(self) -> Tensor:
        """Standard deviation of every coordinate, (D,)."""


@dataclass(frozen=True)
class OptimiserSettings:
    """Settings of training steps: Adam, or gradient descent with momentum.

    Attributes:
        adam: False for gradient descent.
        beta1: decay of the first moment, or the momentum of gradient descent.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        clip_norm: largest norm of a gradient, 0 for no clipping.
        weight: weight of the log likelihood of a row in the loss.
        constant: added to the prior part of the loss.
    """

    adam: bool
    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    weight: float
    constant: float


@dataclass(frozen=True, eq=False)
class DropoutSettings:
    """Dropout on the inputs of layers in training steps. The prior of the density itself then has weight 0.

    Attributes:
        rates: (M, layers).
        precision: precision of the prior, per member (M, D).
        fixed_from: parameters from this offset on stay fixed.
    """

    rates: Tensor
    precision: Tensor
    fixed_from: int


@dataclass(frozen=True, eq=False)
class OutputPrior:
    """The Normal prior of output weights that are integrated out: mean and precision (F,) in float64."""

    loc: Tensor
    precision: Tensor


class CppDensity:
    """log p = weights[0] * log likelihood + weights[1] * log prior of a stack on all rows.

    A chain is computed by one thread, or its rows by several. Results are bit-for-bit identical for any number of
    chains and threads. With `output`, output weights are integrated out and their coordinates hold standardised
    weights, whose prior is part of `prior`: see `inference.collapsed`.
    """

    def __init__(
        self,
        stack: Stack,
        layout: Layout,
        x: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        prior: NormalPrior,
        weights: tuple[float, float],
        row_weight: Tensor | None = None,
        output: OutputPrior | None = None,
    ) -> None:
        targets = y.to(stack.dtype)
        targets = targets.unsqueeze(1) if targets.ndim == 1 else targets
        self.stack, self.rows, self.rows_by_dim = stack, len(x), len(x) * stack.dim
        if output is not None:
            self.rows_by_dim += len(x) * len(output.loc) ** 2
        inputs, outputs = padded_columns(x.to(stack.dtype)), padded_columns(targets)
        loc = prior.loc.to(stack.dtype).contiguous()
        precision = (weights[1] / prior.std.double() ** 2).to(stack.dtype).contiguous()
        own = None if row_weight is None else padded_columns(row_weight.to(stack.dtype).unsqueeze(1))
        self._kept = (inputs, outputs, loc, precision, own, output)  # the struct holds their addresses
        data = likelihood_struct(likelihood, layout, stack, targets.shape[1], weights[0])
        data.rows, data.padded = len(x), inputs.shape[1]
        data.x, data.y, data.row_weight = (api.address(column) for column in (inputs, outputs, own))
        collapsed = (None, None) if output is None else (api.address(output.loc), api.address(output.precision))
        bound = api.Prior(api.address(loc), api.address(precision))
        self.struct = api.Density(stack.struct, data, bound, api.OutputPrior(*collapsed))
        self._evaluations = api.function("evaluations", stack.dtype)
        self._trajectories = api.function("trajectories", stack.dtype)
        self._trees = api.function("trees", stack.dtype)
        self._masses = MassStructs()
        # Energies of the prior are differences of large sums.
        self.energy_of_prior = prior.loc.double().contiguous(), (weights[1] / prior.std.double() ** 2).contiguous()
        self._minibatch_steps = api.function("minibatch_steps", stack.dtype)
        self._training_steps = api.function("training_steps", stack.dtype)

    @staticmethod
    def of(
        stack: Stack | None,
        layout: Layout,
        x: Any,
        y: Tensor,
        likelihood: Likelihood,
        prior: Any,
        weights: tuple[float, float],
        row_weight: Tensor | None = None,
    ) -> CppDensity | None:
        """Return the density, or None if the C++ backend does not support the likelihood, the prior or the data.

        `row_weight` are the weights of the rows, (N,); None for ones.
        """
        if stack is None or not supports(x, y, likelihood, prior):
            return None
        return CppDensity(stack, layout, x, y, likelihood, prior, weights, row_weight)

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,) in float64 and the gradient (C, D) of the log density."""
        theta = theta.detach().contiguous()
        gradient = torch.empty_like(theta)
        log_lik = torch.empty(len(theta), dtype=torch.float64)
        arguments = api.Evaluations(
            chains=len(theta),
            threads=self.threads(len(theta), 1),
            theta=api.address(theta),
            gradient=api.address(gradient),
            log_likelihood=api.address(log_lik),
        )
        self._evaluations(self.struct, arguments)
        return log_lik, gradient

    def decode(self, points: Tensor) -> Tensor:
        """Return the parameter vectors (C, D) of points with standardised output weights."""
        points = points.detach().contiguous()
        theta = torch.empty_like(points)
        arguments = api.Decodings(
            chains=len(points),
            threads=self.threads(len(points), 1),
            standardised=api.address(points),
            theta=api.address(theta),
        )
        api.function("decodings", self.stack.dtype)(self.struct, arguments)
        return theta

    def run(
        self, state: Tensors, size: Tensor, inverse_mass: InverseMass, steps: Sequence[int], scheme: Scheme
    ) -> None:
        """Take `steps[c]` integrator steps of chain c in place.

        `state` is theta, momentum and gradient (C, D), and the log likelihood (C,); step sizes are (C,).
        """
        theta, momentum, gradient, log_likelihood = state
        kicks, drifts = scheme
        arguments = api.Trajectories(
            chains=len(theta),
            threads=self.threads(len(theta), max(steps)),
            theta=api.address(theta),
            momentum=api.address(momentum),
            gradient=api.address(gradient),
            log_likelihood=api.address(log_likelihood),
            step_size=api.address(size),
            inverse_mass=self._masses.of(inverse_mass),
            steps=(api.Int * len(steps))(*steps),
            drifts=len(drifts),
            kick=(api.Real * len(kicks))(*kicks),
            drift=(api.Real * len(drifts))(*drifts),
        )
        self._trajectories(self.struct, arguments)

    def trees(
        self, state: Tensors, size: Tensor, inverse_mass: InverseMass, uniform: Tensor, depth: int, divergent: float
    ) -> Tensor:
        """Take a transition of NUTS for every chain, in place. See `kernels.nuts`.

        `state` is theta, momentum and gradient (C, D), and the log likelihood (C,); step sizes are (C,), uniforms
        (C, K). Returns (C, 8): acceptance, moved, divergent, energy error of the draw and the largest one, doublings,
        steps, and whether the depth ended the trajectory.
        """
        theta, momentum, gradient, log_likelihood = state
        assert uniform.stride(1) == 1
        outcome = torch.empty(len(theta), 8, dtype=torch.float64)
        arguments = api.Trees(
            chains=len(theta),
            threads=self.threads(len(theta), 2**depth),
            theta=api.address(theta),
            momentum=api.address(momentum),
            gradient=api.address(gradient),
            log_likelihood=api.address(log_likelihood),
            step_size=api.address(size),
            inverse_mass=self._masses.of(inverse_mass),
            loc=api.address(self.energy_of_prior[0]),
            precision=api.address(self.energy_of_prior[1]),
            uniform=uniform.data_ptr(),
            uniform_pitch=uniform.stride(0),
            depth=depth,
            divergent=divergent,
            outcome=api.address(outcome),
        )
        self._trees(self.struct, arguments)
        return outcome

    def minibatch_steps(
        self,
        theta: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        root: Tensor | None,
        value: Tensor,
        rows: Tensor | None,
        scale: float,
        noise: Tensor,
        schedule: Tensor,
    ) -> None:
        """Take K steps of SGHMC, or of SGLD with a momentum decay of zero, in place. See `kernels.langevin`.

        root: square root of the diagonal preconditioner (D,), or None for the identity.
        rows: (K, C, B), or None for all of them.
        noise: (C, K, D).
        schedule: (K, 4): step size, noise factor, momentum decay, and a column that is not used here.
        """
        assert noise.stride()[1:] == (theta.shape[1], 1)
        arguments = api.MinibatchSteps(
            chains=len(theta),
            threads=self.threads(len(theta), len(schedule)),
            count=len(schedule),
            theta=api.address(theta),
            momentum=api.address(momentum),
            gradient=api.address(gradient),
            root=api.address(root),
            log_likelihood=api.address(value),
            rows=api.address(rows),
            batch=self.rows if rows is None else rows.shape[-1],
            scale=scale,
            noise=noise.data_ptr(),
            noise_pitch=noise.stride(0),
            schedule=api.address(schedule),
        )
        self._minibatch_steps(self.struct, arguments)

    def training_steps(
        self,
        how: OptimiserSettings,
        theta: Tensor,
        state: tuple[Tensor, ...],
        parts: Tensor,
        first_bad: Tensor,
        rows: Tensor | None,
        schedule: Tensor,
        active: Tensor,
        dropping: DropoutSettings | None = None,
        uniform: Sequence[Tensor | None] = (),
    ) -> None:
        """Take K steps in place that minimise -how.weight * log likelihood + the prior part, for members theta (M, D).

        rows: (K, M, B), (K, B), or None for all of them.
        schedule: (K, 4 or more): learning rate, the two bias corrections of Adam, step number.
        uniform: per layer (K, inputs, `padded_rows(B)`), or None for a layer without dropout.
        """
        assert rows is None or rows.stride(-1) == 1
        batch = self.rows if rows is None else rows.shape[-1]
        arguments = api.TrainingSteps(
            members=len(theta),
            threads=self.threads(len(theta), max(1, len(schedule) * batch // self.rows)),
            count=len(schedule),
            active=api.address(active),
            theta=api.address(theta),
            first_moment=api.address(state[0]),
            second_moment=api.address(state[1] if how.adam else None),
            loss_parts=api.address(parts),
            first_bad=api.address(first_bad),
            rows=None if rows is None else rows.data_ptr(),
            batch=batch,
            step_pitch=0 if rows is None else rows.stride(0),
            member_pitch=rows.stride(1) if rows is not None and rows.ndim == 3 else 0,
            schedule=schedule.data_ptr(),
            schedule_pitch=schedule.stride(0),
            adam=how.adam,
            beta1=how.beta1,
            beta2=how.beta2,
            eps=how.eps,
            clip_norm=how.clip_norm,
            weight=how.weight,
            constant=how.constant,
        )
        if dropping is not None:
            arguments.uniform = (api.Address * len(uniform))(*(api.address(u) for u in uniform))
            arguments.rates, arguments.precision = api.address(dropping.rates), api.address(dropping.precision)
            arguments.fixed_from = dropping.fixed_from
        self._training_steps(self.struct, arguments)

    def steps_per_call(self, chains: int) -> int:
        """Return the number of steps per call that keeps Ctrl-C responsive."""
        return max(1, int(MAX_CALL / (3 * chains * self.rows_by_dim)))

    def threads(self, chains: int, evaluations: int) -> int:
        """Return the threads of a call that evaluates the density this often for every chain."""
        return native_threads() if chains * evaluations * self.rows_by_dim > MIN_THREADED else 1
