"""Randomised CDF values of counts, and one of several targets."""

import pytest
import torch
from scipy import stats

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian, NegativeBinomial
from credibly.predictive.one_target import one_target
from credibly.predictive.pit import pit_values
from credibly.predictive.rescaling import in_units


def fitted(net, y, likelihood, x):
    problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal())
    return cr.METHODS["ensemble"](members=3, steps=20, noise_from="training").fit(problem, seed=0).predict(x)


def test_pit_of_counts_is_uniform_under_the_model():
    x = randn(4000, 2)
    predictive = fitted(mlp(2, 4, 1), (torch.arange(4000.0) % 5), NegativeBinomial(), x)
    y = predictive.sample(400, seed=3)[:, torch.arange(4000)][torch.arange(4000) % 400, torch.arange(4000)]
    assert stats.kstest(pit_values(predictive, y).numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(predictive.cdf(y).numpy(), "uniform").pvalue < 1e-3


@pytest.mark.parametrize("likelihood, outputs", [(Gaussian(per_target=True), 2), (HeteroscedasticGaussian(), 4)])
def test_one_target_is_its_column(likelihood, outputs):
    x = randn(30, 3)
    y = torch.stack([x.sum(1), 2 - x[:, 0]], 1)
    both = in_units(fitted(mlp(3, 4, outputs), y, likelihood, x), [10.0, -5.0], [2.0, 0.5])
    for k in range(2):
        alone = one_target(both, k)
        torch.testing.assert_close(alone.mean, both.mean[:, k])
        torch.testing.assert_close(alone.variance, both.variance[:, k])
        torch.testing.assert_close(alone.epistemic, both.epistemic[:, k])
        torch.testing.assert_close(alone.quantile(0.3), both.quantile(0.3)[:, k])
        torch.testing.assert_close(alone.cdf(y[:, k]), both.cdf(y)[:, k])
    with pytest.raises(cr.InputError, match="target must be from 0 to 1, got 2"):
        one_target(both, 2)
    with pytest.raises(cr.InputError, match="must be of several independent targets"):
        one_target(one_target(both, 0), 0)
