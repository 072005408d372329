"""SGLD and SGHMC: their stationary distributions, minibatches, step sizes and records."""

import math

import pytest
import torch
from sgmcmc_problems import BOTH, DOUBLE, SHORT, X, Y, fit, problem
from torch import nn

import credibly as cr
from chains import assert_moments, assert_weighted_prior
from conftest import mlp, randn
from credibly.backends.cpp import wide
from credibly.core import chain_noise
from credibly.core.chain_noise import LargeNoise
from credibly.core.compilation import compiler_missing
from credibly.core.rng import fill_normal
from credibly.inference import backend
from credibly.inference import target as targets
from credibly.inference.kernels.langevin import adapted_root
from credibly.inference.sampling import sgmcmc as sgmcmc_run
from credibly.inference.sampling import sgmcmc_steps
from credibly.inference.target import to_target
from credibly.likelihoods import Categorical, Gaussian


def precision_of(conjugate, t_lik=1.0, t_prior=1.0):
    return torch.linalg.inv(conjugate.exact(t_lik, t_prior)[1])


def exact_draws(conjugate, count, t_lik=1.0, t_prior=1.0, seed=0):
    mean, covariance = conjugate.exact(t_lik, t_prior)
    return mean + randn(count, len(mean), seed=seed, dtype=DOUBLE) @ torch.linalg.cholesky(covariance).T


# -- the conjugate model; the plain cases are in test_conjugate.py -----------------------------------------------------
# Chains start at exact draws, so they reach the stationary distribution of the dynamics without a long warm-up.
# Draws are far enough apart to be independent along stiff directions, where discretisation errors are largest.
MANY = {"chains": 400, "draws": 4, "warmup": 120, "thin": 40, "batch_size": 30}


def preconditioned_run(method, conjugate, size, **kwargs):
    """Return the draws of a run whose chains each freeze a preconditioner of their own."""
    few = {"chains": 150, "draws": 10, "thin": 30}  # warm-up evaluates chains one by one
    options = method(**{**MANY, **few, **kwargs}, preconditioner="rmsprop", step_size=size, compile=False)
    target = to_target(conjugate.problem())
    sampler = options.sampler(target, 0)
    sampler.start(exact_draws(conjugate, 150))
    draws, seen = [], []
    while sampler.done < sampler.total:
        sampler.advance(lambda: False)
        if sampler.keeps():
            draws.append(sampler.theta.clone())
            seen.append(adapted_root(sampler.squares))
    assert all(torch.equal(s, seen[0]) for s in seen)  # frozen after warm-up
    assert float((seen[0].log().mean(-1)).abs().max()) < 1e-9  # a geometric mean of one
    assert float(seen[0].log().std(-1).min()) > 0.05  # not the identity
    return torch.stack(draws, 1)


def test_preconditioned_sgld_is_exact(conjugate):
    """With independent noise its variance would be up to a quarter too large at this step."""
    size = 0.8 / float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    assert_moments(preconditioned_run(cr.SGLD, conjugate, size), *conjugate.exact())


def test_preconditioned_sghmc_is_exact(conjugate):
    stiffest = float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    draws = preconditioned_run(cr.SGHMC, conjugate, 0.6 / math.sqrt(stiffest), momentum=0.8)
    assert_moments(draws, *conjugate.exact())


@BOTH
def test_minibatch_noise_inflates_the_variance_by_no_more_than_the_step_size_rule_allows(conjugate, method):
    """The mean is exact; every direction is at least as wide as the posterior, and none much wider."""
    start = exact_draws(conjugate, 400)
    posterior = fit(method, conjugate.problem(), chains=400, draws=4, warmup=300, thin=40, batch_size=10, init=start)
    mean, covariance = conjugate.exact()
    draws = posterior.draws.flatten(0, 1)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (draws - mean).T, upper=False)
    assert float(white.mean(1).abs().max()) < 4.5 / math.sqrt(400)
    spread = torch.linalg.eigvalsh(torch.cov(white))
    slack = 4.5 * math.sqrt(2 / 400)
    assert 1 - slack < float(spread[0])
    assert float(spread[-1]) < 1.1 + slack


@pytest.mark.parametrize("t_lik, t_prior", [(0.3, 0.3), (0.2, 4.0)])
@BOTH
def test_the_temperatures_of_the_problem_apply(conjugate, method, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    mean, covariance = conjugate.exact(t_lik, t_prior)
    stiffest = float(torch.linalg.eigvalsh(precision_of(conjugate, t_lik, t_prior))[-1])
    size = 0.8 / stiffest if method is cr.SGLD else 1 / math.sqrt(stiffest)
    start = exact_draws(conjugate, 400, t_lik, t_prior)
    posterior = fit(method, problem, init=start, step_size=size, **MANY)
    assert_moments(posterior.draws, mean, covariance)


@BOTH
def test_a_decreasing_step_size_ends_near_the_exact_covariance(conjugate, method):
    """Polynomial schedule: every draw has a smaller step than the one before, and the last have the exact moments."""
    stiffest = float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    size = 1.6 / stiffest if method is cr.SGLD else 1.2 / math.sqrt(stiffest)
    options = {**MANY, "draws": 8, "schedule": "polynomial"}
    posterior = fit(method, conjugate.problem(), init=exact_draws(conjugate, 400), step_size=size, **options)
    sizes = posterior.statistics["step_size"]
    assert torch.equal(sizes, sizes[:1].expand(400, -1))
    assert bool((sizes[0].diff() < 0).all())
    last = float(sizes[0, -1])
    assert last == pytest.approx(size * (1 + 439 / 44) ** -0.55, rel=1e-12)
    assert_moments(posterior.draws[:, -1:], *conjugate.exact())


# -- other targets -----------------------------------------------------------------------------------------------------
SHAPE = torch.tensor([2.0, 5.0], dtype=DOUBLE)


@pytest.mark.parametrize("preconditioner", [None, "rmsprop"])
@BOTH
def test_a_skewed_density(method, preconditioner):
    """Logarithms of Gamma variables: their mean is digamma, which a wrong sign or factor would shift."""
    target = cr.Density(lambda w: (SHAPE * w - w.exp()).sum(-1), 2, batched=True)
    size = 0.01 if method is cr.SGLD else 0.15
    thin = 100 if method is cr.SGLD else 20
    posterior = fit(
        method, target, chains=300, draws=10, warmup=10 * thin, thin=thin, step_size=size, preconditioner=preconditioner
    )
    assert posterior.record.history["batch_size"] is None
    assert_moments(posterior.draws, torch.digamma(SHAPE), torch.diag(torch.polygamma(1, SHAPE)))


@BOTH
def test_chains_one_at_a_time_equal_a_batch(method, monkeypatch):
    monkeypatch.setattr(backend, "MANY", 1)
    monkeypatch.setattr(sgmcmc_run, "LARGE", 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))
    target = to_target(cr.Problem(net, (randn(24, 3), randn(24, 1, seed=1)), Gaussian(0.5), cr.priors.Normal(1.0)))
    options = method(chains=3, draws=4, warmup=0, thin=2, step_size=1e-2, batch_size=8, compile=False)
    single = options.sampler(target, 5)
    monkeypatch.setattr(sgmcmc_run, "LARGE", 10**6)
    batched = options.sampler(target, 5)
    for sampler in (single, batched):
        sampler.start(0.3 * randn(3, target.dim, seed=2))
        while sampler.done < 8:
            sampler.advance(lambda: False)
    assert (single.one_by_one, batched.one_by_one) == (True, False)
    assert torch.equal(batched.noise.at(5)[1:2], single.noise.of(1, 5))
    torch.testing.assert_close(single.theta, batched.theta, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(compiler_missing(torch.device("cpu"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("fill", [fill_normal, wide.fill_normal])
def test_pieces_of_noise_are_the_noise(fill, monkeypatch):
    """A large chain adds its noise piece by piece, and never holds all of it."""
    monkeypatch.setattr(chain_noise, "LARGE_CHUNK", 4096)
    noise = LargeNoise(3, "noise", range(4, 6), 10_001, one_by_one=True, fill=fill)
    pieces = [(part, numbers.clone()) for part, numbers in noise.chunks(1, 7)]
    assert [part for part, _ in pieces] == [slice(0, 4096), slice(4096, 8192), slice(8192, 10_001)]
    assert "values" not in vars(noise)
    assert torch.equal(torch.cat([numbers for _, numbers in pieces], 1), noise.of(1, 7))


def test_one_scale_of_a_large_prior_takes_no_memory(monkeypatch):
    def scale(prior):
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        return to_target(cr.Problem(net, (randn(5, 3), randn(5)), cr.likelihoods.Gaussian(0.5), prior)).scale

    priors = [
        cr.priors.Normal(0.3),
        cr.priors.Normal(1.0, fan_in=True),
        {"0.*": cr.priors.Normal(1.0), "*": cr.priors.Normal(0.3)},
    ]
    small = [scale(prior) for prior in priors]
    monkeypatch.setattr(targets, "LARGE", 1)
    large = [scale(prior) for prior in priors]
    assert [t.stride() for t in large] == [(0,), (1,), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(small, large))


@pytest.mark.skipif(bool(compiler_missing(torch.device("cpu"))), reason="needs a C++ compiler")
def test_compiled_noise_equals_eager_noise():
    """An odd number of values, of the last chain."""
    plain, fast = (
        LargeNoise(3, "noise", range(4, 6), 50_001, one_by_one=True, fill=fill)
        for fill in (fill_normal, wide.fill_normal)
    )
    expected, found = plain.of(1, 7), fast.of(1, 7)
    assert found.shape == (1, 50_001)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(expected.mean()) == pytest.approx(0, abs=4.5 / math.sqrt(50_001))
    assert float(expected.var()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / 50_001))
    for chain, iteration in ((1, 8), (0, 7)):
        assert float((plain.of(chain, iteration) * found).mean()) == pytest.approx(0, abs=4.5 / math.sqrt(50_001))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@BOTH
def test_a_free_particle_in_many_dimensions(method, dtype):
    """The variance of a sum of stationary momenta; float32 noise comes from random bits.

    After t steps with momentum coefficient c, half of each drift before its friction and half after it. SGLD: c = 0 and
    a step of sqrt(eps), so eps (t - 1/2).
    """
    dim, steps, size, kept = 40_001, 6, 0.3, 0.5
    flat = cr.Density(lambda w: 0.0 * w.sum(-1), dim, batched=True, dtype=dtype)
    start = torch.zeros(3, dim)
    extra = {"momentum": kept} if method is cr.SGHMC else {}
    posterior = fit(method, flat, chains=3, draws=1, warmup=0, thin=steps, step_size=size, init=start, **extra)
    end = posterior.draws[:, 0].double()
    lags = torch.arange(steps + 1, dtype=DOUBLE)
    weight = torch.full((steps + 1,), size, dtype=DOUBLE)
    weight[[0, -1]] /= 2
    expected = float(weight @ kept ** (lags[:, None] - lags).abs() @ weight)
    if method is cr.SGLD:
        expected = size * (steps - 0.5)
    assert float((end.var(1) / expected - 1).abs().max()) < 4.5 * math.sqrt(2 / dim)
    assert float((torch.corrcoef(end) - torch.eye(3)).abs().max()) < 4.5 / math.sqrt(dim)  # chains are independent
    halves = end[:, : dim // 2], end[:, dim // 2 : 2 * (dim // 2)]  # and so are coordinates drawn as pairs
    assert float((halves[0] * halves[1]).mean(1).abs().max() / expected) < 4.5 / math.sqrt(dim // 2)
    fourth = (end / math.sqrt(expected)).pow(4).mean(1)
    assert float((fourth - 3).abs().max()) < 4.5 * math.sqrt(96 / dim)  # Gaussian, not only of the right variance
    alone = fit(method, flat, chains=1, draws=1, warmup=0, thin=steps, step_size=size, init=start[:1], **extra)
    assert torch.equal(alone.draws[0], posterior.draws[0])


def recurrent():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    return Sequence()


INPUT = randn(5, 2)


NETWORKS = {
    "regression": (lambda: mlp(2, 3, 1), INPUT, INPUT.sum(1), Gaussian(1.0), 40_000),
    "classes": (lambda: mlp(2, 3, 3), INPUT, torch.tensor([0, 1, 2, 0, 0]), Categorical(), 40_000),
    "recurrent": (recurrent, randn(4, 3, 2), torch.tensor([0.5, -1.0, 0.3, 1.5]), Gaussian(0.8), 2000),
}


@pytest.mark.parametrize(
    "method, name",
    [
        (cr.SGLD, "regression"),
        pytest.param(cr.SGLD, "classes", marks=pytest.mark.nightly),
        pytest.param(cr.SGHMC, "regression", marks=pytest.mark.nightly),
        (cr.SGHMC, "classes"),
        pytest.param(cr.SGHMC, "recurrent", marks=pytest.mark.nightly),
    ],
)
def test_predictions_of_small_networks_agree_with_importance_sampling(method, name):
    make, x, y, likelihood, count = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = cr.Problem(make(), data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.7))
    assert p.forward.looped == (name == "recurrent")
    size = {"step_size": 0.03} if method is cr.SGLD else {"step_size": 0.2, "momentum": 0.8}
    runs = {"chains": 6, "draws": 50, "warmup": 20, "thin": 4} if p.forward.looped else {"chains": 64, "warmup": 200}
    runs = {"draws": 40, "thin": 30, **runs}
    posterior = fit(method, p, init="prior", **size, **runs)
    assert_weighted_prior(p, posterior.draws, count)
    assert posterior.predict(x).mean.shape[0] == len(x)


# -- minibatches -------------------------------------------------------------------------------------------------------
@BOTH
def test_the_minibatches_of_an_epoch_average_to_the_full_gradient(method):
    p = problem(temperature=cr.Tempering(0.4, 2.0))
    target = to_target(p)
    sampler = method(chains=3, batch_size=8, compile=False).sampler(target, 0)
    theta = randn(3, p.dim, seed=2, dtype=DOUBLE)
    batches = [target.minibatch_and_grad(theta, sampler.batches.at(t), sampler.scale) for t in range(3)]
    value, gradient = (sum(part) / 3 for part in zip(*batches))
    known, slope = target.likelihood_and_grad(theta)
    torch.testing.assert_close(value, known, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-10)
    rows = torch.stack([sampler.batches.at(t) for t in range(3)], 1)  # (chain, step, row)
    assert rows.shape == (3, 3, 8)
    assert all(sorted(own.flatten().tolist()) == list(range(24)) for own in rows)
    assert not torch.equal(rows[0], rows[1])  # each chain has its own order


def test_the_batch_size_is_about_256_or_all_rows():
    assert cr.SGLD().batch(10_240_000) == 256
    assert cr.SGLD().batch(60_000) == 250
    for n in (10_001, 12_347, 50_021):
        assert 192 <= cr.SGLD().batch(n) < 320
        assert n % cr.SGLD().batch(n) < 15
    assert cr.SGLD().batch(10_000) == 10_000
    assert cr.SGLD().batch(24) == 24
    assert cr.SGLD(batch_size=24).batch(24) == 24
    posterior = fit(cr.SGLD, problem(), chains=2, draws=2, warmup=2, thin=1, init="prior")
    assert posterior.record.history["batch_size"] == 24


# -- step-size rule ----------------------------------------------------------------------------------------------------
@pytest.fixture
def exact_curvature(monkeypatch):
    """Enough power iterations for six digits; a run takes fewer."""
    monkeypatch.setattr(sgmcmc_steps, "ITERATIONS", 30)


def test_the_step_size_comes_from_the_largest_curvature(conjugate, exact_curvature):
    """On full batches: nothing else limits it."""
    largest = float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    runs = {"chains": 2, "draws": 2, "warmup": 2, "thin": 1, "init": "prior"}
    for method, expected in ((cr.SGLD, 1.5 / largest), (cr.SGHMC, 1 / math.sqrt(largest))):
        history = fit(method, conjugate.problem(), **runs).record.history
        assert history["curvature"] == pytest.approx(largest, rel=1e-6)
        assert history["step_size"] == pytest.approx(expected, rel=1e-6)
        assert history["gradient_noise"] is None
    assert history["momentum"] == pytest.approx(math.exp(-1.4 * history["step_size"] / conjugate.prior), rel=1e-6)


def test_the_curvature_is_that_of_the_tempered_density(conjugate, exact_curvature):
    p = conjugate.problem(temperature=cr.Tempering(0.1, 0.5))
    history = fit(cr.SGLD, p, chains=2, draws=1, warmup=1, thin=1, init="prior").record.history
    assert history["curvature"] == pytest.approx(
        float(torch.linalg.eigvalsh(precision_of(conjugate, 0.1, 0.5))[-1]), rel=1e-6
    )


def test_the_curvature_is_that_of_the_preconditioned_density(conjugate, exact_curvature):
    sampler = cr.SGLD(chains=3, preconditioner="rmsprop", batch_size=30, compile=False).sampler(
        to_target(conjugate.problem()), 0
    )
    sampler.start(exact_draws(conjugate, 3))
    root = adapted_root(sampler.squares)
    known = torch.linalg.eigvalsh(root.unsqueeze(-1) * precision_of(conjugate) * root.unsqueeze(-2))[:, -1]
    assert sampler.warm.found.curvature == pytest.approx(float(known.max()), rel=1e-3)


def test_the_curvature_of_many_rows_is_estimated_from_some_of_them():
    x = randn(5000, 2, dtype=DOUBLE)
    net = nn.Linear(2, 1, bias=False).double()
    p = cr.Problem(net, data=(x, x.sum(1)), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    history = fit(cr.SGLD, p, chains=1, draws=1, warmup=1, thin=1, init="prior").record.history
    largest = float(torch.linalg.eigvalsh(x.T @ x / 0.25)[-1]) + 1
    assert history["curvature"] == pytest.approx(largest, rel=0.2)  # of 1,024 rows, rescaled to 5,000


def test_a_density_that_is_not_concave_uses_the_curvature_of_the_prior():
    ridge = cr.Density(lambda w: w.square().sum(-1) - w.pow(4).sum(-1), 2, batched=True, scale=0.5)
    history = fit(cr.SGLD, ridge, chains=2, draws=1, warmup=1, thin=1, init=torch.zeros(2, 2)).record.history
    assert history["curvature"] == pytest.approx(4.0)  # 1 / 0.5^2
    assert history["step_size"] == pytest.approx(1.5 / 4)


def test_a_given_step_size_is_used_unchanged():
    history = fit(cr.SGLD, problem(), chains=2, draws=2, warmup=2, thin=1, step_size=1e-4, init="prior").record.history
    assert history["step_size"] == 1e-4
    assert history["curvature"] is None


# -- equivalent computations -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preconditioner", [None, "rmsprop"])
@BOTH
def test_batched_equals_looped(method, preconditioner):
    usual, looped = (
        fit(method, problem(plan=p), **SHORT, preconditioner=preconditioner) for p in ("batched", "looped")
    )
    assert looped.record.history["plan"].startswith("looped")
    torch.testing.assert_close(looped.draws, usual.draws, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(looped.statistics["log_likelihood"], usual.statistics["log_likelihood"])


@pytest.mark.parametrize("preconditioner", [None, "rmsprop"])
@BOTH
def test_a_chain_does_not_depend_on_the_others(method, preconditioner):
    start = 0.3 * randn(4, problem().dim, dtype=DOUBLE)
    many = fit(method, problem(), **{**SHORT, "init": start}, preconditioner=preconditioner)
    few = fit(method, problem(), **{**SHORT, "init": start[:2], "chains": 2}, preconditioner=preconditioner)
    torch.testing.assert_close(few.draws, many.draws[:2], rtol=1e-10, atol=1e-10)


@BOTH
def test_the_same_seed_gives_identical_draws(method):
    one, two, other = (fit(method, problem(), seed=s, **SHORT) for s in (3, 3, 4))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, other.draws)


@BOTH
def test_thinning_keeps_every_third_draw(method):
    usual = fit(method, problem(), **{**SHORT, "thin": 1, "draws": 15})
    third = fit(method, problem(), **SHORT)
    assert torch.equal(third.draws, usual.draws[:, 2::3])


def test_draws_further_apart_than_a_block_of_steps():
    """A block has a hundred steps."""
    far = fit(cr.SGLD, problem(), **{**SHORT, "thin": 150, "draws": 2, "warmup": 130, "step_size": 1e-4})
    near = fit(cr.SGLD, problem(), **{**SHORT, "thin": 50, "draws": 6, "warmup": 130, "step_size": 1e-4})
    assert far.draws.shape == (4, 2, problem().dim)
    assert torch.equal(far.draws, near.draws[:, 2::3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, unrolled, lengths",
    [
        # Two steps per call and no single ones: the time of a test is that of the compiler, which grows with the steps.
        (lambda: nn.Linear(3, 1).double(), 2, {"warmup": 4, "thin": 2}),
        pytest.param(lambda: None, 8, {}, marks=pytest.mark.nightly),  # eight steps in one call, and single steps
    ],
    ids=["linear", "network"],
)
def test_compiled_equals_eager(make, unrolled, lengths, monkeypatch):
    monkeypatch.setattr(sgmcmc_run, "UNROLLED", unrolled)
    settings = {**SHORT, **lengths, "preconditioner": "rmsprop"}
    eager = fit(cr.SGHMC, problem(make()), **settings)
    fast = fit(cr.SGHMC, problem(make()), **{**settings, "compile": True})
    assert fast.record.history["compiled"]
    assert not eager.record.history["compiled"]
    torch.testing.assert_close(fast.draws, eager.draws, rtol=1e-9, atol=1e-9)


# -- record and statistics ---------------------------------------------------------------------------------------------
@BOTH
def test_the_record_describes_the_run(method):
    posterior = fit(method, problem(), **SHORT)
    history = posterior.record.history
    assert history["phases"] == [
        {"name": "warm-up", "first": 0, "end": 10},
        {"name": "sampling", "first": 10, "end": 25},
    ]
    assert history["batch_size"] == 8
    assert history["gradients"] == pytest.approx(4 * (25 + 1) * 8 / 24, abs=0.01)  # of 8 of 24 rows, one at the start
    assert set(posterior.statistics) == {"log_likelihood", "step_size"}
    assert all(v.shape == (4, 5) for v in posterior.statistics.values())
    assert posterior.record.settings["kind"] == f"methods.{method.__name__}"


@BOTH
def test_the_recorded_log_likelihood_is_that_of_the_draw(method):
    """With full batches."""
    p = problem()
    posterior = fit(method, p, **{**SHORT, "batch_size": 24})
    known = p.log_density_and_grad(posterior.draws.flatten(0, 1)).log_likelihood.reshape(4, 5)
    torch.testing.assert_close(posterior.statistics["log_likelihood"], known)


# -- starting points ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [cr.SGHMC, cr.HMC])
def test_more_start_steps_start_nearer_to_the_mode(method):
    """With a tiny step the first draw is the start: its log density rises to that of the mode."""
    options = {"chains": 2, "draws": 1, "warmup": 0, "thin": 1, "step_size": 1e-9, "init": "ensemble"}
    options |= {"trajectory_length": 1e-9} if method is cr.HMC else {}
    data = (X.float(), Y.float())
    p = cr.Problem(mlp(3, 5, 1), data=data, likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    reached = [p.log_density(fit(method, p, start_steps=s, **options).draws[:, 0]) for s in (1, 30, 3000)]
    mode = p.log_density(cr.MAP(steps=20_000).fit(p, seed=0).sample(1))
    assert bool((reached[1] > reached[0] + 1).all())
    assert bool((reached[2] > reached[1] + 1).all())
    assert bool((reached[2] > mode - 1).all())
