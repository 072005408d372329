"""The Laplace approximation: exact for a Gaussian posterior, against brute force otherwise."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import credibly as cr
from chains import assert_moments
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from credibly.posterior.linearised import normal_points

DOUBLE = torch.float64
MODE = {"steps": 2500, "batch_size": 30, "lr": 0.05}
X = randn(12, 3, dtype=DOUBLE)
Y = X @ torch.tensor([1.0, -0.5, 0.2], dtype=DOUBLE) + 0.3 + 0.2 * randn(12, seed=1, dtype=DOUBLE)
NEW = torch.tensor([[0.3, -1.0, 2.0], [8.0, 3.0, -5.0]], dtype=DOUBLE)


def small(likelihood=None, width=1, y=Y, **kwargs):
    kwargs.setdefault("prior", cr.priors.Normal(1.5, fan_in=True))
    return cr.Problem(mlp(3, 4, width, dtype=DOUBLE), data=(X, y), likelihood=likelihood or Gaussian(0.2), **kwargs)


def post_hoc(problem, **kwargs):
    """Fit at the current weights of the network, without training."""
    return cr.Laplace(start="network", **kwargs).fit(problem, seed=0)


def features(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def at_mode(conjugate, structure, t_lik=1.0, t_prior=1.0, **kwargs):
    """Fit at the exact mode of the linear model."""
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    return cr.Laplace(structure=structure, start=conjugate.exact(t_lik, t_prior)[0], **kwargs).fit(problem, seed=0)


def exact_evidence(conjugate):
    design = conjugate.design
    covariance = conjugate.prior**2 * design @ design.T + conjugate.noise**2 * torch.eye(len(design), dtype=DOUBLE)
    return float(
        torch.distributions.MultivariateNormal(torch.zeros(len(design), dtype=DOUBLE), covariance).log_prob(conjugate.y)
    )


# -- the conjugate linear model ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("t_lik, t_prior", [(1.0, 1.0), (0.3, 0.3), (0.2, 1.0), (1.0, 4.0)])
def test_exact_on_the_linear_model(conjugate, structure, t_lik, t_prior):
    """With one output the Kronecker factors give the full matrix, including the bias."""
    posterior = at_mode(conjugate, structure, t_lik, t_prior)
    mean, covariance = conjugate.exact(t_lik, t_prior)
    torch.testing.assert_close(posterior.covariance(), covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.std, covariance.diagonal().sqrt(), rtol=1e-10, atol=0)
    p = posterior.predict(NEW)
    exact = (features(NEW) @ covariance * features(NEW)).sum(1)
    torch.testing.assert_close(p.mean, features(NEW) @ mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(p.epistemic, exact, rtol=1e-9, atol=0)
    torch.testing.assert_close(p.aleatoric, torch.full((2,), conjugate.noise**2, dtype=DOUBLE))


def test_the_mode_is_fitted_first(conjugate):
    posterior = cr.Laplace(**MODE).fit(conjugate.problem(temperature=cr.Tempering(0.2, 1.0)), seed=0)
    torch.testing.assert_close(posterior.loc, conjugate.exact(0.2, 1.0)[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(posterior.covariance(), conjugate.exact(0.2, 1.0)[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_evidence_is_exact_on_the_linear_model(conjugate, structure):
    posterior = at_mode(conjugate, structure)
    assert posterior.log_evidence == pytest.approx(exact_evidence(conjugate), abs=1e-8)
    assert posterior.record.history["log_evidence"] == posterior.log_evidence


def test_the_evidence_of_a_tempered_model_is_its_integral(conjugate):
    """log of the integral of p(D|w)^(1/T_lik) p(w)^(1/T_prior), by completing the square."""
    t_lik, t_prior = 0.3, 2.0
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    posterior = at_mode(conjugate, "full", t_lik, t_prior)
    mean, covariance = conjugate.exact(t_lik, t_prior)
    expected = float(problem.log_density(mean)) + 0.5 * float(torch.logdet(2 * math.pi * covariance))
    assert posterior.log_evidence == pytest.approx(expected, abs=1e-8)


def test_diagonal_is_the_inverse_of_the_precisions_diagonal(conjugate):
    posterior = at_mode(conjugate, "diag")
    precision = torch.linalg.inv(conjugate.exact()[1])
    torch.testing.assert_close(posterior.covariance(), torch.diag(1 / precision.diagonal()), rtol=1e-10, atol=1e-14)


def test_the_predictive_is_the_exact_one(conjugate):
    """Intervals and densities from 1,024 quasi-random draws against the closed form."""
    posterior = at_mode(conjugate, "kron")
    mean, covariance = conjugate.exact()
    p = posterior.predict(NEW, draws=1024)
    centre, sd = features(NEW) @ mean, ((features(NEW) @ covariance * features(NEW)).sum(1) + conjugate.noise**2).sqrt()
    lower, upper = p.interval(0.9)
    torch.testing.assert_close(lower, centre - 1.6448536 * sd, rtol=0, atol=0.005 * float(sd.max()))
    torch.testing.assert_close(upper, centre + 1.6448536 * sd, rtol=0, atol=0.005 * float(sd.max()))
    y = centre + 0.7 * sd
    torch.testing.assert_close(p.log_prob(y), torch.distributions.Normal(centre, sd).log_prob(y), rtol=0, atol=0.003)


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_draws_have_the_covariance(conjugate, structure):
    posterior = at_mode(conjugate, structure)
    draws = posterior.sample(4000, seed=3)
    assert_moments(draws.unsqueeze(1), posterior.loc, posterior.covariance())
    assert torch.equal(posterior.sample(10, seed=3), draws[:10])
    assert not torch.equal(posterior.sample(10, seed=4), draws[:10])


def test_weight_draws_and_functions_agree_where_the_network_is_linear(conjugate):
    posterior = at_mode(conjugate, "full")
    linear = posterior.predict(NEW, joint=True, draws=50, seed=2).functions()
    weights = posterior.predict(NEW, linearised=False, draws=50, seed=2).functions()
    torch.testing.assert_close(linear, weights, rtol=1e-10, atol=1e-10)


# -- networks ----------------------------------------------------------------------------------------------------------
CASES = {
    "two targets": (Gaussian(0.2), 2, torch.stack([Y, Y**2], 1)),
    "heteroscedastic": (HeteroscedasticGaussian(), 2, Y),
    "classes": (Categorical(), 3, (Y > 0).long() + (Y > 1).long()),
    "binary": (Bernoulli(), 1, (Y > 0).long()),
}


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("case", CASES)
def test_output_covariance_comes_from_the_jacobian(case, structure):
    """J Sigma J' from the full Jacobian and the dense covariance, against the moments of sampled outputs."""
    likelihood, width, y = CASES[case]
    problem = small(likelihood, width, y)
    posterior = post_hoc(problem, structure=structure)
    p = posterior.predict(NEW, draws=64)
    output = p.source.outputs(NEW, 0, 64)  # (draw, row, width)
    jacobian = torch.func.jacrev(lambda t: problem.layout.call(t, NEW))(posterior.loc)
    expected = jacobian @ posterior.covariance() @ jacobian.mT
    torch.testing.assert_close(output.mean(0), problem.layout.call(posterior.loc, NEW), rtol=1e-9, atol=1e-9)
    centred = output - output.mean(0)
    torch.testing.assert_close(torch.einsum("sna,snb->nab", centred, centred) / 64, expected, rtol=1e-8, atol=1e-9)


class Images(nn.Module):
    """A convolution, a normalisation with gains, and outputs per pixel with the classes on axis 1."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.last = nn.Conv2d(2, 3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_output_covariance_per_pixel_comes_from_its_jacobian(structure):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Images().double()
    x, y = randn(4, 1, 3, 3, dtype=DOUBLE), torch.arange(36).reshape(4, 3, 3) % 3
    problem = cr.Problem(net, data=(x, y), likelihood=Categorical(axis=1), prior=cr.priors.Normal(1.0))
    posterior = post_hoc(problem, structure=structure)
    p = posterior.predict(x[:2], draws=32)
    output = p.source.outputs(x[:2], 0, 32)  # (draw, row, H, W, class)
    assert output.shape == (32, 2, 3, 3, 3)
    jacobian = torch.func.jacrev(lambda t: problem.layout.call(t, x[:2]).movedim(1, -1))(posterior.loc)
    expected = jacobian @ posterior.covariance() @ jacobian.mT
    centred = output - output.mean(0)
    torch.testing.assert_close(
        torch.einsum("snhwa,snhwb->nhwab", centred, centred) / 32, expected, rtol=1e-8, atol=1e-9
    )
    assert p.mean.shape == (2, 3, 3, 3)


def test_joint_draws_are_those_of_the_linearised_function():
    problem = small(*CASES["two targets"])
    posterior = post_hoc(problem)
    jacobian = torch.func.jacrev(lambda t: problem.layout.call(t, NEW))(posterior.loc)
    expected = problem.layout.call(posterior.loc, NEW) + torch.einsum(
        "nkd,sd->snk", jacobian, posterior.sample(20, seed=5) - posterior.loc
    )
    found = posterior.predict(NEW, joint=True, draws=20, seed=5).functions()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_predictions_in_blocks_of_rows_agree(monkeypatch):
    problem = small(*CASES["classes"])
    posterior = post_hoc(problem)
    full = posterior.predict(X)
    monkeypatch.setattr("credibly.curvature.gauss_newton.BLOCK_VALUES", 64)
    monkeypatch.setattr("credibly.predictive.blocks.CACHE_VALUES", 64)
    monkeypatch.setattr("credibly.predictive.blocks.BLOCK_VALUES", 2000)
    parts = posterior.predict(X)
    assert parts.source.rows < 6
    torch.testing.assert_close(parts.mean, full.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.epistemic, full.epistemic, rtol=1e-10, atol=1e-12)


def test_normal_points_have_exact_moments():
    for count, dim in ((64, 1), (100, 3), (128, 10)):
        points = normal_points(count, dim, seed=1)
        torch.testing.assert_close(points.mean(0), torch.zeros(dim, dtype=DOUBLE), rtol=0, atol=1e-14)
        torch.testing.assert_close(points.mT @ points / count, torch.eye(dim, dtype=DOUBLE), rtol=0, atol=1e-12)
    assert not torch.equal(normal_points(64, 2, seed=1), normal_points(64, 2, seed=2))
    assert torch.equal(normal_points(64, 2, seed=1), normal_points(64, 2, seed=1))
    assert float(normal_points(1, 2, seed=0).abs().max()) == 0


def test_predictions_far_from_the_data_are_uncertain():
    """MAP is confident far from the data, the linearised predictive is not."""
    x = torch.cat([randn(30, 2) * 0.5 - 1, randn(30, 2, seed=1) * 0.5 + 1])
    y = torch.cat([torch.zeros(30), torch.ones(30)])
    problem = cr.Problem(
        mlp(2, 10, 1, activation=nn.ReLU), data=(x, y), likelihood=Bernoulli(), prior=cr.priors.Normal(1.0)
    )
    posterior = cr.Laplace(structure="full", steps=600).fit(problem, seed=0)
    star = torch.tensor([[30.0, 30.0], [30.0, -30.0]])
    certain = torch.sigmoid(problem.layout.call(posterior.loc, star)).squeeze(1)
    p = posterior.predict(star).mean
    assert float((p - 0.5).abs()[1]) < float((certain - 0.5).abs()[1])
    assert float(p[0]) < float(certain[0])
    assert float(posterior.predict(star).epistemic.min()) > float(posterior.predict(x).epistemic.median())


# -- subsets of parameters and trained networks ------------------------------------------------------------------------
def test_only_the_last_layer():
    problem = small(*CASES["classes"])
    posterior = post_hoc(problem, random="last layer", structure="full")
    assert posterior.names == ("2.weight", "2.bias")
    assert posterior.count == 15
    draws = posterior.sample(5)
    assert torch.equal(draws[:, :16], posterior.loc[:16].expand(5, -1))
    assert bool((posterior.std[:16] == 0).all())
    assert bool((posterior.std[16:] > 0).all())
    # By hand: a linear model on the hidden features.
    hidden = nn.functional.silu(mlp(3, 4, 3, dtype=DOUBLE)[0](X)).detach()
    prob = problem.layout.call(posterior.loc, X).softmax(-1)
    fisher = torch.diag_embed(prob) - prob.unsqueeze(2) * prob.unsqueeze(1)
    a = features(hidden)
    precision = torch.einsum("nkl,ni,nj->kilj", fisher, a, a).reshape(15, 15)
    prior = torch.tensor([4 / 1.5**2] * 4 + [1 / 1.5**2], dtype=DOUBLE).repeat(3)
    covariance = torch.linalg.inv(precision + torch.diag(prior))
    index = posterior.parts.indices
    torch.testing.assert_close(posterior.covariance()[index][:, index], covariance, rtol=1e-8, atol=1e-10)
    scale = torch.cat([torch.full((12,), 0.75), torch.full((3,), 1.5)]).double()
    log_prior = float(torch.distributions.Normal(0.0, scale).log_prob(posterior.loc[16:]).sum())
    torch.testing.assert_close(torch.tensor(posterior.log_prior), torch.tensor(log_prior))


def test_a_trained_network_is_not_trained_again():
    net = mlp(3, 4, 1, dtype=DOUBLE, seed=4)
    problem = cr.Problem(net, data=(X, Y), likelihood=Gaussian(0.3), prior=cr.priors.Normal())
    posterior = cr.Laplace(start="network").fit(problem)
    assert torch.equal(posterior.loc, problem.layout.read(net))
    assert torch.equal(posterior.module()(X), net(X))
    given = randn(problem.dim, dtype=DOUBLE)
    assert torch.equal(cr.Laplace(start=given).fit(problem).loc, given)


def test_the_noise_of_a_trained_network_is_fitted_to_it():
    """log s is at its mode given the network: its gradient is zero there."""
    problem = small(Gaussian())
    posterior = post_hoc(problem)
    gradient = problem.log_density_and_grad(posterior.loc.unsqueeze(0)).gradient[0]
    assert abs(float(gradient[-1])) < 1e-7
    assert float(gradient[:-1].abs().max()) > 1
    residual = float((problem.layout.call(posterior.loc, X).squeeze(1) - Y).square().mean().sqrt())
    assert float(posterior.loc[-1].exp()) == pytest.approx(residual, rel=0.2)  # the prior of log s shifts it a little
    p = posterior.predict(NEW)
    expected = torch.exp(2 * posterior.loc[-1] + 2 * posterior.std[-1] ** 2)  # E s^2 of a log-normal scale
    torch.testing.assert_close(p.aleatoric, expected.expand(2), rtol=0.02, atol=0)


def test_an_earlier_posterior_as_prior(conjugate):
    """One part of the data, then the rest with the first posterior as the prior: the posterior of all data."""
    first, second = (conjugate.problem().subset(torch.arange(*r)) for r in ((0, 12), (12, 30)))
    fitted = cr.BayesByBackprop(family="full-rank", steps=30).fit(first)
    prior = fitted.as_prior()
    problem = cr.Problem(
        conjugate.net, data=(conjugate.x[12:], conjugate.y[12:]), likelihood=Gaussian(0.5), prior=prior
    )
    posterior = cr.Laplace(structure="full", start="network").fit(problem)
    likelihood = conjugate.design[12:].T @ conjugate.design[12:] / 0.25
    expected = torch.linalg.inv(likelihood + prior.precision.matrix())
    torch.testing.assert_close(posterior.covariance(), expected, rtol=1e-8, atol=1e-10)
    diagonal = cr.Laplace(structure="diag", start="network").fit(problem)
    torch.testing.assert_close(diagonal.std**-2, (likelihood + prior.precision.matrix()).diagonal(), rtol=1e-8, atol=0)
    with pytest.raises(cr.InputError, match="random must be None if the prior is an earlier posterior"):
        cr.Laplace(random="weight", start="network").fit(problem)
    assert second.n == 18


# -- evidence ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_tuning_finds_the_highest_evidence(structure):
    """Against recomputing the curvature for every scale of a fine grid."""
    problem = small(prior=cr.priors.Normal(1.0, fan_in=True))
    tuned = post_hoc(problem, structure=structure, tune="evidence")
    factor = tuned.record.history["tuned"][0]["prior_scale_factor"]

    def evidence(scale):
        other = small(prior=cr.priors.Normal(scale, fan_in=True))
        return post_hoc(other, structure=structure).log_evidence

    assert tuned.log_evidence == pytest.approx(evidence(factor), abs=1e-8)
    assert tuned.record.history["tuned"][0]["log_evidence_before"] == pytest.approx(evidence(1.0), abs=1e-8)
    grid = [factor * math.exp(0.1 * k) for k in range(-20, 21)]
    assert max(grid, key=evidence) == pytest.approx(factor)
    assert tuned.record.prior["scale"] == pytest.approx(factor)
    torch.testing.assert_close(
        tuned.covariance(),
        post_hoc(small(prior=cr.priors.Normal(factor, fan_in=True)), structure=structure).covariance(),
    )


def test_noise_and_prior_are_tuned_together(conjugate):
    """On the linear model, after refits, the chosen pair maximises the exact evidence."""
    posterior = cr.Laplace(structure="full", tune="evidence", tune_noise=True, refits=4, **{**MODE, "steps": 500}).fit(
        conjugate.problem()
    )
    chosen = posterior.record.history["tuned"][-1]
    best = (conjugate.prior * chosen["prior_scale_factor"], conjugate.noise * chosen["noise_scale_factor"])
    assert posterior.likelihood.scale == pytest.approx(best[1])

    def exact(prior, noise):
        return exact_evidence(dataclasses.replace(conjugate, prior=prior, noise=noise))

    assert posterior.log_evidence == pytest.approx(exact(*best), abs=1e-3)
    for a, b in ((1.1, 1.0), (1 / 1.1, 1.0), (1.0, 1.05), (1.0, 1 / 1.05)):
        assert exact(best[0] * a, best[1] * b) < exact(*best)
    history = [turn["log_evidence"] for turn in posterior.record.history["tuned"]]
    assert history[-1] >= history[0]
    assert exact(conjugate.prior, conjugate.noise) < exact(*best)


def test_tuning_does_not_change_learned_noise():
    problem = small(Gaussian())
    plain, tuned = post_hoc(problem), post_hoc(problem, tune="evidence")
    assert tuned.log_evidence > plain.log_evidence
    assert torch.equal(tuned.loc, plain.loc)
    assert torch.equal(tuned.std[-1], plain.std[-1])
    factor = tuned.record.history["tuned"][0]["prior_scale_factor"]
    assert tuned.log_evidence == pytest.approx(
        post_hoc(small(Gaussian(), prior=cr.priors.Normal(1.5 * factor, fan_in=True))).log_evidence, abs=1e-8
    )


# -- storage and seeds -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("random", [None, "last layer"])
def test_saved_and_loaded_bit_for_bit(structure, random, tmp_path):
    problem = cr.Problem(
        mlp(3, 4, 3), data=(X.float(), CASES["classes"][2]), likelihood=Categorical(), prior=cr.priors.Normal()
    )
    posterior = cr.Laplace(structure=structure, random=random, steps=20).fit(problem, seed=1)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 4, 3, seed=9))
    assert isinstance(loaded, cr.LaplacePosterior)
    assert loaded.log_evidence == posterior.log_evidence
    assert loaded.names == posterior.names
    assert torch.equal(loaded.sample(7, seed=2), posterior.sample(7, seed=2))
    assert torch.equal(loaded.std, posterior.std)
    for options in ({}, {"joint": True}, {"linearised": False}):
        a, b = (p.predict(NEW.float(), **options).probabilities for p in (loaded, posterior))
        assert torch.equal(a, b)
    again = cr.Laplace(structure=structure, random=random, steps=20).fit(problem, seed=1)
    assert torch.equal(again.sample(7), posterior.sample(7))
    assert again.log_evidence == posterior.log_evidence


# -- invalid input -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"structure": "block"}, "structure must be one of 'kron', 'diag', 'full', got 'block'"),
        ({"start": "here"}, r'start must be "map", "network" or a \(D,\) tensor, got \'here\''),
        ({"tune": "rows"}, "tune must be \"evidence\" or None, got 'rows'"),
        ({"tune_noise": True}, 'tune must be "evidence" with tune_noise or refits, got None'),
        (
            {"tune": "evidence", "refits": 1, "start": "network"},
            "refits must be 0 unless start=\"map\", got 1 with start='network'",
        ),
        ({"refits": -1}, "refits must be a non-negative integer, got -1"),
        ({"random": 3}, 'random must be None, "last layer" or patterns on names, got 3'),
        ({"steps": 0}, "steps must be a positive integer, got 0"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(cr.InputError, match=message):
        cr.Laplace(**settings)


def test_invalid_problems_raise_before_any_work():
    forever = {"steps": 10**9}
    with pytest.raises(cr.InputError, match="random: pattern 'body' matches no random parameter"):
        cr.Laplace(random="body", **forever).fit(small())
    with pytest.raises(cr.InputError, match="tune: the prior is StudentT"):
        cr.Laplace(tune="evidence", **forever).fit(small(prior=cr.priors.StudentT()))
    with pytest.raises(cr.InputError, match="tune_noise: the likelihood is Bernoulli"):
        cr.Laplace(tune="evidence", tune_noise=True, **forever).fit(small(*CASES["binary"]))
    with pytest.raises(cr.InputError, match=r"start must be a finite tensor of shape \(21,\), got shape \(3,\)"):
        cr.Laplace(start=torch.zeros(3)).fit(small())
    posterior = post_hoc(small())
    with pytest.raises(cr.InputError, match="draws must be a positive integer, got 0"):
        posterior.predict(X, draws=0)
    with pytest.raises(cr.InputError, match="count must be a positive integer, got True"):
        posterior.sample(True)
