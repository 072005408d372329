"""Counts, proportions, ordered classes and censored times: against scipy, closed forms and quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit

import credibly as cr
from credibly.likelihoods import Beta, NegativeBinomial, Ordinal, Survival

f64 = torch.float64
OUTPUT = torch.tensor([[[0.4]], [[-1.1]]], dtype=f64)  # two draws, one row, one target
LOGS = torch.tensor([-0.5, 0.2], dtype=f64)
MEANS, SCALES = np.exp([0.4, -1.1]), np.exp([-0.5, 0.2])


def negative_binomial(s, unit=1.0):
    r = 1 / SCALES[s]
    return stats.nbinom(r, r / (r + unit * MEANS[s]))


def beta(s):
    m, phi = expit([0.4, -1.1][s]), SCALES[s]
    return stats.beta(m * phi, (1 - m) * phi)


CASES = {
    "negative binomial": (NegativeBinomial(unit=1.0), {"log_dispersion": LOGS}, negative_binomial, [0.0, 1.0, 7.0]),
    "large counts": (
        NegativeBinomial(unit=900.0),
        {"log_dispersion": LOGS},
        lambda s: negative_binomial(s, 900.0),
        [0.0, 40.0, 1500.0],
    ),
    "beta": (Beta(margin=0.0), {"log_precision": LOGS}, beta, [0.02, 0.4, 0.97]),
    "weibull": (
        Survival("weibull", unit=2.0),
        {"log_scale": LOGS},
        lambda s: stats.weibull_min(1 / SCALES[s], scale=2 * MEANS[s]),
        [0.1, 1.0, 6.0],
    ),
    "lognormal": (
        Survival("lognormal", unit=2.0),
        {"log_scale": LOGS},
        lambda s: stats.lognorm(SCALES[s], scale=2 * MEANS[s]),
        [0.1, 1.0, 6.0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_scipy(name):
    likelihood, extra, reference, values = CASES[name]
    discrete = likelihood.support == "count"
    mean, variance = likelihood.moments(OUTPUT, extra)
    entropy = likelihood.entropy(OUTPUT, extra)
    for s in range(2):
        d = reference(s)
        for value in values:
            y = torch.full((1, 1), value, dtype=f64)
            expected = d.logpmf(value) if discrete else d.logpdf(value)
            assert float(likelihood.log_prob(OUTPUT, y, extra)[s, 0]) == pytest.approx(expected, rel=1e-9)
            assert float(likelihood.cdf(OUTPUT, y, extra)[s, 0, 0]) == pytest.approx(d.cdf(value), rel=1e-8)
        assert float(mean[s, 0, 0]) == pytest.approx(d.mean(), rel=1e-9)
        assert float(variance[s, 0, 0]) == pytest.approx(d.var(), rel=1e-9)
        exact = -(lambda p: (p[p > 0] * np.log(p[p > 0])).sum())(d.pmf(np.arange(200_000))) if discrete else d.entropy()
        assert float(entropy[s, 0, 0]) == pytest.approx(float(exact), rel=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_density(name):
    likelihood, extra, reference, _ = CASES[name]
    count = 20_000
    draws = likelihood.sample(OUTPUT.expand(2, count, 1), extra, torch.Generator().manual_seed(0)).squeeze(-1).numpy()
    for s in range(2):
        d = reference(s)
        if likelihood.support == "count":
            values, seen = np.unique(draws[s], return_counts=True)
            expected = d.pmf(values) * count
            assert (np.abs(seen - expected) < 4.5 * np.sqrt(expected) + 2).all()
        else:
            assert stats.kstest(draws[s], d.cdf).pvalue > 1e-3


@pytest.mark.parametrize("family, survival", [("weibull", stats.weibull_min), ("lognormal", stats.lognorm)])
def test_censored_times_count_by_their_survival_function(family, survival):
    likelihood, extra, reference, _ = CASES[family]
    y = likelihood.prepare(torch.tensor([[3.0, 1.0], [3.0, 0.0]], dtype=f64), f64)
    assert y.flatten().tolist() == [3.0, -3.0]
    rows = likelihood.log_prob(OUTPUT.expand(2, 2, 1), y, extra)
    for s in range(2):
        d = reference(s)
        assert rows[s].tolist() == pytest.approx([d.logpdf(3.0), d.logsf(3.0)], rel=1e-9)


def test_quantiles_of_a_mixture_of_times():
    likelihood, extra, reference, _ = CASES["weibull"]
    from credibly.predictive.quantiles import mixture_quantiles

    got = mixture_quantiles(likelihood, OUTPUT, extra, (0.05, 0.5, 0.95)).flatten()
    for level, value in zip((0.05, 0.5, 0.95), got.tolist()):
        assert np.mean([reference(s).cdf(value) for s in range(2)]) == pytest.approx(level, abs=1e-9)


def test_negative_binomial_goes_to_poisson():
    """In float32 too, where the log gamma functions of 1/dispersion have no digits left."""
    output = torch.tensor([[[0.7]]])
    y = torch.tensor([[3.0]])
    got = NegativeBinomial(1e-6, unit=1.0).log_prob(output, y, {})
    assert float(got) == pytest.approx(stats.poisson(math.exp(0.7)).logpmf(3), abs=1e-4)


def test_a_margin_stretches_the_beta_density():
    likelihood = Beta(margin=0.05)
    extra = {"log_precision": LOGS}
    edges = likelihood.prepare(torch.tensor([[0.0], [1.0]], dtype=f64), f64)
    assert torch.isfinite(likelihood.log_prob(OUTPUT.expand(2, 2, 1), edges, extra)).all()
    grid = torch.linspace(-0.05 / 0.9, 0.95 / 0.9, 400_003, dtype=f64)[1:-1, None]
    for s, density in enumerate(likelihood.log_prob(OUTPUT.expand(2, len(grid), 1), grid, extra).exp()):
        d = beta(s)
        y = np.array([0.0, 0.3, 1.0])
        expected = d.logpdf(0.05 + 0.9 * y) + np.log(0.9)
        at = torch.from_numpy(y)[:, None]
        got = likelihood.log_prob(OUTPUT.expand(2, 3, 1), at, extra)[s]
        assert got.tolist() == pytest.approx(expected.tolist(), rel=1e-9)
        assert torch.isfinite(density).all()
        cdf = likelihood.cdf(OUTPUT.expand(2, 3, 1), at, extra)[s, :, 0]
        assert cdf.tolist() == pytest.approx([d.cdf(0.05), d.cdf(0.05 + 0.27), 1.0], rel=1e-8)
    assert Beta().bind(torch.zeros(4, 1), torch.tensor([0.1, 0.2, 0.3, 1.0])).margin == 0.125
    assert Beta().bind(torch.zeros(3, 1), torch.tensor([0.1, 0.2, 0.3])).margin == 0.0


def test_ordinal_probabilities_are_differences_of_sigmoids():
    cuts = torch.tensor([[-1.0, math.log(0.5), math.log(2.0)], [0.3, math.log(1e-3), 1.5]], dtype=f64)
    likelihood, extra = Ordinal(classes=4), {"cuts": cuts}
    points = np.array([[-1.0, -0.5, 1.5], [0.3, 0.301, 0.301 + math.exp(1.5)]])
    torch.testing.assert_close(likelihood.cut_points(extra), torch.from_numpy(points))
    p = likelihood.log_probabilities(OUTPUT, extra).exp()
    for s, f in enumerate([0.4, -1.1]):
        below = np.concatenate([[0], expit(points[s] - f), [1]])
        assert p[s, 0].tolist() == pytest.approx(np.diff(below).tolist(), rel=1e-9)
    log_prob = likelihood.log_prob(OUTPUT, torch.tensor([2]), extra)
    torch.testing.assert_close(log_prob[:, 0].exp(), p[:, 0, 2])
    draws = likelihood.sample(OUTPUT.expand(2, 30_000, 1), extra, torch.Generator().manual_seed(0))
    for s in range(2):
        seen = torch.bincount(draws[s], minlength=4) / 30_000
        assert seen.tolist() == pytest.approx(p[s, 0].tolist(), abs=4 * np.sqrt(0.25 / 30_000))


def test_ordinal_far_from_the_cut_points_stays_finite():
    cuts = torch.tensor([[0.0, -20.0, 3.0]])
    leaf = torch.tensor([[[300.0], [-300.0]]], requires_grad=True)
    log_p = Ordinal(classes=4).log_probabilities(leaf, {"cuts": cuts})
    assert torch.isfinite(log_p).all()
    (gradient,) = torch.autograd.grad(log_p.sum(), leaf)
    assert torch.isfinite(gradient).all()


def test_ordinal_prior_is_centred_at_the_frequencies():
    y = torch.tensor([0] * 10 + [1] * 30 + [2] * 60)
    bound = Ordinal().bind(torch.zeros(100, 1), y).scaled_to(y, None)
    assert bound.classes == 3
    (cuts,) = bound.parameters().values()
    p = Ordinal(classes=3).log_probabilities(torch.zeros(1, 1, 1), {"cuts": torch.tensor([cuts.init])}).exp()
    assert p.flatten().tolist() == pytest.approx([0.1, 0.3, 0.6], abs=0.01)


def test_units_follow_the_targets():
    y = torch.tensor([[100.0], [300.0]])
    assert NegativeBinomial().scaled_to(y, None).unit == pytest.approx(200)
    assert NegativeBinomial().scaled_to(y, torch.tensor([3.0, 1.0])).unit == pytest.approx(150)
    assert Survival().scaled_to(torch.tensor([[10.0], [-1000.0]]), None).unit == pytest.approx(100)
    assert Survival(unit=3.0).scaled_to(y, None).unit == 3.0


def test_targets_outside_the_support():
    with pytest.raises(cr.InputError, match="not counts, such as 1.5.*NegativeBinomial needs"):
        NegativeBinomial(squeeze=True).prepare(torch.tensor([1.5, 2.0]), torch.float32)
    with pytest.raises(cr.InputError, match="outside 0 to 1, such as 40.*divide percentages by 100"):
        Beta(squeeze=True).prepare(torch.tensor([40.0, 0.2]), torch.float32)
    with pytest.raises(cr.InputError, match="the beta density is 0 or infinite.*Pass margin"):
        Beta(squeeze=True, margin=0.0).prepare(torch.tensor([1.0, 0.2]), torch.float32)
    with pytest.raises(cr.InputError, match="margin must be a number from 0 to below 0.5, got 0.5"):
        Beta(margin=0.5)
    with pytest.raises(cr.InputError, match="has a time of 0"):
        Survival().prepare(torch.tensor([0.0, 1.0]), torch.float32)
    with pytest.raises(cr.InputError, match="negative times, such as -2"):
        Survival().prepare(torch.tensor([[-2.0, 1.0]]), torch.float32)
    with pytest.raises(cr.InputError, match="events other than 0 and 1, such as 2"):
        Survival().prepare(torch.tensor([[2.0, 2.0]]), torch.float32)
    with pytest.raises(cr.InputError, match="one output per row, and y of shape"):
        Survival().bind(torch.zeros(4, 2), torch.ones(4, 2))
    with pytest.raises(cr.InputError, match="family must be one of"):
        Survival("gamma")
    with pytest.raises(cr.InputError, match="labels from 0 to 3.*labels are 0 to 2"):
        Ordinal(classes=3).prepare(torch.tensor([0, 3]), torch.float32)
    with pytest.raises(cr.InputError, match="Ordinal needs one output"):
        Ordinal(classes=3).bind(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(cr.InputError, match='dispersion must be a positive number or "learned"'):
        NegativeBinomial("auto")


FITS = {
    "counts": (NegativeBinomial(), torch.arange(30.0) % 7),
    "ordinal": (Ordinal(), torch.arange(30) % 4),
    "proportions": (Beta(), (torch.arange(30.0) % 7) / 6),
    "survival": (Survival(), torch.stack([1 + torch.arange(30.0) % 7, (torch.arange(30) % 3 > 0).float()], 1)),
}


@pytest.mark.parametrize("name", FITS)
def test_stored_fits_predict_the_same(name, tmp_path):
    """The settings that were taken from the training targets are stored with the likelihood."""
    likelihood, y = FITS[name]
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    net = torch.nn.Linear(1, 1)
    problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal())
    posterior = cr.METHODS["map"](steps=20).fit(problem, seed=0, out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", torch.nn.Linear(1, 1))
    assert loaded.predict(x).likelihood == posterior.predict(x).likelihood
    assert torch.equal(loaded.predict(x[:5]).log_prob(y[:5]), posterior.predict(x[:5]).log_prob(y[:5]))
