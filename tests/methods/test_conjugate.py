"""Every method against the closed-form posterior of linear regression."""

import math

import pytest
import torch

import credibly as cr
from chains import assert_moments
from conftest import randn

OPTIONS = {"steps": 2500, "batch_size": 30, "lr": 0.05}


@pytest.mark.parametrize("t_lik, t_prior", [(1.0, 1.0), (0.3, 0.3), (0.2, 1.0), (1.0, 4.0)])
def test_map_is_the_posterior_mean(conjugate, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    posterior = cr.MAP(**OPTIONS).fit(problem, seed=0)
    mean, _ = conjugate.exact(t_lik, t_prior)
    torch.testing.assert_close(posterior.draws[0, 0], mean, rtol=0, atol=1e-7)


def test_mle_is_least_squares(conjugate):
    posterior = cr.MLE(**OPTIONS).fit(conjugate.problem(), seed=0)
    solution = torch.linalg.lstsq(conjugate.design, conjugate.y.unsqueeze(1)).solution.squeeze(1)
    torch.testing.assert_close(posterior.draws[0, 0], solution, rtol=0, atol=1e-6)


def test_mle_and_map_differ_only_by_the_prior(conjugate):
    mean, _ = conjugate.exact()
    solution = torch.linalg.lstsq(conjugate.design, conjugate.y.unsqueeze(1)).solution.squeeze(1)
    assert float((mean - solution).abs().max()) > 1e-2  # otherwise the two tests above could not distinguish them


def test_map_with_minibatches_ends_near_the_mean(conjugate):
    posterior = cr.MAP(steps=6000, batch_size=10, lr=0.03).fit(conjugate.problem(), seed=1)
    mean, covariance = conjugate.exact()
    assert float(((posterior.draws[0, 0] - mean) / covariance.diagonal().sqrt()).abs().max()) < 0.25


@pytest.mark.parametrize(
    "t_lik, t_prior, members", [pytest.param(1.0, 1.0, 1, marks=pytest.mark.nightly), (0.2, 4.0, 3)]
)
def test_ivon_is_the_best_gaussian_of_independent_weights(conjugate, t_lik, t_prior, members):
    """Exact mean, variances 1 / diag(precision), within the noise of the estimates."""
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    beta2, samples = 0.996, 4
    posterior = cr.IVON(steps=2500, batch_size=30, beta2=beta2, samples=samples, members=members).fit(problem, seed=0)
    mean, covariance = conjugate.exact(t_lik, t_prior)
    precision = torch.linalg.inv(covariance)
    width = precision.diagonal().rsqrt()
    # At rest, h_hat_j = e_j sum_k A_jk s_k e_k / s_j has the variance A_jj^2 (2 + sum of squared correlations), and h
    # is an exponential average of such estimates.
    related = torch.square(precision * width * width.unsqueeze(1)).sum(1) + 1
    error = (related * (1 - beta2) / (1 + beta2) / samples).sqrt()
    assert posterior.loc.shape == (members, 4)
    assert float(((posterior.std / width) ** 2 - 1).abs().div(error).max()) < 4
    # The mean forgets its steps over the last 424, at which the cosine has brought the rate r from 0.1 to 0.007. Steps
    # at a rate r leave it a variance of r / 2 times that of a Newton step.
    assert float(((posterior.loc - mean) / width).abs().max()) < 4 * float((0.007 / 2 * related / samples).max().sqrt())


@pytest.mark.parametrize("t_lik, t_prior", [pytest.param(1.0, 1.0, marks=pytest.mark.nightly), (0.25, 0.5)])
def test_anchored_members_are_exact_posterior_draws(conjugate, t_lik, t_prior):
    """Randomised MAP: mean and covariance over M members, within Monte Carlo error."""
    members = 4000
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    # 300 such steps end within 0.0005 posterior standard deviations of the optimum of every member.
    posterior = cr.DeepEnsemble(members=members, anchored=True, steps=300, batch_size=30, lr=0.3).fit(problem, seed=5)
    draws = posterior.draws[:, 0]
    mean, covariance = conjugate.exact(t_lik, t_prior)
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws - mean).T, upper=False
    )  # N(0, I) if exact
    dim = len(mean)
    assert float(whitened.mean(1).abs().max()) < 4 / math.sqrt(members)
    # Entries of a sample covariance of N(0, I) have standard deviation sqrt(1/M), sqrt(2/M) on the diagonal.
    assert float((torch.cov(whitened) - torch.eye(dim, dtype=draws.dtype)).abs().max()) < 4.5 * math.sqrt(2 / members)


def test_anchoring_perturbs_targets_and_anchors(conjugate):
    """Both perturbations matter: without either one the covariance would fail the test above."""
    problem = conjugate.problem()
    method = cr.DeepEnsemble(members=1000, anchored=True, steps=10)
    perturbation = method.perturbation(problem, seed=0)
    noise = perturbation.targets - problem.y
    assert float(noise.std()) == pytest.approx(conjugate.noise, rel=0.02)
    assert float(perturbation.anchors.std()) == pytest.approx(conjugate.prior, rel=0.03)
    assert float((perturbation.anchors[0] - perturbation.anchors[1]).abs().max()) > 0.1


def test_predictive_of_exact_draws_matches_the_exact_predictive(conjugate):
    """Mean, both terms of the variance, quantiles and log density of many exact draws against the closed form."""
    mean, covariance = conjugate.exact()
    generator = torch.Generator().manual_seed(0)
    draws = (
        mean
        + torch.randn(20_000, len(mean), generator=generator, dtype=mean.dtype) @ torch.linalg.cholesky(covariance).T
    )
    point = cr.MAP(steps=1).fit(conjugate.problem(), seed=0)
    posterior = cr.DrawsPosterior(point.model, draws.unsqueeze(0), point.record)
    x = torch.tensor([[0.3, -1.0, 2.0], [8.0, 3.0, -5.0]], dtype=torch.float64)
    p = posterior.predict(x)
    features = torch.cat([x, torch.ones(2, 1, dtype=x.dtype)], 1)
    exact_mean = features @ mean
    exact_epistemic = (features @ covariance * features).sum(1)
    sd = (exact_epistemic + conjugate.noise**2).sqrt()
    assert p.mean.shape == (2,)
    assert float(((p.mean - exact_mean) / sd).abs().max()) < 4 / math.sqrt(20_000)
    torch.testing.assert_close(p.epistemic, exact_epistemic, rtol=0.05, atol=0)
    torch.testing.assert_close(p.aleatoric, torch.full((2,), conjugate.noise**2, dtype=x.dtype))
    lower, upper = p.interval(0.9)
    torch.testing.assert_close(lower, exact_mean - 1.6448536 * sd, rtol=0, atol=0.05 * float(sd.max()))
    torch.testing.assert_close(upper, exact_mean + 1.6448536 * sd, rtol=0, atol=0.05 * float(sd.max()))
    y = exact_mean + 0.7 * sd
    torch.testing.assert_close(p.log_prob(y), torch.distributions.Normal(exact_mean, sd).log_prob(y), rtol=0, atol=0.03)


HMC = cr.HMC(chains=32, draws=100, warmup=80, mass="diagonal", jitter=0.3, init="prior", compile=False)


@pytest.fixture(scope="module")
def by_hmc(conjugate):
    """Return the posterior at temperature one, by HMC."""
    return HMC.fit(conjugate.problem(), seed=0)


def test_hmc_draws_have_the_exact_moments(conjugate, by_hmc):
    """Mean and covariance over 32 independent chains started from the prior, within Monte Carlo error."""
    assert_moments(by_hmc.draws, *conjugate.exact())


@pytest.mark.parametrize("t_lik, t_prior", [pytest.param(0.3, 0.3, marks=pytest.mark.nightly), (0.2, 4.0)])
def test_tempered_hmc_draws_have_the_exact_moments(conjugate, t_lik, t_prior):
    posterior = HMC.fit(conjugate.problem(temperature=cr.Tempering(t_lik, t_prior)), seed=0)
    assert_moments(posterior.draws, *conjugate.exact(t_lik, t_prior))


@pytest.mark.parametrize("t_lik, t_prior", [pytest.param(1.0, 1.0, marks=pytest.mark.nightly), (0.2, 1.0)])
def test_nuts_draws_have_the_exact_moments(conjugate, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    method = cr.NUTS(chains=32, draws=40, warmup=40, mass="diagonal", init="prior", compile=False)
    assert_moments(method.fit(problem, seed=0).draws, *conjugate.exact(t_lik, t_prior))


@pytest.mark.parametrize("t_lik, t_prior", [(1.0, 1.0), pytest.param(0.2, 1.0, marks=pytest.mark.nightly)])
def test_adjusted_mclmc_draws_have_the_exact_moments(conjugate, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    method = cr.MCLMC(chains=32, draws=100, warmup=80, adjusted=True, init="prior", compile=False)
    assert_moments(method.fit(problem, seed=0).draws, *conjugate.exact(t_lik, t_prior))


@pytest.mark.parametrize("t_lik, t_prior", [pytest.param(1.0, 1.0, marks=pytest.mark.nightly), (0.2, 4.0)])
def test_tempering_draws_have_the_exact_moments(conjugate, t_lik, t_prior):
    """The draws are those of the problem's own temperatures, whatever the ladder above them."""
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    settings = {"chains": 32, "temperatures": 3, "warmup": 80, "draws": 100, "mass": "diagonal"}
    method = cr.ParallelTempering(**settings, init="prior", compile=False)
    assert_moments(method.fit(problem, seed=0).draws, *conjugate.exact(t_lik, t_prior))


@pytest.mark.parametrize("t_lik, t_prior", [pytest.param(1.0, 1.0, marks=pytest.mark.nightly), (0.2, 1.0)])
def test_chees_draws_have_the_exact_moments(conjugate, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    method = cr.ChEES(chains=32, draws=100, warmup=80, mass="diagonal", init="prior", compile=False)
    assert_moments(method.fit(problem, seed=0).draws, *conjugate.exact(t_lik, t_prior))


def test_mile_has_the_exact_moments_where_there_is_one_mode(conjugate):
    """From a fit of its own, every adjusted chain reaches the only mode, so their mixture is the posterior."""
    method = cr.MILE(chains=24, draws=60, warmup=60, adjusted=True, start_steps=100, compile=False)
    assert_moments(method.fit(conjugate.problem(), seed=0).draws, *conjugate.exact())


def exact_draws(conjugate, count):
    mean, covariance = conjugate.exact()
    return mean + randn(count, len(mean), dtype=mean.dtype) @ torch.linalg.cholesky(covariance).T


# Chains start at exact draws, so they reach the stationary distribution of the dynamics without a long warm-up.
# Draws are far enough apart to be independent along stiff directions, where discretisation errors are largest.
SGMCMC = {"chains": 400, "draws": 4, "warmup": 120, "thin": 40, "batch_size": 30, "compile": False}


@pytest.mark.parametrize("rate", [1.2, 0.3])
def test_sgld_has_the_exact_covariance_even_at_a_large_step(conjugate, rate):
    """Noise averaged over two steps; independent noise would give A^-1 (1 - eps A / 4)^-1, up to 43 % too much."""
    mean, covariance = conjugate.exact()
    precision = torch.linalg.inv(covariance)
    size = rate / float(torch.linalg.eigvalsh(precision)[-1])
    start = exact_draws(conjugate, 400)
    posterior = cr.SGLD(step_size=size, init=start, **SGMCMC).fit(conjugate.problem(), seed=0)
    assert_moments(posterior.draws, mean, covariance)
    if rate > 1:
        biased = torch.linalg.inv(precision - size * precision @ precision / 4)
        with pytest.raises(AssertionError, match="is off by"):  # that bias would be detected
            assert_moments(posterior.draws, mean, biased)


def test_sghmc_has_the_exact_covariance_even_at_a_large_step(conjugate):
    stiffest = float(torch.linalg.eigvalsh(torch.linalg.inv(conjugate.exact()[1]))[-1])
    start = exact_draws(conjugate, 400)
    posterior = cr.SGHMC(step_size=1.2 / math.sqrt(stiffest), momentum=0.8, init=start, **SGMCMC).fit(
        conjugate.problem(), seed=0
    )
    assert_moments(posterior.draws, *conjugate.exact())


def test_hmc_predictions_match_the_exact_posterior(conjugate, by_hmc):
    mean, covariance = conjugate.exact()
    x = torch.tensor([[0.3, -1.0, 2.0], [8.0, 3.0, -5.0]], dtype=torch.float64)
    features = torch.cat([x, torch.ones(2, 1, dtype=x.dtype)], 1)
    p = by_hmc.predict(x)
    epistemic = (features @ covariance * features).sum(1)
    effective = 1000  # at least this many of the 3,200 draws, as the moments above show
    assert float(((p.mean - features @ mean) / epistemic.sqrt()).abs().max()) < 4.5 / math.sqrt(effective)
    torch.testing.assert_close(p.epistemic, epistemic, rtol=4.5 * math.sqrt(2 / effective), atol=0)
    torch.testing.assert_close(p.aleatoric, torch.full((2,), conjugate.noise**2, dtype=x.dtype))
