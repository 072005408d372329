"""Predictions of a transformed target: densities integrate to one, and every quantity agrees with that density."""

import dataclasses
import functools
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import credibly as cr
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian, StudentT
from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.predictive.transformed import in_original_units, near_limits, on_fitted_scale
from credibly.predictive.transforms import Transform, candidate_transforms, fit_transform

f64 = torch.float64
TRANSFORMS = {
    "none": Transform(),
    "log": Transform("log"),
    "shifted log": Transform("shifted_log", shift=0.4),
    "square root": Transform("box_cox", power=0.5, unit=3.0),
    "cube root": Transform("box_cox", power=0.35, unit=3.0),
    "yeo-johnson": Transform("yeo_johnson", power=0.3, shift=1.0, unit=2.0),
    "yeo-johnson, left": Transform("yeo_johnson", power=1.8, shift=1.0, unit=2.0),
    "yeo-johnson, log": Transform("yeo_johnson", power=0.0, shift=1.0, unit=2.0),
    "logit": Transform("logit"),
}
DOMAINS = {"log": (0, np.inf), "shifted_log": (0, np.inf), "box_cox": (0, np.inf), "logit": (0, 1)}


class Draws:
    """Outputs of three draws at one row."""

    def __init__(self, likelihood, outputs=(0.2, -0.4, 0.5), extra=None):
        self.likelihood = likelihood
        self.values = torch.tensor(outputs, dtype=f64).reshape(3, 1, -1)
        self.given = extra or {}
        self.count = 3

    def outputs(self, x, start, stop, first_row=0):
        return self.values[start:stop].expand(stop - start, len(x), self.values.shape[-1])

    def extra(self, start, stop):
        return {name: value[start:stop] for name, value in self.given.items()}

    def row_width(self):
        return 1


def predictive(transform, likelihood=None, location=0.3, scale=0.6):
    source = Draws(likelihood or Gaussian(0.5, squeeze=True))
    return in_original_units(Predictive(source, torch.zeros(1, 1, dtype=f64)), (transform,), (location,), (scale,))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inverse_and_slope(name):
    transform = TRANSFORMS[name]
    low, high = DOMAINS.get(transform.kind, (-np.inf, np.inf))
    y = torch.tensor([-3.0, -0.2, 0.01, 0.3, 0.7, 0.95, 4.0, 60.0], dtype=f64)
    y = y[(y > low) & (y < high)].requires_grad_()
    u = transform.forward(y)
    torch.testing.assert_close(transform.inverse(u), y)
    (slope,) = torch.autograd.grad(u.sum(), y)
    torch.testing.assert_close(transform.log_slope(y), slope.log())
    assert Transform(**transform.to_dict()) == transform


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_density_has_the_moments_and_quantiles(name):
    """By integration of the density in y; predictions below the domain are an atom at 0."""
    transform = TRANSFORMS[name]
    p = predictive(transform)
    low, high = DOMAINS.get(transform.kind, (-np.inf, np.inf))

    @functools.cache  # the three integrals share most points
    def density(y):
        return float(p.log_prob(torch.tensor([y], dtype=f64)).exp())

    ends = [float(p.quantile(q)) for q in (1e-12, 1 - 1e-12)]
    points = [float(p.quantile(q)) for q in np.linspace(0.02, 0.98, 25)]

    def integral(f):
        cuts = [max(ends[0], low), *points, min(ends[1], high)]
        return sum(integrate.quad(f, a, b, epsabs=1e-12)[0] for a, b in pairwise(cuts))

    atom = float(p.cdf(torch.zeros(1, dtype=f64))) if low == 0 else 0.0
    mass, mean, square = (integral(lambda y, k=k: y**k * density(y)) for k in range(3))
    assert mass + atom == pytest.approx(1, abs=1e-6)
    assert float(p.mean) == pytest.approx(mean, rel=1e-4)
    assert float(p.variance) == pytest.approx(square - mean**2, rel=1e-3)
    for level in (0.05, 0.5, 0.95):
        value = p.quantile(level)
        assert float(p.cdf(value)) == pytest.approx(level, abs=1e-9)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    draws = p.sample(20_000, seed=1).flatten()
    assert float(draws.mean()) == pytest.approx(mean, abs=5 * np.sqrt((square - mean**2) / 20_000))
    assert low <= float(draws.min()) <= float(draws.max()) <= high


def test_log_of_a_heteroscedastic_fit_is_a_lognormal_mixture():
    likelihood = HeteroscedasticGaussian(squeeze=True)
    source = Draws(likelihood, [0.2, -1.0, 0.4, 0.3, -0.7, -2.0])
    p = in_original_units(Predictive(source, torch.zeros(1, 1, dtype=f64)), (Transform("log"),), (2.0,), (0.5,))
    parts = [
        stats.lognorm(0.5 * np.exp(v / 2), scale=np.exp(2 + 0.5 * m))
        for m, v in [(0.2, -1.0), (0.4, 0.3), (-0.7, -2.0)]
    ]
    assert float(p.mean) == pytest.approx(np.mean([d.mean() for d in parts]))
    assert float(p.aleatoric) == pytest.approx(np.mean([d.var() for d in parts]))
    assert float(p.epistemic) == pytest.approx(np.var([d.mean() for d in parts]))
    y = torch.tensor([5.0], dtype=f64)
    assert float(p.log_prob(y)) == pytest.approx(np.log(np.mean([d.pdf(5.0) for d in parts])))
    assert float(p.likelihood.entropy(source.values, {})[0]) == pytest.approx(parts[0].entropy())


def test_student_noise_on_a_log_scale_has_no_mean():
    p = predictive(Transform("log"), StudentT(0.5, df=4.0, squeeze=True), 0.0, 1.0)
    assert float(p.mean) == pytest.approx(np.mean(np.exp([0.2, -0.4, 0.5])))
    assert float(p.variance) == np.inf
    lower, upper = p.interval(0.9)
    assert 0 < float(lower) < float(upper) < np.inf
    # A square has a mean and a variance under five degrees of freedom.
    p = predictive(Transform("box_cox", power=0.5), StudentT(0.1, df=5.0, squeeze=True), 4.0, 1.0)
    values = [(1 + 0.5 * (4 + m)) ** 2 + 0.25 * 0.01 * 5 / 3 for m in (0.2, -0.4, 0.5)]
    assert float(p.mean) == pytest.approx(np.mean(values), rel=1e-5)
    assert np.isfinite(float(p.variance))


@pytest.mark.parametrize("name", ["log", "shifted log", "square root", "yeo-johnson", "logit"])
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_means_count_values_beyond_the_limits_as_those(name, noise):
    """By integration over the noise on the transformed scale."""
    limits = (0.2, 0.7) if name == "logit" else (0.4, 9.0)
    transform = dataclasses.replace(TRANSFORMS[name], limits=limits)
    p = predictive(transform, Gaussian(noise, squeeze=True))
    parts = []
    for output in (0.2, -0.4, 0.5):

        def value(z, centre=0.3 + 0.6 * output):
            u = torch.tensor(centre + 0.6 * noise * z, dtype=f64)
            return float(transform.inverse(u).clamp(*limits))

        edges = transform.forward(torch.tensor(limits, dtype=f64)).numpy()
        cuts = np.sort(np.clip([-9, *((edges - 0.3 - 0.6 * output) / (0.6 * noise)), 9], -9, 9))
        parts.append(
            [
                sum(
                    integrate.quad(lambda z, k=k: value(z) ** k * stats.norm.pdf(z), a, b)[0] for a, b in pairwise(cuts)
                )
                for k in (1, 2)
            ]
        )
    mean, square = np.mean(parts, axis=0)
    # Logarithms are closed forms; quadrature has a kink at each limit.
    tolerance = 1e-7 if "log" in name and name != "logit" else 0.02
    assert float(p.mean) == pytest.approx(mean, rel=tolerance)
    assert float(p.variance) == pytest.approx(square - mean**2, rel=2 * tolerance)


def test_one_draw_far_out_does_not_determine_the_mean():
    rng = np.random.default_rng(0)
    transform = fit_transform("log", rng.lognormal(size=100))
    source = Draws(HeteroscedasticGaussian(squeeze=True), [0.2, -1.0, 0.4, 0.3, -0.7, 12.0])
    p = in_original_units(Predictive(source, torch.zeros(1, 1, dtype=f64)), (transform,), (0.0,), (1.0,))
    assert 0 < float(p.mean) < transform.limits[1]
    assert 0 < float(p.variance) < transform.limits[1] ** 2
    # Without limits its mean is e to the power of half its variance.
    free = in_original_units(Predictive(source, torch.zeros(1, 1, dtype=f64)), (Transform("log"),), (0.0,), (1.0,))
    assert float(free.mean) > 1e20
    # Quantiles and densities do not depend on limits.
    torch.testing.assert_close(p.quantile(0.9), free.quantile(0.9))
    # Student noise on a log scale has a mean within limits.
    p = predictive(transform, StudentT(0.5, df=4.0, squeeze=True), 0.0, 1.0)
    assert float(p.mean) > np.mean(np.exp([0.2, -0.4, 0.5]))
    assert np.isfinite(float(p.variance))


def test_limits_are_checked_and_stored():
    transform = Transform("log", limits=(-1.0, 5.0))
    assert Transform(**json.loads(json.dumps(transform.to_dict()))) == transform
    for wrong in [(1.0, 1.0), (2.0,), ("a", "b")]:
        with pytest.raises(cr.InputError, match="limits must be two increasing numbers, got"):
            Transform("log", limits=wrong)


def test_values_outside_the_domain_have_no_density():
    p = predictive(Transform("log"))
    assert float(p.log_prob(torch.tensor([-1.0], dtype=f64))) == -np.inf
    assert float(p.cdf(torch.tensor([-1.0], dtype=f64))) == 0
    assert float(predictive(Transform("logit")).cdf(torch.tensor([1.5], dtype=f64))) == 1


def test_several_targets_have_a_transform_each():
    likelihood = Gaussian(0.5)
    source = Draws(likelihood, [0.2, 0.1, -0.4, 0.0, 0.5, 0.3])
    both = in_original_units(
        Predictive(source, torch.zeros(1, 1, dtype=f64)),
        (Transform("log"), Transform("logit")),
        (0.3, 0.1),
        (0.6, 0.9),
    )
    for k, (kind, location, scale) in enumerate([("log", 0.3, 0.6), ("logit", 0.1, 0.9)]):
        one = Draws(Gaussian(0.5, squeeze=True), source.values[:, 0, k].tolist())
        alone = in_original_units(
            Predictive(one, torch.zeros(1, 1, dtype=f64)), (Transform(kind),), (location,), (scale,)
        )
        torch.testing.assert_close(both.mean[:, k], alone.mean)
        torch.testing.assert_close(both.quantile(0.9)[:, k], alone.quantile(0.9))
    assert both.log_prob(torch.tensor([[1.0, 0.5]], dtype=f64)).shape == (1,)


def test_fitted_transforms():
    rng = np.random.default_rng(0)
    skewed = rng.lognormal(10, 1, 5000)
    found = fit_transform("log", skewed)
    low, high = skewed.min(), skewed.max()
    assert found == Transform("log", limits=(11 * low - 10 * high, 11 * high - 10 * low))
    assert fit_transform("none", skewed).limits is None
    assert fit_transform("power", skewed).kind == "log"
    squares = rng.normal(10, 1, 2000) ** 2
    found = fit_transform("power", squares)
    assert found.kind == "box_cox"
    assert found.power == pytest.approx(0.5, abs=0.4)
    # The power does not depend on the unit.
    assert fit_transform("power", squares * 1000).power == found.power
    assert fit_transform("power", squares - 100).kind == "yeo_johnson"
    assert fit_transform("log1p", np.array([0.0, 1.0, 2.0, 3.0])).shift == pytest.approx(1.1)


def test_candidates():
    rng = np.random.default_rng(0)
    assert candidate_transforms(rng.normal(size=500)) == ("none",)
    assert candidate_transforms(rng.lognormal(size=500)) == ("none", "log", "power")
    assert candidate_transforms(np.maximum(rng.normal(size=500), 0) ** 2) == ("none", "log1p", "power")
    assert candidate_transforms(rng.beta(2, 2, 500)) == ("none", "logit")
    assert candidate_transforms(np.ones(5)) == ("none",)


def test_targets_outside_the_domain():
    with pytest.raises(cr.InputError, match='"log" needs positive targets, the smallest is 0.*Use log1p or power'):
        fit_transform("log", np.array([0.0, 1.0]))
    with pytest.raises(cr.InputError, match='"log1p" needs targets of at least 0, the smallest is -1'):
        fit_transform("log1p", np.array([-1.0, 1.0]))
    with pytest.raises(cr.InputError, match='"logit" needs targets strictly between 0 and 1'):
        fit_transform("logit", np.array([0.0, 0.5]))
    with pytest.raises(cr.InputError, match="transform must be one of"):
        fit_transform("sqrt", np.array([0.0, 0.5]))
    with pytest.raises(cr.InputError, match="power must be from 0 to 2, got 3"):
        Transform("yeo_johnson", power=3.0)


def test_far_from_the_training_targets_the_uncertainty_of_the_fitted_scale_remains():
    """All draws beyond the upper limit: the mean is the limit with a variance of 0, which `near_limits` reports."""
    transform = fit_transform("log", np.exp(np.linspace(0, 3, 50)))
    low, high = transform.limits

    def at(far):
        source = Draws(Gaussian(0.5, squeeze=True), outputs=(0.2 * far, -0.4 + far, 0.5 + 2 * far))
        return in_original_units(Predictive(source, torch.zeros(1, 1, dtype=f64)), (transform,), (1.0,), (1.0,))

    near, far = at(1.0), at(100.0)
    assert far.mean.item() == pytest.approx(high, rel=1e-6)
    assert far.epistemic.item() < 1e-6 < near.epistemic.item()
    assert on_fitted_scale(far).epistemic.item() > 1000 * on_fitted_scale(near).epistemic.item()
    joined = on_fitted_scale(JoinedPredictive([far, near], torch.tensor([1, 0])))
    torch.testing.assert_close(joined.epistemic[1:], on_fitted_scale(far).epistemic)
    plain = predictive(Transform())
    assert on_fitted_scale(plain) is plain
    half = high - (high - low) * 5 / 21
    means = torch.tensor([half - 1, half + 1, high, low, 0.0], dtype=f64)
    assert near_limits(means, (transform,)).tolist() == [False, True, True, True, False]
    assert not near_limits(means, ()).any()
    both = torch.stack([torch.zeros(5, dtype=f64), means], 1)
    assert near_limits(both, (Transform(), transform)).tolist() == [False, True, True, True, False]
