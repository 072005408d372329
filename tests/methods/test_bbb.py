"""Bayes by Backprop: known optimum and evidence, fits of several networks, starts, empirical Bayes and failures."""

import math
from dataclasses import replace

import pytest
import torch
from bbb_models import FAMILIES, TEMPERATURES, X, best, evaluate, f64, free_energy, normal, pack, problem
from torch import distributions as td
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import credibly as cr
from conftest import mlp, randn
from credibly.core.rng import MANY, stream
from credibly.gaussians.families import FullRank, MeanField
from credibly.inference.method import initial
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.bbb import FreeEnergy
from credibly.posterior.gaussian import GaussianPosterior
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture, StudentT

# The start of fits of the conjugate model.
ORIGIN = torch.zeros(1, 4, dtype=f64)


# -- linear regression, with known posterior and evidence --------------------------------------------------------------
def sigma_points(size, members=1):
    """Return noise with mean 0 and covariance I exactly: the average of a quadratic over it is its expectation."""
    points = math.sqrt(size) * torch.eye(size, dtype=f64)
    return torch.cat([points, -points]).expand(members, -1, -1)


@pytest.fixture
def exact_noise(monkeypatch):
    """Fit linear models without Monte Carlo error."""

    def noise(self, step):
        return (sigma_points(self.family.noise_size(self.problem.dim), self.options.members),)

    monkeypatch.setattr(FreeEnergy, "noise", noise)


def log_normaliser(conjugate, t_lik, t_prior):
    """Return the log of the integral of p(D|w)^(1/T_lik) p(w)^(1/T_prior): the mode plus the volume around it."""
    mean, covariance = conjugate.exact(t_lik, t_prior)
    peak = td.Normal(conjugate.design @ mean, conjugate.noise).log_prob(conjugate.y).sum() / t_lik
    peak = peak + normal(0.0, conjugate.prior).log_prob(mean).sum() / t_prior
    return float(peak + 0.5 * len(mean) * math.log(2 * math.pi) + 0.5 * torch.logdet(covariance))


def fitted(posterior):
    return MultivariateNormal(posterior.loc[0], covariance_matrix=posterior.covariance()[0])


def test_the_normaliser_is_the_evidence(conjugate):
    """The closed form used by the tests below, against the density of y with the weights integrated out."""
    covariance = conjugate.prior**2 * conjugate.design @ conjugate.design.T
    covariance = covariance + conjugate.noise**2 * torch.eye(len(conjugate.y), dtype=f64)
    evidence = MultivariateNormal(torch.zeros_like(conjugate.y), covariance).log_prob(conjugate.y)
    assert log_normaliser(conjugate, 1.0, 1.0) == pytest.approx(float(evidence), abs=1e-9)


@pytest.mark.parametrize("t_lik, t_prior", TEMPERATURES)
@pytest.mark.parametrize("name", ["mean-field", "full-rank"])
def test_the_free_energy_at_the_best_gaussian(conjugate, name, t_lik, t_prior):
    """Minus the log evidence if q is exact, plus KL(q || posterior) otherwise; the gradient is zero."""
    p = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    objective, _ = free_energy(p, FAMILIES[name])
    q, target = best(conjugate, name, t_lik, t_prior), best(conjugate, "full-rank", t_lik, t_prior)
    gap = float(kl_divergence(q, target))
    assert (gap > 0.1) == (name == "mean-field")
    parts, gradient = evaluate(objective, pack(name, q), (sigma_points(p.dim),))
    elbo = -p.n * float(parts.sum())
    assert elbo == pytest.approx(log_normaliser(conjugate, t_lik, t_prior) - gap, abs=1e-6)
    assert float(gradient.abs().max()) < 1e-7


@pytest.mark.parametrize(
    "t_lik, t_prior",
    # The optimum at the other temperatures is checked above, without training.
    [t if t == (0.25, 1.0) else pytest.param(*t, marks=pytest.mark.nightly) for t in TEMPERATURES],
)
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
        pytest.param("mean-field", 4, 1.0, 1.0, marks=pytest.mark.nightly),
        ("mean-field", 4, 0.25, 1.0),
        pytest.param("full-rank", 64, 1.0, 1.0, marks=pytest.mark.nightly),
        ("full-rank", 64, 0.5, 0.5),
    ],
)
def test_training_with_random_draws_ends_at_the_best_gaussian(conjugate, name, samples, t_lik, t_prior):
    """With the usual noise. The ELBO plus KL(q || posterior) is the log evidence for any q, so this needs no slack."""
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
    """The gradient on a third of the rows, averaged over the three thirds, vanishes at the same point."""
    p = conjugate.problem()
    objective, _ = free_energy(p, FullRank(), per_epoch=3)
    phi = pack("full-rank", best(conjugate, "full-rank", 1.0, 1.0))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(10)
    gradients = [evaluate(objective, phi, (sigma_points(p.dim),), rows)[1] for rows in order]
    assert float(sum(gradients).abs().max()) < 1e-7
    assert float(gradients[0].abs().max()) > 1e-3


def test_the_warm_up_changes_the_path_but_not_the_optimum(conjugate, exact_noise):
    options = {"steps": 700, "batch_size": 30, "lr": 0.06, "estimator": "weights", "compile": False, "init_scale": 0.1}
    runs = [cr.BayesByBackprop(kl_warmup=w, init=ORIGIN, **options).fit(conjugate.problem(), seed=0) for w in (0, 300)]
    first = [run.record.history["parts"]["complexity"][0][0] for run in runs]
    assert first[1] < 0.5 * first[0]
    torch.testing.assert_close(runs[1].loc, runs[0].loc, rtol=0, atol=1e-4)
    torch.testing.assert_close(runs[1].std, runs[0].std, rtol=1e-4, atol=0)


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
    """A few steps on a learnable task: the free energy falls and classification is better than chance."""
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
    assert float(predictive.log_prob(y).mean()) > -1.0  # chance level is -1.04, minus the entropy of the classes
    assert float(predictive.epistemic.min()) > 0


@pytest.mark.parametrize(
    "prior", [Laplace(0.5), StudentT(3.0, 0.5), ScaleMixture(0.5, 1.0, 0.05)], ids=lambda p: type(p).__name__
)
def test_every_prior_with_geometric_weights_and_warm_up(prior):
    p = problem(prior=prior)
    method = cr.BayesByBackprop(steps=200, batch_size=8, kl_weights="geometric", kl_warmup=20, samples=2, compile=False)
    posterior = method.fit(p, seed=0)
    assert posterior.record.history["loss"][-1][0] < posterior.record.history["loss"][1][0]
    assert math.isfinite(posterior.record.history["elbo"])


def test_progress_and_history_show_the_free_energy_and_its_terms(capsys):
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
    # The ELBO in nats is -N times the loss, up to the noise of both.
    assert history["elbo_standard_error"] > 0
    assert history["elbo"] == pytest.approx(-40 * history["loss"][-1][0], abs=10 * history["elbo_standard_error"])


def test_the_seed_determines_the_fit_and_the_global_generator_is_not_used():
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


# -- starting points ---------------------------------------------------------------------------------------------------
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
        "network": p.layout.reinitialised(0, 2),  # several members from one point would stay together
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
    # The reported ELBO is that of the learned prior, and better than that of the given one.
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


# -- held-out rows, failures, compilation ------------------------------------------------------------------------------
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
    """Make the likelihood NaN after the given number of calls."""
    calls, original = [], p.log_likelihood_rows

    def poisoned(theta, x, y, **kwargs):
        calls.append(1)
        return original(theta, x, y, **kwargs) * (math.nan if len(calls) > after else 1.0)

    p.log_likelihood_rows = poisoned
    return p


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_finite_parameters_are_kept_after_a_failure(tmp_path, family):
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


def test_a_failed_map_start_has_no_posterior(tmp_path):
    with pytest.raises(cr.TrainingError, match="MAP start: the loss of member 0 was not finite at step 71") as caught:
        cr.BayesByBackprop(steps=200, init="map", compile=False).fit(
            poison(problem(), 70), seed=0, out=tmp_path / "run"
        )
    assert caught.value.posterior is None
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # raised inside torch's compiler
@pytest.mark.parametrize(
    "options",
    [{"family": "low-rank", "members": 2, "samples": 2}, {"estimator": "local"}],
    ids=str,
)
@pytest.mark.nightly
def test_compiled_training_equals_eager(options, caplog):
    p = problem(prior=ScaleMixture(0.5, 1.0, 0.1))
    method = {"steps": 40, "batch_size": 8, "kl_weights": "geometric", "kl_warmup": 10, **options}
    with caplog.at_level("INFO", logger="credibly"):
        runs = [cr.BayesByBackprop(compile=c, **method).fit(p, seed=0).phi for c in (True, False)]
    assert not [r for r in caplog.records if r.name == "credibly"]  # it did not fall back to eager
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_noise_of_large_networks_is_drawn_as_random_bits(estimator, compiled):
    """A step on the bits equals a step on the normal noise they encode, and the same seed gives identical fits."""
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
        # The norm of phi is about 700, so rounding alone is a thousandth of the move.
        assert (first.phi - eager.phi).norm() < 1e-2 * moved


def test_no_factor_is_learned_for_the_prior_of_the_noise_scale():
    p = problem(likelihood=Gaussian("learned"))
    assert len(p.prior.segments) == 2
    posterior = cr.BayesByBackprop(steps=5, learn_prior_scale=True).fit(p, seed=0)
    assert torch.tensor(posterior.record.history["prior_scale_factor"]).shape == (1, 1)
    assert posterior.phi.shape == (1, 2 * p.dim)
