"""Bayes by Backprop: the optimum and the evidence where both are known, the objective term by term, and the posterior."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import distributions as td
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn.functional import softplus

import credibly as cr
from conftest import mlp, randn
from credibly.core.rng import MANY, stream
from credibly.gaussians.families import FullRank, LowRank, MeanField, inverse_softplus
from credibly.inference.method import initial
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.bbb import FreeEnergy, kl_weight
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture, StudentT
from credibly.storage.record import Record

f64 = torch.float64
X, Y = randn(40, 3, dtype=f64), randn(40, 3, dtype=f64).sum(1) + 0.1 * randn(40, seed=1, dtype=f64)
ORIGIN = torch.zeros(1, 4, dtype=f64)  # where fits of the conjugate model start
TEMPERATURES = [(1.0, 1.0), (0.25, 1.0), (0.5, 0.5)]
FAMILIES = {"mean-field": MeanField(), "low-rank": LowRank(2), "full-rank": FullRank()}


def scalar(value):
    return torch.tensor(value, dtype=f64)


def normal(loc, scale):
    """In float64: torch makes float32 of two plain numbers."""
    return td.Normal(scalar(loc), scale)


def problem(net=None, prior=None, likelihood=None, **kwargs):
    net = net or mlp(3, 5, 1, dtype=f64)
    return cr.Problem(net, data=(X, Y), likelihood=likelihood or Gaussian(0.3), prior=prior or Normal(), **kwargs)


def free_energy(p, chosen=None, *, per_epoch=1, **options):
    """The objective of a fit that draws weights, and a phi of no particular shape."""
    chosen, method = chosen or MeanField(), cr.BayesByBackprop(**options)
    layers = choose_estimator("weights", p, p.n, mean_field=True)
    objective = FreeEnergy(p, chosen, p.n, method, layers, seed=0, per_epoch=per_epoch)
    phi = chosen.init(0.4 * randn(method.members, p.dim, seed=2, dtype=f64), 0.2)
    phi = phi + 0.1 * randn(*phi.shape, seed=3, dtype=f64)
    if method.learn_prior_scale:
        phi = torch.cat([phi, 0.3 * randn(method.members, p.prior.groups, seed=4, dtype=f64)], 1)
    return objective, phi


def evaluate(objective, phi, noise, rows=None, step=0):
    """Parts (M, 2) and gradient (M, P) of a step."""
    p, figures = objective.problem, torch.tensor(objective.controls(step), dtype=f64)
    return objective.evaluate(phi, (), p.x, p.y, rows, noise, figures)


def posterior_of(p, phi, chosen=None):
    return GaussianPosterior(Model.of(p), chosen or MeanField(), phi, Record(method="bbb"))


# -- linear regression, where the posterior and the evidence are known -------------------------------------------------
def sigma_points(size, members=1):
    """Noise with mean 0 and covariance I exactly: the average of a quadratic over it is its expectation."""
    points = math.sqrt(size) * torch.eye(size, dtype=f64)
    return torch.cat([points, -points]).expand(members, -1, -1)


@pytest.fixture
def exact_noise(monkeypatch):
    """Fits of linear models without Monte Carlo error."""

    def noise(self, step):
        return (sigma_points(self.family.noise_size(self.problem.dim), self.options.members),)

    monkeypatch.setattr(FreeEnergy, "noise", noise)


def log_normaliser(conjugate, t_lik, t_prior):
    """log of the integral of p(D|w)^(1/T_lik) p(w)^(1/T_prior): its value at the mode times the volume around it."""
    mean, covariance = conjugate.exact(t_lik, t_prior)
    peak = td.Normal(conjugate.design @ mean, conjugate.noise).log_prob(conjugate.y).sum() / t_lik
    peak = peak + normal(0.0, conjugate.prior).log_prob(mean).sum() / t_prior
    return float(peak + 0.5 * len(mean) * math.log(2 * math.pi) + 0.5 * torch.logdet(covariance))


def best(conjugate, name, t_lik, t_prior):
    """The Gaussian of a family that minimises the free energy, in closed form."""
    mean, covariance = conjugate.exact(t_lik, t_prior)
    if name == "mean-field":
        covariance = torch.diag(1 / torch.linalg.inv(covariance).diagonal())
    return MultivariateNormal(mean, covariance_matrix=covariance)


def pack(name, q):
    """phi of that Gaussian."""
    dim = len(q.loc)
    deviations = torch.tensor([inverse_softplus(float(v)) for v in q.scale_tril.diagonal()], dtype=f64)
    if name == "mean-field":
        return torch.cat([q.loc, deviations]).unsqueeze(0)
    factor = q.scale_tril.tril(-1) + torch.diag(deviations)
    rows, columns = torch.tril_indices(dim, dim)
    return torch.cat([q.loc, factor[rows, columns]]).unsqueeze(0)


def fitted(posterior):
    return MultivariateNormal(posterior.loc[0], covariance_matrix=posterior.covariance()[0])


def test_the_normaliser_is_the_evidence(conjugate):
    """The closed form that the tests below lean on, against the density of y with the weights integrated out."""
    covariance = conjugate.prior**2 * conjugate.design @ conjugate.design.T
    covariance = covariance + conjugate.noise**2 * torch.eye(len(conjugate.y), dtype=f64)
    evidence = MultivariateNormal(torch.zeros_like(conjugate.y), covariance).log_prob(conjugate.y)
    assert log_normaliser(conjugate, 1.0, 1.0) == pytest.approx(float(evidence), abs=1e-9)


@pytest.mark.parametrize("t_lik, t_prior", TEMPERATURES)
@pytest.mark.parametrize("name", ["mean-field", "full-rank"])
def test_the_free_energy_at_the_best_gaussian(conjugate, name, t_lik, t_prior):
    """Minus the log evidence where q is exact, more by KL(q || posterior) where it cannot be; and flat there."""
    p = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    objective, _ = free_energy(p, FAMILIES[name])
    q, target = best(conjugate, name, t_lik, t_prior), best(conjugate, "full-rank", t_lik, t_prior)
    gap = float(kl_divergence(q, target))
    assert (gap > 0.1) == (name == "mean-field")
    parts, gradient = evaluate(objective, pack(name, q), (sigma_points(p.dim),))
    elbo = -p.n * float(parts.sum())
    assert elbo == pytest.approx(log_normaliser(conjugate, t_lik, t_prior) - gap, abs=1e-6)
    assert float(gradient.abs().max()) < 1e-7


@pytest.mark.parametrize("t_lik, t_prior", TEMPERATURES)
@pytest.mark.parametrize("name", FAMILIES)
def test_training_ends_at_the_best_gaussian(conjugate, exact_noise, name, t_lik, t_prior):
    """Exact mean; variance 1 / diag(precision) for the mean field, the exact covariance for the others."""
    p = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    options = {"steps": 700, "batch_size": 30, "lr": 0.06, "init": ORIGIN, "init_scale": 0.1, "compile": False}
    posterior = cr.BayesByBackprop(family=name, rank=4, estimator="weights", **options).fit(p, seed=0)
    q = best(conjugate, name, t_lik, t_prior)
    torch.testing.assert_close(posterior.loc[0], q.loc, rtol=0, atol=1e-6)
    scale = torch.outer(q.stddev, q.stddev)
    torch.testing.assert_close(posterior.covariance()[0] / scale, q.covariance_matrix / scale, rtol=0, atol=1e-6)
    assert float(kl_divergence(fitted(posterior), q)) < 1e-9
    torch.testing.assert_close(posterior.std[0], posterior.covariance()[0].diagonal().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, samples, t_lik, t_prior",
    [
        ("mean-field", 4, 1.0, 1.0),
        ("mean-field", 4, 0.25, 1.0),
        ("full-rank", 64, 1.0, 1.0),
        ("full-rank", 64, 0.5, 0.5),
    ],
)
def test_training_with_random_draws_ends_there_too(conjugate, name, samples, t_lik, t_prior):
    """As users run it. The ELBO plus KL(q || posterior) is the log evidence for any q, so that needs no allowance."""
    p = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    options = {"steps": 1500, "batch_size": 30, "lr": 0.03, "init": ORIGIN, "init_scale": 0.1, "compile": False}
    posterior = cr.BayesByBackprop(family=name, rank=4, samples=samples, **options).fit(p, seed=0)
    assert posterior.record.history["estimator"] == ("local" if name == "mean-field" else "weights")
    q = fitted(posterior)
    assert float(kl_divergence(q, best(conjugate, name, t_lik, t_prior))) < 0.005
    elbo = posterior.elbo(p, samples=4000, seed=1)
    assert float(elbo.standard_error) < 0.1
    gap = float(kl_divergence(q, best(conjugate, "full-rank", t_lik, t_prior)))
    away = float(elbo.value) + gap - log_normaliser(conjugate, t_lik, t_prior)
    assert abs(away) < 4 * float(elbo.standard_error)
    reported = posterior.record.history
    assert abs(reported["elbo"] - float(elbo.value)) < 4 * reported["elbo_standard_error"]


def test_minibatches_have_the_same_optimum(conjugate):
    """The gradient of a third of the rows, averaged over the three thirds, vanishes at the same place."""
    p = conjugate.problem()
    objective, _ = free_energy(p, FullRank(), per_epoch=3)
    phi = pack("full-rank", best(conjugate, "full-rank", 1.0, 1.0))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(10)
    gradients = [evaluate(objective, phi, (sigma_points(p.dim),), rows)[1] for rows in order]
    assert float(sum(gradients).abs().max()) < 1e-7
    assert float(gradients[0].abs().max()) > 1e-3


# -- the objective, term by term -------------------------------------------------------------------------------------------
PRIORS = {
    "normal": (Normal(0.7), lambda w: normal(0.0, 0.7).log_prob(w)),
    "normal off centre": (Normal(0.7, loc=0.3), lambda w: normal(0.3, 0.7).log_prob(w)),
    "laplace": (Laplace(0.4), lambda w: td.Laplace(scalar(0.0), 0.4).log_prob(w)),
    "student-t": (StudentT(3.0, 0.5), lambda w: td.StudentT(scalar(3.0), 0.0, 0.5).log_prob(w)),
    "scale mixture": (
        ScaleMixture(0.25, 1.5, 0.1),
        lambda w: torch.log(0.25 * normal(0.0, 1.5).log_prob(w).exp() + 0.75 * normal(0.0, 0.1).log_prob(w).exp()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("t_lik, t_prior", TEMPERATURES)
@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_a_free_energy_written_by_hand(family, name, t_lik, t_prior):
    prior, log_prob = PRIORS[name]
    p = problem(prior=prior, temperature=cr.Tempering(t_lik, t_prior))
    chosen = FAMILIES[family]
    objective, phi = free_energy(p, chosen, samples=6)
    noise = objective.noise(0)
    parts, _ = evaluate(objective, phi, noise)
    draws = chosen.draw(phi, noise[0])[0]
    log_lik = torch.stack([
        td.Normal(torch.func.functional_call(p.layout.module, p.layout.split(w)[0], X).squeeze(1), 0.3).log_prob(Y).sum()
        for w in draws
    ])  # fmt: skip
    q = MultivariateNormal(chosen.loc(phi, p.dim)[0], covariance_matrix=chosen.covariance(phi, p.dim)[0])
    if isinstance(prior, Normal):  # in closed form
        centred = torch.square(q.loc - prior.loc) + q.variance
        expected = (-0.5 * centred / prior.scale**2 - math.log(prior.scale) - 0.5 * math.log(2 * math.pi)).sum()
    else:
        expected = log_prob(draws).sum(1).mean()
    misfit, complexity = -log_lik.mean() / t_lik / 40, (-q.entropy() - expected / t_prior) / 40
    torch.testing.assert_close(parts[0], torch.stack([misfit, complexity]), rtol=1e-7, atol=1e-7)


def test_the_gradient_is_that_of_the_sum_of_the_parts():
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
    """Not averaged over weights, not divided by layers, not scaled: the peers' commonest error."""
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
    """A mixture of two equal normals is one normal, but goes through the draws."""
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
    """(N/M) times the sum of the losses of an epoch, with the same draws, is VFE on all rows; so is that of gradients."""
    p = problem(prior=ScaleMixture(0.25, 1.5, 0.1), temperature=cr.Tempering(0.5, 2.0))
    objective, phi = free_energy(p, per_epoch=5, kl_weights=kind, samples=3)
    whole, _ = free_energy(p, samples=3)
    noise = objective.noise(0)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).split(8)
    batches = [evaluate(objective, phi, noise, rows, step=35 + i) for i, rows in enumerate(order)]  # the eighth epoch
    parts, gradient = evaluate(whole, phi, noise)
    torch.testing.assert_close(sum(b[0] for b in batches) * 40 / 5, 40 * parts)
    torch.testing.assert_close(sum(b[1] for b in batches) / 5, gradient)
    complexities = [float(b[0][0, 1]) for b in batches]
    if kind == "uniform":
        assert complexities == pytest.approx([complexities[0]] * 5)
    else:
        assert all(a == pytest.approx(2 * b) for a, b in itertools.pairwise(complexities))


def test_the_misfit_is_a_mean_over_the_batch_and_the_complexity_a_share_of_n():
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
def test_shares_of_the_complexity_sum_to_one(kind, batches):
    shares = [kl_weight(kind, i, batches) for i in range(batches)]
    assert math.fsum(shares) == pytest.approx(1, abs=1e-12)
    assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(shares))


def test_geometric_shares_are_blundells():
    """pi_i = 2^(M-i) / (2^M - 1) for i from 1 to M; uniform ones 1/M."""
    for m in (1, 4, 30):
        exact = [2 ** (m - i) / (2**m - 1) for i in range(1, m + 1)]
        assert [kl_weight("geometric", i, m) for i in range(m)] == pytest.approx(exact, rel=1e-12)
        assert {kl_weight("uniform", i, m) for i in range(m)} == {1 / m}


def test_figures_start_again_with_every_epoch():
    objective, _ = free_energy(problem(), per_epoch=4, kl_weights="geometric")
    figures = [objective.controls(step)[0] for step in range(12)]
    assert figures[:4] == figures[4:8] == figures[8:]
    assert figures[:4] == pytest.approx([4 * 2 ** (4 - i) / 15 for i in (1, 2, 3, 4)])


def test_the_warm_up_rises_and_ends_at_exactly_one():
    objective, _ = free_energy(problem(), kl_warmup=9)
    weights = [objective.controls(step)[0] for step in range(40)]
    assert weights[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert weights[9:] == [1.0] * 31
    assert free_energy(problem())[0].controls(0) == (1.0,)


def test_the_warm_up_changes_the_way_but_not_the_end(conjugate, exact_noise):
    options = {"steps": 700, "batch_size": 30, "lr": 0.06, "estimator": "weights", "compile": False, "init_scale": 0.1}
    runs = [cr.BayesByBackprop(kl_warmup=w, init=ORIGIN, **options).fit(conjugate.problem(), seed=0) for w in (0, 300)]
    first = [run.record.history["parts"]["complexity"][0][0] for run in runs]
    assert first[1] < 0.5 * first[0]
    torch.testing.assert_close(runs[1].loc, runs[0].loc, rtol=0, atol=1e-4)
    torch.testing.assert_close(runs[1].std, runs[0].std, rtol=1e-4, atol=0)


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


def test_each_group_of_the_prior_has_a_factor_of_its_own():
    prior = {"0.*": Normal(0.5), "*": Laplace(0.8)}
    objective, phi = free_energy(problem(prior=prior), learn_prior_scale=True)
    assert phi.shape[1] == 2 * objective.problem.dim + 2
    factors = phi[0, -2:].exp().tolist()
    scaled = {"0.*": Normal(0.5 * factors[0]), "*": Laplace(0.8 * factors[1])}
    fixed, _ = free_energy(problem(prior=scaled))
    noise = objective.noise(0)[0]
    torch.testing.assert_close(objective.complexity(phi, noise), fixed.complexity(phi[:, :-2], noise))


# -- fitting -----------------------------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(self.lift(x)).mean(1))


NETS = {
    "mlp": (lambda: mlp(8, 6, 3), (8,), "local"),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.SiLU(), nn.Flatten(), nn.Linear(4, 3)), (2, 2, 2), "flipout"),
    "lstm": (Recurrent, (4, 2), "local"),
    "transformer": (Transformer, (4, 2), "flipout"),
}


@pytest.mark.parametrize("estimator", ["auto", "weights"])
@pytest.mark.parametrize("name", NETS)
def test_any_network(name, estimator):
    """A few steps on a task that can be learned: the free energy falls and the classes come out better than by chance."""
    make, shape, expected = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
    x = randn(60, 8)
    y = (x[:, -1] > 0).long() + (x[:, -2] > 0).long()
    p = cr.Problem(net, data=(x.reshape(60, *shape), y), likelihood=Categorical(), prior=Normal(1.0))
    method = cr.BayesByBackprop(steps=80, batch_size=30, lr=0.03, estimator=estimator, compile=False)
    posterior = method.fit(p, seed=0)
    history = posterior.record.history
    assert history["estimator"] == (expected if estimator == "auto" else "weights")
    assert history["estimator_reason"]
    assert history["loss"][-1][0] < history["loss"][0][0]
    predictive = posterior.predict(x.reshape(60, *shape), draws=20)
    assert predictive.mean.shape == (60, 3)
    assert float(predictive.log_prob(y).mean()) > -1.0  # chance is -1.04 (the entropy of the classes)
    assert float(predictive.epistemic.min()) > 0


@pytest.mark.parametrize(
    "prior", [Laplace(0.5), StudentT(3.0, 0.5), ScaleMixture(0.5, 1.0, 0.05)], ids=lambda p: type(p).__name__
)
def test_every_prior_and_both_kinds_of_weights(prior):  # fmt: skip
    p = problem(prior=prior)
    method = cr.BayesByBackprop(steps=200, batch_size=8, kl_weights="geometric", kl_warmup=20, samples=2, compile=False)
    posterior = method.fit(p, seed=0)
    assert posterior.record.history["loss"][-1][0] < posterior.record.history["loss"][1][0]
    assert math.isfinite(posterior.record.history["elbo"])


def test_progress_and_history_show_the_free_energy_and_its_parts(capsys):
    posterior = cr.BayesByBackprop(steps=600, batch_size=40, compile=False).fit(problem(), seed=0, progress=True)
    line = capsys.readouterr().err.split("\r")[-1]
    assert line.startswith(f"Bayes by Backprop {'━' * 24} 600/600 loss ")
    assert "  misfit " in line
    assert "  complexity " in line
    history = posterior.record.history
    misfit, complexity = history["parts"]["misfit"], history["parts"]["complexity"]
    assert len(history["step"]) == len(history["loss"]) == len(misfit) == len(complexity) == 20
    for loss, a, b in zip(history["loss"], misfit, complexity):
        assert loss[0] == pytest.approx(a[0] + b[0])
    for part in (misfit, complexity, history["loss"]):
        assert part[-1][0] < part[0][0]
    # The ELBO in nats is what was minimised, times -N, up to the noise of both.
    assert history["elbo_standard_error"] > 0
    assert history["elbo"] == pytest.approx(-40 * history["loss"][-1][0], abs=10 * history["elbo_standard_error"])


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for options in ({}, {"estimator": "flipout"}, {"family": "low-rank", "samples": 2}, {"members": 2}):
        method = cr.BayesByBackprop(steps=20, batch_size=8, compile=False, **options)
        a, b, c = (method.fit(problem(), seed=s) for s in (3, 3, 4))
        assert torch.equal(a.phi, b.phi)
        assert a.record.history == b.record.history
        assert not torch.equal(a.phi, c.phi)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_differs_from_step_to_step_and_between_members():
    objective, _ = free_energy(problem(), members=2, samples=2)
    first, second = objective.noise(0)[0], objective.noise(1)[0]
    assert first.shape == (2, 2, objective.problem.dim)
    assert len({float(v) for v in torch.cat([first, second])[..., 0].flatten()}) == 8
    assert torch.equal(objective.noise(1)[0], second)


# -- where it starts ---------------------------------------------------------------------------------------------------
STILL = {"steps": 1, "optimiser": "sgd", "lr": 1e-12, "compile": False}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init_scale", [0.003, 0.5])
def test_the_start_is_the_network_with_the_stated_scale(family, init_scale):
    p = problem()
    posterior = cr.BayesByBackprop(family=family, init_scale=init_scale, **STILL).fit(p, seed=0)
    torch.testing.assert_close(posterior.loc[0], p.layout.read(p.layout.module), rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.std, torch.full_like(posterior.std, init_scale), rtol=1e-7, atol=0)


def test_starts_by_name_and_by_tensor():
    p, given = problem(), randn(2, problem().dim, seed=5, dtype=f64)
    exact = {
        "fresh": p.layout.reinitialised(0, 2),
        "prior": torch.cat([p.prior.sample(1, stream(0, "prior start", m)) for m in range(2)]),
        "network": p.layout.reinitialised(0, 2),  # several members from one place would stay together
    }
    for init, start in [*exact.items(), (given, given)]:
        posterior = cr.BayesByBackprop(init=init, members=2, **STILL).fit(p, seed=0)
        torch.testing.assert_close(posterior.loc, start, rtol=0, atol=1e-9)


@pytest.mark.parametrize("members", [1, 2])
def test_the_map_start_is_a_map_fit(monkeypatch, members):
    starts, plain = [], MeanField.init
    monkeypatch.setattr(
        MeanField, "init", lambda self, loc, scale: starts.append(loc.clone()) or plain(self, loc, scale)
    )
    options = {"steps": 60, "batch_size": 8, "compile": False}
    cr.BayesByBackprop(init="map", members=members, **options).fit(problem(), seed=3)
    if members == 1:
        exact = cr.MAP(**options).fit(problem(), seed=3).draws[:, 0]
    else:
        exact = cr.DeepEnsemble(members=2, **options).fit(problem(), seed=3).draws[:, 0]
    torch.testing.assert_close(starts[0], exact, rtol=0, atol=1e-12)


# -- empirical Bayes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, prior, above", [(3.0, 0.3, True), (0.1, 2.0, False)])
def test_the_prior_scale_moves_to_the_weights(exact_noise, size, prior, above):
    """At its optimum, the scale squared is the mean of mu^2 + sigma^2 over the weights."""
    x = randn(60, 8, dtype=f64)
    y = x @ (size * randn(8, seed=1, dtype=f64)) + 0.1 * randn(60, seed=2, dtype=f64)
    net = nn.Linear(8, 1, bias=False).double()
    p = cr.Problem(net, data=(x, y), likelihood=Gaussian(0.1), prior=Normal(prior))
    options = {"steps": 700, "batch_size": 60, "lr": 0.05, "estimator": "weights", "compile": False}
    posterior = cr.BayesByBackprop(learn_prior_scale=True, init=torch.zeros(1, 8, dtype=f64), **options).fit(p, seed=0)
    ((factor,),) = posterior.record.history["prior_scale_factor"]
    assert factor > 3 if above else factor < 1 / 3
    exact = float((posterior.loc.square() + posterior.std.square()).mean().sqrt())
    assert factor * prior == pytest.approx(exact, rel=1e-3)
    # The ELBO that is reported is that of the learned prior, and better than that of the given one.
    rescaled = cr.Problem(net, data=(x, y), likelihood=Gaussian(0.1), prior=Normal(prior * factor))
    assert posterior.record.history["elbo"] == pytest.approx(float(posterior.elbo(rescaled, samples=32).value))
    assert posterior.record.history["elbo"] > float(posterior.elbo(p, samples=32).value) + 1


def test_the_prior_scale_is_not_learned_by_default():
    posterior = cr.BayesByBackprop(steps=5).fit(problem(), seed=0)
    assert "prior_scale_factor" not in posterior.record.history
    assert not cr.BayesByBackprop().learn_prior_scale
    learned = cr.BayesByBackprop(steps=5, learn_prior_scale=True, members=2).fit(problem(), seed=0)
    assert torch.tensor(learned.record.history["prior_scale_factor"]).shape == (2, 1)
    assert learned.phi.shape == (2, 2 * learned.layout.dim)


# -- held-out rows, blow-ups, compiling --------------------------------------------------------------------------------
def test_the_held_out_score_is_the_log_of_the_averaged_density():
    p = problem()
    objective, phi = free_energy(p, members=2)
    draws = MeanField().draw(phi, objective._scoring)
    assert draws.shape == (2, 8, p.dim)
    rows = p.log_likelihood_rows(draws.flatten(0, 1), X, p.y).reshape(2, 8, 40)
    exact = rows.exp().mean(1).log().mean(1)
    torch.testing.assert_close(objective.score(phi, p), exact)
    assert bool((exact > rows.mean((1, 2)) + 0.01).all())  # not the average of logs


def test_early_stopping_keeps_the_best_on_held_out_rows():
    """Pure noise as targets and a wide prior: the held-out density gets worse after a while."""
    x, noise = randn(40, 3, dtype=f64), randn(40, seed=3, dtype=f64)
    p = cr.Problem(mlp(3, 30, 1, dtype=f64), data=(x, noise), likelihood=Gaussian(0.3), prior=Normal(10.0))
    method = cr.BayesByBackprop(
        steps=2000, lr=0.02, validation=0.25, patience=5, batch_size=10, init_scale=1e-3, compile=False
    )
    posterior = method.fit(p, seed=0)
    history = posterior.record.history
    assert history["steps"] < 2000
    scores = torch.tensor(history["validation"], dtype=f64)
    assert float(scores.max()) > float(scores[-1])
    held = torch.randperm(40, generator=stream(0, "validation split"))[:10].sort().values
    scoring = FreeEnergy(
        p, MeanField(), 30, method, choose_estimator("weights", p, 10, mean_field=True), seed=0, per_epoch=3
    )
    torch.testing.assert_close(scoring.score(posterior.phi, p.subset(held)), scores.max(0).values)


def poison(p, after):
    """Likelihoods that are NaN from some call on."""
    calls, original = [], p.log_likelihood_rows

    def poisoned(theta, x, y, **kwargs):
        calls.append(1)
        return original(theta, x, y, **kwargs) * (math.nan if len(calls) > after else 1.0)

    p.log_likelihood_rows = poisoned
    return p


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_reached_before_a_blow_up_is_kept(tmp_path, family):
    method = cr.BayesByBackprop(steps=200, estimator="weights", family=family, compile=False, learn_prior_scale=True)
    with pytest.raises(
        cr.TrainingError, match="Bayes by Backprop: the loss of member 0 was not finite at step 71"
    ) as caught:
        method.fit(poison(problem(), 70), seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert isinstance(kept, GaussianPosterior)
    assert kept.record.status == "partial"
    assert "not finite at step 71" in kept.record.history["error"]
    assert bool(torch.isfinite(kept.phi).all())
    assert torch.equal(cr.load(tmp_path / "run", mlp(3, 5, 1, dtype=f64)).phi, kept.phi)
    assert kept.predict(X, draws=5).mean.shape == (40,)


def test_a_map_start_that_blows_up_has_no_posterior(tmp_path):
    with pytest.raises(cr.TrainingError, match="MAP start: the loss of member 0 was not finite at step 71") as caught:
        cr.BayesByBackprop(steps=200, init="map", compile=False).fit(
            poison(problem(), 70), seed=0, out=tmp_path / "run"
        )
    assert caught.value.posterior is None
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # torch's own compiler
@pytest.mark.parametrize(
    "options",
    [{"family": "low-rank", "members": 2, "samples": 2}, {"estimator": "local"}],
    ids=str,
)
def test_compiled_training_equals_eager(options, caplog):
    p = problem(prior=ScaleMixture(0.5, 1.0, 0.1))
    method = {"steps": 40, "batch_size": 8, "kl_weights": "geometric", "kl_warmup": 10, **options}
    with caplog.at_level("INFO", logger="credibly"):
        runs = [cr.BayesByBackprop(compile=c, **method).fit(p, seed=0).phi for c in (True, False)]
    assert not [r for r in caplog.records if r.name == "credibly"]  # it did not fall back to eager
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-9)


# -- the posterior -----------------------------------------------------------------------------------------------------
def fit(**options):
    return cr.BayesByBackprop(**{"steps": 150, "compile": False, **options}).fit(problem(likelihood=Gaussian()), seed=0)


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
    deviations = (posterior.draws - centres.unsqueeze(1)) / 0.1
    assert float(deviations.std()) == pytest.approx(1, abs=4.5 / math.sqrt(2 * deviations.numel()))
    assert float((deviations[0] - deviations[1]).abs().max()) > 0.1


def test_members_are_different_fits_of_the_same_data():
    posterior = fit(members=3, steps=400)
    assert posterior.components == 3
    assert posterior.loc.shape == posterior.std.shape == (3, posterior.layout.dim)
    assert float((posterior.loc[0] - posterior.loc[1]).abs().max()) > 0.1
    error = [float((posterior_of(problem(likelihood=Gaussian()), posterior.phi[m : m + 1]).predict(X).mean - Y).square().mean())
             for m in range(3)]  # fmt: skip
    assert max(error) < 0.2 * float(Y.var())


@pytest.mark.parametrize("sizes", [(3, 1), (3, 3, 1), (3, 5, 1)], ids=str)
@pytest.mark.parametrize("members", [1, 2])
def test_a_draw_is_the_same_however_many_are_asked_for(sizes, members):
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


def test_predictions_are_fixed_by_draws_and_seed():
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


def test_layers_tell_sizes_and_ratios():
    p = problem(mlp(3, 2, 1, dtype=f64), likelihood=Gaussian())
    mu = torch.arange(1.0, p.dim + 1, dtype=f64) * torch.tensor([1.0, -1.0]).repeat(p.dim)[: p.dim]
    sigma = torch.full((p.dim,), 0.5, dtype=f64)
    rho = torch.tensor([inverse_softplus(0.5)] * p.dim, dtype=f64)
    layers = posterior_of(p, torch.cat([mu, rho]).unsqueeze(0)).layers()
    assert [(row.name, row.shape) for row in layers] == [
        ("0.weight", (2, 3)), ("0.bias", (2,)), ("2.weight", (1, 2)), ("2.bias", (1,)), ("likelihood.log_scale", p.layout.entries[-1].shape)
    ]  # fmt: skip
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
def test_signal_to_noise_is_the_mean_over_the_deviation():
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
    assert not bool(gone[:, network:].any())  # the noise scale is the likelihood's own
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


def test_pruning_again_starts_from_what_is_already_gone():
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


# -- the evidence lower bound --------------------------------------------------------------------------------------------
def test_the_standard_error_shrinks_with_the_root_of_the_samples():
    p = problem(prior=Laplace(0.5))
    objective, phi = free_energy(p)
    errors = [float(posterior_of(p, phi).elbo(p, samples=n).standard_error) for n in (250, 4000)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert objective.problem is p


@pytest.mark.parametrize("name, members", [("normal", 1), ("laplace", 1), ("scale mixture", 1), ("normal", 2)])
def test_the_standard_error_is_the_spread_of_estimates(name, members):
    """Over 300 seeds: the spread of the values is the error that each of them states (its own error is 4 %)."""
    p = problem(mlp(3, 2, 1, dtype=f64), prior=PRIORS[name][0], likelihood=Gaussian(2.0))
    _, phi = free_energy(p, members=members)
    phi[-1, : p.dim] += 2.0 * (members - 1)  # components whose values differ by more than their draws do
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


def test_the_elbo_is_the_free_energy_of_its_own_draws():
    """The same draws through the objective of training, for a prior in closed form and one through draws."""
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


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, value",
    [("family", "cauchy"), ("rank", 0), ("rank", 1.5), ("samples", 0), ("samples", 2.0), ("samples", True), ("members", 0), ("members", "two"),
     ("estimator", "magic"), ("init_scale", 0.0), ("init_scale", -1.0), ("init_scale", math.inf), ("init_scale", math.nan), ("init_scale", "wide"),
     ("init_scale", True), ("kl_weights", "cosine"), ("kl_warmup", -1), ("kl_warmup", 2.5), ("kl_warmup", True), ("learn_prior_scale", "yes"),
     ("learn_prior_scale", 1), ("steps", 0), ("lr", -1.0), ("batch_size", 0), ("epochs", 0), ("validation", 1.5), ("patience", 0), ("clip_norm", 0.0),
     ("optimiser", "newton"), ("schedule", "none"), ("momentum", 1.0), ("warmup", -1)],
)  # fmt: skip
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(cr.InputError, match=f"^{name}(: found| must be .*, got) ") as caught:
        cr.BayesByBackprop(**{name: value})
    assert caught.value.argument == name


def test_settings_that_do_not_fit_the_problem():
    for warmup in (20, 100):
        with pytest.raises(cr.InputError, match=f"kl_warmup: found {warmup} for 20 steps. It has to end before"):
            cr.BayesByBackprop(steps=20, kl_warmup=warmup).fit(problem(), seed=0)
    cr.BayesByBackprop(steps=20, kl_warmup=19).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="init: found 'best'"):
        cr.BayesByBackprop(init="best").fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match=r"init: has shape \(1, 3\)"):
        cr.BayesByBackprop(init=torch.zeros(1, 3)).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="batch_size: found 41 for 40 training rows"):
        cr.BayesByBackprop(batch_size=41).fit(problem(), seed=0)
    with pytest.raises(
        cr.InputError, match='family: "full-rank" supports at most 4000 parameters, this problem has 5001'
    ):
        cr.BayesByBackprop(family="full-rank", steps=2).fit(problem(mlp(3, 1000, 1, dtype=f64)), seed=0)


@pytest.mark.parametrize("method, other", [("log_prob", "sample"), ("sample", "log_prob")])
def test_a_prior_without_sample_or_log_prob_is_refused(method, other):
    thing = type("Half", (), {other: lambda self, *args: None, "fan_in": False})()
    with pytest.raises(
        cr.InputError, match=rf"prior: Half for '\*' has no method {method}\. Pass one of credibly.priors.elementwise"
    ):
        problem(prior=thing)
    with pytest.raises(cr.InputError, match="prior: object for '[*]' has no method log_prob and no sample"):
        problem(prior={"*": object()})


def test_bad_questions_to_the_posterior():
    p, posterior = problem(likelihood=Gaussian()), fit(steps=5)
    for draws in (0, -1, 2.0, True):
        with pytest.raises(cr.InputError, match="draws must be a positive integer, got "):
            posterior.predict(X, draws=draws)
        with pytest.raises(cr.InputError, match="count must be a positive integer, got "):
            posterior.sample(draws)
    for samples in (0, 1, 2.5):
        with pytest.raises(cr.InputError, match="samples must be an integer of at least 2, got "):
            posterior.elbo(p, samples=samples)
    for fraction in (-0.1, 1.0, 2, math.nan, "half", True):
        with pytest.raises(cr.InputError, match="fraction must be at least 0 and below 1, got "):
            posterior.prune(fraction)
    with pytest.raises(cr.InputError, match="seed must be a non-negative integer .*got "):
        posterior.sample(3, seed=-1)
    with pytest.raises(cr.InputError, match="family must be mean-field to prune single weights, got FullRank"):
        fit(steps=5, family="full-rank").prune(0.5)
    with pytest.raises(cr.InputError, match=r"phi must have shape \(components, \d+\), got \(1, 3\)"):
        posterior_of(p, torch.zeros(1, 3, dtype=f64))


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_noise_of_large_networks_is_drawn_as_bits(estimator, compiled):
    """A step on the bits is the step on the normal numbers they stand for, and the same seed gives the same bits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 180), nn.ReLU(), nn.Linear(180, 1))
    x = torch.randn(200, 200)
    problem = cr.Problem(net, (x, x[:, :1]), Gaussian(0.1), Normal(1.0))
    assert problem.dim > MANY
    method = cr.BayesByBackprop(
        estimator=estimator, batch_size=200, steps=3, lr=1e-4, optimiser="sgd", compile=compiled
    )
    layers = choose_estimator(estimator, problem, 200, mean_field=True)
    objective = FreeEnergy(problem, MeanField(), problem.n, method, layers, seed=0, per_epoch=1)
    phi = MeanField().init(initial(problem, "network", 1, 0), 0.03)
    noise = objective.noise(0)
    assert any(n.dtype == torch.int32 for n in noise)
    arguments = (problem.x, problem.y, None)
    parts, gradient = objective.evaluate(phi, (), *arguments, noise, torch.ones(1))
    again = objective.evaluate(phi, (), *arguments, objective._normal(noise), torch.ones(1))
    assert torch.equal(parts, again[0])
    assert torch.equal(gradient, again[1])
    first, second = (method.fit(problem, seed=7, progress=False) for _ in range(2))
    assert torch.equal(first.phi, second.phi)
    if compiled:
        eager = replace(method, compile=False).fit(problem, seed=7, progress=False)
        moved = (eager.phi - phi).norm()
        assert moved > 0.01
        # phi is some 700 long, so its rounding alone is a thousandth of the move.
        assert (first.phi - eager.phi).norm() < 1e-2 * moved


def test_no_factor_is_learned_for_the_prior_of_the_noise_scale():
    p = problem(likelihood=Gaussian("learned"))
    assert len(p.prior.segments) == 2
    posterior = cr.BayesByBackprop(steps=5, learn_prior_scale=True).fit(p, seed=0)
    assert torch.tensor(posterior.record.history["prior_scale_factor"]).shape == (1, 1)
    assert posterior.phi.shape == (1, 2 * p.dim)
