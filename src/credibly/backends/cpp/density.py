"""The density of a small network in compiled code: values, gradients, and whole trajectories of many chains."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.stack import Stack, checked, padded_columns, pointer
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from credibly.networks.layout import Layout
from credibly.priors.flat import BoundPrior

KINDS: dict[type[Likelihood], int] = {Gaussian: 0, HeteroscedasticGaussian: 1, Categorical: 2, Bernoulli: 3}
CALL = 5e9  # multiplications in one call, about a tenth of a second of a core: Ctrl-C is looked at in between

SHARED = (
    2e6  # rows times parameters of a call, about a tenth of a millisecond, beyond which threads are worth their start
)


class Rows(ctypes.Structure):
    """Data and likelihood as the compiled code takes them."""

    _fields_ = [
        ("count", ctypes.c_int64), ("padded", ctypes.c_int64), ("x", ctypes.c_void_p), ("y", ctypes.c_void_p),
        ("kind", ctypes.c_int64), ("targets", ctypes.c_int64), ("scale", ctypes.POINTER(ctypes.c_double)),
        ("log_scale", ctypes.c_int64), ("per_target", ctypes.c_int64), ("weight", ctypes.c_double),
    ]  # fmt: skip


class _Prior(ctypes.Structure):
    _fields_ = [("loc", ctypes.c_void_p), ("precision", ctypes.c_void_p)]


class _Steps(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64), ("friction", ctypes.c_int64), ("rows", ctypes.c_void_p), ("batch", ctypes.c_int64),
        ("scale", ctypes.c_double), ("noise", ctypes.c_void_p), ("noise_pitch", ctypes.c_int64), ("figures", ctypes.c_void_p),
    ]  # fmt: skip


class _Training(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64), ("batch", ctypes.c_int64), ("rows", ctypes.c_void_p), ("step_pitch", ctypes.c_int64),
        ("member_pitch", ctypes.c_int64), ("figures", ctypes.c_void_p), ("figure_pitch", ctypes.c_int64), ("adam", ctypes.c_int64),
        ("first", ctypes.c_double), ("second", ctypes.c_double), ("tiny", ctypes.c_double), ("clip", ctypes.c_double),
        ("weight", ctypes.c_double), ("constant", ctypes.c_double), ("uniform", ctypes.c_void_p), ("rates", ctypes.c_void_p),
        ("precision", ctypes.c_void_p), ("fixed", ctypes.c_int64),
    ]  # fmt: skip


@dataclass(frozen=True)
class Descent:
    """How training steps go: Adam with two decays and what is added to the root, or gradient descent with a momentum (the first
    decay); the largest norm of a gradient, 0 for any; the weight of a row's log likelihood in the loss; a constant of it."""

    adam: bool
    first: float
    second: float
    tiny: float
    clip: float
    weight: float
    constant: float


@dataclass(frozen=True, eq=False)
class Dropping:
    """Dropout on the inputs of layers in training steps: rates (M, layers), the prior's precision for each member (M, D), and from
    which parameter on they stay as they are. The prior of the density itself then has no weight."""

    rates: Tensor
    precision: Tensor
    fixed: int


class NativeDensity:
    """log p = weights[0] * log likelihood + weights[1] * log prior of a stack on all of its rows.

    A chain is computed by one thread, or its rows by several, with the same bits: how many chains or threads there are
    changes none.
    """

    def __init__(
        self, stack: Stack, layout: Layout, x: Tensor, y: Tensor, likelihood: Likelihood, prior: BoundPrior, weights: tuple[float, float]
    ) -> None:  # fmt: skip
        targets = y.to(stack.dtype)
        targets = targets.unsqueeze(1) if targets.ndim == 1 else targets
        count = stack.outputs if isinstance(likelihood, Categorical) else targets.shape[1]
        scale, place, each = noise_scales(likelihood, layout, count)
        self.stack, self.rows_by_dim = stack, len(x) * stack.dim
        scales = (ctypes.c_double * count)(*scale)
        inputs, outputs = padded_columns(x.to(stack.dtype)), padded_columns(targets)
        loc = prior.loc.to(stack.dtype).contiguous()
        precision = (weights[1] / prior.std.double() ** 2).to(stack.dtype).contiguous()
        self._kept = (inputs, outputs, loc, precision, scales)  # the structures only point at them
        self.rows = Rows(
            len(x), inputs.shape[1], inputs.data_ptr(), outputs.data_ptr(), KINDS[type(likelihood)], count, scales, place, each,
            weights[0],
        )  # fmt: skip
        self.prior = _Prior(loc.data_ptr(), precision.data_ptr())
        self._evaluations, self._trajectories = stack.function("evaluations"), stack.function("trajectories")
        self._steps, self._training = stack.function("minibatch_steps"), stack.function("training_steps")

    @staticmethod
    def of(
        stack: Stack | None, layout: Layout, x: Any, y: Tensor, likelihood: Likelihood, prior: Any, weights: tuple[float, float]
    ) -> NativeDensity | None:  # fmt: skip
        """None where the compiled code does not know the likelihood, the prior or the form of the data."""
        if stack is None or type(likelihood) not in KINDS or not isinstance(prior, BoundPrior) or not prior.is_normal:
            return None
        if not isinstance(x, Tensor) or x.ndim != 2 or y.ndim > 2 or likelihood.axis not in (-1, 1):
            return None
        return NativeDensity(stack, layout, x, y, likelihood, prior, weights)

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood (C,) in float64, and the gradient (C, D) of the whole log density."""
        theta = theta.detach().contiguous()
        gradient = torch.empty_like(theta)
        log_lik = torch.empty(len(theta), dtype=torch.float64)
        checked(self._evaluations(*self._head(len(theta), 1), pointer(theta), pointer(gradient), pointer(log_lik)))
        return log_lik, gradient

    def run(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor | None,
        steps: Sequence[int], kicks: Sequence[float], drifts: Sequence[float],
    ) -> None:  # fmt: skip
        """So many steps of an integrator for each chain, in place: theta, momentum, gradient (C, D), log_likelihood, size (C,)."""
        counts = (ctypes.c_int64 * len(steps))(*steps)
        kick, drift = (ctypes.c_double * len(kicks))(*kicks), (ctypes.c_double * len(drifts))(*drifts)
        checked(
            self._trajectories(
                *self._head(len(theta), max(steps)), pointer(theta), pointer(momentum), pointer(gradient), pointer(log_likelihood), pointer(size),
                pointer(inverse_mass), counts, ctypes.c_int64(len(drifts)), kick, drift,
            )
        )  # fmt: skip

    def minibatch_steps(
        self, theta: Tensor, momentum: Tensor | None, gradient: Tensor | None, value: Tensor, rows: Tensor | None, scale: float,
        noise: Tensor, figures: Tensor,
    ) -> None:  # fmt: skip
        """K steps of SGHMC, or of SGLD without a momentum, in place; as `kernels.sghmc` and `kernels.langevin` have them.

        rows (K, C, B) or None for all of them, noise (C, K, D), figures (K, 4): step size, heat, kept momentum and one more.
        """
        assert noise.stride()[1:] == (theta.shape[1], 1)
        plan = _Steps(
            len(figures), momentum is not None, pointer(rows), self.rows.count if rows is None else rows.shape[-1], scale,
            noise.data_ptr(), noise.stride(0), pointer(figures),
        )  # fmt: skip
        checked(
            self._steps(
                *self._head(len(theta), len(figures)), ctypes.byref(plan), pointer(theta), pointer(momentum), pointer(gradient), pointer(value)
            )
        )  # fmt: skip

    def training_steps(
        self, how: Descent, theta: Tensor, state: tuple[Tensor, ...], parts: Tensor, first_bad: Tensor, rows: Tensor | None,
        figures: Tensor, active: Tensor, dropping: Dropping | None = None, uniform: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """K steps that minimise -how.weight * log likelihood + the prior's part, in place, for members theta (M, D).

        rows (K, M, B), (K, B) or None for all of them; figures (K, 4 or more): learning rate, corrections and number of the step.
        uniform: of each layer (K, inputs, rows padded as `padded_rows` has it), or None for a layer without dropout.
        """
        assert rows is None or rows.stride(-1) == 1
        pitches = (0, 0) if rows is None else (rows.stride(0), rows.stride(1) if rows.ndim == 3 else 0)
        batch = self.rows.count if rows is None else rows.shape[-1]
        place = None if rows is None else rows.data_ptr()
        plan = _Training(
            len(figures), batch, place, *pitches, figures.data_ptr(), figures.stride(0), how.adam, how.first, how.second, how.tiny,
            how.clip, how.weight, how.constant,
        )  # fmt: skip
        places = (ctypes.c_void_p * len(uniform))(*(pointer(u) for u in uniform))
        if dropping is not None:
            plan.uniform, plan.fixed = ctypes.cast(places, ctypes.c_void_p), dropping.fixed
            plan.rates, plan.precision = pointer(dropping.rates), pointer(dropping.precision)
        head = self._head(len(theta), max(1, len(figures) * batch // self.rows.count))
        second = state[1] if how.adam else None
        checked(
            self._training(
                *head, ctypes.byref(plan), pointer(active), pointer(theta), pointer(state[0]), pointer(second), pointer(parts),
                pointer(first_bad),
            )
        )  # fmt: skip

    def steps_in_a_call(self, chains: int) -> int:
        """So many that the user's wish to stop is seen soon."""
        return max(1, int(CALL / (3 * chains * self.rows_by_dim)))

    def _head(self, chains: int, evaluations: int) -> tuple[Any, ...]:
        threads = torch.get_num_threads() if chains * evaluations * self.rows_by_dim > SHARED else 1
        return (
            ctypes.byref(self.stack.struct), ctypes.byref(self.rows), ctypes.byref(self.prior), ctypes.c_int64(chains),
            ctypes.c_int64(threads),
        )  # fmt: skip


def noise_scales(likelihood: Likelihood, layout: Layout, targets: int) -> tuple[list[float], int, int]:
    """Fixed scales, the place of a learned one or -1, and whether there is one for each target."""
    if not isinstance(likelihood, Gaussian):
        return [1.0] * targets, -1, 0
    given = likelihood.scale
    if isinstance(given, str):
        place = next(e.start for e in layout.entries if e.name == "likelihood.log_scale")
        return [1.0] * targets, place, int(likelihood.per_target)
    return ([float(v) for v in given] if isinstance(given, (tuple, list)) else [float(given)] * targets), -1, 0
