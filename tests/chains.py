"""Checks of many independent chains against known moments, or against the prior weighted by the likelihood.

Tolerances come from the variation between chains.
"""

import math

import torch
from scipy import stats

# The probability that a correct sampler fails one call.
LEVEL = 1e-5


def assert_moments(draws, mean, covariance, *, precision=0.1):
    """Check the mean (D,) and the covariance of draws (chain, draw, D).

    Chains are independent, so the chain means give the standard error of the overall mean by Student's t. Draws are
    whitened by the expected covariance, so errors depend on the number of effective draws alone.

    Args:
        draws: posterior draws.
        mean: expected mean.
        covariance: expected covariance, (D, D), or (chain, D, D) if each chain has its own.
        precision: the largest standard error at which the check is still meaningful, in standard deviations for means
            and in sqrt(2) variances for second moments.
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
    """Check that values (chain, draw, K) have mean zero, within the standard error of the chain means."""
    averages = values.double().mean(1)
    chains, count = averages.shape
    error = averages.std(0) / math.sqrt(chains)
    worst = float(error.max())
    if precision is not None:
        assert worst < precision, f"too few effective draws for this check: standard error {worst:.3f}"
    score = averages.mean(0).abs() / error
    limit = float(stats.t.isf(LEVEL / (2 * count), chains - 1))
    worst_index = int(score.argmax())
    assert float(score[worst_index]) < limit, (
        f"value {worst_index} of {count} is off by {float(averages.mean(0)[worst_index]):.4f}, "
        f"{float(score[worst_index]):.1f} standard errors, limit {limit:.1f}"
    )


def assert_weighted_prior(problem, draws, count):
    """Check mean predictions at the data and their squares against importance sampling from the prior.

    With little data, prior draws weighted by their likelihood represent the posterior well, for any network.

    Args:
        problem: the problem that was sampled.
        draws: posterior draws (chain, draw, D).
        count: number of prior draws.
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
    assert float((error / spread).max()) < 0.2  # otherwise the comparison is meaningless
    score = ((seen.mean(0) - known) / error).abs()
    assert float(score.max()) < float(stats.t.isf(LEVEL * 10 / len(score), chains - 1))
