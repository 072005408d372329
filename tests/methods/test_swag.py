"""SWAG: its moments by brute force, its covariance formula, the location of its mean, and invalid settings."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import Conjugate, mlp, randn
from credibly.gaussians.families import LowRank
from credibly.inference.training.data import split
from credibly.inference.training.gradient_noise import IndependentBatches, gradient_noise, largest_curvature
from credibly.inference.training.iterates import Iterates
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.swag import SWAG

DOUBLE = torch.float64


def small(**kwargs):
    x = randn(60, 3)
    return cr.Problem(
        mlp(3, 5, 1), data=(x, x[:, 0] - x[:, 1].square()), likelihood=Gaussian(0.3), prior=cr.priors.Normal(), **kwargs
    )


def brute_force(iterates, rank):
    """Return mean and covariance by the formulas of the paper, from all iterates (T, D)."""
    mean = iterates.mean(0)
    variance = iterates.square().mean(0) - mean.square()
    running = iterates.cumsum(0) / torch.arange(1, len(iterates) + 1, dtype=DOUBLE).unsqueeze(1)
    last = (iterates - running)[-rank:].T
    return mean, 0.5 * (torch.diag(variance) + last @ last.T / (rank - 1))


@pytest.mark.parametrize("count, rank", [(12, 4), (5, 5), (2, 2)])
def test_moments_are_those_of_the_iterates(count, rank):
    iterates = randn(count, 6, dtype=DOUBLE) * torch.tensor([1, 2, 0.1, 5, 1, 1.0], dtype=DOUBLE) + 3
    moments = Iterates(rank, 6, torch.device("cpu"))
    for row in iterates:
        moments.add(row)
    phi, family = moments.phi(DOUBLE), LowRank(rank)
    mean, covariance = brute_force(iterates, rank)
    torch.testing.assert_close(family.loc(phi, 6)[0], mean)
    torch.testing.assert_close(family.covariance(phi, 6)[0], covariance)
    torch.testing.assert_close(family.variance(phi, 6)[0], covariance.diagonal())


@pytest.mark.parametrize("init", ["map", "network"])
def test_a_fit_is_the_gaussian_of_its_iterates(monkeypatch, init):
    seen = []
    original = Iterates.add

    def add(self, theta, loss=math.nan):
        seen.append(theta.clone())
        original(self, theta, loss)

    monkeypatch.setattr(Iterates, "add", add)
    problem = small(dtype=DOUBLE)
    posterior = SWAG(steps=30, rank=3, iterates=7, every=4, init=init).fit(problem, seed=0)
    mean, covariance = brute_force(torch.stack(seen), 3)
    torch.testing.assert_close(posterior.loc[0], mean)
    torch.testing.assert_close(posterior.covariance()[0], covariance)
    assert len(seen) == 7
    assert float((seen[0] - seen[-1]).abs().max()) > 1e-4


def test_the_iterates_are_those_of_plain_sgd():
    """torch's SGD on the same rows: the mean of its iterates is that of the posterior."""
    from credibly.inference.training.batches import Batches

    problem = small(dtype=DOUBLE)
    posterior = SWAG(init="network", rank=2, iterates=3, every=5, sgd_lr=1e-3, batch_size=10).fit(problem, seed=4)
    net = mlp(3, 5, 1, dtype=DOUBLE)
    rule = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    batches = Batches(problem.n, 10, seed=4, members=1, first=1)
    kept = []
    for t in range(15):
        rows = batches.at(t)[0]
        rule.zero_grad()
        misfit = 0.5 * ((net(problem.x[rows]) - problem.y[rows].reshape(-1, 1)) / 0.3).square().mean()
        loss = misfit + 0.5 * sum(p.square().sum() for p in net.parameters()) / problem.n
        loss.backward()
        rule.step()
        if (t + 1) % 5 == 0:
            kept.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(posterior.loc[0], torch.stack(kept).mean(0), rtol=1e-9, atol=1e-10)


def test_the_mean_is_at_the_mode_of_a_linear_model_and_the_covariance_is_not_the_posterior(conjugate):
    """At a constant rate SGD on a quadratic loss fluctuates around the mode, so its average converges to it.

    The tolerance is the standard error of that average over several seeds, plus a hundredth of the posterior standard
    deviation: rows are shuffled, not resampled, which shifts the average by an amount of the order of the rate.
    """
    problem = conjugate.problem()
    mean, covariance = conjugate.exact()
    std = covariance.diagonal().sqrt()
    mode = cr.MAP(steps=1500, batch_size=30, lr=0.05).fit(problem, seed=0).draws[0]

    def swag(seed, rate):
        return SWAG(init=mode, rank=20, iterates=120, every=8, batch_size=5, sgd_lr=rate).fit(problem, seed=seed)

    fits = [swag(seed, 0.002) for seed in range(6)]
    means = torch.stack([f.loc[0] for f in fits])
    average, error = means.mean(0), means.std(0) / math.sqrt(6)
    assert bool(((average - mean).abs() < 4 * error + 0.01 * std).all())
    assert bool((error < 0.05 * std).all())  # otherwise the check above could not fail
    # Rate and batch size set the width: a smaller rate gives a narrower Gaussian for the same posterior.
    narrow, wide = swag(0, 0.0005), fits[0]
    assert bool((narrow.std < 0.7 * wide.std).all())


def linear(count, scales, correlation=0.0, noise=0.3, assumed=None):
    """Return a linear model with inputs of those scales; the likelihood's noise is the true one unless given."""
    x = randn(count, len(scales), dtype=DOUBLE)
    shared = randn(count, 1, seed=1, dtype=DOUBLE)
    x = (math.sqrt(1 - correlation) * x + math.sqrt(correlation) * shared) * torch.tensor(scales, dtype=DOUBLE) + 0.5
    y = x @ randn(len(scales), seed=2, dtype=DOUBLE) + 0.2 + noise * randn(count, seed=3, dtype=DOUBLE)
    return Conjugate(nn.Linear(len(scales), 1).double(), x, y, noise=assumed or noise, prior=1.0)


@pytest.mark.parametrize(
    "model, batch_size",
    [
        pytest.param(linear(200, [1.0] * 4), None, marks=pytest.mark.nightly),
        (linear(1000, [0.3, 1.0, 3.0, 1.0, 1.0], noise=1.0), None),  # condition number 130
        pytest.param(linear(500, [1.0] * 4, correlation=0.5, noise=0.1), 20, marks=pytest.mark.nightly),
        (linear(400, [1.0] * 5, noise=0.3, assumed=1.0), 200),  # gradients a tenth as noisy as the likelihood assumes
    ],
    ids=["isotropic", "scaled", "correlated", "misspecified noise"],
)
def test_the_default_variance_is_that_of_the_posterior(model, batch_size):
    """Ratios of the weights' variances, on average over them.

    Forty differences of averages estimate each variance with a relative standard error of 0.27 (that of n squares of
    normal numbers, correlated -1/2 between neighbours), and gradient noise adds 0.1 to all. Windows of finite length
    take up to 0.2 away. Iterates at the former default rate had ratios of 0.001 to 0.2.
    """
    mean, covariance = model.exact()
    posterior = SWAG(batch_size=batch_size).fit(model.problem(), seed=0)
    ratio = posterior.std[0].square() / covariance.diagonal()
    assert 0.7 < float(ratio.mean()) < 1.4, ratio
    assert bool(((ratio > 0.3) & (ratio < 2.5)).all()), ratio
    assert bool(((posterior.loc[0] - mean).abs() < 0.3 * covariance.diagonal().sqrt()).all())


def test_the_noise_of_gradients_and_the_curvature_are_measured():
    """On a linear model both have closed forms: the rows' gradients at the mode, and the design."""
    model, batch = linear(300, [0.3, 1.0, 3.0], noise=0.5, assumed=0.8), 40
    problem, mode = model.problem(), model.exact()[0]
    noise = gradient_noise(problem, mode.unsqueeze(0), split(problem, SWAG(), 0), batch, seed=0)
    residual = model.y - model.design @ mode
    rows = model.design * residual.unsqueeze(1) / model.noise**2
    gradients = torch.cov(rows.T) * (1 - batch / 300) / batch  # without replacement
    hessian = model.design.T @ model.design / model.noise**2 / 300
    scale = (batch * gradients.diagonal() + 1 / 300).rsqrt()
    assert bool(((noise.scale[0] / scale).log().abs() < 0.35).all())  # 64 batches: 0.18 of each variance
    size = noise.scale[0].square()
    exact = float((size * gradients.diagonal()).sum() / (size * hessian.diagonal()).sum())
    assert noise.ratio == pytest.approx(exact, rel=0.25)  # 192 batches: 0.1 along one direction
    # Directions are random, so their mean curvature is the trace up to its off-diagonal part.
    scaled = noise.scale[0].unsqueeze(1) * hessian * noise.scale[0]
    spread = float((2 * (scaled - torch.diag(scaled.diagonal())).square().sum() / 16).sqrt())
    assert abs(noise.trace - float(scaled.trace())) < 3 * spread


def test_minibatches_of_averages_are_independent():
    """Shuffled epochs use every row once, so gradient noise would cancel over an epoch."""
    few = IndependentBatches(12, 4, seed=0, purpose="test", device=torch.device("cpu"))
    rows = torch.cat([few.at(step) for step in range(300)])
    assert rows.shape == (300, 4)
    assert all(len(set(row.tolist())) == 4 for row in rows)
    epochs = rows.reshape(100, 12)
    # Three disjoint batches in a row have probability 0.0003.
    assert sum(len(set(epoch.tolist())) == 12 for epoch in epochs) < 3
    counts = torch.bincount(rows.flatten(), minlength=12).double()
    assert float((counts - 100).square().sum() / 100) < 30  # chi-squared with 11 degrees of freedom
    assert torch.equal(few.at(7), rows[7:8])
    many = IndependentBatches(torch.arange(500, 5000), 4, seed=0, purpose="test", device=torch.device("cpu"))
    assert int(torch.cat([many.at(step) for step in range(200)]).min()) >= 500


def test_the_default_rate_follows_the_curvature(conjugate):
    """-(1/N) log p of a linear model has the exact precision over N as its Hessian."""
    problem = conjugate.problem()
    data = split(problem, SWAG(), 0)
    mean, covariance = conjugate.exact()
    hessian, mode = torch.linalg.inv(covariance) / problem.n, mean.unsqueeze(0)
    found = largest_curvature(problem, torch.zeros(1, 4, dtype=DOUBLE), data, 0)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-3)
    history = SWAG(init=mode, rank=2, iterates=2, every=1).fit(problem, seed=0).record.history
    assert history["sgd_batch"] == 7
    noise = gradient_noise(problem, mode, data, 7, seed=0)
    scaled = noise.scale[0].unsqueeze(1) * hessian * noise.scale[0]
    top = float(torch.linalg.eigvalsh(scaled)[-1])
    assert history["sgd_lr"] == pytest.approx(0.1 * min(1 / top, 0.2 * 7 / noise.trace), rel=1e-2)
    assert history["stretch"] == pytest.approx(math.sqrt(1 / (problem.n * noise.ratio)))


def test_a_drift_is_no_width():
    """From far away SGD moves towards the mode for many windows: their averages differ by hundreds of widths."""
    model = linear(300, [1.0, 1.0])
    mean, covariance = model.exact()
    start = (mean + 100 * covariance.diagonal().sqrt()).unsqueeze(0)
    posterior = SWAG(init=start, every=5, momentum=0.0).fit(model.problem(), seed=0)
    assert bool((posterior.std[0] < 4 * covariance.diagonal().sqrt()).all())


def test_post_hoc_from_a_trained_network():
    """An already trained network: the mean stays near it, and predictions agree with it on the training rows."""
    x = randn(200, 2)
    y = (x[:, 0] > 0.3 * x[:, 1]).long()
    trained = cr.MAP(steps=800).fit(
        cr.Problem(mlp(2, 8, 2), data=(x, y), likelihood=Categorical(), prior=cr.priors.Normal()), seed=0
    )
    problem = cr.Problem(trained.module(), data=(x, y), likelihood=Categorical(), prior=cr.priors.Normal())
    posterior = SWAG(init="network").fit(problem, seed=0)
    assert "loss" not in posterior.record.history  # no training before SGD
    before, after = trained.predict(x).probabilities, posterior.predict(x).probabilities
    assert float((before - after).abs().mean()) < 0.1
    assert float((after.argmax(-1) == y).float().mean()) > 0.95
    start = torch.cat([p.detach().flatten() for p in trained.module().parameters()])
    assert torch.equal(problem.layout.read(problem.layout.module), start)  # the caller's network is unchanged


def test_saved_loaded_and_used_as_a_prior_in_float32(tmp_path):
    posterior = SWAG(steps=30, rank=3, iterates=5, every=3).fit(small(), seed=0, out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 5, 1))
    assert torch.equal(loaded.phi, posterior.phi)
    prior = loaded.as_prior()
    assert prior.precision.structure == "low-rank"
    torch.testing.assert_close(prior.bind(posterior.layout).std, posterior.std[0])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rank": 1}, "rank must be an integer of at least 2, got 1"),
        ({"rank": 30, "iterates": 20}, "rank must be at most the number of iterates, 20, got 30"),
        ({"iterates": 1, "rank": 2}, "iterates must be an integer of at least 2, got 1"),
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"sgd_lr": -1.0}, "sgd_lr must be a positive number, got -1.0"),
        ({"sgd_lr": True}, "sgd_lr must be a positive number, got True"),
        ({"init": "prior"}, r'init must be "map", "network" or a \(1, D\) tensor, got \'prior\''),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(cr.InputError, match=message):
        SWAG(**settings)


def test_a_full_batch_and_a_diverging_rate_raise():
    with pytest.raises(cr.InputError, match="batch_size must be smaller than the number of training rows, 60, got 60"):
        SWAG(batch_size=60).fit(small(), seed=0)
    with pytest.raises(cr.InputError, match=r"init must be a finite tensor of shape \(1, 26\), got shape \(1, 3\)"):
        SWAG(init=torch.zeros(1, 3)).fit(small(), seed=0)
    with pytest.raises(cr.TrainingError, match="smaller sgd_lr") as caught:
        SWAG(init="network", sgd_lr=1e4).fit(small(), seed=0)
    assert caught.value.posterior is None
    flat = cr.Problem(
        nn.Linear(2, 1), data=(randn(40, 2), randn(40, seed=1)), likelihood=Gaussian(1.0), prior=cr.priors.Normal()
    )
    assert SWAG(steps=20).fit(flat, seed=0).loc.shape == (1, 3)


def test_the_noise_of_held_out_rows_is_that_of_a_map_fit():
    x = randn(60, 8)
    y = x[:, :1] + 0.5 * randn(60, 1, seed=1)
    problem = cr.Problem(nn.Linear(8, 1), (x, y), cr.likelihoods.Gaussian(), cr.priors.Normal(3.0))
    settings = {"steps": 200, "compile": False, "noise_from": "held-out"}
    point = cr.MAP(**settings).fit(problem, seed=0)
    cloud = cr.SWAG(**settings, iterates=5, rank=3).fit(problem, seed=0)
    assert float(cloud.loc[0, -1]) == pytest.approx(float(point.draws[0, 0, -1]), abs=1e-6)
    assert cloud.record.history["held_out_noise"] == pytest.approx(point.record.history["held_out_noise"])
    other = cr.SWAG(**settings | {"noise_from": "training"}, iterates=5, rank=3).fit(problem, seed=0)
    assert float(cloud.loc[0, -1]) > float(other.loc[0, -1]) + 0.02
