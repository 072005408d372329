"""The Laplace approximation: a Gaussian around a trained network, with the curvature of the log density there.

    q(w) = N(w*, P^-1),   P = (1/T_lik) sum_i v_i J_i' F_i J_i + (1/T_prior) diag(-d^2 log p(w*))

w* is the mode (a MAP fit first), or an already trained network. J_i is the Jacobian of the output of row i and
F_i the Fisher information of the likelihood in that output: the generalised Gauss-Newton matrix, which is positive
semi-definite. v_i is the weight of row i, 1 by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer
from credibly.core.inputs import blank_row, describe
from credibly.core.rows import sum_rows
from credibly.curvature import STRUCTURES, Fisher, choose_names, curvature_blocks, find_parts
from credibly.curvature.cost import values_per_row, warn_if_long
from credibly.curvature.evidence import (
    ScaleFactors,
    check_tunable,
    choose_scales,
    fit_own_parameters,
    log_prior_of,
    noise_by_evidence,
    rescaled,
)
from credibly.curvature.gauss_newton import check_memory, rows_per_block
from credibly.curvature.jacobian_check import check_jacobian
from credibly.curvature.prior_precision import prior_precision
from credibly.errors import InputError, TrainingError
from credibly.inference.method import Fit, initial
from credibly.inference.training.data import split
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.record import Record


@dataclass(frozen=True, kw_only=True)
class Laplace(TrainingMethod[LaplacePosterior]):
    """Laplace approximation: a Gaussian around a trained network, from the curvature at its weights.

    Args:
        structure: structure of the curvature: "kron" (K-FAC: Kronecker factors of Linear layers and convolutions),
            "diag" or "full" (small networks). With "kron", parameters of other layers are diagonal.
        fisher: the Fisher information of the outputs: "exact", "sampled" (from labels drawn from the model; unbiased,
            and cheaper for many classes) or "empirical" (from the observed labels; a rough substitute).
        fisher_samples: number of labels per row with "sampled". Each costs one backward pass.
        random: which of the problem's random parameters the Gaussian covers: None for all, "last layer", or glob
            patterns on their names. The others stay at their trained values.
        start: "map" fits the mode first, with the training settings; "network" uses the network as it is, which
            makes a network trained elsewhere Bayesian; or a (D,) tensor of weights.
        init: starting point of the MAP fit: "network", "fresh", "prior" or a (1, D) tensor.
        noise_from: what learned noise maximises: "training" (the density of the training rows, together with the
            weights: too small if the network has fitted some of the noise) or "evidence" (the marginal likelihood,
            with the weights integrated out).
        tune: "evidence" chooses one factor on the scale of all Normal priors by the Laplace evidence, after the fit.
        tune_noise: with `tune`, also choose a factor on a Gaussian likelihood's fixed scale.
        refits: with `tune`, how often to fit the mode again under the chosen scales, and choose again.
    """

    name: ClassVar[str] = "laplace"
    structure: str = "kron"
    fisher: str = "exact"
    fisher_samples: int = 1
    random: str | tuple[str, ...] | None = None
    start: str | Tensor = "map"
    init: str | Tensor = "network"
    noise_from: str = "training"
    tune: str | None = None
    tune_noise: bool = False
    refits: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("structure", self.structure, STRUCTURES)
        Fisher(self.fisher, self.fisher_samples)
        if self.fisher_samples != 1 and self.fisher != "sampled":
            found = f'must be 1 unless fisher="sampled", got {self.fisher_samples}'
            raise InputError("fisher_samples", found)
        check_choice("noise_from", self.noise_from, ("training", "evidence"))
        if isinstance(self.random, list):
            object.__setattr__(self, "random", tuple(self.random))
        if not (
            self.random is None
            or isinstance(self.random, str)
            or (isinstance(self.random, tuple) and self.random and all(isinstance(p, str) for p in self.random))
        ):
            raise InputError("random", f'must be None, "last layer" or patterns on names, got {self.random!r}')
        if not isinstance(self.start, Tensor) and self.start not in ("map", "network"):
            raise InputError("start", f'must be "map", "network" or a (D,) tensor, got {self.start!r}')
        if self.tune not in (None, "evidence"):
            raise InputError("tune", f'must be "evidence" or None, got {self.tune!r}')
        check_integer("refits", self.refits, least=0)
        if self.tune is None and (self.tune_noise or self.refits):
            raise InputError("tune", 'must be "evidence" with tune_noise or refits, got None')
        if self.tune_noise and self.fisher == "empirical":
            raise InputError(
                "tune_noise",
                'must be False with fisher="empirical", got True',
                "The empirical Fisher follows the residuals, not the scale of the noise",
            )
        if self.refits and not (isinstance(self.start, str) and self.start == "map"):
            raise InputError("refits", f'must be 0 unless start="map", got {self.refits} with start={self.start!r}')

    @property
    def post_hoc(self) -> bool:
        """Whether w* is the network's own weights, without a MAP fit."""
        return isinstance(self.start, Tensor) or self.start == "network"

    def _fit(self, fit: Fit) -> LaplacePosterior:
        """Return the Gaussian. What `tune` chose is in `record.history`."""
        problem, seed, progress = fit.problem, fit.seed, fit.progress
        row = blank_row(describe(problem.sample.x), problem.device)
        names = choose_names(problem.layout, self.random, row)
        parts = find_parts(problem.layout, names, row)
        check_memory(problem, self.structure, parts)
        fisher = Fisher(self.fisher, self.fisher_samples, seed)
        fisher.check(problem.likelihood)
        held = values_per_row(problem, fisher)
        at_once = problem.micro_batch or rows_per_block(problem.forward.row_width, parts, held, problem.device)
        warn_if_long(problem, fisher, len(parts.indices), min(problem.n, at_once))
        if self.tune is not None:
            check_tunable(problem, noise=self.tune_noise)
        begin = initial(problem, self.init, 1, seed)
        # Both raise before any work: for a flat prior, and for a forward pass that hides its weights from autograd.
        prior_precision(problem.prior, begin[0])
        check_jacobian(problem, begin[0], parts)
        history: dict[str, Any] = {}
        choice = ScaleFactors()
        tried: list[dict[str, float]] = []
        for _ in range(1 + self.refits):
            current = rescaled(problem, choice)
            theta = self._point(fit, current, begin, history)
            blocks = curvature_blocks(current, theta, self.structure, parts, fisher=fisher, progress=progress)
            if self.noise_from == "evidence":
                theta = noise_by_evidence(current, theta, blocks)
                blocks = curvature_blocks(current, theta, self.structure, parts, fisher=fisher, progress=progress)
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
        posterior.record.history["log_evidence"] = posterior.log_evidence
        return posterior

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings that choose the noise by the evidence: on a small table that of the mode is too small."""
        return super().table_settings(layers, noise) | {"noise_from": "evidence"}

    def _point(self, fit: Fit, problem: Problem, begin: Tensor, history: dict[str, Any]) -> Tensor:
        """Return w*, (D,)."""
        layout, seed = problem.layout, fit.seed
        if isinstance(self.start, Tensor):
            if self.start.shape != (layout.dim,) or not bool(torch.isfinite(self.start).all()):
                found = f"must be a finite tensor of shape ({layout.dim},), got shape {tuple(self.start.shape)}"
                raise InputError("start", found)
            return self.start.detach().to(layout.device, layout.dtype).clone()
        if self.start == "network":
            return fit_own_parameters(problem, initial(problem, "network", 1, seed)[0])
        model = Model.of(problem)
        data = split(problem, self, seed)

        def partial(theta: Tensor, _: Record, error: TrainingError) -> DrawsPosterior:
            """Return the parameters reached, with the record of the problem as it is rescaled."""
            record = self.record(problem, seed, {"error": str(error)}, "partial")
            return DrawsPosterior(model, theta.unsqueeze(1), record)

        with fit.keep_partial(partial):
            objective, mesh = NegativeLogDensity(problem, data.count), fit.world.all_rows()
            done = train(
                problem, objective, begin, self, data, seed=seed, title="MAP", progress=fit.progress, mesh=mesh
            )
        history.update({**done.history, "gradients": history.get("gradients", 0.0) + done.history["gradients"]})
        return done.theta[0]


def _log_likelihood(problem: Problem, theta: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=problem.device)
    with torch.no_grad():
        for x, y, weight in problem.blocks(1):
            total += sum_rows(problem.log_likelihood_rows(theta.unsqueeze(0), x, y).double(), weight).sum()
    return total
