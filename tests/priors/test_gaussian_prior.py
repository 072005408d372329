"""A posterior as the next prior: densities against torch.distributions, moments, closed forms, sequential inference."""

import json
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import credibly as cr
from chains import assert_moments
from conftest import mlp, randn
from credibly.gaussians.block_precisions import Blocks, Kronecker
from credibly.gaussians.families import FullRank, LowRank, MeanField
from credibly.gaussians.precisions import Dense, Diagonal, LowRankPlusDiagonal
from credibly.inference.sampling.recording import FolderRecorder
from credibly.inference.training.reparameterisation import LayerNoise
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.bbb import FreeEnergy
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.gaussian import GaussianPrior, signature

DOUBLE = torch.float64
DIM = 8


def spd(dim, seed):
    root = randn(dim, dim, seed=seed, dtype=DOUBLE)
    return root @ root.T + 0.3 * torch.eye(dim, dtype=DOUBLE)


def kronecker(rows, columns, seed):
    left, right = (torch.linalg.eigh(spd(n, seed + n)).eigenvectors for n in (rows, columns))
    scale = 0.5 + randn(columns, seed=seed + 1, dtype=DOUBLE).abs()
    return Kronecker(left, right, 0.4 + randn(rows, columns, seed=seed, dtype=DOUBLE).square(), scale)


def precisions():
    std = 0.2 + randn(DIM, seed=1, dtype=DOUBLE).abs()
    return {
        "diagonal": Diagonal(std**-2),
        "low-rank": LowRankPlusDiagonal.of(std, randn(DIM, 3, seed=2, dtype=DOUBLE)),
        "dense": Dense.of_root(torch.linalg.cholesky(spd(DIM, 3))),
        "dense by precision": Dense.of_precision(spd(DIM, 4)),
        "dense by covariance": Dense.of_covariance(spd(DIM, 5)),
        "blocks": Blocks(kronecker(2, 3, 6), Diagonal(torch.tensor([0.7, 5.0], dtype=DOUBLE))),
        "blocks permuted": Blocks(kronecker(2, 3, 6), Dense.of_root(torch.linalg.cholesky(spd(2, 7))), indices=INDICES),
    }


INDICES = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
STRUCTURES = ["diagonal", "low-rank", "dense", "dense by precision", "dense by covariance", "blocks", "blocks permuted"]


def covariance_of(name):
    """The covariance by the definition of each structure."""
    std = 0.2 + randn(DIM, seed=1, dtype=DOUBLE).abs()
    factor = randn(DIM, 3, seed=2, dtype=DOUBLE)
    if name.startswith("blocks"):
        block = kronecker(2, 3, 6)
        scale = torch.kron(torch.eye(2, dtype=DOUBLE), torch.diag(1 / block.scale))
        basis = scale @ torch.kron(block.left.contiguous(), block.right.contiguous())
        second = torch.diag(torch.tensor([1 / 0.7, 1 / 5.0], dtype=DOUBLE)) if name == "blocks" else spd(2, 7)
        whole = torch.block_diag(basis @ torch.diag(1 / block.values.flatten()) @ basis.T, second)
        if name == "blocks":
            return whole
        moved = torch.zeros_like(whole)
        moved[INDICES.unsqueeze(1), INDICES] = whole
        return moved
    return {
        "diagonal": torch.diag(std**2),
        "low-rank": torch.diag(std**2) + factor @ factor.T,
        "dense": spd(DIM, 3),
        "dense by precision": torch.linalg.inv(spd(DIM, 4)),
        "dense by covariance": spd(DIM, 5),
    }[name]


def linear(dim=DIM, dtype=DOUBLE):
    return cr.Problem(
        nn.Linear(dim - 1, 1).to(dtype),
        data=(randn(6, dim - 1, dtype=dtype), randn(6, seed=1, dtype=dtype)),
        likelihood=Gaussian(0.5),
        prior=cr.priors.Normal(),
    )


def bound(name):
    p = linear()
    loc = randn(DIM, seed=9, dtype=DOUBLE)
    return GaussianPrior(loc, precisions()[name], signature(p.layout)).bind(p.layout), loc


@pytest.mark.parametrize("name", STRUCTURES)
def test_log_prob_is_that_of_torch(name):
    prior, loc = bound(name)
    points = randn(5, DIM, seed=4, dtype=DOUBLE) * 2
    expected = MultivariateNormal(loc, covariance_of(name)).log_prob(points)
    torch.testing.assert_close(prior.log_prob(points), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STRUCTURES)
def test_parts_of_the_precision(name):
    tested, covariance = precisions()[name], covariance_of(name)
    precision = torch.linalg.inv(covariance)
    torch.testing.assert_close(tested.matrix(), precision, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(tested.diagonal(), precision.diagonal(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(tested.variance(), covariance.diagonal(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(tested.log_det(), torch.logdet(precision), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", STRUCTURES)
def test_draws_have_its_moments(name):
    prior, loc = bound(name)
    count = 40_000
    draws = prior.sample(count, torch.Generator().manual_seed(0))
    covariance = covariance_of(name)
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (draws - loc).T, upper=False)
    assert float(z.mean(1).abs().max()) < 4 / math.sqrt(count)
    # Entries of a sample covariance of N(0, I) have standard deviation sqrt(1/S), sqrt(2/S) on the diagonal.
    assert float((torch.cov(z) - torch.eye(DIM, dtype=DOUBLE)).abs().max()) < 4.5 * math.sqrt(2 / count)
    torch.testing.assert_close(prior.std, covariance.diagonal().sqrt())
    assert torch.equal(prior.loc, loc)


@pytest.mark.parametrize("family", [MeanField(), LowRank(2), FullRank()], ids=["mean-field", "low-rank", "full-rank"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_expected_log_prob_by_brute_force_and_by_draws(name, family):
    prior, loc = bound(name)
    phi = 0.5 * randn(2, family.size(DIM), seed=7, dtype=DOUBLE)
    mean, variance, factor = family.loc(phi, DIM), family.variance(phi, DIM), family.factor(phi)
    value = prior.expected_log_prob(mean, variance, torch.zeros(()), None, factor)
    precision = torch.linalg.inv(covariance_of(name))
    for m in range(2):
        trace = torch.trace(precision @ family.covariance(phi, DIM)[m])
        exact = MultivariateNormal(loc, covariance_of(name)).log_prob(mean[m]) - 0.5 * trace
        torch.testing.assert_close(value[m], exact, rtol=1e-9, atol=1e-9)
    noise = randn(2, 20_000, family.noise_size(DIM), seed=8, dtype=DOUBLE)
    seen = prior.log_prob(family.draw(phi, noise))
    error = seen.std(1) / math.sqrt(20_000)
    assert bool(((seen.mean(1) - value).abs() < 4.5 * error).all())


def posterior_of(family, phi, problem):
    return GaussianPosterior(Model.of(problem), family, phi, cr.BayesByBackprop().record(problem, 0, {}))


@pytest.mark.parametrize("family", [MeanField(), LowRank(3), FullRank()], ids=["mean-field", "low-rank", "full-rank"])
def test_a_gaussian_posterior_is_its_own_prior_exactly(family):
    p = linear()
    phi = 0.7 * randn(1, family.size(DIM), seed=3, dtype=DOUBLE)
    posterior = posterior_of(family, phi, p)
    prior = posterior.as_prior().bind(p.layout)
    points = posterior.sample(6, seed=1)
    exact = MultivariateNormal(posterior.loc[0], posterior.covariance()[0]).log_prob(points)
    torch.testing.assert_close(prior.log_prob(points), exact, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(prior.std, posterior.std[0])
    # KL[q || q] = 0: the free energy's complexity vanishes where q is the prior.
    again = cr.Problem(
        nn.Linear(DIM - 1, 1).double(), data=(p.x, p.y), likelihood=Gaussian(0.5), prior=posterior.as_prior()
    )
    method = cr.BayesByBackprop(estimator="weights")
    energy = FreeEnergy(again, family, again.n, method, LayerNoise(""), seed=0, per_epoch=1)
    noise = randn(1, 1, family.noise_size(DIM), dtype=DOUBLE)
    assert abs(float(energy.complexity(phi, noise))) < 1e-9


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_a_laplace_posterior_is_its_own_prior_exactly(structure):
    x = randn(30, 3, dtype=DOUBLE)
    p = cr.Problem(
        mlp(3, 4, 2, dtype=DOUBLE),
        data=(x, (x[:, 0] > 0.3).long()),
        likelihood=Categorical(),
        prior=cr.priors.Normal(0.8),
    )
    posterior = cr.Laplace(structure=structure, steps=80, compile=False).fit(p, seed=0)
    prior = posterior.as_prior().bind(p.layout)
    points = posterior.sample(5, seed=1)
    exact = MultivariateNormal(posterior.loc, posterior.covariance()).log_prob(points)
    torch.testing.assert_close(prior.log_prob(points), exact, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(prior.std, posterior.std)
    assert prior.is_normal == (structure == "diag")
    some = cr.Laplace(structure=structure, random="last layer", steps=5, compile=False).fit(p, seed=0)
    with pytest.raises(cr.InputError, match="covers 10 of 26 parameters"):
        some.as_prior()


@pytest.mark.nightly  # `credibly.continual` does the same, and its tests check it
def test_online_laplace_on_a_linear_model_is_one_batch_fit(conjugate):
    """Sequential updates end at the posterior of all rows, up to the optimiser's tolerance."""
    prior, init = cr.priors.Normal(conjugate.prior), "network"
    for x, y in parts(conjugate):
        problem = cr.Problem(conjugate.net, data=(x, y), likelihood=Gaussian(conjugate.noise), prior=prior)
        method = cr.Laplace(structure="full", steps=2500, batch_size=len(x), lr=0.05, init=init, compile=False)
        posterior = method.fit(problem, seed=1)
        prior, init = posterior.as_prior(), posterior.loc.unsqueeze(0)
    mean, covariance = conjugate.exact()
    torch.testing.assert_close(posterior.loc, mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(posterior.covariance(), covariance, rtol=1e-8, atol=1e-10)


# -- sequential inference


def parts(conjugate):
    """The rows in three unequal parts."""
    return [(conjugate.x[a:b], conjugate.y[a:b]) for a, b in ((0, 7), (7, 18), (18, 30))]


@pytest.mark.nightly
def test_sequential_updates_are_one_batch_fit(conjugate):
    """Full rank on a linear model: each posterior becomes the next prior, and the last is that of all rows.

    The optimum of every fit is exact; what remains is gradient noise. In units of the posterior's standard deviation it
    is 1/sqrt(K) for K draws; the end of the cosine schedule averages over 100 steps or more, and three fits add up.
    """
    samples, fits = 256, 3
    tolerance = 4 * math.sqrt(fits / (samples * 100))
    mean, covariance = conjugate.exact()
    prior, init = cr.priors.Normal(conjugate.prior), "network"
    for x, y in parts(conjugate):
        problem = cr.Problem(conjugate.net, data=(x, y), likelihood=Gaussian(conjugate.noise), prior=prior)
        method = cr.BayesByBackprop(
            family="full-rank", samples=samples, steps=1500, lr=0.03, init=init, init_scale=0.3, compile=False
        )
        posterior = method.fit(problem, seed=1)
        prior, init = posterior.as_prior(), posterior
    white = torch.linalg.inv(torch.linalg.cholesky(covariance))
    assert float((white @ (posterior.loc[0] - mean)).abs().max()) < tolerance
    relative = white @ posterior.covariance()[0] @ white.T
    torch.testing.assert_close(relative, torch.eye(4, dtype=DOUBLE), rtol=0, atol=2 * tolerance)
    # The posterior of the last rows alone is much further away.
    x, y = parts(conjugate)[-1]
    lone = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
    precision = lone.T @ lone / conjugate.noise**2 + torch.eye(4, dtype=DOUBLE) / conjugate.prior**2
    forgetful = torch.linalg.solve(precision, lone.T @ y / conjugate.noise**2)
    assert float((white @ (forgetful - mean)).abs().max()) > 10 * tolerance


def test_the_batch_posterior_is_exactly_the_optimum_of_the_last_update(conjugate):
    """The free energy of the second rows (closed form for a linear model) has zero gradient at the posterior of all."""
    prior, names = exact_prior(conjugate, 12), signature(conjugate.problem().layout)
    x, y = conjugate.x[12:], conjugate.y[12:]
    problem = cr.Problem(conjugate.net, data=(x, y), likelihood=Gaussian(conjugate.noise), prior=prior)
    assert names == prior.names
    mean, covariance = conjugate.exact()
    root = torch.linalg.cholesky(covariance)
    rows, columns = torch.tril_indices(4, 4)
    packed = torch.where(rows == columns, torch.log(torch.expm1(root[rows, columns])), root[rows, columns])
    phi = torch.cat([mean, packed]).unsqueeze(0).requires_grad_()
    energy = FreeEnergy(problem, FullRank(), problem.n, cr.BayesByBackprop(), LayerNoise(""), seed=0, per_epoch=1)
    loc, scale = FullRank().parts(phi)
    design = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
    misfit = (y - design @ loc[0]).square().sum() + (design @ scale[0]).square().sum()
    total = energy.complexity(phi, torch.zeros(1, 1, 4, dtype=DOUBLE)).sum() + 0.5 * misfit / conjugate.noise**2
    (slope,) = torch.autograd.grad(total, phi)
    assert float(slope.abs().max()) < 1e-8


def exact_prior(conjugate, rows):
    """The exact posterior of the first rows, as a prior."""
    design = torch.cat([conjugate.x[:rows], torch.ones(rows, 1, dtype=DOUBLE)], 1)
    precision = design.T @ design / conjugate.noise**2 + torch.eye(4, dtype=DOUBLE) / conjugate.prior**2
    mean = torch.linalg.solve(precision, design.T @ conjugate.y[:rows] / conjugate.noise**2)
    return GaussianPrior(mean, Dense.of_precision(precision), signature(conjugate.problem().layout))


def test_sequential_densities_add_up_exactly(conjugate):
    """With the exact posterior of the first rows as prior, the second density is that of all rows, up to rounding."""
    prior, second = exact_prior(conjugate, 12), (conjugate.x[12:], conjugate.y[12:])
    whole = conjugate.problem()
    second_problem = cr.Problem(conjugate.net, data=second, likelihood=Gaussian(conjugate.noise), prior=prior)
    points = prior.loc + 0.3 * randn(4, 4, dtype=DOUBLE)
    a, b = whole.log_density_and_grad(points), second_problem.log_density_and_grad(points)
    torch.testing.assert_close(b.gradient, a.gradient, rtol=1e-9, atol=1e-9)
    gap = b.log_density - a.log_density  # the log evidence of the first rows, the same at every point
    torch.testing.assert_close(gap, gap[:1].expand(4), rtol=0, atol=1e-8)


def test_samplers_take_it(conjugate):
    """HMC on the second half under the exact posterior of the first: moments of the posterior of all rows."""
    problem = cr.Problem(
        conjugate.net,
        data=(conjugate.x[12:], conjugate.y[12:]),
        likelihood=Gaussian(conjugate.noise),
        prior=exact_prior(conjugate, 12),
    )
    method = cr.HMC(chains=32, draws=100, warmup=80, mass="diagonal", jitter=0.3, init="prior", compile=False)
    assert_moments(method.fit(problem, seed=0).draws, *conjugate.exact())


# -- draws


def test_draws_match_moments():
    p = linear(4)
    draws = randn(3, 50, 4, dtype=DOUBLE) @ torch.linalg.cholesky(spd(4, 1)).T + 2.0
    posterior = cr.DrawsPosterior(Model.of(p), draws, cr.HMC().record(p, 0, {}))
    flat = draws.flatten(0, 1)
    full, diag = posterior.as_prior(family="full"), posterior.as_prior()
    torch.testing.assert_close(torch.linalg.inv(full.precision.matrix()), torch.cov(flat.T))
    torch.testing.assert_close(diag.precision.variance(), flat.var(0))
    torch.testing.assert_close(full.loc, flat.mean(0))
    with pytest.raises(cr.InputError, match="family must be one of 'diag', 'full', got 'half'"):
        posterior.as_prior(family="half")
    few = cr.DrawsPosterior(Model.of(p), draws[:1, :4], posterior.record)
    with pytest.raises(cr.InputError, match="4 draws of hmc do not determine the covariance of 4 parameters"):
        few.as_prior(family="full")


# -- refusals


def test_points_mixtures_dropout_and_densities_are_refused():
    x, y = randn(20, 3), randn(20, seed=1)
    p = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    for method in (cr.MLE(steps=2), cr.MAP(steps=2)):
        with pytest.raises(cr.InputError, match="as_prior: m.* is a single point, which has no variance"):
            method.fit(p, seed=0).as_prior()
    with pytest.raises(cr.InputError, match="mixture of 3 Gaussians"):
        cr.BayesByBackprop(members=3, steps=2).fit(p, seed=0).as_prior()
    with pytest.raises(cr.InputError, match="posterior of dropout is not a Gaussian"):
        cr.MCDropout(insert="*", steps=2).fit(p, seed=0).as_prior()
    pruned = cr.BayesByBackprop(steps=2).fit(p, seed=0).prune(0.5)
    with pytest.raises(cr.InputError, match="precision must have a positive finite variance for every parameter"):
        pruned.as_prior()
    density = cr.HMC(chains=2, draws=5, warmup=20, compile=False).fit(
        cr.Density(lambda t: -0.5 * t.square().sum(-1), 2), seed=0
    )
    with pytest.raises(cr.InputError, match="which has no network"):
        density.as_prior()


def test_a_prior_of_another_network_is_refused_with_both_named():
    x, y = randn(20, 3), randn(20, seed=1)
    p = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    prior = cr.BayesByBackprop(steps=2).fit(p, seed=0).as_prior()
    with pytest.raises(
        cr.InputError, match=r"another network: '0.weight' has shape \(4, 3\) there, shape \(5, 3\) here"
    ):
        cr.Problem(mlp(3, 5, 1), data=(x, y), likelihood=Gaussian(0.5), prior=prior)
    with pytest.raises(cr.InputError, match="'likelihood.log_scale' has no such tensor there, shape .* here"):
        cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(), prior=prior)
    with pytest.raises(cr.InputError, match="'0.weight' has shape .* there, no such tensor here"):
        cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=prior, random="2.*")


def test_methods_that_need_another_prior_say_so():
    x, y = randn(20, 3), randn(20, seed=1)
    p = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    prior = cr.BayesByBackprop(steps=2).fit(p, seed=0).as_prior()
    next_one = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=prior)
    with pytest.raises(cr.InputError, match="prior must be Normal with mean zero for MC-Dropout"):
        cr.MCDropout(insert="*", steps=2).fit(next_one, seed=0)
    with pytest.raises(cr.InputError, match="learn_prior_scale"):
        cr.BayesByBackprop(steps=2, learn_prior_scale=True).fit(next_one, seed=0)
    assert cr.DeepEnsemble(members=2, anchored=True, steps=2).fit(next_one, seed=0).draws.shape[0] == 2
    low = cr.BayesByBackprop(family="low-rank", rank=2, steps=2).fit(p, seed=0).as_prior()
    correlated = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=low)
    with pytest.raises(cr.InputError, match="anchored must be False unless the prior is Normal"):
        cr.DeepEnsemble(members=2, anchored=True, steps=2).fit(correlated, seed=0)


def test_a_warm_start_needs_a_posterior_of_the_same_family_members_and_network():
    x, y = randn(20, 3), randn(20, seed=1)
    p = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    posterior = cr.BayesByBackprop(steps=30).fit(p, seed=0)
    still = cr.BayesByBackprop(steps=1, lr=1e-12, init=posterior).fit(p, seed=0)
    torch.testing.assert_close(still.phi, posterior.phi, rtol=0, atol=1e-6)
    assert "GaussianPosterior" in still.record.settings["init"]
    with pytest.raises(cr.InputError, match="init must be a posterior of 1 x LowRank.*, got .*MeanField"):
        cr.BayesByBackprop(steps=1, family="low-rank", init=posterior).fit(p, seed=0)
    with pytest.raises(cr.InputError, match="init must be a posterior of 2 x MeanField.*, got .*1 x MeanField"):
        cr.BayesByBackprop(steps=1, members=2, init=posterior).fit(p, seed=0)
    other = cr.Problem(mlp(3, 5, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    with pytest.raises(
        cr.InputError, match=r"init must be a posterior of this network, got one with \('0.weight', \(4, 3\)\)"
    ):
        cr.BayesByBackprop(steps=1, init=posterior).fit(other, seed=0)


# -- the record, the store, resuming


def test_it_is_recorded_saved_and_recognised(tmp_path):
    x, y = randn(40, 3), (randn(40, seed=1) > 0).long()
    first = cr.Problem(mlp(3, 4, 2), data=(x[:20], y[:20]), likelihood=Categorical(), prior=cr.priors.Normal())
    posterior = cr.BayesByBackprop(steps=20).fit(first, seed=0, out=tmp_path / "first")
    prior = posterior.as_prior()
    second = cr.Problem(mlp(3, 4, 2), data=(x[20:], y[20:]), likelihood=Categorical(), prior=prior)
    fitted = cr.BayesByBackprop(steps=20).fit(second, seed=0, out=tmp_path / "second")
    facts = fitted.record.prior
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["structure"], facts["dim"], facts["source"]) == ("diagonal", first.dim, "bbb")
    loaded = cr.load(tmp_path / "second", mlp(3, 4, 2))
    assert loaded.record.prior == facts
    again = cr.load(tmp_path / "first", mlp(3, 4, 2)).as_prior()
    assert again.checksum() == prior.checksum() == facts["checksum"]
    assert cr.BayesByBackprop(steps=21).fit(first, seed=0).as_prior().checksum() != prior.checksum()
    assert torch.equal(loaded.predict(x).probabilities, fitted.predict(x).probabilities)


class Crash(BaseException):
    """Simulates the end of the process."""


def test_a_stopped_sampler_resumes_only_under_the_same_prior(tmp_path, monkeypatch):
    x, y = randn(40, 3), randn(40, seed=1)
    base = cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    one, other = (cr.BayesByBackprop(steps=n).fit(base, seed=0).as_prior() for n in (20, 30))

    def problem(prior):
        return cr.Problem(mlp(3, 4, 1), data=(x, y), likelihood=Gaussian(0.5), prior=prior)

    method = cr.HMC(chains=2, draws=8, warmup=20, trajectory_length=0.1, max_steps=8, init="prior", compile=False)
    whole = method.fit(problem(one), seed=0)
    folder = tmp_path / "run"
    original = FolderRecorder.checkpoint

    def checkpoint(self, process, **how):
        original(self, process, **how)
        raise Crash

    monkeypatch.setattr(FolderRecorder, "checkpoint", checkpoint)
    with pytest.raises(Crash):
        method.fit(problem(one), seed=0, out=folder)
    monkeypatch.undo()
    with pytest.raises(cr.StoreError, match="was started with another problem: prior is .*GaussianPrior"):
        cr.resume(folder, problem(other))
    with pytest.raises(cr.StoreError, match="prior of .* is a posterior, of which the folder stores only a checksum"):
        cr.resume(folder)
    assert torch.equal(cr.resume(folder, problem(one)).draws, whole.draws)
