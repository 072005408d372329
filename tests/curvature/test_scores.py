"""Sampled and empirical Fisher information, and likelihoods with a density of their own, against brute force."""

import math
from dataclasses import dataclass

import pytest
import torch
from curvature_cases import CASES, CLASSES, DOUBLE, REAL, X
from torch import nn

import credibly as cr
from conftest import mlp
from credibly.core.inputs import blank_row, describe
from credibly.curvature import Fisher, choose_names, curvature_blocks, find_parts
from credibly.inference.method import initial
from credibly.likelihoods import Categorical, Gaussian


def problem_of(name, repeats=1):
    """Rows are repeated for the sampled Fisher: many labels for each of seven rows, in few passes."""
    if name == "pixels":
        net = nn.Sequential(mlp(3, 4, 12, dtype=DOUBLE), nn.Unflatten(1, (2, 2, 3)))
        likelihood, y = Categorical(), torch.arange(28).reshape(7, 2, 2) % 3
    else:
        likelihood, width, y = CASES[name]
        net = mlp(3, 4, width, dtype=DOUBLE)
    return repeated(net, likelihood, y, repeats)


def repeated(net, likelihood, y, repeats):
    x, y = X.repeat(repeats, 1), y.repeat(repeats, *(1,) * (y.ndim - 1))
    return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.8))


def parts_of(problem):
    row = blank_row(describe(problem.x), problem.device)
    return find_parts(problem.layout, choose_names(problem.layout, None, row), row)


def likelihood_terms(problem, structure, fisher):
    """The likelihood's curvature of the network's parameters, by blocks."""
    theta, parts = initial(problem, "network", 1, 0)[0], parts_of(problem)
    blocks = curvature_blocks(problem, theta, structure, parts, fisher=fisher)
    return [b.likelihood_precision() for b in blocks if b.source != "likelihood"], theta, parts


@pytest.mark.parametrize("name", [*CASES, "pixels"])
def test_empirical_fisher_is_the_sum_of_outer_products_of_row_gradients(name):
    problem = problem_of(name)
    (found,), theta, parts = likelihood_terms(problem, "full", Fisher("empirical"))

    def log_likelihoods(t):
        rows = problem.log_likelihood_rows(t.unsqueeze(0), problem.x, problem.y)
        return rows.reshape(len(X), -1).sum(1)

    gradients = torch.func.jacrev(log_likelihoods)(theta)[:, parts.indices]
    torch.testing.assert_close(found, gradients.mT @ gradients, rtol=1e-8, atol=1e-9)
    diagonal = torch.cat(likelihood_terms(problem, "diag", Fisher("empirical"))[0])
    torch.testing.assert_close(diagonal, gradients.square().sum(0), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [*CASES, "pixels"])
def test_sampled_fisher_tends_to_the_exact_one(name):
    """The error of M labels per row falls as M^-1/2: it is unbiased."""
    problem = problem_of(name, repeats=100)
    (exact,), *_ = likelihood_terms(problem, "full", Fisher())

    def error(samples):
        """The root mean square over four seeds."""
        found = [likelihood_terms(problem, "full", Fisher("sampled", samples, seed=s))[0][0] for s in range(4)]
        return float(torch.stack([(f - exact).norm() / exact.norm() for f in found]).square().mean().sqrt())

    few, many = error(1), error(25)
    assert many < 0.06
    assert many < few / 2.5  # 5 on average


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_every_structure_takes_the_sampled_fisher(structure):
    problem = problem_of("categorical", repeats=500)
    exact, *_ = likelihood_terms(problem, structure, Fisher())
    sampled, *_ = likelihood_terms(problem, structure, Fisher("sampled", 8, seed=1))
    for a, b in zip(sampled, exact, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.05


def test_kronecker_factors_of_the_empirical_fisher():
    """B is the sum of g g' over the gradients of the row's log likelihood in the layer's outputs."""
    problem = problem_of("categorical")
    theta, parts = initial(problem, "network", 1, 0)[0], parts_of(problem)
    last = curvature_blocks(problem, theta, "kron", parts, fisher=Fisher("empirical"))[-1]
    p = problem.layout.call(theta, X).softmax(-1).detach()
    g = torch.nn.functional.one_hot(CLASSES, 3) - p
    torch.testing.assert_close(last.factors()[0], g.mT @ g)


def test_the_choice_is_recorded_and_survives_the_disk(tmp_path):
    problem = problem_of("categorical")
    for fisher, samples in (("exact", 1), ("sampled", 5), ("empirical", 1)):
        method = cr.Laplace(start="network", random="last layer", fisher=fisher, fisher_samples=samples)
        posterior = method.fit(problem, seed=4)
        posterior.save(tmp_path / fisher)
        loaded = cr.load(tmp_path / fisher, mlp(3, 4, 3, dtype=DOUBLE))
        assert loaded.record.settings["fisher"] == fisher
        assert loaded.record.settings["fisher_samples"] == samples
        assert torch.equal(loaded.std, posterior.std)
        assert torch.equal(method.fit(problem, seed=4).std, posterior.std)
    assert not torch.equal(method.fit(problem, seed=4).std, cr.Laplace(start="network").fit(problem).std)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"fisher": "true"}, "fisher must be one of 'exact', 'sampled', 'empirical', got 'true'"),
        ({"fisher": "sampled", "fisher_samples": 0}, "fisher_samples must be a positive integer, got 0"),
        ({"fisher_samples": 3}, 'fisher_samples must be 1 unless fisher="sampled", got 3'),
        ({"fisher": "empirical", "tune": "evidence", "tune_noise": True}, "tune_noise must be False with fisher"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(cr.InputError, match=text):
        cr.Laplace(**settings)


# -- likelihoods with a density of their own ---------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Sharp(Categorical):
    """Classes with probabilities softmax(4 f)."""

    def log_prob(self, output, y, extra):
        return super().log_prob(4 * output, y, extra)


@dataclass(frozen=True)
class Correlated(Gaussian):
    """Two targets with correlated noise."""

    def log_prob(self, output, y, extra):
        noise = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=output.dtype)
        return torch.distributions.MultivariateNormal(output, noise).log_prob(y)


@dataclass(frozen=True)
class Exponential(Gaussian):
    """A location that the density ignores, since a fixed scale takes the output itself."""

    def location_scale(self, output, extra):
        location, scale = super().location_scale(output, extra)
        return location.exp(), scale


OWN = {
    "sharp": (Sharp(), 3, CLASSES),
    "correlated": (Correlated(0.5), 2, torch.stack([REAL, REAL**2], 1)),
    "location": (Exponential(0.5), 1, REAL),
}


@pytest.mark.parametrize("name", OWN)
def test_an_overridden_density_has_its_own_curvature(name):
    """sum_i J_i' H_i J_i with H_i the Hessian of -log_prob, by torch.func."""
    likelihood, width, y = OWN[name]
    problem = cr.Problem(
        mlp(3, 4, width, dtype=DOUBLE), data=(X, y), likelihood=likelihood, prior=cr.priors.Normal(1.0)
    )
    (found,), theta, parts = likelihood_terms(problem, "full", Fisher())
    jacobian = torch.func.jacrev(lambda t: problem.layout.call(t, X))(theta)[..., parts.indices]
    expected = torch.zeros_like(found)
    for i in range(len(X)):

        def minus(f, i=i):
            return -problem.likelihood.log_prob(f.reshape(1, 1, -1), problem.y[i : i + 1], {}).sum()

        hessian = torch.func.hessian(minus)(problem.layout.call(theta, X[i : i + 1])[0].detach())
        expected += jacobian[i].mT @ hessian @ jacobian[i]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_an_overridden_density_agrees_with_the_posterior():
    """One weight, integrated on a grid: Laplace with the softmax of the parent class would be four times too wide."""
    x = torch.cat([torch.ones(40, 1), -torch.ones(40, 1)]).double()
    y = ((torch.arange(80) % 4 == 0) ^ (x[:, 0] > 0)).long()  # one in four is of the other class
    net = nn.Linear(1, 2, bias=False).double()
    problem = cr.Problem(net, data=(x, y), likelihood=Sharp(), prior=cr.priors.Normal(1.0))
    posterior = cr.Laplace(structure="full", steps=400, lr=0.05).fit(problem, seed=0)
    w = torch.linspace(-3, 3, 2001, dtype=DOUBLE)
    # The log likelihood depends on the difference d of the weights alone, with prior N(0, 2).
    log_p = 60 * nn.functional.logsigmoid(4 * w) + 20 * nn.functional.logsigmoid(-4 * w) - w**2 / 4
    weight = torch.softmax(log_p, 0)
    std = math.sqrt(float((weight * w**2).sum() - (weight * w).sum() ** 2))
    c = posterior.covariance()
    assert math.sqrt(float(c[0, 0] + c[1, 1] - 2 * c[0, 1])) == pytest.approx(std, rel=0.03)


def test_labels_are_drawn_only_from_the_density_itself():
    problem = cr.Problem(mlp(3, 4, 3, dtype=DOUBLE), data=(X, CLASSES), likelihood=Sharp(), prior=cr.priors.Normal())
    with pytest.raises(cr.InputError, match="fisher must be .* for Sharp, got 'sampled'.*overrides log_prob and not"):
        cr.Laplace(fisher="sampled", steps=10**9).fit(problem)

    @dataclass(frozen=True, kw_only=True)
    class WithLabels(Sharp):
        def sample(self, output, extra, generator):
            return super().sample(4 * output, extra, generator)

    problem = repeated(mlp(3, 4, 3, dtype=DOUBLE), WithLabels(), CLASSES, 500)
    (exact,), *_ = likelihood_terms(problem, "full", Fisher())
    (sampled,), *_ = likelihood_terms(problem, "full", Fisher("sampled", 8))
    assert float((sampled - exact).norm() / exact.norm()) < 0.05


def test_the_noise_of_an_overridden_gaussian_is_not_tuned():
    problem = cr.Problem(
        mlp(3, 4, 2, dtype=DOUBLE),
        data=(X, torch.stack([REAL, REAL**2], 1)),
        likelihood=Correlated(0.5),
        prior=cr.priors.Normal(),
    )
    with pytest.raises(cr.InputError, match="tune_noise: the likelihood is Correlated"):
        cr.Laplace(tune="evidence", tune_noise=True, steps=10**9).fit(problem)
