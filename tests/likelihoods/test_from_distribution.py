"""Likelihoods from torch distributions: against scipy, credibly's own classes, and the stated Monte Carlo errors."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions as d

import credibly as cr
from conftest import mlp, randn
from credibly.curvature.output_fisher import fisher_root
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, Parameter, Poisson, from_distribution

f64 = torch.float64
X = randn(40, 3, dtype=f64)
Y = X.sum(1) + 0.1 * randn(40, seed=1, dtype=f64)
COUNTS = Y.exp().round().clamp(max=9)
LABELS = (Y > 0).long() + (Y > 1).long()


def student(out):
    return d.StudentT(5.0, out[:, 0], out[:, 1].exp())


def lognormal(out):
    """No mean, variance or entropy: only what follows from the transform."""
    return d.TransformedDistribution(d.Normal(out[..., 0], 0.5), [d.transforms.ExpTransform()])


def noisy(out, log_scale):
    return d.Normal(out, log_scale.exp())


NOISE = 0.09 * torch.eye(2, dtype=f64)
OWN = {"log_scale": Parameter((), cr.priors.Normal(1.0, -1.0), -1.0)}


def problem(make, width, y, **kwargs):
    return cr.Problem(mlp(3, 5, width, dtype=f64), (X, y), from_distribution(make, **kwargs), cr.priors.Normal())


def predictive(make, width, y, members=4, **kwargs):
    p = problem(make, width, y, **kwargs)
    return cr.DeepEnsemble(members=members, steps=20).fit(p, seed=0).predict(X)


def outputs(p):
    return next(iter(p.map_blocks(lambda output, extra, start: output)))


def test_the_density_is_that_of_the_distribution_with_learned_parameters():
    ours = problem(noisy, 1, Y, parameters=OWN)
    known = cr.Problem(
        mlp(3, 5, 1, dtype=f64), (X, Y), Gaussian(scale_prior=cr.priors.Normal(1.0, -1.0)), cr.priors.Normal()
    )
    theta = randn(3, ours.dim, seed=4, dtype=f64)
    a, b = ours.log_density_and_grad(theta), known.log_density_and_grad(theta)
    torch.testing.assert_close(a.log_likelihood, b.log_likelihood)
    torch.testing.assert_close(a.gradient, b.gradient)
    assert ours.layout.extra == ("likelihood.log_scale",)


@pytest.mark.parametrize(
    "make, width, y, own, shape",
    [
        (lambda out: d.Categorical(logits=out), 3, LABELS, Categorical(), (40, 3)),
        (lambda out: d.Bernoulli(logits=out), 1, (Y > 0).long(), Bernoulli(), (40,)),
        (lambda out: d.Bernoulli(logits=out[..., 0]), 1, (Y > 0).long(), Bernoulli(), (40,)),
        (lambda out: d.Bernoulli(logits=out), 2, torch.stack([Y > 0, Y > 1], 1).long(), Bernoulli(), (40, 2)),
        (lambda out: d.Poisson(out.squeeze(-1).exp()), 1, COUNTS, Poisson(), (40,)),
        (lambda out: d.Normal(out, 0.3), 2, torch.stack([Y, -Y], 1), Gaussian(0.3), (40, 2)),
        (lambda out: d.Independent(d.Normal(out, 0.3), 1), 2, torch.stack([Y, -Y], 1), Gaussian(0.3), (40, 2)),
        (lambda out: d.MultivariateNormal(out, NOISE), 2, torch.stack([Y, -Y], 1), Gaussian(0.3), (40, 2)),
    ],
    ids=["classes", "binary", "binary plain", "labels", "counts", "two targets", "independent", "vector"],
)
def test_equals_the_likelihood_of_the_package(make, width, y, own, shape):
    """Moments, decomposition, densities, intervals, metrics and the curvature of Laplace."""
    ours, known = (
        cr.Problem(mlp(3, 5, width, dtype=f64), (X, y), likelihood, cr.priors.Normal())
        for likelihood in (from_distribution(make, samples=4000), own)
    )
    p, q = (cr.DeepEnsemble(members=3, steps=30).fit(one, seed=0).predict(X) for one in (ours, known))
    assert p.mean.shape == shape
    for name in ("mean", "variance", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(p, name), getattr(q, name))
    torch.testing.assert_close(p.log_prob(y), q.log_prob(y))
    assert p.sample(3).shape == q.sample(3).shape
    if ours.likelihood.ordered and "cdf" not in ours.likelihood.sampled:
        torch.testing.assert_close(p.quantile([0.1, 0.7]), q.quantile([0.1, 0.7]))
        assert p.likelihood.monte_carlo_error(p).keys() <= {"entropy"}
    elif ours.likelihood.ordered:
        torch.testing.assert_close(p.quantile(0.7), q.quantile(0.7), atol=0.03, rtol=0)
    else:
        assert cr.evaluate(p, y) == pytest.approx(cr.evaluate(q, y))
    laplace = [cr.Laplace(steps=30, structure="full").fit(one, seed=0).std for one in (ours, known)]
    # Labels have an exact Fisher information, others that of 256 sampled labels for each of 40 rows.
    exact = ours.likelihood.support in ("class", "binary")
    assert float((laplace[0] / laplace[1]).log().abs().max()) < (1e-8 if exact else 0.1)


def test_sampled_moments_and_entropy_lie_within_their_stated_errors():
    p = predictive(lognormal, 1, Y.exp())
    assert set(p.likelihood.sampled) == {"mean", "variance", "entropy"}
    output = outputs(p)
    exact = stats.lognorm(0.5, scale=np.exp(output[..., 0].numpy()))
    error = p.likelihood.monte_carlo_error(p)
    away = (p.mean.numpy() - exact.mean().mean(0)) / error["mean"].numpy()
    assert 0.5 < np.std(away) < 1.6
    assert np.abs(away).max() < 4.5
    entropy = p.likelihood.entropy(output, {}).squeeze(-1).mean(0)
    away = (entropy.numpy() - exact.entropy().mean(0)) / error["entropy"].numpy()
    assert 0.5 < np.std(away) < 1.6
    assert np.abs(away).max() < 4.5
    # A second question gets the same answer, and torch's generator is left alone.
    state = torch.random.get_rng_state()
    again = predictive(lognormal, 1, Y.exp())
    assert torch.equal(again.mean, p.mean)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_cdf_and_quantiles_from_samples():
    p = predictive(student, 2, Y)
    assert p.likelihood.sampled == ("cdf",)
    loc, scale = outputs(p)[..., 0].numpy(), np.exp(outputs(p)[..., 1].numpy())
    exact = stats.t(5, loc, scale)
    stated = p.likelihood.monte_carlo_error(p)["cdf"]
    assert stated == 0.5 / math.sqrt(4 * 1024)
    assert np.abs(p.cdf(Y).numpy() - exact.cdf(Y.numpy()).mean(0)).max() < 4.5 * stated
    quantiles = p.quantile([0.05, 0.5, 0.95]).numpy()
    reached = np.stack([exact.cdf(q).mean(0) for q in quantiles])
    assert np.abs(reached - np.array([[0.05], [0.5], [0.95]])).max() < 4.5 * 0.5 / math.sqrt(16 * 1024)
    assert np.abs(cr.evaluate(p, Y)["coverage"] - 0.9) <= 0.1


def test_large_counts_and_values_outside_the_support():
    p = predictive(lambda out: d.Poisson(9 * out.squeeze(-1).exp()), 1, 9 * COUNTS)
    rate = 9 * np.exp(outputs(p)[..., 0].numpy())
    np.testing.assert_allclose(
        p.cdf(9 * COUNTS).numpy(), stats.poisson(rate).cdf(9 * COUNTS.numpy()).mean(0), rtol=1e-9
    )
    gamma = predictive(lambda out: d.Gamma(out[..., 0].exp(), out[..., 1].exp()), 2, Y.exp())
    assert not gamma.cdf(torch.full((40,), -1.0)).any()
    assert bool((gamma.interval(0.99)[0] >= 0).all())


def test_fisher_information_from_samples():
    """Of a gamma distribution, whose Fisher information is known, at 200 equal rows."""
    likelihood = from_distribution(lambda out: d.Gamma(out[..., 0].exp(), out[..., 1].exp()))
    output = torch.tensor([[0.4, -0.3]], dtype=f64).expand(200, 2)
    likelihood = likelihood.bind(output, torch.ones(200, dtype=f64))
    root = fisher_root(likelihood, output, torch.ones(200, 1, dtype=f64), {})
    a = math.exp(0.4)
    trigamma = float(torch.polygamma(1, torch.tensor(a, dtype=f64)))
    exact = torch.tensor([[a * a * trigamma, -a], [-a, a]], dtype=f64)
    torch.testing.assert_close((root @ root.mT).mean(0), exact, rtol=0.03, atol=0.02)


def test_not_a_number_is_a_density_of_its_own():
    p = problem(student, 2, Y)
    assert bool(torch.isnan(p.log_density(torch.full((1, p.dim), math.nan, dtype=f64))).all())


def test_saving_and_loading_needs_the_likelihood_again(tmp_path):
    posterior = cr.DeepEnsemble(members=2, steps=5).fit(problem(noisy, 1, Y, parameters=OWN), seed=0)
    posterior.save(tmp_path / "run")
    net = mlp(3, 5, 1, dtype=f64, seed=3)
    with pytest.raises(cr.StoreError, match=r"likelihood: .* from_distribution\(noisy\).* Pass likelihood= "):
        cr.load(tmp_path / "run", net)
    with pytest.raises(cr.InputError, match=r"likelihood: is student with parameters \[\], that of the run noisy"):
        cr.load(tmp_path / "run", net, likelihood=from_distribution(student))
    loaded = cr.load(tmp_path / "run", net, likelihood=from_distribution(noisy, parameters=OWN))
    assert torch.equal(loaded.predict(X).variance, posterior.predict(X).variance)
    assert torch.equal(loaded.predict(X).quantile(0.3), posterior.predict(X).quantile(0.3))


class OwnClass(Poisson):
    pass


def test_an_own_class_is_restored_with_the_shape_of_its_targets(tmp_path):
    p = cr.Problem(mlp(3, 5, 1, dtype=f64), (X, COUNTS), OwnClass(), cr.priors.Normal())
    posterior = cr.MAP(steps=3).fit(p, seed=0)
    posterior.save(tmp_path / "run")
    with pytest.raises(cr.StoreError, match=r"OwnClass.* Pass likelihood= "):
        cr.load(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", likelihood=OwnClass())
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)


BAD = {
    "no function": (lambda: from_distribution(3), "make must be a function"),
    "support": (lambda: from_distribution(student, support="odd"), "support must be one of"),
    "samples": (lambda: from_distribution(student, samples=1), "samples must be an integer of at least 2"),
    "parameters": (lambda: from_distribution(noisy, parameters={"a": 1.0}), "parameters must map names to"),
    "fails": (lambda: problem(lambda out: d.Normal(out[..., 7], 1.0), 1, Y), r"make: .*failed on outputs of shape"),
    "no distribution": (lambda: problem(lambda out: out, 1, Y), "make must return a torch.distributions.Distribution"),
    "shape": (lambda: problem(lambda out: d.Normal(out, 1.0), 2, Y), r"y: has shape \(rows\).*batch \(2, 2\)"),
    "outside": (lambda: problem(lambda out: d.Exponential(out.exp()), 1, Y), "outside the support of Exponential"),
    "no integers": (lambda: problem(lambda out: d.Poisson(out.exp()), 1, Y.abs()), "y: has values that are not int"),
    "labels": (lambda: problem(lambda out: d.Bernoulli(logits=out), 1, LABELS), "y: has values other than 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    build, message = BAD[name]
    with pytest.raises(cr.InputError, match=message):
        build()


@pytest.mark.parametrize("concentration", [0.1, 2.0, 25.0, 4000.0])
def test_the_variance_of_an_angle_is_not_the_circular_one(concentration):
    def angle(out):
        return d.VonMises(out[..., 0], torch.full_like(out[..., 0], concentration))

    p = predictive(angle, 1, Y, members=1)
    expected = torch.full_like(Y, stats.vonmises(concentration).var())
    torch.testing.assert_close(p.aleatoric, expected, rtol=2e-5, atol=0)


def test_vectors_of_counts_and_of_one_hot_labels():
    counts = d.Multinomial(7, torch.softmax(X, -1)).sample()
    p = predictive(lambda out: d.Multinomial(7, logits=out), 3, counts)
    probability = torch.softmax(outputs(p), -1).mean(0)
    torch.testing.assert_close(p.mean, 7 * probability)
    assert torch.isfinite(p.log_prob(counts)).all()
    one_hot = torch.nn.functional.one_hot(LABELS, 3).to(f64)
    p = predictive(lambda out: d.OneHotCategorical(logits=out), 3, one_hot)
    own = cr.DeepEnsemble(members=4, steps=20).fit(
        cr.Problem(mlp(3, 5, 3, dtype=f64), (X, LABELS), Categorical(), cr.priors.Normal()), seed=0
    )
    torch.testing.assert_close(p.mean, own.predict(X).mean)
    torch.testing.assert_close(p.log_prob(one_hot), own.predict(X).log_prob(LABELS))
