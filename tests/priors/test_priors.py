"""Elementwise priors: densities, samplers, assignment by name, fan-in scaling."""

import math

import pytest
import torch
from scipy import stats

import credibly as cr
from conftest import mlp
from credibly.networks.layout import Layout
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture, StudentT
from credibly.priors.flat import bind

PRIORS = [
    Normal(0.7, loc=0.3),
    Laplace(0.5, loc=-0.2),
    StudentT(df=5.0, scale=0.8, loc=0.1),
    ScaleMixture(0.25, 1.0, 0.05),
    StudentT(df=1.0, scale=0.5),
]


def reference_cdf(prior):
    if isinstance(prior, Normal):
        return stats.norm(prior.loc, prior.scale).cdf
    if isinstance(prior, Laplace):
        return stats.laplace(prior.loc, prior.scale).cdf
    if isinstance(prior, StudentT):
        return stats.t(prior.df, prior.loc, prior.scale).cdf
    return lambda w: prior.pi * stats.norm(0, prior.scale1).cdf(w) + (1 - prior.pi) * stats.norm(0, prior.scale2).cdf(w)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_log_prob_is_the_derivative_of_the_distribution_function(prior):
    w = torch.linspace(-2, 2, 41, dtype=torch.float64)
    cdf, h = reference_cdf(prior), 1e-5
    expected = torch.tensor([(cdf(v + h) - cdf(v - h)) / (2 * h) for v in w.tolist()], dtype=torch.float64)
    keep = (w - prior.centre).abs() > 1e-3  # a Laplace density has a kink at its mode
    torch.testing.assert_close(prior.log_prob(w).exp()[keep], expected[keep], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
@pytest.mark.parametrize("shrink", [1.0, 0.5])
def test_samples_follow_the_density(prior, shrink):
    draws = prior.sample((20_000,), torch.Generator().manual_seed(1), dtype=torch.float64, shrink=shrink)
    loc = prior.centre
    unscaled = loc + (draws - loc) / shrink
    assert stats.kstest(unscaled.numpy(), reference_cdf(prior)).pvalue > 1e-3
    if math.isfinite(prior.std):
        assert float(unscaled.std()) == pytest.approx(prior.std, rel=0.05)


def test_groups_by_pattern_first_match_decides():
    layout = Layout(mlp(3, 4, 2).double())
    prior = {"0.*": Normal(0.1), "*.bias": Laplace(0.3), "*": StudentT(3.0)}
    bound = bind(prior, layout)
    theta = torch.randn(2, layout.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = layout.split(theta)[0]
    expected = (
        Normal(0.1).log_prob(parts["0.weight"]).sum((1, 2))
        + Normal(0.1).log_prob(parts["0.bias"]).sum(1)
        + StudentT(3.0).log_prob(parts["2.weight"]).sum((1, 2))
        + Laplace(0.3).log_prob(parts["2.bias"]).sum(1)
    )
    torch.testing.assert_close(bound.log_prob(theta), expected)
    assert not bound.is_normal
    assert bind({"0.*": Normal(0.1), "*": Normal(2.0)}, layout).is_normal


def test_fan_in_scales_weights_and_not_biases():
    layout = Layout(mlp(9, 4, 2).double())
    bound = bind(Normal(0.6, fan_in=True), layout)
    expected = {"0.weight": 0.2, "0.bias": 0.6, "2.weight": 0.3, "2.bias": 0.6}
    for name, std in layout.split(bound.std)[0].items():
        torch.testing.assert_close(std, torch.full_like(std, expected[name]))
    draws = bound.sample(4000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.std(0), bound.std, rtol=0.1, atol=0)
    torch.testing.assert_close(bound.log_prob(draws), torch.distributions.Normal(0.0, bound.std).log_prob(draws).sum(1))


def test_bad_priors_are_refused():
    layout = Layout(mlp(3, 4, 1))
    with pytest.raises(cr.InputError, match="scale must be a positive number, got 0"):
        Normal(0)
    with pytest.raises(cr.InputError, match="scale must be a positive number, got nan"):
        Laplace(math.nan)
    with pytest.raises(cr.InputError, match="df must be a positive number, got -1"):
        StudentT(-1)
    with pytest.raises(cr.InputError, match="pi must be strictly between 0 and 1, got 1"):
        ScaleMixture(pi=1)
    with pytest.raises(cr.InputError, match=r"no pattern matches parameter '0.bias'"):
        bind({"*.weight": Normal()}, layout)
    with pytest.raises(cr.InputError, match=r"pattern '7.\*' matches no random parameter"):
        bind({"7.*": Normal(), "*": Normal()}, layout)
    with pytest.raises(cr.InputError, match="has no method log_prob and no sample"):
        bind({"*": object()}, layout)


def test_a_custom_prior_with_missing_members_is_refused():
    class Duck:
        def log_prob(self, w, shrink=1.0):
            return -w.abs()

        def sample(self, shape, generator, *, dtype=torch.float32, shrink=1.0):
            return torch.zeros(shape, dtype=dtype)

    net = torch.nn.Linear(2, 1)
    with pytest.raises(cr.InputError, match=r"prior: Duck for '\*' has no fan_in and no total_log_prob"):
        bind(Duck(), Layout(net))
    Duck.fan_in = False
    with pytest.raises(cr.InputError, match=r"has no total_log_prob\."):
        bind(Duck(), Layout(net))


def test_expected_log_density_of_a_float64_problem_is_not_rounded():
    """The closed form against the average over sigma points, which is exact for a Normal prior."""
    scale, loc, variance = 0.1, 0.3, 0.7
    prior = bind(Normal(scale, loc=0.2), Layout(torch.nn.Linear(3, 1).double()))
    mean, variances = torch.full((1, 4), loc, dtype=torch.float64), torch.full((1, 4), variance, dtype=torch.float64)
    points = torch.stack([mean[0] + variance**0.5, mean[0] - variance**0.5])
    exact = prior.log_prob(points).mean()
    found = prior.expected_log_prob(mean, variances, torch.empty(0))
    torch.testing.assert_close(found[0], exact, rtol=1e-13, atol=0)


def test_the_networks_groups_are_counted_without_the_likelihoods():
    layout = Layout(torch.nn.Linear(3, 1), extra={"likelihood.log_scale": (1,)})
    for own in (Normal(1.0), Normal(2.0)):  # the same prior as the network's, and another one
        prior = bind(Normal(1.0), layout, {"likelihood.log_scale": own})
        assert prior.groups == 1
        assert len(prior.segments) == 2
        loc, variance = torch.full((1, 5), 0.4), torch.full((1, 5), 0.3)
        wide = prior.expected_log_prob(loc, variance, torch.empty(0), torch.full((1, 1), 3.0))
        by_hand = bind(Normal(3.0), layout, {"likelihood.log_scale": own}).expected_log_prob(
            loc, variance, torch.empty(0)
        )
        torch.testing.assert_close(wide, by_hand)
