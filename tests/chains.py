"""What many independent chains are held against: known moments, or the prior weighted by the likelihood.

Tolerances come from how far the chains differ among themselves.
"""

import math

import torch
from scipy import stats

LEVEL = 1e-5  # chance that a right sampler fails one call


def assert_moments(draws, mean, covariance, *, precision=0.1):
    """Mean (D,) and covariance (D, D), or (chain, D, D) where it is known for each, of draws (chain, draw, D).

    Chains are independent, so the averages of each chain give the standard error of their common average by Student's t. Draws
    are whitened by what they should be, which makes errors those of the number of effective draws alone. `precision` is the
    largest standard error with which the check still means something: in units of the standard deviation for means, of
    sqrt(2) variances for second moments.
    """
    draws = draws.double()
    dim = draws.shape[-1]
    factor = torch.linalg.cholesky(covariance.double()).expand(len(draws), dim, dim)
    white = torch.linalg.solve_triangular(factor, (draws - mean).mT, upper=False).mT
    first, second = torch.tril_indices(dim, dim)
    products = white[..., first] * white[..., second] - (first == second).double()
    scale = torch.where(first == second, math.sqrt(2), 1.0).double()
    assert_zero(torch.cat([white, products / scale], -1), precision=precision)


def assert_zero(values, *, precision=None):
    """Values (chain, draw, K) have mean zero, within the error that the spread of the chains' averages gives."""
    averages = values.double().mean(1)
    chains, count = averages.shape
    error = averages.std(0) / math.sqrt(chains)
    worst = float(error.max())
    if precision is not None:
        assert worst < precision, f"too few effective draws to tell: standard error {worst:.3f}"
    score = averages.mean(0).abs() / error
    limit = float(stats.t.isf(LEVEL / (2 * count), chains - 1))
    place = int(score.argmax())
    assert float(score[place]) < limit, (
        f"number {place} of {count} is off by {float(averages.mean(0)[place]):.4f}, "
        f"{float(score[place]):.1f} standard errors where {limit:.1f} are allowed"
    )


def assert_weighted_prior(problem, draws, count):
    """Mean predictions at the data and their squares, from draws (chain, draw, D) and from the prior by importance sampling.

    With few data, draws of the prior weighted by their likelihood are a good sample of the posterior: another way to it, for
    any network.
    """

    def functions(theta):
        with torch.no_grad():
            output = problem.likelihood.arrange(problem.forward(theta, problem.x), 1)
            log_lik = problem.likelihood.log_prob(output, problem.y, problem.extra(theta)).flatten(1).sum(1)
            middle = problem.likelihood.moments(output, problem.extra(theta))[0].flatten(1)
        return log_lik.double(), torch.cat([middle, middle.square()], 1).double()

    prior = problem.prior.sample(count, torch.Generator().manual_seed(1))
    log_weight, values = (torch.cat(column) for column in zip(*(functions(part) for part in prior.split(10_000))))
    weight = torch.softmax(log_weight, 0)
    effective = 1 / float(weight.square().sum())
    assert effective > 300
    known = weight @ values
    spread = (weight @ (values - known).square()).sqrt()
    chains = len(draws)
    seen = functions(draws.flatten(0, 1))[1].reshape(*draws.shape[:2], -1).mean(1)
    error = (seen.var(0) / chains + spread.square() / effective).sqrt()
    assert float((error / spread).max()) < 0.2  # otherwise the comparison would tell nothing
    score = ((seen.mean(0) - known) / error).abs()
    assert float(score.max()) < float(stats.t.isf(LEVEL * 10 / len(score), chains - 1))
