"""Scales of prior and noise chosen by the Laplace evidence, at one point and without new passes over the data.

    log p(D; c, s) = log p(D | w*; s) + log p(w*; c) + (d/2) log 2 pi - (1/2) log |H / s^2 + diag(d) / c^2|

c multiplies the scale of every Normal prior of the network, s the fixed scale of a Gaussian likelihood. Blocks in whitened form
give the determinant for all c and s from their eigenvalues.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.curvature import Block
from credibly.errors import InputError
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Normal, Prior
from credibly.priors.flat import BoundPrior, bind
from credibly.priors.gaussian import BoundGaussianPrior, GaussianPrior
from credibly.problem import Problem

WIDEST = math.log(1e4)  # factors are looked for from a ten-thousandth to ten thousand
GRID = 81


@dataclass(frozen=True)
class Choice:
    """Factors on the prior's scale and on the noise's."""

    prior: float = 1.0
    noise: float = 1.0

    def times(self, other: Choice) -> Choice:
        """Both, one after the other."""
        return Choice(self.prior * other.prior, self.noise * other.noise)


@dataclass(frozen=True)
class Found:
    """The best factors, what the posterior then consists of, and the evidence before and after."""

    choice: Choice
    blocks: list[Block]
    log_likelihood: float
    log_prior: float
    figures: dict[str, float]


def check_tunable(problem: Problem, *, noise: bool) -> None:
    """Refuses priors and likelihoods whose scale is not one number that can be multiplied."""
    known = problem.prior_spec.values() if isinstance(problem.prior_spec, Mapping) else [problem.prior_spec]
    other = [type(p).__name__ for p in known if not isinstance(p, Normal)]
    if other:
        raise InputError(
            "tune", f"the prior is {other[0]}", "Only the scale of Normal priors can be chosen by evidence"
        )
    fixed = isinstance(problem.likelihood, Gaussian) and problem.likelihood.scale != "learned"
    if noise and not fixed:
        raise InputError(
            "tune_noise",
            f"the likelihood is {problem.likelihood}",
            "Only a Gaussian's fixed scale can be chosen; a learned one is fitted with the weights",
        )


def rescaled(problem: Problem, choice: Choice) -> Problem:
    """The problem with its scales multiplied."""
    if choice == Choice():
        return problem
    part = copy.copy(problem)
    part.prior_spec = _stretched(problem.prior_spec, choice.prior)
    own = problem.likelihood.parameters()
    part.prior = bind(part.prior_spec, part.layout, {f"likelihood.{k}": p.prior for k, p in own.items()})
    if choice.noise != 1:
        part.likelihood = _louder(problem.likelihood, choice.noise)
    return part


def choose_scales(
    problem: Problem, theta: Tensor, blocks: list[Block], names: tuple[str, ...], log_likelihood: float, *, noise: bool
) -> Found:
    """The factors with the most evidence at theta (D,), by a grid and golden sections, one factor after the other."""
    mine = [b for b in blocks if b.source != "likelihood"]
    others = [b for b in blocks if b.source == "likelihood"]
    cold = problem.tempering
    targets = problem.y.numel()
    # -(1/2 s^2) sum r^2 / sigma^2 is what of the log likelihood depends on the noise, beside the normaliser.
    misfit = _misfit(problem, log_likelihood) if noise else 0.0
    offset = _squares(problem, theta, names)
    size = sum(b.size for b in mine)
    base_prior = log_prior_of(problem, theta, names)

    def parts(c: float, s: float) -> tuple[float, float]:
        """Log likelihood and log prior at these factors."""
        lik = log_likelihood + misfit * (1 - s**-2) - targets * math.log(s) if noise else log_likelihood
        return lik, base_prior + 0.5 * offset * (1 - c**-2) - size * math.log(c)

    def evidence(c: float, s: float) -> float:
        lik, prior = parts(c, s)
        log_det = sum(b.log_det(c**-2, s**-2) for b in mine) + sum(b.log_det() for b in others)
        constant = 0.5 * (size + sum(b.size for b in others)) * math.log(2 * math.pi)
        return lik / cold.likelihood + prior / cold.prior + constant - 0.5 * log_det

    c = s = 1.0
    for _ in range(20 if noise else 1):
        before = (c, s)
        c = math.exp(_highest(lambda u, s=s: evidence(math.exp(u), s)))  # type: ignore[misc]
        if noise:
            s = math.exp(_highest(lambda u, c=c: evidence(c, math.exp(u))))  # type: ignore[misc]
        if max(abs(math.log(c / before[0])), abs(math.log(s / before[1]))) < 1e-6:
            break
    lik, prior = parts(c, s)
    figures = {"log_evidence_before": evidence(1.0, 1.0), "log_evidence": evidence(c, s)}
    changed = [b if b.source == "likelihood" else b.scaled(c**-2, s**-2) for b in blocks]
    return Found(Choice(c, s), changed, lik, prior, figures)


def log_prior_of(problem: Problem, theta: Tensor, names: tuple[str, ...]) -> float:
    """The log prior of some of the network's parameters and of all of the likelihood's own, in float64."""
    wanted = {*names, *problem.layout.extra}
    places = torch.zeros(problem.dim, dtype=torch.bool, device=theta.device)
    for entry in problem.layout.entries:
        if entry.name in wanted:
            places[entry.start : entry.stop] = True
    total = 0.0
    if isinstance(problem.prior, BoundGaussianPrior):
        if not bool(places.all()):
            raise InputError(
                "random", "found with a prior that is an earlier posterior", "That is of all parameters; leave it out"
            )
        return float(problem.prior.log_prob(theta.detach().double().unsqueeze(0)))
    for segment in problem.prior.segments:
        here = slice(segment.start, segment.stop)
        shrink = segment.shrink.double() if isinstance(segment.shrink, Tensor) else segment.shrink
        each = segment.prior.log_prob(theta[here].detach().double(), shrink)
        total += float(each[places[here]].sum())
    return total


def fit_own_parameters(problem: Problem, theta: Tensor) -> Tensor:
    """theta (D,) with the likelihood's own parameters at their mode, the network's as they are; by Newton's method.

    A network that was trained elsewhere does not say how large the noise is.
    """
    first = problem.layout.network_dim
    if first == problem.dim:
        return theta
    with torch.no_grad():
        output = torch.cat(
            [problem.likelihood.arrange(problem.forward(theta.unsqueeze(0), x), 1) for x, _ in problem.blocks(1)], 1
        )
    network, own = theta[:first].double(), theta[first:].double()

    def loss(values: Tensor) -> Tensor:
        whole = torch.cat([network, values]).unsqueeze(0)
        log_lik = problem.likelihood.log_prob(output.double(), problem.y, problem.extra(whole)).sum()
        prior = _tail(problem.prior, network, values)
        return -log_lik / problem.tempering.likelihood - prior / problem.tempering.prior

    for _ in range(50):
        slope, curve = torch.func.grad(loss)(own), torch.func.jacrev(torch.func.grad(loss))(own)
        values, basis = torch.linalg.eigh(curve)
        step = -(basis * (1 / values.abs().clamp_min(1e-8))) @ (basis.mT @ slope)
        step = step.clamp(-1, 1)
        own = own + step
        if float(step.abs().max()) < 1e-10:
            break
    if not bool(torch.isfinite(own).all()):
        raise InputError("start", "the noise cannot be fitted to the network as it is", 'Use start="map"')
    return torch.cat([theta[:first], own.to(theta)])


def _tail(prior: BoundPrior | BoundGaussianPrior, network: Tensor, values: Tensor) -> Tensor:
    """The log prior of the likelihood's own parameters, up to a constant."""
    first = len(network)
    if isinstance(prior, BoundGaussianPrior):
        return prior.log_prob(torch.cat([network, values]).unsqueeze(0)).sum()
    parts = [
        s.prior.log_prob(values[s.start - first : s.stop - first], s.shrink).sum()
        for s in prior.segments
        if s.start >= first
    ]
    return torch.stack(parts).sum()


def _squares(problem: Problem, theta: Tensor, names: tuple[str, ...]) -> float:
    """sum_j (w_j - loc_j)^2 / s_j^2 over the network's chosen parameters."""
    z = (theta.detach().double() - problem.prior.loc.double()) / problem.prior.std.double()
    wanted = [slice(e.start, e.stop) for e in problem.layout.entries if e.name in names]
    return float(sum(z[here].square().sum() for here in wanted))


def _misfit(problem: Problem, log_likelihood: float) -> float:
    """sum_i r_i^2 / (2 sigma^2): what the log likelihood falls short of its normaliser."""
    assert isinstance(problem.likelihood, Gaussian)
    scale = torch.as_tensor(problem.likelihood.scale, dtype=torch.float64).log()
    constant = float(scale.expand(problem.y.shape[-1]).sum()) * (problem.y.numel() / problem.y.shape[-1])
    return -log_likelihood - constant - 0.5 * problem.y.numel() * math.log(2 * math.pi)


def _stretched(
    prior: Prior | Mapping[str, Prior] | GaussianPrior, factor: float
) -> Prior | Mapping[str, Prior] | GaussianPrior:
    def one(member: Prior) -> Prior:
        assert isinstance(member, Normal)
        return dataclasses.replace(member, scale=member.scale * factor)

    if isinstance(prior, Mapping):
        return {name: one(member) for name, member in prior.items()}
    assert isinstance(prior, Prior)
    return one(prior)


def _louder(likelihood: object, factor: float) -> Gaussian:
    assert isinstance(likelihood, Gaussian)
    assert not isinstance(likelihood.scale, str)
    scale = likelihood.scale
    new = tuple(v * factor for v in scale) if isinstance(scale, (tuple, list)) else scale * factor
    return dataclasses.replace(likelihood, scale=new)


def _highest(function: Callable[[float], float]) -> float:
    """Where a function of a logarithm is highest: the best of a grid, and a golden section around it."""
    grid = [WIDEST * (2 * i / (GRID - 1) - 1) for i in range(GRID)]
    values = [function(u) for u in grid]
    best = max(range(GRID), key=lambda i: values[i])
    low, high = grid[max(0, best - 1)], grid[min(GRID - 1, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = function(a), function(b)
    while high - low > 1e-8:
        if fa >= fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = function(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = function(b)
    return 0.5 * (low + high)
