"""SGLD and SGHMC by default, on a linear model; the noise of minibatch gradients, and control variates."""

import itertools
import math

import pytest
import torch
from sgmcmc_problems import BOTH, DOUBLE, fit, problem
from torch import nn

import credibly as cr
from chains import assert_moments
from conftest import Conjugate, mlp, randn
from credibly.diagnostics import convergence
from credibly.inference.sampling import sgmcmc_steps
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.sampling.sgmcmc_steps import Estimate, Probe, momentum_step, overdamped_step
from credibly.inference.target import to_target
from credibly.inference.training.batches import Batches
from credibly.likelihoods import Categorical, Gaussian
from credibly.metrics.evaluation import compare

ROWS, INPUTS, CONDITION = 2000, 6, 7.0


@pytest.fixture(scope="module")
def linear():
    """A linear model whose posterior covariance has condition number 7."""
    spread = torch.linspace(1, math.sqrt(CONDITION), INPUTS + 1, dtype=DOUBLE)
    columns = torch.cat([randn(ROWS, INPUTS, dtype=DOUBLE), torch.ones(ROWS, 1, dtype=DOUBLE)], 1)
    # Orthonormal columns, the last of them constant, which is the intercept.
    basis = torch.linalg.qr(columns.flip(1))[0].flip(1)[:, :-1] * math.sqrt(ROWS)
    turn = torch.linalg.qr(randn(INPUTS, INPUTS, seed=1, dtype=DOUBLE))[0]
    x = basis @ torch.diag(spread[1:]) @ turn.T
    y = x @ randn(INPUTS, seed=2, dtype=DOUBLE) + randn(ROWS, seed=3, dtype=DOUBLE)
    return Conjugate(nn.Linear(INPUTS, 1).double(), x, y, noise=1.0, prior=1.0)


@BOTH
def test_the_defaults_sample_the_posterior_of_a_linear_model(linear, method):
    """Means within Monte Carlo error, variances within 10 %, R-hat below 1.05, with a third of HMC's gradients.

    Before, R-hat was 1.2 and variances were off by 40 %.
    """
    mean, covariance = linear.exact()
    eigenvalues = torch.linalg.eigvalsh(covariance)
    assert float(eigenvalues[-1] / eigenvalues[0]) == pytest.approx(CONDITION, rel=0.01)
    posterior = method().fit(linear.problem(), seed=0, progress=False)
    draws, history = posterior.draws, posterior.record.history
    assert float(convergence.rhat(draws).max()) < 1.05
    error = float((draws.flatten(0, 1).mean(0) - mean).abs().div(covariance.diagonal().sqrt()).max())
    assert error < 4.5 / math.sqrt(float(convergence.ess(draws).min()))
    assert float((draws.flatten(0, 1).var(0) / covariance.diagonal() - 1).abs().max()) < 0.1
    assert_moments(draws, mean, covariance)
    # HMC() takes 520,000 gradients here.
    assert history["gradients"] + history["start_gradients"] < 175_000
    assert history["batch_size"] == ROWS
    assert not history["shortened"]


@pytest.mark.nightly  # test_sgmcmc.py has a shorter test of the noise of minibatches
def test_minibatches_of_a_linear_model(linear):
    """The heat of minibatch gradients stays near 5 % of the variance."""
    mean, covariance = linear.exact()
    start = mean + randn(16, INPUTS + 1, seed=9, dtype=DOUBLE) @ torch.linalg.cholesky(covariance).T
    options = {"batch_size": 100, "warmup": 3000, "init": start}
    posterior = cr.SGLD(chains=16, draws=50, thin=150, **options).fit(linear.problem(), seed=0, progress=False)
    assert posterior.record.history["gradient_noise"] > 0
    variances = posterior.draws.flatten(0, 1).var(0) / covariance.diagonal()
    assert 0.85 < float(variances.mean()) < 1.15


# -- gradient noise ----------------------------------------------------------------------------------------------------
def test_the_noise_of_a_minibatch_gradient_by_brute_force(monkeypatch):
    """(N^2 / B) (1 - B/N) S over all batches of 3 of 7 rows, and as it is estimated."""
    x, y = randn(7, 2, dtype=DOUBLE) * torch.tensor([3.0, 1.0]), randn(7, seed=1, dtype=DOUBLE)
    p = cr.Problem(nn.Linear(2, 1).double(), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    target, theta = to_target(p), randn(1, 3, seed=2, dtype=DOUBLE)
    batches = [torch.tensor(rows) for rows in itertools.combinations(range(7), 3)]
    gradients = torch.cat([target.minibatch_and_grad(theta, rows, 7 / 3)[1] for rows in batches])
    rows = [target.minibatch_and_grad(theta, torch.tensor([i]), 1.0)[1] for i in range(7)]
    single = torch.cov(torch.cat(rows).T)  # the prior's gradient is the same in each
    exact = torch.cov(gradients.T, correction=0)
    torch.testing.assert_close(exact, 49 / 3 * (1 - 3 / 7) * single, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients.mean(0), target.likelihood_and_grad(theta)[1][0], rtol=1e-10, atol=1e-10)
    monkeypatch.setattr(sgmcmc_steps, "ITERATIONS", 30)
    monkeypatch.setattr(sgmcmc_steps, "PROBE_BATCHES", 200)
    sampler = cr.SGLD(chains=1, batch_size=3, compile=False).sampler(target, 0)
    estimate = sampler.warm.probe.estimate(theta, None, 0)
    found = estimate.noise
    design = torch.cat([x, torch.ones(7, 1, dtype=DOUBLE)], 1)
    stiffest = torch.linalg.eigh(design.T @ design)[1][:, -1]
    expected = float(stiffest @ exact @ stiffest)
    assert found == pytest.approx(expected, rel=4.5 * math.sqrt(2 / 200))
    # Consecutive differences are correlated: the standard error is that of 2/3 as many batches.
    assert estimate.spread == pytest.approx(float(exact.diagonal().mean()), rel=4.5 * math.sqrt(3 / 200))


def plan(**kwargs) -> SGMCMCPlan:
    return cr.SGHMC(**kwargs).plan(to_target(problem()))


def test_the_step_size_rule():
    """Stability, and either the heat of single batches or epochs short enough for their noise to cancel."""
    whole, even, odd = (Batches(24, b, seed=0) for b in (24, 8, 7))
    rule = plan(batch_size=8)
    assert rule.unit == 1.0
    calm, noisy = Estimate(100.0, 1e-6), Estimate(100.0, 1e6)
    for batches in (None, whole, even):
        assert momentum_step(calm, rule, batches) == pytest.approx(0.1)
        assert overdamped_step(calm, rule, batches) == pytest.approx(0.015)
    assert momentum_step(noisy, rule, whole) == pytest.approx(0.1)
    # No rows are left out: 3 batches per epoch.
    assert momentum_step(noisy, rule, even) == pytest.approx(0.25 / (3 * 10))
    assert overdamped_step(noisy, rule, even) == pytest.approx(1 / (3 * 100))
    # Three of 24 rows are left out, and their heat is 5 %: V_left = V / (1 - B/N) * 3/24.
    left = 1e6 / (1 - 7 / 24) * 3 / 24
    assert momentum_step(noisy, rule, odd) == pytest.approx(0.1 * 1.4 / left)
    assert overdamped_step(noisy, rule, odd) == pytest.approx(0.2 / left)
    # Chains that could not move far enough in the largest number of steps take longer steps, while the mean heat of all
    # coordinates stays below 5 %.
    few = plan(batch_size=8, max_steps=5800)
    assert few.least_step == pytest.approx(0.01)
    assert momentum_step(noisy, few, odd) == pytest.approx(0.1 * 1.4 / left)
    assert momentum_step(noisy._replace(spread=1.0), few, odd) == pytest.approx(0.01)
    assert momentum_step(noisy._replace(spread=100.0), few, odd) == pytest.approx(0.1 * 1.4 / 100)
    assert momentum_step(noisy._replace(spread=1.0), plan(batch_size=8, draws=10, thin=1), odd) == pytest.approx(0.05)
    assert overdamped_step(noisy._replace(spread=1.0), few, odd) == pytest.approx(0.01**2)
    # A given momentum c has the friction ln(1/c) / h.
    given = plan(batch_size=8, momentum=0.9)
    some = Estimate(100.0, 5.0)
    assert momentum_step(some, given, even) == pytest.approx(math.sqrt(0.1 * -math.log(0.9) / 5))
    # With a control variate the mean over the three steps of an epoch counts: V' (3 h)^2 / 3, or V' 3 eps / 2.
    variate = plan(batch_size=8, control_variate=True)
    size = momentum_step(noisy, variate, even)
    assert size * 1e6 * (3 * size) ** 2 / 3 / (2 * 1.4) == pytest.approx(0.05)
    size = overdamped_step(noisy, variate, even)
    assert size * 1e6 * 3 * size / 2 / 4 == pytest.approx(0.05)


# -- control variates --------------------------------------------------------------------------------------------------
def test_control_variates_leave_gradients_unbiased_and_remove_most_of_their_noise():
    """Over all minibatches of an epoch, at points near the anchor."""
    target = to_target(problem())
    sampler = cr.SGHMC(chains=3, batch_size=4, control_variate=True, step_size=1e-3, compile=False).sampler(target, 0)
    sampler.start(0.3 * randn(3, target.dim, dtype=DOUBLE))
    sampler._move_anchor()
    point = sampler.anchor + 0.02 * randn(3, target.dim, seed=1, dtype=DOUBLE)
    zero = torch.zeros(3, target.dim, dtype=DOUBLE)
    # A step of size 0 evaluates the gradient where it is.
    state = (point, zero, zero, sampler.squares, sampler.value, sampler.anchor, sampler.anchor_gradient)
    still = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=DOUBLE)
    reduced = torch.stack([sampler._after(state, sampler.batches.at(t), zero, still)[2] for t in range(6)])
    plain = torch.stack([target.minibatch_and_grad(point, sampler.batches.at(t), 6.0)[1] for t in range(6)])
    full = target.likelihood_and_grad(point)[1]
    torch.testing.assert_close(reduced.mean(0), full, rtol=1e-9, atol=1e-9)
    noise = [float((values - full).square().sum(-1).mean()) for values in (reduced, plain)]
    assert noise[0] < 0.02 * noise[1]


@BOTH
def test_control_variates_sample_the_posterior(conjugate, method):
    """From exact draws, with minibatches of 5 of 30 rows at steps that their own noise would not allow."""
    mean, covariance = conjugate.exact()
    start = mean + randn(100, 4, dtype=DOUBLE) @ torch.linalg.cholesky(covariance).T
    options = {"chains": 100, "draws": 6, "warmup": 120, "thin": 60, "batch_size": 5, "init": start}
    posterior = fit(method, conjugate.problem(), control_variate=True, **options)
    history = posterior.record.history
    assert not history["native"]
    # Two minibatches per step, a full gradient per epoch, one batch at the start, and the estimates of warm-up.
    steps = 100 * 480 * (2 * 5 / 30 + 1 / 6)
    assert steps < history["gradients"] < 1.1 * steps
    draws = posterior.draws.flatten(0, 1)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (draws - mean).T, upper=False)
    assert float(white.mean(1).abs().max()) < 4.5 / math.sqrt(100)
    assert 0.8 < float(torch.cov(white).diagonal().mean()) < 1.2


@BOTH
def test_control_variates_need_minibatches(method):
    for target, options in ((problem(), {"batch_size": 24}), (cr.Density(lambda w: -w.square().sum(), 2), {})):
        with pytest.raises(cr.InputError, match="control_variate must be False without minibatches, got True"):
            method(control_variate=True, **options).fit(target, seed=0)


# -- preconditioner, numbers of steps and starts -----------------------------------------------------------------------
@BOTH
def test_the_prior_is_the_preconditioner_if_its_scales_differ(method):
    scale = torch.tensor([0.5, 2.0, 8.0], dtype=DOUBLE)
    uneven = cr.Density(lambda w: -0.5 * (w / scale).square().sum(-1), 3, batched=True, scale=scale)
    posterior = fit(method, uneven, chains=200, draws=8)
    assert posterior.record.history["preconditioner"] == "prior"
    assert posterior.record.history["curvature"] == pytest.approx(1.0, rel=1e-6)
    assert_moments(posterior.draws, torch.zeros(3, dtype=DOUBLE), torch.diag(scale**2))
    assert fit(method, problem(), chains=2, draws=1, warmup=2, thin=1).record.history["preconditioner"] == "identity"


@BOTH
def test_unstable_steps_of_warmup_are_taken_again_with_half_the_size(method, monkeypatch):
    """Steps of 3 / sqrt(a) blow up; halved, they are stable."""
    target = to_target(cr.Density(lambda w: -50 * w.square().sum(-1), 3, batched=True))
    monkeypatch.setattr(sgmcmc_steps, "STABLE", 3.0)
    sampler = method(chains=2, draws=5, compile=False, init="prior").sampler(target, 0)
    sampler.start(0.1 * randn(2, 3, dtype=DOUBLE))
    taken_again, slow_down = [], sampler.warm.slow_down
    monkeypatch.setattr(sampler.warm, "slow_down", lambda steps: (taken_again.append(steps), slow_down(steps)))
    counted, stages = sampler.warm.gradients, 0
    while sampler.done < sampler.warmup:
        end = sampler.warm.stage_end
        sampler.advance(lambda: False)
        stages += sampler.done == end
        assert float(sampler.theta.abs().max()) < 2
    assert sum(taken_again) > 0
    # They count: as many gradients per chain, beside those of one estimate per stage.
    again = 2 * sum(taken_again)
    assert sampler.warm.gradients - counted == again + stages * sampler.warm.probe.cost


@BOTH
def test_the_number_of_steps_follows_from_the_step_size(method):
    """Warm-up and draws cover given times in units of the prior's scale, unless that takes too many steps."""
    scale = 3.0
    target = cr.Density(lambda w: -50 * w.square().sum(-1), 2, batched=True, scale=scale)
    history = fit(method, target, chains=2, draws=10).record.history
    size = history["step_size"] if method is cr.SGHMC else math.sqrt(history["step_size"])
    warm, drawing = (scale * time for time in method.times)
    assert history["thin"] == round(drawing / (10 * size))
    # Steps of 1 / sqrt(100), halved in the first quarter.
    assert history["warmup"] == pytest.approx(warm * (0.25 / 0.05 + 0.75 / 0.1), rel=0.05)
    assert not history["shortened"]
    short = fit(method, target, chains=2, draws=10, max_steps=200).record.history
    assert short["shortened"]
    assert short["steps"] <= 200 + 1


@BOTH
def test_chains_start_at_map_fits_where_those_are_cheap(linear, method):
    """1,000 steps of 128 rows are 64 gradients of 2,000 rows, and 1,000 of 24."""
    assert method().start_points(linear.problem()) == "ensemble"
    assert method().start_points(problem()) == "fresh"
    assert method(start_steps=100).start_points(problem()) == "ensemble"
    assert method(init="prior").start_points(linear.problem()) == "prior"
    runs = {"chains": 3, "draws": 1, "warmup": 1, "thin": 1}
    history = fit(method, problem(), start_steps=50, init="ensemble", **runs).record.history
    assert history["start_gradients"] == 3 * 50
    assert fit(method, problem(), init="map", start_steps=50, **runs).record.history["start_gradients"] == 50
    assert fit(method, problem(), **runs).record.history["start_gradients"] == 0


def test_at_most_16_chains_are_probed():
    target = to_target(problem())
    many, few = (Probe(target, plan(chains=c), 0, cr.SGHMC(chains=c).sampler(target, 0).mesh, None) for c in (64, 3))
    assert (many.chosen, few.chosen) == (list(range(0, 64, 4)), [0, 1, 2])
    assert many.count == 16


@BOTH
def test_the_defaults_come_close_to_hmc_on_a_network(method):
    """The demo's far-away star: predictions on a grid, most of it far from the data, with no more gradients than HMC.

    The other tasks of the demo take longer: `python -m benchmarks.sgmcmc_accuracy`.
    """
    toy = cr.data.star_classification(seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 50), nn.SiLU(), nn.Linear(50, 1))
    prior = cr.priors.Normal(2.0, fan_in=True)
    p = cr.Problem(net, data=(toy.x, toy.y), likelihood=cr.likelihoods.Bernoulli(), prior=prior)
    hmc = cr.HMC(**cr.HMC.demo_settings(quick=False)).fit(p, seed=0, progress=False)
    posterior = method().fit(p, seed=0, progress=False)
    grid = toy.grid[::50]
    assert compare(posterior.predict(grid), hmc.predict(grid))["total_variation"] < 0.05
    history = posterior.record.history
    assert history["gradients"] + history["start_gradients"] <= hmc.record.history["gradients"]


def test_chains_on_minibatches_leave_their_start():
    """Averaged over all weights, the temperature is near that of the posterior; that of a MAP fit is near zero."""
    x = randn(12_000, 200) * torch.tensor([1.0] * 3 + [0.01] * 197)
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * randn(12_000, seed=1) > 0).long()
    p = cr.Problem(mlp(200, 20, 2), data=(x, y), likelihood=Categorical(), prior=cr.priors.Normal())
    history = cr.SGHMC(chains=2, draws=10, max_steps=15_000).fit(p, seed=0, progress=False).record.history
    assert history["gradient_noise"] > 0
    configurational = torch.tensor(history["temperature"]["configurational"])
    assert 0.6 < float(configurational.mean()) < 1.4
