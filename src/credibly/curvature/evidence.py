"""Choose the scales of prior and noise by the Laplace evidence, at one point and without further passes over the data.

    log p(D; c, s) = log p(D | w*; s) + log p(w*; c) + (d/2) log 2 pi - (1/2) log |H / s^2 + diag(d) / c^2|

c multiplies the scale of every Normal prior of the network, s the fixed scale of a Gaussian likelihood. Whitened blocks
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

from credibly.core.rows import sum_rows
from credibly.curvature import Block
from credibly.curvature.output_fisher import closed_form
from credibly.errors import InputError
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Normal, Prior
from credibly.priors.flat import BoundPrior, bind
from credibly.priors.gaussian import BoundGaussianPrior, GaussianPrior
from credibly.problem import Problem

# Factors are searched between 1e-4 and 1e4.
WIDEST = math.log(1e4)
GRID = 81


@dataclass(frozen=True)
class ScaleFactors:
    """Factors on the scales of the prior and of the noise."""

    prior: float = 1.0
    noise: float = 1.0

    def times(self, other: ScaleFactors) -> ScaleFactors:
        """Return the product of both."""
        return ScaleFactors(self.prior * other.prior, self.noise * other.noise)


@dataclass(frozen=True)
class TunedScales:
    """The best factors, the posterior's blocks and density under them, and the log evidence before and after."""

    factors: ScaleFactors
    blocks: list[Block]
    log_likelihood: float
    log_prior: float
    log_evidence: dict[str, float]


def check_tunable(problem: Problem, *, noise: bool) -> None:
    """Raise unless the prior (and, with `noise`, the likelihood) has a fixed scale that can be multiplied."""
    priors = problem.prior_spec.values() if isinstance(problem.prior_spec, Mapping) else [problem.prior_spec]
    other = [type(p).__name__ for p in priors if not isinstance(p, Normal)]
    if other:
        raise InputError("tune", f"the prior is {other[0]}", "Only Normal priors can be scaled by evidence")
    likelihood = problem.likelihood
    fixed = isinstance(likelihood, Gaussian) and closed_form(likelihood) and likelihood.scale != "learned"
    if noise and not fixed:
        raise InputError(
            "tune_noise",
            f"the likelihood is {likelihood}",
            "Only a Gaussian's fixed scale can be tuned; a learned one is fitted with the weights",
        )


def rescaled(problem: Problem, factors: ScaleFactors) -> Problem:
    """Return the problem with its scales multiplied."""
    if factors == ScaleFactors():
        return problem
    scaled = copy.copy(problem)
    scaled.prior_spec = _scaled_prior(problem.prior_spec, factors.prior)
    own = problem.likelihood.parameters()
    scaled.prior = bind(scaled.prior_spec, scaled.layout, {f"likelihood.{k}": p.prior for k, p in own.items()})
    if factors.noise != 1:
        scaled.likelihood = _scaled_noise(problem.likelihood, factors.noise)
    return scaled


def choose_scales(
    problem: Problem, theta: Tensor, blocks: list[Block], names: tuple[str, ...], log_likelihood: float, *, noise: bool
) -> TunedScales:
    """Maximise the evidence at theta (D,) over one factor at a time, by a grid and golden-section search."""
    network = [b for b in blocks if b.source != "likelihood"]
    others = [b for b in blocks if b.source == "likelihood"]
    tempering = problem.tempering
    targets = _targets(problem)
    # Beside the normaliser, the log likelihood depends on the noise through -(1/2 s^2) sum r^2 / sigma^2.
    misfit = _misfit(problem, log_likelihood) if noise else 0.0
    squares = _squares(problem, theta, names)
    size = sum(b.size for b in network)
    base_prior = log_prior_of(problem, theta, names)

    def density(c: float, s: float) -> tuple[float, float]:
        """Return the log likelihood and log prior at these factors."""
        lik = log_likelihood + misfit * (1 - s**-2) - targets * math.log(s) if noise else log_likelihood
        return lik, base_prior + 0.5 * squares * (1 - c**-2) - size * math.log(c)

    def evidence(c: float, s: float) -> float:
        lik, prior = density(c, s)
        log_det = sum(b.log_det(c**-2, s**-2) for b in network) + sum(b.log_det() for b in others)
        constant = 0.5 * (size + sum(b.size for b in others)) * math.log(2 * math.pi)
        return lik / tempering.likelihood + prior / tempering.prior + constant - 0.5 * log_det

    c = s = 1.0
    for _ in range(20 if noise else 1):
        before = (c, s)
        c = math.exp(_maximise(lambda u, s=s: evidence(math.exp(u), s)))  # type: ignore[misc]
        if noise:
            s = math.exp(_maximise(lambda u, c=c: evidence(c, math.exp(u))))  # type: ignore[misc]
        if max(abs(math.log(c / before[0])), abs(math.log(s / before[1]))) < 1e-6:
            break
    lik, prior = density(c, s)
    before_and_after = {"log_evidence_before": evidence(1.0, 1.0), "log_evidence": evidence(c, s)}
    scaled = [b if b.source == "likelihood" else b.scaled(c**-2, s**-2) for b in blocks]
    return TunedScales(ScaleFactors(c, s), scaled, lik, prior, before_and_after)


def log_prior_of(problem: Problem, theta: Tensor, names: tuple[str, ...]) -> float:
    """Return the log prior, in float64, of the named network parameters and of all of the likelihood's own."""
    wanted = {*names, *problem.layout.extra}
    included = torch.zeros(problem.dim, dtype=torch.bool, device=theta.device)
    for entry in problem.layout.entries:
        if entry.name in wanted:
            included[entry.start : entry.stop] = True
    total = 0.0
    if isinstance(problem.prior, BoundGaussianPrior):
        if not bool(included.all()):
            found = "must be None if the prior is an earlier posterior, which covers all parameters"
            raise InputError("random", found)
        return float(problem.prior.log_prob(theta.detach().double().unsqueeze(0)))
    for segment in problem.prior.segments:
        here = slice(segment.start, segment.stop)
        shrink = segment.shrink.double() if isinstance(segment.shrink, Tensor) else segment.shrink
        each = segment.prior.log_prob(theta[here].detach().double(), shrink)
        total += float(each[included[here]].sum())
    return total


def fit_own_parameters(problem: Problem, theta: Tensor) -> Tensor:
    """Return theta (D,) with the likelihood's own parameters moved to their mode by Newton's method.

    A network trained elsewhere carries no estimate of the noise.
    """
    first = problem.layout.network_dim
    if first == problem.dim:
        return theta
    output, y = _outputs(problem, theta)
    network, own = theta[:first].double(), theta[first:].double()

    def loss(values: Tensor) -> Tensor:
        whole = torch.cat([network, values]).unsqueeze(0)
        rows = problem.likelihood.log_prob(output, y, problem.extra(whole))
        log_lik = sum_rows(rows, problem.sample_weight).sum()
        prior = own_log_prior(problem.prior, network, values)
        return -log_lik / problem.tempering.likelihood - prior / problem.tempering.prior

    for _ in range(50):
        slope, curve = _derivatives(loss, own)
        values, basis = torch.linalg.eigh(curve)
        step = -(basis * (1 / values.abs().clamp_min(1e-8))) @ (basis.mT @ slope)
        step = step.clamp(-1, 1)
        own = own + step
        if float(step.abs().max()) < 1e-10:
            break
    if not bool(torch.isfinite(own).all()):
        raise InputError("start", "the noise cannot be fitted to the network's residuals", 'Use start="map"')
    return torch.cat([theta[:first], own.to(theta)])


def _derivatives(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient (E,) and the second derivatives (E, E) of a function of few numbers."""
    leaf = at.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        rows = [torch.autograd.grad(part, leaf, retain_graph=True)[0] for part in slope]
    return slope.detach(), torch.stack(rows)


def noise_by_evidence(problem: Problem, theta: Tensor, blocks: list[Block]) -> Tensor:
    """Return theta (D,) with all learned noise scales multiplied by the factor of highest evidence, given its blocks.

    At the joint mode of weights and noise, the noise is that of residuals which the weights have made small. With the
    weights integrated out, a Gaussian's variance is RSS / (N - gamma), where gamma is the number of weights that the
    data determine (MacKay 1992). The weights stay where they are. Nothing changes without a learned scale.
    """
    first = problem.layout.network_dim
    if list(problem.likelihood.parameters()) != ["log_scale"]:
        return theta
    (output, y), tempering = _outputs(problem, theta), problem.tempering
    network, own = theta[:first].double(), theta[first:].double()
    weights = [b for b in blocks if b.source != "likelihood"]

    def evidence(shift: float) -> float:
        extra = problem.extra(torch.cat([network, own + shift]).unsqueeze(0))
        log_lik = float(sum_rows(problem.likelihood.log_prob(output, y, extra), problem.sample_weight))
        prior = float(own_log_prior(problem.prior, network, own + shift))
        log_det = sum(b.log_det(1.0, math.exp(-2 * shift)) for b in weights)
        return log_lik / tempering.likelihood + prior / tempering.prior - 0.5 * log_det

    return torch.cat([theta[:first], (own + _maximise(evidence)).to(theta)])


def _outputs(problem: Problem, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one network (D,) at all rows, (1, N, ..., K) in float64, and the targets."""
    with torch.no_grad():
        points = theta.unsqueeze(0)
        blocks = [(problem.likelihood.arrange(problem.forward(points, x), 1), y) for x, y, _ in problem.blocks(1)]
    return torch.cat([output for output, _ in blocks], 1).double(), torch.cat([y for _, y in blocks])


def own_log_prior(prior: BoundPrior | BoundGaussianPrior, network: Tensor, values: Tensor) -> Tensor:
    """Return the log prior of the likelihood's own parameters, up to a constant."""
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
    """Return sum_j (w_j - loc_j)^2 / s_j^2 over the named parameters."""
    z = (theta.detach().double() - problem.prior.loc.double()) / problem.prior.std.double()
    wanted = [slice(e.start, e.stop) for e in problem.layout.entries if e.name in names]
    return float(sum(z[here].square().sum() for here in wanted))


def _misfit(problem: Problem, log_likelihood: float) -> float:
    """Return sum_i v_i r_i^2 / (2 sigma^2): the log normaliser less the log likelihood."""
    assert isinstance(problem.likelihood, Gaussian)
    scale = torch.as_tensor(problem.likelihood.scale, dtype=torch.float64).log()
    width = problem.sample.y.shape[-1]
    constant = float(scale.expand(width).sum()) * (_targets(problem) / width)
    return -log_likelihood - constant - 0.5 * _targets(problem) * math.log(2 * math.pi)


def _targets(problem: Problem) -> float:
    """Return the number of targets in all rows, each row counted by its weight."""
    rows = problem.n if problem.sample_weight is None else problem.total_weight
    return problem.sample.y[0].numel() * rows


def _scaled_prior(
    prior: Prior | Mapping[str, Prior] | GaussianPrior, factor: float
) -> Prior | Mapping[str, Prior] | GaussianPrior:
    def one(member: Prior) -> Prior:
        assert isinstance(member, Normal)
        return dataclasses.replace(member, scale=member.scale * factor)

    if isinstance(prior, Mapping):
        return {name: one(member) for name, member in prior.items()}
    assert isinstance(prior, Prior)
    return one(prior)


def _scaled_noise(likelihood: object, factor: float) -> Gaussian:
    assert isinstance(likelihood, Gaussian)
    assert not isinstance(likelihood.scale, str)
    scale = likelihood.scale
    new = tuple(v * factor for v in scale) if isinstance(scale, (tuple, list)) else scale * factor
    return dataclasses.replace(likelihood, scale=new)


def _maximise(function: Callable[[float], float]) -> float:
    """Return the maximiser of a function of a log factor: the best grid point, refined by a golden-section search."""
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
