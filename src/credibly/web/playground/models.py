"""Problems and methods of the library for the requests of the page, and the short fits that stand in at first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from credibly import likelihoods, priors, zoo
from credibly.inference.method import Method
from credibly.inference.sampling.run import SamplingMethod
from credibly.methods import METHODS
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.problem import Problem, Tempering
from credibly.web.playground.protocol import PREDICTED, Data, ModelSpec, PanelSpec

# Smallest standard deviation of predicted noise.
FLOOR = 0.02
# Steps of a draft that starts at an earlier fit, and of one that has none.
WARM_STEPS, COLD_STEPS = 40, 150
# A draft's warm-up and draws; with short trajectories, as its step size is still small.
DRAFT_SAMPLING: dict[str, dict[str, Any]] = {
    "hmc": {"warmup": 20, "draws": 5, "max_steps": 25},
    "sghmc": {"warmup": 30, "draws": 5, "thin": 4},
}


def make_problem(data: Data, model: ModelSpec, *, classes: bool) -> Problem:
    """Return the problem of some data under a model."""
    x, y = torch.tensor(data.x), torch.tensor(data.y)
    predicted = model.noise == PREDICTED and not classes
    net = zoo.mlp(x.shape[1], model.hidden, 2 if predicted else 1, activation=model.activation)
    likelihood: likelihoods.Likelihood
    if classes:
        likelihood = likelihoods.Bernoulli()
    elif predicted:
        likelihood = likelihoods.HeteroscedasticGaussian(floor=FLOOR)
    else:
        likelihood = likelihoods.Gaussian(scale=float(model.noise))
    return Problem(
        net,
        data=(x, y),
        likelihood=likelihood,
        prior=priors.Normal(scale=model.prior_scale, fan_in=True),
        temperature=Tempering(likelihood=model.likelihood_temperature, prior=model.prior_temperature),
    )


def make_method(panel: PanelSpec, hidden: int) -> Method:
    """Return the method of a panel for a network with a number of hidden layers.

    Every method starts at fresh weights by the seed, so the code of a panel needs nothing but the seed to get the same
    numbers. Dropout goes before every layer but the first: dropping a single input would leave nothing.
    """
    options: dict[str, Any] = {"init": "fresh", **panel.options}
    if panel.method == "dropout":
        options["insert"] = tuple(str(2 * layer) for layer in range(1, hidden + 1))
    return METHODS[panel.method](**options)


def draft(method: Method, previous: Posterior | None, dim: int) -> Method:
    """Return a short version of a method that starts where an earlier fit to other data or settings ended."""
    start = None if previous is None else weights(previous)
    options: dict[str, Any] = {}
    if isinstance(method, SamplingMethod):
        options |= DRAFT_SAMPLING[method.name]
        if start is not None and len(start) != method.chains:
            start = start[torch.arange(method.chains) % len(start)]
    else:
        options["steps"] = COLD_STEPS if start is None else WARM_STEPS
        if start is not None and len(start) != getattr(method, "members", 1):
            start = None
    if start is not None and start.shape[1] == dim:
        warm_q = isinstance(previous, GaussianPosterior) and method.name == "bbb"
        options["init"] = previous if warm_q else start
    return replace(method, **options)  # type: ignore[type-var]


def weights(posterior: Posterior) -> Tensor | None:
    """Return the weights (C, D) at which another fit may start: the last draws, members or means."""
    if isinstance(posterior, SampledPosterior):
        return posterior.draws[:, -1].clone()
    if isinstance(posterior, GaussianPosterior):
        return posterior.loc.clone()
    if isinstance(posterior, LaplacePosterior):
        return posterior.loc.unsqueeze(0).clone()
    return posterior.theta.unsqueeze(0).clone() if isinstance(posterior, DropoutPosterior) else None
