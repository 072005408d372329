"""Predictions of a standardised target in the target's own units, against the change of variables."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import clone

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, StudentT
from credibly.predictive.rescaling import InUnits, in_double, in_units

f64 = torch.float64
X = randn(12, 3)
LIKELIHOODS = {
    "gaussian": (Gaussian(), 1),
    "known": (Gaussian(0.3), 1),
    "student": (StudentT(), 1),
    "heteroscedastic": (HeteroscedasticGaussian(), 2),
}
SCALES = {"a": (7.5, 250.0), "tiny": (-3e-7, 2e-9), "huge": (1e9, 3.0), "far and wide": (-4e12, 1e11)}


def predictive(likelihood, outputs, y, dtype=torch.float32):
    """Predictions of five barely trained ensemble members."""
    net = mlp(3, 6, outputs, dtype=dtype)
    problem = cr.Problem(net, data=(X.to(dtype), y.to(dtype)), likelihood=likelihood, prior=cr.priors.Normal())
    posterior = cr.DeepEnsemble(members=5, steps=3, init="prior", compile=False).fit(problem, seed=0, progress=False)
    return posterior.predict(X.to(dtype))


def close(a, b, scale, rtol=2e-6):
    """Assert equality to the precision of a float32 prediction of z, in units of y."""
    assert torch.allclose(a, b, rtol=rtol, atol=rtol * scale), float((a - b).abs().max() / scale)


@pytest.mark.parametrize("units", SCALES)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_quantity_follows_the_change_of_variables(name, units):
    location, scale = SCALES[units]
    likelihood, outputs = LIKELIHOODS[name]
    p = predictive(likelihood, outputs, randn(12, seed=5))
    q = in_units(p, location, scale)
    z = randn(12, seed=6, dtype=f64)
    y = location + scale * z
    z = (y - location) / scale  # what is left of it in float64
    close(q.mean, location + scale * p.mean.double(), scale)
    close(q.std, scale * p.std.double(), scale)
    close(q.variance, scale**2 * p.variance.double(), scale**2)
    close(q.total, scale**2 * p.total.double(), scale**2)
    close(q.aleatoric, scale**2 * p.aleatoric.double(), scale**2)
    close(q.epistemic, scale**2 * p.epistemic.double(), scale**2)
    close(q.log_prob(y), p.log_prob(z).double() - math.log(scale), 1, 2e-5)
    close(q.cdf(y), p.cdf(z).double(), 1)
    for mine, inner in zip(q.interval(0.8), p.interval(0.8)):
        close(mine, location + scale * inner.double(), scale, 1e-5)
    close(q.quantile([0.05, 0.5]), location + scale * p.quantile([0.05, 0.5]).double(), scale, 1e-5)
    close(q.functions(), location + scale * p.functions().double(), scale)
    assert q.sample(3).shape == (3, 12)
    assert q.mean.dtype == q.sample(1).dtype == f64


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_density_differs_by_exactly_the_logarithm_of_the_scale(name):
    likelihood, outputs = LIKELIHOODS[name]
    p = predictive(likelihood, outputs, randn(12, seed=5), f64)
    z = randn(12, seed=6, dtype=f64)
    for scale in (0.25, 8.0):  # powers of two: the change of variables itself rounds nothing
        difference = in_units(p, 0.0, scale).log_prob(scale * z) - p.log_prob(z)
        assert torch.allclose(difference, torch.full((12,), -math.log(scale), dtype=f64), rtol=0, atol=1e-13)


def test_the_density_in_units_integrates_to_one():
    q = in_units(predictive(StudentT(), 1, randn(12, seed=5), f64), 1e9, 40.0)
    grid = torch.linspace(-40, 40, 1001, dtype=f64)
    density = torch.stack([q.log_prob(1e9 + 40 * z.expand(12)).exp() for z in grid])
    assert torch.allclose(torch.trapezoid(density, 40 * grid, dim=0), torch.ones(12, dtype=f64), atol=1e-3)


def test_entropy_grows_by_the_logarithm_of_the_scale():
    p = predictive(StudentT(), 1, randn(12, seed=5), f64)
    q = in_units(p, -2.0, 30.0)
    output, extra = p.source.outputs(X.double(), 0, 5), p.source.extra(0, 5)
    difference = q.likelihood.entropy(output, extra) - p.likelihood.entropy(output, extra)
    assert torch.allclose(difference, torch.full_like(difference, math.log(30)))


def test_samples_have_the_moments_and_the_far_digits():
    q = in_units(predictive(Gaussian(), 1, randn(12, seed=5)), 1e9, 0.5)
    draws = q.sample(4000, seed=1)
    error = (q.variance / 4000).sqrt()
    assert bool(((draws.mean(0) - q.mean).abs() < 5 * error).all())
    assert torch.allclose(draws.std(0), q.std, rtol=0.1)
    assert len(draws.unique()) > 40_000  # at 1e9 float32 has only multiples of 64


def test_quantiles_invert_the_distribution_function_far_off():
    q = in_units(predictive(Gaussian(), 1, randn(12, seed=5)), 1e9, 0.5)
    for level in (0.01, 0.3, 0.95):
        assert torch.allclose(q.cdf(q.quantile(level)), torch.full((12,), level, dtype=f64), atol=1e-5)


def test_each_target_has_its_own_units():
    locations, scales = [5.0, 1e6, -2.0], [2.0, 1e3, 1e-3]
    y = randn(12, 3, seed=5)
    p = predictive(Gaussian(per_target=True), 3, y, f64)
    q = in_units(p, locations, scales)
    location, scale = torch.tensor(locations, dtype=f64), torch.tensor(scales, dtype=f64)
    z = y.double()
    assert q.mean.shape == (12, 3)
    assert torch.allclose(q.mean, location + scale * p.mean)
    assert torch.allclose(q.std, scale * p.std)
    assert torch.allclose(q.log_prob(location + scale * z), p.log_prob(z) - scale.log().sum(), atol=1e-8)
    for mine, inner in zip(q.interval(0.9), p.interval(0.9)):
        assert torch.allclose(mine, location + scale * inner)
    assert torch.allclose(q.cdf(location + scale * z), p.cdf(z), atol=1e-8)


def test_metrics_of_evaluate_scale_with_the_units():
    y = randn(12, seed=7, dtype=f64)
    p = predictive(Gaussian(), 1, y, f64)
    plain, scaled = cr.evaluate(p, y), cr.evaluate(in_units(p, 16.0, 8.0), 16 + 8 * y)
    assert scaled["rmse"] == pytest.approx(8 * plain["rmse"])
    assert scaled["coverage"] == plain["coverage"]
    assert scaled["log_density"] == pytest.approx(plain["log_density"] - math.log(8))


@pytest.mark.parametrize("noise", ["learned", "student", "heteroscedastic", 0.4])
@pytest.mark.parametrize(
    "scale, offset", [pytest.param(1000.0, -7.0, marks=pytest.mark.nightly), (1e-6, 0.0), (3.0, 1e9)]
)
def test_a_fit_does_not_depend_on_the_units_of_the_target(noise, scale, offset):
    """Fits to y and to a y + b make the same predictions, and their log densities differ by log |a|."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = x[:, 0] - x[:, 1] ** 2 + 0.3 * x[:, 2]
    model = cr.BayesianRegressor("map", hidden=(8,), noise=noise, settings={"steps": 100})
    plain = clone(model).fit(x, y)
    other_y = scale * y + offset
    other = clone(model).fit(x, other_y)
    std = plain.predict(x, return_std=True)[1]
    # float64 keeps 16 digits of the offset, float32 7 of the standardised target, and training amplifies the last ones
    rounding = np.finfo(np.float64).eps * abs(offset) / scale
    error = np.abs((other.predict(x) - offset) / scale - plain.predict(x)) / std
    assert error.max() < 2e-3 + 100 * rounding
    other_std = other.predict(x, return_std=True)[1] / scale
    assert np.abs(other_std / std - 1).max() < 2e-3 + 100 * rounding
    lower = (other.predict_interval(x)[0] - offset) / scale
    assert np.abs((lower - plain.predict_interval(x)[0]) / std).max() < 4e-3 + 100 * rounding
    assert other.log_score(x, other_y) == pytest.approx(plain.log_score(x, y) - math.log(scale), abs=4e-3)


def test_in_double_keeps_probabilities_from_zero_and_one():
    p = predictive(Bernoulli(), 1, (randn(12, seed=5) > 0).float())
    p.source.theta[:] = p.source.theta[:1]  # a single network ...
    p.source.theta[:, -1] = 25.0  # ... whose logits are all close to 25, the last bias
    q = in_double(p)
    assert bool((p.probabilities[:, 0] == 0).all())  # 1 - p is exactly 0 in float32
    logits = p.source.outputs(X, 0, 1)[0, :, 0].double()
    assert torch.allclose(q.probabilities[:, 0], torch.sigmoid(-logits), rtol=1e-4, atol=0)


def test_refuses_what_has_no_units():
    real = predictive(Gaussian(), 1, randn(12, seed=5))
    binary = predictive(Bernoulli(), 1, (randn(12, seed=5) > 0).float())
    with pytest.raises(cr.InputError, match="likelihood must have real targets, its support is 'binary'"):
        in_units(binary, 0.0, 1.0)
    with pytest.raises(
        cr.InputError, match="location must be one finite number per target, got \\(0.0, 1.0\\) with scale \\(1.0,\\)"
    ):
        in_units(real, [0.0, 1.0], 1.0)
    with pytest.raises(cr.InputError, match="location must be one finite number per target, got \\(inf,\\)"):
        in_units(real, math.inf, 1.0)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(cr.InputError, match=rf"scale must be one positive number per target, got \({scale},\)"):
            in_units(real, 0.0, scale)
    with pytest.raises(cr.InputError, match=r"y must have shape \(12,\), got \(11,\)"):
        in_units(real, 0.0, 1.0).log_prob(torch.zeros(11))


def test_moments_of_a_likelihood_in_units():
    made = InUnits(Gaussian(0.5), (3.0,), (2.0,))
    assert made.support == "real"
    assert made.ordered
    output = torch.zeros(1, 4, 1)
    mean, variance = made.moments(output, {})
    assert torch.equal(mean, torch.full((1, 4, 1), 3.0, dtype=f64))
    assert torch.allclose(variance, torch.full((1, 4, 1), 1.0, dtype=f64))
