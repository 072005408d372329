"""The posterior of Bayes by Backprop: draws, predictions, layers, pruning and the evidence lower bound."""

import math

import pytest
import torch
from bbb_models import FAMILIES, PRIORS, X, Y, best, evaluate, f64, fit, free_energy, pack, posterior_of, problem
from torch.nn.functional import softplus

import credibly as cr
from conftest import mlp, randn
from credibly.gaussians.families import FullRank, MeanField, inverse_softplus
from credibly.likelihoods import Gaussian
from credibly.posterior.gaussian import GaussianPosterior
from credibly.priors.elementwise import Laplace, Normal, StudentT


# -- draws, predictions and layers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"family": f, "rank": 3} for f in FAMILIES] + [{"members": 3}], ids=str)
def test_saved_and_loaded_bit_for_bit(tmp_path, options):
    posterior = fit(steps=20, **options)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 5, 1, seed=9, dtype=f64))
    assert isinstance(loaded, GaussianPosterior)
    assert loaded.family == posterior.family
    assert torch.equal(loaded.phi, posterior.phi)
    assert torch.equal(loaded.sample(7, seed=2), posterior.sample(7, seed=2))
    assert torch.equal(loaded.predict(X).log_prob(Y), posterior.predict(X).log_prob(Y))
    assert loaded.record == posterior.record
    assert repr(loaded) == repr(posterior)


def test_draws_come_from_every_component_in_turn():
    p = problem()
    centres = torch.stack([torch.full((p.dim,), v, dtype=f64) for v in (-10.0, 0.0, 10.0)])
    posterior = posterior_of(p, MeanField().init(centres, 0.1))
    assert posterior.components == 3
    nearest = posterior.sample(8, seed=1).mean(1).div(10).round()
    assert nearest.tolist() == [-1, 0, 1, -1, 0, 1, -1, 0]
    assert posterior.draws.shape == (3, 34, p.dim)
    assert posterior.draws.mean((1, 2)).div(10).round().tolist() == [-1, 0, 1]
    noise = (posterior.draws - centres.unsqueeze(1)) / 0.1
    assert float(noise.std()) == pytest.approx(1, abs=4.5 / math.sqrt(2 * noise.numel()))
    assert float((noise[0] - noise[1]).abs().max()) > 0.1


def test_members_are_different_fits_of_the_same_data():
    posterior = fit(members=3, steps=400)
    assert posterior.components == 3
    assert posterior.loc.shape == posterior.std.shape == (3, posterior.layout.dim)
    assert float((posterior.loc[0] - posterior.loc[1]).abs().max()) > 0.1
    p = problem(likelihood=Gaussian())
    means = [posterior_of(p, posterior.phi[m : m + 1]).predict(X).mean for m in range(3)]
    error = [float((mean - Y).square().mean()) for mean in means]
    assert max(error) < 0.2 * float(Y.var())


@pytest.mark.parametrize("sizes", [(3, 1), (3, 3, 1), (3, 5, 1)], ids=str)
@pytest.mark.parametrize("members", [1, 2])
def test_a_draw_does_not_depend_on_the_number_of_draws(sizes, members):
    p = problem(mlp(*sizes, dtype=torch.float32), dtype=torch.float32)
    posterior = posterior_of(p, MeanField().init(randn(members, p.dim), 0.3))
    many = posterior.sample(25, seed=4)
    for count in (1, 2, 3, 7, 24):
        assert torch.equal(posterior.sample(count, seed=4), many[:count])
    assert len(many[:, 0].unique()) == 25
    assert not torch.equal(posterior.sample(3, seed=5), many[:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_mean_and_the_covariance(family):
    p, chosen = problem(mlp(3, 2, 1, dtype=f64)), FAMILIES[family]
    phi = chosen.init(randn(1, p.dim, dtype=f64), 0.4)
    phi = phi + 0.3 * randn(*phi.shape, seed=1, dtype=f64)
    posterior, count = posterior_of(p, phi, chosen), 20_000
    factor = torch.linalg.cholesky(posterior.covariance()[0])
    whitened = torch.linalg.solve_triangular(factor, (posterior.sample(count) - posterior.loc[0]).T, upper=False)
    assert float(whitened.mean(1).abs().max()) < 4.5 / math.sqrt(count)
    away = torch.cov(whitened) - torch.eye(p.dim, dtype=f64)
    assert float(away.abs().max()) < 4.5 * math.sqrt(2 / count)


def test_draws_and_seed_determine_predictions():
    posterior = fit()
    a, b = posterior.predict(X, draws=30, seed=1), posterior.predict(X, draws=30, seed=1)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.epistemic, b.epistemic)
    assert not torch.equal(a.mean, posterior.predict(X, draws=30, seed=2).mean)
    assert not torch.equal(a.mean, posterior.predict(X, draws=31, seed=1).mean)
    theta = posterior.sample(30, seed=1)
    outputs = torch.stack([posterior.layout.call(w, X).squeeze(1) for w in theta])
    torch.testing.assert_close(a.mean, outputs.mean(0))
    torch.testing.assert_close(a.epistemic, outputs.var(0, correction=0))
    scale = theta[:, -1].exp()
    torch.testing.assert_close(a.aleatoric, scale.square().mean().expand(40))


def test_predictions_on_the_linear_model_are_exact(conjugate):
    """The exact Gaussian as q: mean and epistemic variance of the closed form, within Monte Carlo error."""
    p, count = conjugate.problem(), 4000
    posterior = posterior_of(p, pack("full-rank", best(conjugate, "full-rank", 1.0, 1.0)), FullRank())
    mean, covariance = conjugate.exact()
    predictive = posterior.predict(conjugate.x, draws=count)
    variance = (conjugate.design @ covariance * conjugate.design).sum(1)
    assert float(((predictive.mean - conjugate.design @ mean) / variance.sqrt()).abs().max()) < 4.5 / math.sqrt(count)
    assert float((predictive.epistemic / variance - 1).abs().max()) < 4.5 * math.sqrt(2 / count)
    torch.testing.assert_close(predictive.aleatoric, torch.full_like(variance, conjugate.noise**2))


def test_layers_report_scales_and_signal_to_noise():
    p = problem(mlp(3, 2, 1, dtype=f64), likelihood=Gaussian())
    mu = torch.arange(1.0, p.dim + 1, dtype=f64) * torch.tensor([1.0, -1.0]).repeat(p.dim)[: p.dim]
    sigma = torch.full((p.dim,), 0.5, dtype=f64)
    rho = torch.tensor([inverse_softplus(0.5)] * p.dim, dtype=f64)
    layers = posterior_of(p, torch.cat([mu, rho]).unsqueeze(0)).layers()
    assert [(row.name, row.shape) for row in layers] == [
        ("0.weight", (2, 3)),
        ("0.bias", (2,)),
        ("2.weight", (1, 2)),
        ("2.bias", (1,)),
        ("likelihood.log_scale", p.layout.entries[-1].shape),
    ]
    first = layers[0]
    assert first.mean_abs == pytest.approx(3.5)
    assert first.mean_scale == pytest.approx(0.5)
    exact = torch.quantile((mu / sigma)[:6].abs(), torch.tensor([0.1, 0.5, 0.9], dtype=f64)).tolist()
    assert first.signal_to_noise == pytest.approx(tuple(exact))
    assert layers[3].signal_to_noise == pytest.approx((22.0, 22.0, 22.0))


def test_layers_average_over_components():
    p = problem(mlp(3, 2, 1, dtype=f64))
    phi = torch.cat([MeanField().init(torch.full((1, p.dim), v, dtype=f64), s) for v, s in ((-1.0, 0.1), (3.0, 0.3))])
    for row in posterior_of(p, phi).layers():
        assert row.mean_abs == pytest.approx(2.0)
        assert row.mean_scale == pytest.approx(0.2)
        assert row.signal_to_noise == pytest.approx((10.0, 10.0, 10.0))


# -- pruning -----------------------------------------------------------------------------------------------------------
def test_signal_to_noise_is_the_mean_over_the_standard_deviation():
    posterior = fit()
    torch.testing.assert_close(
        posterior.signal_to_noise(), posterior.loc.abs() / softplus(posterior.phi[:, posterior.layout.dim :])
    )


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.75, 0.98])
def test_pruning_removes_the_stated_fraction_with_least_signal(fraction, members):
    posterior = fit(members=members)
    pruned, network = posterior.prune(fraction), posterior.layout.network_dim
    assert posterior.layout.dim == network + 1
    gone = pruned.std == 0
    assert gone.sum(1).tolist() == [round(fraction * network)] * members
    ratio = posterior.signal_to_noise()
    for m in range(members):
        left = ratio[m, :network][~gone[m, :network]]
        assert not bool(gone[m].any()) or float(ratio[m][gone[m]].max()) <= float(left.min())
    draws = pruned.sample(12, seed=3)
    for m in range(members):
        assert bool((draws[m::members][:, gone[m]] == 0).all())
        assert torch.equal(draws[m::members][:, ~gone[m]], posterior.sample(12, seed=3)[m::members][:, ~gone[m]])
    assert not bool(gone[:, network:].any())  # the noise scale belongs to the likelihood
    assert bool(torch.isfinite(pruned.predict(X).log_prob(Y)).all())
    assert pruned.record.history["pruned"] == fraction


def test_pruning_nothing_changes_nothing():
    posterior = fit()
    assert torch.equal(posterior.prune(0.0).phi, posterior.phi)
    assert torch.equal(posterior.prune(0).predict(X).log_prob(Y), posterior.predict(X).log_prob(Y))


def test_the_learned_noise_scale_is_never_pruned():
    """Even where it has the least signal of all."""
    p = problem(likelihood=Gaussian())
    mu = torch.ones(1, p.dim, dtype=f64)
    mu[0, -1] = 0.0
    pruned = posterior_of(p, MeanField().init(mu, 0.1)).prune(0.99)
    assert float(pruned.std[0, -1]) == pytest.approx(0.1)
    assert int((pruned.std == 0).sum()) == round(0.99 * p.layout.network_dim)


def test_pruning_counts_exactly_where_ratios_are_equal():
    p = problem()
    posterior = posterior_of(p, MeanField().init(torch.ones(1, p.dim, dtype=f64), 0.1))
    assert p.dim == 26
    assert int((posterior.prune(0.5).std == 0).sum()) == 13


def test_pruning_again_counts_weights_that_are_already_pruned():
    posterior = fit()
    again = posterior.prune(0.5).prune(0.75)
    assert torch.equal(again.phi, posterior.prune(0.75).phi)
    ratio = again.signal_to_noise()
    assert bool(torch.isfinite(ratio).all())
    assert torch.equal(ratio == 0, again.std == 0)
    assert all(math.isfinite(v) for row in again.layers() for v in row.signal_to_noise)


def test_a_pruned_posterior_is_saved_and_loaded(tmp_path):
    pruned = fit().prune(0.5)
    pruned.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 5, 1, dtype=f64))
    assert torch.equal(loaded.phi, pruned.phi)
    assert torch.equal(loaded.predict(X).log_prob(Y), pruned.predict(X).log_prob(Y))
    assert loaded.record.history["pruned"] == 0.5


# -- the evidence lower bound ------------------------------------------------------------------------------------------
def test_the_standard_error_shrinks_with_the_square_root_of_the_samples():
    p = problem(prior=Laplace(0.5))
    objective, phi = free_energy(p)
    errors = [float(posterior_of(p, phi).elbo(p, samples=n).standard_error) for n in (250, 4000)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert objective.problem is p


@pytest.mark.parametrize("name, members", [("normal", 1), ("laplace", 1), ("scale mixture", 1), ("normal", 2)])
def test_the_standard_error_is_the_standard_deviation_of_estimates(name, members):
    """Over 300 seeds: the standard deviation of the values, known to 4 %, is the reported error."""
    p = problem(mlp(3, 2, 1, dtype=f64), prior=PRIORS[name][0], likelihood=Gaussian(2.0))
    _, phi = free_energy(p, members=members)
    phi[-1, : p.dim] += 2.0 * (members - 1)  # the components differ by more than their draws
    posterior = posterior_of(p, phi)
    estimates = [posterior.elbo(p, samples=20, seed=s) for s in range(300)]
    values, errors = (torch.stack(column) for column in zip(*estimates))
    assert float(values.std()) == pytest.approx(float(errors.square().mean().sqrt()), rel=0.17)
    exact = posterior.elbo(p, samples=20_000, seed=1)
    z = (values.mean() - exact.value) / (exact.standard_error**2 + errors.square().mean() / 300).sqrt()
    assert abs(float(z)) < 4


@pytest.mark.parametrize("factors", [None, torch.tensor([[0.5], [2.0]], dtype=f64)], ids=["given", "learned scales"])
def test_the_elbo_of_a_mixture_is_the_mean_over_its_components(factors):
    common = {"likelihood": Gaussian(20.0), "temperature": cr.Tempering(0.5, 2.0)}
    p = problem(prior=Laplace(0.5), **common)
    _, phi = free_energy(p, members=2)
    phi[1, : p.dim] += 1.0
    both = posterior_of(p, phi).elbo(p, samples=2000, prior_scale=factors)
    each = []
    for m in range(2):
        own = p if factors is None else problem(prior=Laplace(0.5 * float(factors[m])), **common)
        each.append(posterior_of(p, phi[m : m + 1]).elbo(own, samples=2000, seed=7 + m))
    error = math.hypot(float(both.standard_error), *(0.5 * float(e.standard_error) for e in each))
    assert error < 0.2
    assert abs(float(both.value) - 0.5 * sum(float(e.value) for e in each)) < 4 * error


def test_the_elbo_is_the_free_energy_of_its_draws():
    """The same draws in the training objective, for a prior with a closed form and one without."""
    for prior in (Normal(0.7), StudentT(3.0, 0.5)):
        p = problem(prior=prior, temperature=cr.Tempering(0.5, 2.0), likelihood=Gaussian())
        objective, phi = free_energy(p)
        posterior = posterior_of(p, phi)
        noise = (posterior.sample(50, seed=2) - posterior.loc) / posterior.std
        parts, _ = evaluate(objective, phi, (noise.unsqueeze(0),))
        elbo = posterior.elbo(p, samples=50, seed=2)
        assert float(elbo.value) == pytest.approx(-p.n * float(parts.sum()), rel=1e-9)


def test_the_elbo_in_small_blocks_is_the_same():
    p, small = problem(), problem(micro_batch=7)
    _, phi = free_energy(p)
    a, b = posterior_of(p, phi).elbo(p, samples=20), posterior_of(small, phi).elbo(small, samples=20)
    assert float(a.value) == pytest.approx(float(b.value), rel=1e-12)


@pytest.mark.parametrize("method", [cr.BayesByBackprop(steps=5), cr.SWAG(steps=5, rank=2, iterates=2, every=1)])
def test_modules_of_the_mean_and_of_a_draw(method):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    problem = cr.Problem(net, data=(x, x.sum(1)), likelihood=cr.likelihoods.Gaussian(), prior=cr.priors.Normal())
    posterior = method.fit(problem, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(posterior.module()(x), problem.forward(posterior.loc, x)[0])
        torch.testing.assert_close(posterior.module(3, seed=2)(x), problem.forward(posterior.sample(4, seed=2), x)[3])
    with pytest.raises(cr.InputError, match="component must be below 1"):
        posterior.module(component=1)
