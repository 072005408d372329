"""Quantile and mixture-of-Gaussians heads: against scipy, torch.distributions, quadrature and sample quantiles."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import distributions as d

import credibly as cr
from conftest import mlp, randn
from credibly.curvature.output_fisher import fisher_root
from credibly.likelihoods import GaussianMixture, Quantiles
from credibly.predictive.quantiles import mixture_quantiles

f64 = torch.float64
LEVELS = (0.1, 0.5, 0.8)
SCALES = {"log_scale": torch.tensor([[-0.5, 0.1, -0.9], [0.2, -0.3, -0.1]], dtype=f64)}
RAW = randn(2, 1, 3, seed=3, dtype=f64)  # two draws, one row
MIXED = torch.tensor([[[0.3, -0.4, 0.9, -1.0, 1.5, 0.2, -0.6, 0.3, -1.2]]], dtype=f64)


def at(values):
    return torch.as_tensor(values, dtype=f64).reshape(-1, 1)


# -- quantiles ---------------------------------------------------------------------------------------------------------
def test_one_level_is_the_asymmetric_laplace_distribution():
    likelihood = Quantiles((0.3,), scale=0.7)
    output = torch.full((1, 5, 1), 0.4, dtype=f64)
    y = at([-3.0, 0.1, 0.4, 1.0, 5.0])
    kappa = (0.3 / 0.7) ** 0.5
    exact = stats.laplace_asymmetric(kappa, 0.4, 0.7 / (0.3 * 0.7) ** 0.5)
    for density in (likelihood.log_prob, likelihood.predictive_log_prob):
        np.testing.assert_allclose(density(output, y, {})[0].numpy(), exact.logpdf(y[:, 0].numpy()), rtol=1e-12)
    np.testing.assert_allclose(likelihood.cdf(output, y, {})[0, :, 0].numpy(), exact.cdf(y[:, 0].numpy()), rtol=1e-12)
    mean, variance = likelihood.moments(output, {})
    assert float(mean[0, 0, 0]) == pytest.approx(exact.mean())
    assert float(variance[0, 0, 0]) == pytest.approx(exact.var())
    assert float(likelihood.entropy(output, {})[0, 0, 0]) == pytest.approx(exact.entropy())
    root = fisher_root(likelihood, output[0], y, {})
    torch.testing.assert_close((root @ root.mT)[0], torch.full((1, 1), 0.3 * 0.7 / 0.7**2, dtype=f64))


def test_the_distribution_has_the_predicted_quantiles():
    likelihood = Quantiles(LEVELS)
    q = likelihood.quantiles(RAW)
    assert bool((q.diff(dim=-2) > 0).all())
    for i, level in enumerate(LEVELS):
        found = likelihood.cdf(RAW, q[..., i, :], SCALES)
        torch.testing.assert_close(found, torch.full_like(found, level))
    for s in range(2):
        one, extra = RAW[s : s + 1], {"log_scale": SCALES["log_scale"][s : s + 1]}

        def density(y, one=one, extra=extra):
            return float(likelihood.predictive_log_prob(one, at([y]), extra).exp())

        knots = q[s].flatten().tolist()
        pieces = [-np.inf, *knots, np.inf]

        def integral(f, pieces=pieces):
            return sum(integrate.quad(f, a, b)[0] for a, b in pairwise(pieces))

        mean, variance = (float(m) for m in likelihood.moments(one, extra))
        assert integral(density) == pytest.approx(1, abs=1e-8)
        assert integral(lambda y: y * density(y)) == pytest.approx(mean, abs=1e-7)
        assert integral(lambda y, mean=mean: (y - mean) ** 2 * density(y)) == pytest.approx(variance, rel=1e-6)
        entropy = integral(lambda y: -density(y) * np.log(max(density(y), 1e-300)))
        assert float(likelihood.entropy(one, extra)) == pytest.approx(entropy, abs=1e-6)
        drawn = likelihood.sample(one.expand(1, 20_000, 3), extra, torch.Generator().manual_seed(0)).flatten()
        cdf = likelihood.cdf(one.expand(1, 20_000, 3), drawn.reshape(-1, 1), extra).flatten()
        assert stats.kstest(cdf.numpy(), "uniform").pvalue > 1e-3


def test_the_curvature_is_that_of_the_expected_log_likelihood():
    """Its slope in a quantile q is (level - F(q)) / (L s), so its curvature follows from the CDF around q."""
    likelihood, step = Quantiles(LEVELS), 1e-5
    one, extra = RAW[:1], {"log_scale": SCALES["log_scale"][:1]}
    q = likelihood.quantiles(one)
    ends = [torch.stack([likelihood.cdf(one, q[..., i, :] + e, extra) for i in range(3)]) for e in (step, -step)]
    density = ((ends[0] - ends[1]) / (2 * step)).flatten()
    curvature = torch.diag(density / (3 * extra["log_scale"].exp().flatten()))
    slope = torch.autograd.functional.jacobian(lambda raw: likelihood.quantiles(raw).flatten(), one)[..., 0, 0, :]
    root = fisher_root(likelihood, one[0], at([0.0]), extra)
    torch.testing.assert_close((root @ root.mT)[0], slope.T @ curvature @ slope, rtol=1e-4, atol=1e-6)


def test_several_targets_are_independent():
    likelihood = Quantiles(LEVELS)
    second = randn(2, 1, 3, seed=8, dtype=f64)
    both = torch.stack([RAW, second], -1).flatten(-2)  # quantile by quantile, targets in each
    y = torch.tensor([[0.3, -0.7]], dtype=f64)
    for density in ("log_prob", "predictive_log_prob"):
        found = getattr(likelihood, density)(both, y, SCALES)
        single = [getattr(likelihood, density)(o, y[:, k : k + 1], SCALES) for k, o in enumerate((RAW, second))]
        torch.testing.assert_close(found, single[0] + single[1])
    extra = {"log_scale": SCALES["log_scale"][:1]}
    root = fisher_root(likelihood, both[0], y, extra)
    matrix = (root @ root.mT)[0]
    for k, o in enumerate((RAW, second)):
        alone = fisher_root(likelihood, o[0], y[:, k : k + 1], extra)
        torch.testing.assert_close(matrix[k::2, k::2], (alone @ alone.mT)[0])
    assert not matrix[0::2, 1::2].any()


def test_the_fit_has_the_sample_quantiles():
    """The pinball loss of a constant is minimised by the quantiles of y, whatever its distribution."""
    y = randn(400, seed=2, dtype=f64).exp()
    net = torch.nn.Linear(1, 3, bias=False).double()
    p = cr.Problem(net, (torch.ones(400, 1, dtype=f64), y), Quantiles(LEVELS), cr.priors.Normal(10.0))
    posterior = cr.MAP(steps=600, lr=0.05).fit(p, seed=0)
    found = posterior.predict(torch.ones(1, 1, dtype=f64)).quantile(list(LEVELS)).flatten()
    reached = [(y <= value).double().mean().item() for value in found]
    assert reached == pytest.approx(LEVELS, abs=0.02)


# -- mixtures of Gaussians ---------------------------------------------------------------------------------------------
def reference(output):
    a, mean, log_std = output.chunk(3, -1)
    return d.MixtureSameFamily(d.Categorical(logits=a), d.Normal(mean, log_std.exp()))


def test_mixture_against_torch():
    likelihood, exact = GaussianMixture(3), reference(MIXED[0, 0])
    y = at([-2.0, -0.9, 0.2, 1.4, 3.0])
    output = MIXED.expand(1, 5, 9)
    torch.testing.assert_close(likelihood.log_prob(output, y, {})[0], exact.log_prob(y[:, 0]))
    torch.testing.assert_close(likelihood.cdf(output, y, {})[0, :, 0], exact.cdf(y[:, 0]))
    mean, variance = likelihood.moments(MIXED, {})
    torch.testing.assert_close(mean.squeeze(), exact.mean)
    torch.testing.assert_close(variance.squeeze(), exact.variance)
    entropy = integrate.quad(
        lambda v: -float(exact.log_prob(at([v])[0, 0]).exp() * exact.log_prob(at([v])[0, 0])), -12, 12, limit=200
    )[0]
    assert float(likelihood.entropy(MIXED, {})) == pytest.approx(entropy, abs=1e-6)
    drawn = likelihood.sample(MIXED.expand(1, 20_000, 9), {}, torch.Generator().manual_seed(0)).flatten()
    assert stats.kstest(exact.cdf(drawn).numpy(), "uniform").pvalue > 1e-3
    levels = (0.05, 0.5, 0.9)
    other = torch.cat([MIXED, -MIXED])
    found = mixture_quantiles(likelihood, other, {}, levels).flatten()
    parts = [reference(other[s, 0]) for s in range(2)]
    for level, value in zip(levels, found):
        assert float(sum(part.cdf(value) for part in parts) / 2) == pytest.approx(level, abs=1e-9)


def test_mixture_of_two_targets_and_one_component():
    one = GaussianMixture(1)
    output = randn(3, 7, 6, seed=1, dtype=f64)
    y = randn(7, 2, seed=2, dtype=f64)
    found = one.log_prob(output, y, {})
    exact = d.Normal(output[..., 2:4], output[..., 4:].exp()).log_prob(y).sum(-1)
    torch.testing.assert_close(found, exact)
    entropy = one.entropy(output, {})
    torch.testing.assert_close(entropy, d.Normal(output[..., 2:4], output[..., 4:].exp()).entropy())


def test_a_mixture_finds_both_branches():
    x = torch.linspace(-1, 1, 200, dtype=f64)[:, None]
    y = torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0).double() * (1 + x[:, 0]) + 0.05 * randn(200, dtype=f64)
    p = cr.Problem(mlp(1, 16, 6, dtype=f64), (x, y), GaussianMixture(2), cr.priors.Normal(3.0))
    predictive = cr.MAP(steps=800, lr=0.03).fit(p, seed=0).predict(torch.tensor([[0.8]], dtype=f64))
    assert abs(float(predictive.mean)) < 0.3
    for value, expected in ((-1.8, 1.5), (0.0, None), (1.8, 1.5)):
        density = float(predictive.log_prob(torch.tensor([value], dtype=f64)).exp())
        assert density > expected if expected else density < 0.05


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Quantiles((0.5, 0.5)), "levels must be increasing"),
        (lambda: Quantiles((0.5, 1.0)), "levels must be increasing"),
        (lambda: Quantiles(scale="odd"), "scale must be positive"),
        (lambda: Quantiles((0.1, 0.5), scale=(1.0,)), "scale: has 1 values for 2 levels"),
        (lambda: GaussianMixture(0), "components must be a positive integer"),
    ],
)
def test_errors(build, message):
    with pytest.raises(cr.InputError, match=message):
        build()
