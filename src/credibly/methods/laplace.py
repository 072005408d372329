"""The Laplace approximation: a Gaussian around a trained network, with the curvature of the log density there.

    q(w) = N(w*, P^-1),   P = (1/T_lik) sum_i J_i' F_i J_i + (1/T_prior) diag(-d^2 log p(w*))

w* is the mode (a MAP fit first), or a network that was trained before. J_i is the Jacobian of row i's output and F_i the
Fisher information of the likelihood in that output: the generalised Gauss-Newton matrix, positive semi-definite always.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.inputs import blank_row, describe
from credibly.curvature import STRUCTURES, choose_names, curvature_blocks, find_parts
from credibly.curvature.evidence import (
    ScaleFactors,
    check_tunable,
    choose_scales,
    fit_own_parameters,
    log_prior_of,
    rescaled,
)
from credibly.curvature.gauss_newton import check_memory
from credibly.curvature.prior_precision import prior_precision
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.method import Method, fit_with_rows, initial, partial_result
from credibly.inference.training.loop import Training, split, train
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.posterior.model import Model
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Laplace(Training, Method):
    """Laplace approximation: a Gaussian around a trained network, from the curvature at its weights.

    Args:
        structure: of the curvature: "kron" (Kronecker factors of each Linear layer and convolution, K-FAC), "diag" or "full"
            (small networks). Parameters of other kinds are diagonal unless it is full.
        random: which of the problem's random parameters the Gaussian is over: None for all, "last layer", or glob patterns
            on their names. The others stay at their trained values.
        start: "map" fits the mode first, with the settings of training below; "network" takes the network as it is, which is
            how a network that was trained elsewhere is made Bayesian; or a (D,) tensor of weights.
        init: where the MAP fit begins: "network", "fresh", "prior" or a (1, D) tensor.
        tune: "evidence" chooses one factor on the scale of all Normal priors by the Laplace evidence, after the fit.
        tune_noise: with `tune`, a Gaussian likelihood's fixed scale gets a factor too.
        refits: with `tune`, how often to fit the mode again under what was chosen, and choose again.
    """

    name: ClassVar[str] = "laplace"
    structure: str = "kron"
    random: str | tuple[str, ...] | None = None
    start: str | Tensor = "map"
    init: str | Tensor = "network"
    tune: str | None = None
    tune_noise: bool = False
    refits: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure not in STRUCTURES:
            raise InputError("structure", f"found {self.structure!r}", f"Pass one of {', '.join(STRUCTURES)}")
        if isinstance(self.random, list):
            object.__setattr__(self, "random", tuple(self.random))
        if not (
            self.random is None
            or isinstance(self.random, str)
            or (isinstance(self.random, tuple) and self.random and all(isinstance(p, str) for p in self.random))
        ):
            raise InputError("random", f"found {self.random!r}", 'Pass None, "last layer" or patterns on names')
        if not isinstance(self.start, Tensor) and self.start not in ("map", "network"):
            raise InputError("start", f"found {self.start!r}", 'Pass "map", "network" or a (D,) tensor')
        if self.tune not in (None, "evidence"):
            raise InputError("tune", f"found {self.tune!r}", 'Pass "evidence" or None')
        if isinstance(self.refits, bool) or not isinstance(self.refits, int) or self.refits < 0:
            raise InputError("refits", f"found {self.refits!r}", "Pass a whole number from 0 up")
        if self.tune is None and (self.tune_noise or self.refits):
            raise InputError("tune", "found None beside tune_noise or refits", 'Pass tune="evidence" with them')
        if self.refits and not (isinstance(self.start, str) and self.start == "map"):
            raise InputError("refits", f"found {self.refits} with start={self.start!r}", 'Refits need start="map"')

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> LaplacePosterior:
        """The Gaussian; `posterior.log_evidence` is its evidence, and what `tune` chose is in `record.history`."""
        return fit_with_rows(self, problem, seed, out, progress, self._fit)

    def _fit(
        self, problem: Problem, seed: int, mesh: Mesh, out: str | os.PathLike[str] | None, progress: bool | None
    ) -> LaplacePosterior:
        row = blank_row(describe(problem.x), problem.device)
        names = choose_names(problem.layout, self.random, row)
        parts = find_parts(problem.layout, names, row)
        check_memory(problem, self.structure, parts)
        if self.tune is not None:
            check_tunable(problem, noise=self.tune_noise)
        begin = initial(problem, self.init, 1, seed)
        prior_precision(problem.prior, begin[0])  # a flat prior is refused before any work
        history: dict[str, Any] = {}
        choice = ScaleFactors()
        tried: list[dict[str, float]] = []
        for _ in range(1 + self.refits):
            current = rescaled(problem, choice)
            theta = self._point(current, begin, seed, mesh, out, progress, history)
            blocks = curvature_blocks(current, theta, self.structure, parts, progress=progress)
            value = float(_log_likelihood(current, theta))
            log_prior = log_prior_of(current, theta, names)
            if self.tune is not None:
                found = choose_scales(current, theta, blocks, names, value, noise=self.tune_noise)
                choice = choice.times(found.factors)
                blocks, value, log_prior = found.blocks, found.log_likelihood, found.log_prior
                tried.append(
                    {**found.log_evidence, "prior_scale_factor": choice.prior, "noise_scale_factor": choice.noise}
                )
                begin = theta.unsqueeze(0).clone()
        final = rescaled(problem, choice)
        if tried:
            history["tuned"] = tried
        posterior = LaplacePosterior(
            Model.of(final),
            theta,
            blocks,
            names,
            self.record(final, seed, history),
            log_likelihood=value,
            log_prior=log_prior,
        )
        history["log_evidence"] = posterior.log_evidence
        return posterior

    def _point(
        self, problem: Problem, begin: Tensor, seed: int, mesh: Mesh, out: str | os.PathLike[str] | None, progress: bool | None,
        history: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """w*, (D,)."""
        layout = problem.layout
        if isinstance(self.start, Tensor):
            if self.start.shape != (layout.dim,) or not bool(torch.isfinite(self.start).all()):
                found = f"has shape {tuple(self.start.shape)}, or values that are not finite"
                raise InputError("start", found, f"Pass a finite ({layout.dim},) tensor")
            return self.start.detach().to(layout.device, layout.dtype).clone()
        if self.start == "network":
            return fit_own_parameters(problem, initial(problem, "network", 1, seed)[0])
        model = Model.of(problem)
        data = split(problem, self, seed)
        with partial_result(
            out,
            lambda theta, error: DrawsPosterior(
                model, theta.unsqueeze(1), self.record(problem, seed, {"error": str(error)}, "partial")
            ),
        ):
            objective = NegativeLogDensity(problem, data.count)
            done = train(problem, objective, begin, self, data, seed=seed, title="MAP", progress=progress, mesh=mesh)
        history.update(done.history)
        return done.theta[0]


def _log_likelihood(problem: Problem, theta: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=problem.device)
    with torch.no_grad():
        for x, y in problem.blocks(1):
            total += problem.log_likelihood_rows(theta.unsqueeze(0), x, y).double().sum()
    return total
