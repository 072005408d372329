"""Bayes by Backprop: the free energy term by term, KL weights, KL warm-up and learned prior scales."""

import itertools
import math

import pytest
import torch
from bbb_models import (
    FAMILIES,
    PRIORS,
    TEMPERATURES,
    X,
    Y,
    evaluate,
    f64,
    free_energy,
    normal,
    problem,
)
from torch import distributions as td
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn.functional import softplus

import credibly as cr
from credibly.inference.training.free_energy import kl_weight
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture, StudentT


@pytest.mark.parametrize("t_lik, t_prior", TEMPERATURES)
@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_terms_equal_those_of_a_hand_written_free_energy(family, name, t_lik, t_prior):
    prior, log_prob = PRIORS[name]
    p = problem(prior=prior, temperature=cr.Tempering(t_lik, t_prior))
    chosen = FAMILIES[family]
    objective, phi = free_energy(p, chosen, samples=6)
    noise = objective.noise(0)
    parts, _ = evaluate(objective, phi, noise)
    draws = chosen.draw(phi, noise[0])[0]
    outputs = [torch.func.functional_call(p.layout.module, p.layout.split(w)[0], X).squeeze(1) for w in draws]
    log_lik = torch.stack([td.Normal(output, 0.3).log_prob(Y).sum() for output in outputs])
    q = MultivariateNormal(chosen.loc(phi, p.dim)[0], covariance_matrix=chosen.covariance(phi, p.dim)[0])
    if isinstance(prior, Normal):  # in closed form
        centred = torch.square(q.loc - prior.loc) + q.variance
        expected = (-0.5 * centred / prior.scale**2 - math.log(prior.scale) - 0.5 * math.log(2 * math.pi)).sum()
    else:
        expected = log_prob(draws).sum(1).mean()
    misfit, complexity = -log_lik.mean() / t_lik / 40, (-q.entropy() - expected / t_prior) / 40
    torch.testing.assert_close(parts[0], torch.stack([misfit, complexity]), rtol=1e-7, atol=1e-7)


def test_the_gradient_is_that_of_the_sum_of_the_terms():
    objective, phi = free_energy(problem(prior=Laplace(0.4)), samples=3, learn_prior_scale=True)
    noise = objective.noise(0)

    def value(phi):
        p = objective.problem
        misfit = -objective.log_likelihood(phi, p.x, p.y, noise) / p.n
        return misfit + objective.complexity(phi, noise[0]) / p.n

    assert torch.autograd.gradcheck(value, phi.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(value(leaf := phi.clone().requires_grad_()).sum(), leaf)
    torch.testing.assert_close(evaluate(objective, phi, noise)[1], gradient)


def test_complexity_is_the_kl_divergence_summed_over_every_weight():
    """Not averaged over weights, not divided by layers, not scaled: the most common error of other libraries."""
    objective, phi = free_energy(problem())
    mu, rho = phi.chunk(2, -1)
    exact = kl_divergence(td.Normal(mu, softplus(rho)), normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(objective.complexity(phi, objective.noise(0)[0]), exact)
    assert float(exact) > 1


def test_the_complexity_of_two_layers_is_the_sum_of_theirs():
    layer = [nn.Linear(3, 3) for _ in range(3)]
    sizes = []
    for count in (1, 2, 3):
        p = problem(nn.Sequential(*layer[:count], nn.Linear(3, 1)).double())
        objective, _ = free_energy(p)
        mu, rho = torch.full((1, p.dim), 0.3, dtype=f64), torch.full((1, p.dim), -2.0, dtype=f64)
        sizes.append(float(objective.complexity(torch.cat([mu, rho], 1), objective.noise(0)[0])))
    assert sizes[1] - sizes[0] == pytest.approx(sizes[2] - sizes[1])
    assert sizes[0] / (12 + 4) == pytest.approx((sizes[1] - sizes[0]) / 12)


def test_monte_carlo_complexity_agrees_with_the_closed_form():
    """A mixture of two equal normals is one normal, but is evaluated by draws."""
    closed, phi = free_energy(problem(prior=Normal(0.6)))
    sampled, _ = free_energy(problem(prior=ScaleMixture(0.5, 0.6, 0.6)), samples=50)
    noise = [sampled.noise(step)[0] for step in range(400)]
    values = torch.cat([sampled.complexity(phi, n) for n in noise])
    exact = float(closed.complexity(phi, closed.noise(0)[0]))
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - exact) < 4 * error
    assert error < 0.01 * exact
    assert torch.equal(closed.complexity(phi, noise[0]), closed.complexity(phi, noise[1]))  # exact: no noise in it


@pytest.mark.parametrize("kind", ["uniform", "geometric"])
def test_an_epoch_of_minibatches_adds_up_to_the_free_energy(kind):
    """(N/M) times the sum of the losses of an epoch, with the same draws, is VFE on all rows; likewise gradients."""
    p = problem(prior=ScaleMixture(0.25, 1.5, 0.1), temperature=cr.Tempering(0.5, 2.0))
    objective, phi = free_energy(p, per_epoch=5, kl_weights=kind, samples=3)
    full, _ = free_energy(p, samples=3)
    noise = objective.noise(0)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).split(8)
    batches = [evaluate(objective, phi, noise, rows, step=35 + i) for i, rows in enumerate(order)]  # the eighth epoch
    parts, gradient = evaluate(full, phi, noise)
    torch.testing.assert_close(sum(b[0] for b in batches) * 40 / 5, 40 * parts)
    torch.testing.assert_close(sum(b[1] for b in batches) / 5, gradient)
    complexities = [float(b[0][0, 1]) for b in batches]
    if kind == "uniform":
        assert complexities == pytest.approx([complexities[0]] * 5)
    else:
        assert all(a == pytest.approx(2 * b) for a, b in itertools.pairwise(complexities))


def test_the_misfit_is_a_mean_over_the_batch_and_the_complexity_is_divided_by_n():
    """Data seen twice: the same misfit, half the complexity."""
    once = problem()
    twice = cr.Problem(once.layout.module, (torch.cat([X, X]), torch.cat([Y, Y])), Gaussian(0.3), Normal())
    parts = []
    for p in (once, twice):
        objective, phi = free_energy(p)
        parts.append(evaluate(objective, phi, objective.noise(0))[0][0])
    torch.testing.assert_close(parts[0] / parts[1], torch.tensor([1.0, 2.0], dtype=f64))


@pytest.mark.parametrize("kind", ["uniform", "geometric"])
@pytest.mark.parametrize("batches", [1, 2, 3, 10, 469, 5000])
def test_kl_weights_sum_to_one(kind, batches):
    weights = [kl_weight(kind, i, batches) for i in range(batches)]
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(weights))


def test_geometric_kl_weights_are_those_of_blundell():
    """pi_i = 2^(M-i) / (2^M - 1) for i from 1 to M; uniform ones 1/M."""
    for m in (1, 4, 30):
        exact = [2 ** (m - i) / (2**m - 1) for i in range(1, m + 1)]
        assert [kl_weight("geometric", i, m) for i in range(m)] == pytest.approx(exact, rel=1e-12)
        assert {kl_weight("uniform", i, m) for i in range(m)} == {1 / m}


def test_kl_weights_restart_every_epoch():
    objective, _ = free_energy(problem(), per_epoch=4, kl_weights="geometric")
    weights = [objective.controls(step)[0] for step in range(12)]
    assert weights[:4] == weights[4:8] == weights[8:]
    assert weights[:4] == pytest.approx([4 * 2 ** (4 - i) / 15 for i in (1, 2, 3, 4)])


def test_the_warm_up_rises_and_ends_at_exactly_one():
    objective, _ = free_energy(problem(), kl_warmup=9)
    weights = [objective.controls(step)[0] for step in range(40)]
    assert weights[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert weights[9:] == [1.0] * 31
    assert free_energy(problem())[0].controls(0) == (1.0,)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: Normal(0.6 * s),
        lambda s: Normal(0.6 * s, loc=0.2, fan_in=True),
        lambda s: Laplace(0.6 * s),
        lambda s: StudentT(4.0, 0.6 * s, fan_in=True),
        lambda s: ScaleMixture(0.25, 1.5 * s, 0.1 * s),
    ],
    ids=["normal", "normal by fan-in", "laplace", "student-t by fan-in", "scale mixture"],
)
def test_a_learned_factor_multiplies_the_scale_of_the_prior(make):
    learned, phi = free_energy(problem(prior=make(1.0)), samples=4, members=2, learn_prior_scale=True)
    for member in range(2):
        factor = float(phi[member, -1].exp())
        fixed, _ = free_energy(problem(prior=make(factor)), samples=4)
        noise = learned.noise(0)[0]
        mine = fixed.complexity(phi[member : member + 1, :-1], noise[member : member + 1])
        torch.testing.assert_close(learned.complexity(phi, noise)[member], mine[0])


def test_each_group_of_the_prior_has_its_own_factor():
    prior = {"0.*": Normal(0.5), "*": Laplace(0.8)}
    objective, phi = free_energy(problem(prior=prior), learn_prior_scale=True)
    assert phi.shape[1] == 2 * objective.problem.dim + 2
    factors = phi[0, -2:].exp().tolist()
    scaled = {"0.*": Normal(0.5 * factors[0]), "*": Laplace(0.8 * factors[1])}
    fixed, _ = free_energy(problem(prior=scaled))
    noise = objective.noise(0)[0]
    torch.testing.assert_close(objective.complexity(phi, noise), fixed.complexity(phi[:, :-2], noise))
