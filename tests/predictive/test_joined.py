"""Predictions of rows by several fits as one."""

from __future__ import annotations

import pytest
import torch

import credibly as cr
from credibly.metrics import evaluation
from credibly.predictive.joined import JoinedPredictive


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    y = x.sum(1) + 0.1 * torch.randn(30)
    found = []
    for k in range(3):
        problem = cr.Problem(cr.zoo.mlp(2, (5,)), (x, y), cr.likelihoods.Gaussian("learned"), cr.priors.Normal(1.0))
        posterior = cr.DeepEnsemble(members=2 + k, steps=20).fit(problem, seed=k, progress=False)
        found.append(posterior.predict(torch.randn(4 + k, 2)))
    return found


@pytest.fixture(scope="module")
def joined(parts):
    return JoinedPredictive(parts, torch.randperm(15, generator=torch.Generator().manual_seed(1)))


def in_order(joined, values, axis=0):
    """Put values of the parts, one after the other, where their rows are in the result."""
    out = torch.empty_like(values)
    out.index_copy_(axis, joined.places, values)
    return out


@pytest.mark.parametrize("name", ["mean", "variance", "std", "total", "aleatoric", "epistemic"])
def test_moments(parts, joined, name):
    expected = in_order(joined, torch.cat([getattr(part, name) for part in parts]))
    torch.testing.assert_close(getattr(joined, name), expected)


def test_densities_and_quantiles(parts, joined):
    y = torch.randn(15)
    own = y[joined.places].split([4, 5, 6])
    for name in ("log_prob", "cdf"):
        expected = in_order(joined, torch.cat([getattr(part, name)(rows) for part, rows in zip(parts, own)]))
        torch.testing.assert_close(getattr(joined, name)(y), expected)
    expected = in_order(joined, torch.cat([part.quantile((0.1, 0.5)) for part in parts], 1), 1)
    torch.testing.assert_close(joined.quantile((0.1, 0.5)), expected)
    lower, upper = joined.interval(0.8)
    torch.testing.assert_close(torch.stack([lower, upper]), joined.quantile((0.1, 0.9)))
    assert joined.sample(3).shape == (3, 15)


def test_metrics_are_those_of_all_rows(parts, joined):
    y = torch.randn(15)
    own = y[joined.places].split([4, 5, 6])
    log_density = torch.cat([part.log_prob(rows) for part, rows in zip(parts, own)]).mean()
    assert evaluation.evaluate(joined, y)["log_density"] == pytest.approx(float(log_density), rel=1e-6)


def test_subsets_keep_the_order_asked_for(joined):
    rows = torch.tensor([14, 0, 7, 3])
    torch.testing.assert_close(joined.subset(rows).mean, joined.mean[rows])
    mask = joined.mean > joined.mean.median()
    torch.testing.assert_close(joined.subset(mask).mean, joined.mean[mask])
    one = joined.places[:3]
    torch.testing.assert_close(joined.subset(one).mean, joined.mean[one])


def test_draws_of_one_fit_are_refused(joined):
    with pytest.raises(cr.InputError, match="functions"):
        joined.functions()
    with pytest.raises(cr.InputError, match="order"):
        JoinedPredictive(joined.parts, torch.zeros(15, dtype=torch.int64))
