"""Bayes by Backprop: a Gaussian over the weights, fitted by the free energy (Blundell et al. 2015).

    VFE = E_q[log q(w)] - (1/T_prior) E_q[log p(w)] - (1/T_lik) E_q[log p(D | w)]          (ELBO = -VFE at T = 1)

Draws are reparameterised, w = mu + sigma e, so that gradients pass through them. The entropy has a closed form, and so
has E_q[log p] for Normal priors; for others it is averaged over the draws. The loss is VFE / N. Minibatch i of the M in
an epoch carries the weight pi_i of the KL term (the first two terms): 1/M, or Blundell's 2^(M-i) / (2^M - 1). The
weights sum to one, so an epoch adds up to the free energy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_positive
from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import Family, FullRank, LowRank, MeanField, family
from credibly.gaussians.relative import Relative
from credibly.inference.footprint import check_training
from credibly.inference.method import Fit, initial
from credibly.inference.training.data import Data, split
from credibly.inference.training.free_energy import FreeEnergy
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.reparameterisation import LayerNoise, choose_estimator
from credibly.inference.training.trained import Trained
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.gaussian import signature
from credibly.problem import Problem
from credibly.storage.record import Record

# Draws for the ELBO that is reported at the end.
FINAL_SAMPLES = 32
# Learning rate of the richer families relative to that of the mean field. Theirs is in units of the standard deviations
# they start from, which are a few tenths or less; that of the mean field is in units of the weights.
RELATIVE_RATE = 3


@dataclass(frozen=True, kw_only=True)
class BayesByBackprop(TrainingMethod[GaussianPosterior]):
    """Bayes by Backprop: a Gaussian over the weights, fitted by the variational free energy.

    Args:
        family: "mean-field", "low-rank" (with `rank`) or "full-rank" (small networks). The last two continue from a
            mean-field fit for as many steps again, and return that fit if the ELBO has not risen.
        samples: draws of the weights per step.
        estimator: how a draw enters the network. "weights" (any module), "local" (local reparameterisation: noise on
            the outputs of Linear layers; for convolutions it treats positions as independent, which the posterior does
            not), "flipout" (pseudo-independent draws per row by random signs; Linear and convolutions), or "auto".
        members: Gaussians in the mixture, fitted side by side from different starting points.
        init: initial means: "network", "fresh", "prior", "map" (a MAP fit first) or an (M, D) tensor. A posterior of
            the same family and network gives the standard deviations too: a warm start, as in continual learning.
        init_scale: initial standard deviation of every weight.
        kl_weights: "uniform" or "geometric" weights of the KL term over an epoch's minibatches.
        kl_warmup: steps over which the weight of the KL term rises to 1.
        learn_prior_scale: empirical Bayes: one factor on the prior scale of each parameter group, by the same free
            energy.
    """

    name: ClassVar[str] = "bbb"
    infers_scales: ClassVar[bool] = True
    label: ClassVar[str] = "Bayes by Backprop"
    family: str = "mean-field"
    rank: int = 10
    samples: int = 1
    estimator: str = "auto"
    members: int = 1
    init: str | Tensor | GaussianPosterior = "network"
    init_scale: float = 0.03
    kl_weights: str = "uniform"
    kl_warmup: int = 0
    learn_prior_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        family(self.family, self.rank)
        for name in ("samples", "members"):
            check_integer(name, getattr(self, name))
        check_choice("estimator", self.estimator, ("auto", "weights", "local", "flipout"))
        check_choice("kl_weights", self.kl_weights, ("uniform", "geometric"))
        check_positive("init_scale", self.init_scale)
        if not isinstance(self.learn_prior_scale, bool):
            raise InputError("learn_prior_scale", f"must be True or False, got {self.learn_prior_scale!r}")
        check_integer("kl_warmup", self.kl_warmup, least=0)

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than is available: for the family's parameters and a draw."""
        values = self.members * family(self.family, self.rank).size(problem.dim)
        drawn = 2 * self.members * self.samples * problem.dim
        check_training(type(self).__name__, problem, parameters=values, result=drawn, batch=self.rows_at_once(problem))

    def _fit(self, fit: Fit) -> GaussianPosterior:
        """Return the fitted Gaussian; `record.history` holds the free energy, its parts and the ELBO in nats."""
        problem, seed = fit.problem, fit.seed
        data = split(problem, self, seed)
        steps, batch, _ = self.plan(data.count, problem.stream)
        if self.kl_warmup >= steps:
            raise InputError("kl_warmup", f"must be below the number of steps, {steps}, got {self.kl_warmup}")
        if self.learn_prior_scale and not problem.prior.groups:
            raise InputError(
                "learn_prior_scale", "must be False if the prior is a posterior, got True", "Its scale is known"
            )
        chosen = family(self.family, self.rank)
        width, single = chosen.size(problem.dim), self.members == 1
        noise = choose_estimator(self.estimator, problem, batch, mean_field=isinstance(chosen, MeanField) and single)
        warm = isinstance(self.init, GaussianPosterior)
        if isinstance(self.init, GaussianPosterior):
            phi = warm_start(problem, self.init, chosen, self.members)
        else:
            start = self._start(problem, self.init, seed, fit.world.all_rows(), fit.progress)
            phi = MeanField().init(start, self.init_scale)
        if self.learn_prior_scale:
            phi = torch.cat([phi, phi.new_zeros(self.members, problem.prior.groups)], -1)
        history: dict[str, Any] = {}
        if isinstance(chosen, MeanField):
            done = self._train(fit, data, chosen, phi, noise)
        else:
            if not warm:
                # Noise on layers takes a pass per draw, weights one pass for all of them.
                asked = self.estimator if self.samples == 1 else "weights"
                layers = choose_estimator(asked, problem, batch, mean_field=single)
                phi = widened(chosen, self._train(fit, data, MeanField(), phi, layers).theta, problem.dim)
            done = self._refine(fit, data, chosen, phi.clone(), noise, warm)
            if not (warm or data.stops):
                # Both use the same draws, so noise that they share cancels in the difference.
                before, after = (self._elbos(fit, chosen, values) for values in (phi, done.theta))
                done.theta = torch.where((after >= before).unsqueeze(1), done.theta, phi)
                history |= {"mean_field_elbo": float(before.mean()), "improved": (after >= before).tolist()}
        history |= {**done.history, "estimator": noise.name, "estimator_reason": noise.reason}
        factor = done.theta[:, width:].exp() if self.learn_prior_scale else None
        if factor is not None:
            history["prior_scale_factor"] = factor.tolist()
        fitted = self._posterior(fit, chosen, done.theta, Record(method=self.name))
        elbo = fitted.elbo(problem, samples=FINAL_SAMPLES, seed=seed, prior_scale=factor)
        history |= {"elbo": float(elbo.value), "elbo_standard_error": float(elbo.standard_error)}
        return self._posterior(fit, chosen, done.theta, fit.record(history))

    def _train(
        self, fit: Fit, data: Data, chosen: Family, phi: Tensor, noise: LayerNoise, title: str | None = None
    ) -> Trained:
        """Minimise the free energy from phi, which is changed in place."""
        per_epoch = self.plan(data.count, fit.problem.stream)[2]
        objective = FreeEnergy(fit.problem, chosen, data.count, self, noise, seed=fit.seed, per_epoch=per_epoch)
        with fit.keep_partial(lambda values, record, error: self._posterior(fit, chosen, values, record)):
            return train(
                fit.problem,
                objective,
                phi,
                self,
                data,
                seed=fit.seed,
                title=title or self.label,
                shared_batches=True,
                progress=fit.progress,
                mesh=fit.world.all_rows(),
            )

    def _refine(
        self, fit: Fit, data: Data, chosen: LowRank | FullRank, phi: Tensor, noise: LayerNoise, warm: bool
    ) -> Trained:
        """Train a richer family from phi of a Gaussian in it, in the units of that Gaussian.

        A mean-field start has no factor yet; it begins with a small one, whose variance is taken off the diagonal.
        """
        width, dim = phi.shape[-1] - (fit.problem.prior.groups if self.learn_prior_scale else 0), fit.problem.dim
        gaussian, rest = phi[:, :width], phi[:, width:]
        relative = Relative(chosen, chosen.loc(gaussian, dim), chosen.variance(gaussian, dim).sqrt())
        begin = relative.phi(chosen.parts(gaussian)) if warm else relative.start()
        # After a mean-field fit the weight of the KL term has already risen to 1.
        options = replace(self, lr=RELATIVE_RATE * self.learning_rate, kl_warmup=self.kl_warmup if warm else 0)
        title = f"{self.label}, {self.family}"
        done = options._train(fit, data, relative, torch.cat([begin, rest], -1), noise, title)
        values, rest = done.theta[:, :width], done.theta[:, width:]
        done.theta = torch.cat([chosen.phi(relative.parts(values)), rest], -1)
        return done

    def _posterior(self, fit: Fit, chosen: Family, values: Tensor, record: Record) -> GaussianPosterior:
        """Return the posterior of phi (M, P), with or without learned prior scales behind it."""
        values = values[:, : chosen.size(fit.problem.dim)].contiguous()
        if isinstance(chosen, Relative):
            base = chosen.base
            return GaussianPosterior(Model.of(fit.problem), base, base.phi(chosen.parts(values)), record)
        return GaussianPosterior(Model.of(fit.problem), chosen, values, record)

    def _elbos(self, fit: Fit, chosen: Family, values: Tensor) -> Tensor:
        """Return the ELBO of each member, (M,)."""
        width = chosen.size(fit.problem.dim)
        found = []
        for one in values.split(1):
            factor = one[:, width:].exp() if self.learn_prior_scale else None
            posterior = self._posterior(fit, chosen, one, Record(method=self.name))
            found.append(posterior.elbo(fit.problem, samples=FINAL_SAMPLES, seed=fit.seed, prior_scale=factor).value)
        return torch.stack(found).to(values.device)

    @property
    def starts_fresh(self) -> bool:
        """Whether members start at new initial values: several members from one point would stay together."""
        several = isinstance(self.init, str) and self.init in ("network", "map") and self.members > 1
        return several or super().starts_fresh

    def _start(self, problem: Problem, init: str | Tensor, seed: int, mesh: Mesh, progress: bool | None) -> Tensor:
        if isinstance(init, Tensor) or init != "map":
            several = isinstance(init, str) and init == "network" and self.members > 1
            return initial(problem, "fresh" if several else init, self.members, seed)
        theta = initial(problem, "fresh" if self.members > 1 else "network", self.members, seed)
        data = split(problem, self, seed)
        objective = NegativeLogDensity(problem, data.count)
        try:
            return train(
                problem, objective, theta, self, data, seed=seed, title="MAP start", progress=progress, mesh=mesh
            ).theta
        except TrainingError as error:
            # A point estimate is not a result of this method.
            error.posterior = None
            raise

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings that clip gradients harder if the network predicts the variance.

        Noisy weights bring a predicted variance near zero. For other likelihoods a norm of 10 would slow a precise fit.
        """
        settings = super().table_settings(layers, noise)
        return settings | ({"clip_norm": 10.0} if str(noise).startswith("heteroscedastic") else {})


def widened(chosen: LowRank | FullRank, values: Tensor, dim: int) -> Tensor:
    """Return the phi of a richer family for the same Gaussians as a mean-field phi; columns behind it are kept."""
    mu, sigma = MeanField().parts(values[:, : 2 * dim])
    none = sigma.new_zeros(len(sigma), dim, chosen.rank) if isinstance(chosen, LowRank) else None
    parts = (mu, torch.diag_embed(sigma)) if none is None else (mu, sigma, none)
    return torch.cat([chosen.phi(parts), values[:, 2 * dim :]], -1)


def warm_start(problem: Problem, posterior: GaussianPosterior, chosen: Family, members: int) -> Tensor:
    """Return the parameters phi (M, P) of an earlier posterior. Raise if its network or family differs."""
    if (posterior.family, posterior.components) != (chosen, members):
        raise InputError(
            "init",
            f"must be a posterior of {members} x {chosen}, got {posterior!r}",
            "Or pass its means: init=posterior.loc",
        )
    mine, theirs = signature(problem.layout), signature(posterior.layout)
    if mine != theirs:
        here, there = next((a, b) for a, b in itertools.zip_longest(mine, theirs) if a != b)
        raise InputError(
            "init", f"must be a posterior of this network, got one with {there}, where the problem has {here}"
        )
    return posterior.phi.detach().to(problem.device, problem.layout.dtype).clone()
