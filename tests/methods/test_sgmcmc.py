"""SGLD and SGHMC end to end: the distribution that theory says they have, their schedules, step sizes and refusals."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import credibly as cr
from chains import assert_moments, assert_weighted_prior
from conftest import mlp, randn
from credibly.core.compilation import compiler_missing
from credibly.inference.sampling import noise as chain_noise
from credibly.inference.sampling import sgmcmc as sgmcmc_run
from credibly.inference.target import to_target
from credibly.likelihoods import Categorical, Gaussian

DOUBLE = torch.float64
BOTH = pytest.mark.parametrize("method", [cr.SGLD, cr.SGHMC])


def fit(method, target, *, seed=0, **kwargs):
    return method(**{"compile": False, **kwargs}).fit(target, seed=seed)


def precision_of(conjugate, t_lik=1.0, t_prior=1.0):
    return torch.linalg.inv(conjugate.exact(t_lik, t_prior)[1])


def exact_draws(conjugate, count, t_lik=1.0, t_prior=1.0, seed=0):
    mean, covariance = conjugate.exact(t_lik, t_prior)
    return mean + randn(count, len(mean), seed=seed, dtype=DOUBLE) @ torch.linalg.cholesky(covariance).T


# -- the conjugate model; the plain cases are in test_conjugate.py -------------------------------------------------------
# Chains begin at exact draws: what they come to is the dynamics' own distribution, without a warm-up to wait for.
MANY = {"chains": 400, "draws": 4, "warmup": 600, "thin": 150, "batch_size": 30}


def preconditioned_process(method, conjugate, size, **kwargs):
    """A run and, for each chain, the preconditioner that it froze."""
    options = method(**{**MANY, **kwargs}, preconditioner="rmsprop", step_size=size, compile=False)
    target = to_target(conjugate.problem())
    process = options.sampler(target, 0)
    process.start(exact_draws(conjugate, 400))
    draws, seen = [], []
    while process.done < process.total:
        process.advance(lambda: False)
        if process.keeps():
            draws.append(process.theta.clone())
            seen.append(process._preconditioner(process.squares))
    assert all(torch.equal(s, seen[0]) for s in seen)  # frozen after warm-up
    assert float((seen[0].log().mean(-1)).abs().max()) < 1e-9  # a geometric mean of one
    assert float(seen[0].log().std(-1).min()) > 0.05  # not the identity
    return torch.stack(draws, 1), seen[0]


def test_preconditioned_sgld_solves_its_own_balance(conjugate):
    """S = B S B' + eps P with B = 1 - eps P A / 2, for the preconditioner of every chain."""
    precision = precision_of(conjugate)
    size = 0.8 / float(torch.linalg.eigvalsh(precision)[-1])
    draws, metric = preconditioned_process(cr.SGLD, conjugate, size)
    kept = torch.eye(4, dtype=DOUBLE) - 0.5 * size * metric.unsqueeze(-1) * precision
    covariance = size * torch.diag_embed(metric)
    for _ in range(20):  # the sum of B^k eps P B^k' by doubling
        covariance, kept = covariance + kept @ covariance @ kept.mT, kept @ kept
    assert_moments(draws, conjugate.exact()[0], covariance)


def test_preconditioned_sghmc_is_exact(conjugate):
    stiffest = float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    draws, _ = preconditioned_process(cr.SGHMC, conjugate, 0.6 / math.sqrt(stiffest), momentum=0.8)
    assert_moments(draws, *conjugate.exact())


@BOTH
def test_minibatches_heat_by_no_more_than_the_step_size_rule_allows(conjugate, method):
    """Mean as it should be; every direction at least as wide as the posterior, and none much wider."""
    start = exact_draws(conjugate, 400)
    posterior = fit(method, conjugate.problem(), chains=400, draws=4, warmup=300, thin=100, batch_size=10, init=start)
    mean, covariance = conjugate.exact()
    draws = posterior.draws.flatten(0, 1)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (draws - mean).T, upper=False)
    assert float(white.mean(1).abs().max()) < 4.5 / math.sqrt(400)
    spread = torch.linalg.eigvalsh(torch.cov(white))
    slack = 4.5 * math.sqrt(2 / 400)
    assert 1 - slack < float(spread[0])
    assert float(spread[-1]) < 1.1 + slack


@pytest.mark.parametrize("t_lik, t_prior", [(0.3, 0.3), (0.2, 1.0), (1.0, 4.0)])
@BOTH
def test_the_temperatures_are_those_of_the_problem(conjugate, method, t_lik, t_prior):
    problem = conjugate.problem(temperature=cr.Tempering(t_lik, t_prior))
    mean, covariance = conjugate.exact(t_lik, t_prior)
    precision = precision_of(conjugate, t_lik, t_prior)
    stiffest = float(torch.linalg.eigvalsh(precision)[-1])
    size = 0.8 / stiffest if method is cr.SGLD else 1 / math.sqrt(stiffest)
    if method is cr.SGLD:  # its bias is known, so the step need not be small
        covariance = torch.linalg.inv(precision - size * precision @ precision / 4)
    start = exact_draws(conjugate, 400, t_lik, t_prior)
    posterior = fit(method, problem, init=start, step_size=size, **MANY)
    assert_moments(posterior.draws, mean, covariance)


@BOTH
def test_a_falling_step_size_ends_near_the_exact_covariance(conjugate, method):
    """Polynomial schedule: the last draws have a smaller step, and for SGLD a smaller bias, than the first."""
    precision = precision_of(conjugate)
    stiffest = float(torch.linalg.eigvalsh(precision)[-1])
    size = 1.6 / stiffest if method is cr.SGLD else 1.2 / math.sqrt(stiffest)
    options = {**MANY, "draws": 8, "schedule": "polynomial"}
    posterior = fit(method, conjugate.problem(), init=exact_draws(conjugate, 400), step_size=size, **options)
    sizes = posterior.statistics["step_size"]
    assert torch.equal(sizes, sizes[:1].expand(400, -1))
    assert bool((sizes[0].diff() < 0).all())
    last = float(sizes[0, -1])
    assert last == pytest.approx(size * (1 + 1799 / 180) ** -0.55, rel=1e-12)
    mean, covariance = conjugate.exact()
    if method is cr.SGLD:
        covariance = torch.linalg.inv(precision - last * precision @ precision / 4)
    assert_moments(posterior.draws[:, -1:], mean, covariance)


# -- other targets -------------------------------------------------------------------------------------------------------
SHAPE = torch.tensor([2.0, 5.0], dtype=DOUBLE)


@pytest.mark.parametrize("preconditioner", [None, "rmsprop"])
@BOTH
def test_a_skewed_density(method, preconditioner):
    """Logarithms of Gamma variables: their mean is digamma, and a wrong sign or factor moves it."""
    target = cr.Density(lambda w: (SHAPE * w - w.exp()).sum(-1), 2, batched=True)
    size = 0.01 if method is cr.SGLD else 0.15
    thin = 100 if method is cr.SGLD else 20
    posterior = fit(
        method, target, chains=300, draws=10, warmup=10 * thin, thin=thin, step_size=size, preconditioner=preconditioner
    )
    assert posterior.record.history["batch_size"] is None
    assert_moments(posterior.draws, torch.digamma(SHAPE), torch.diag(torch.polygamma(1, SHAPE)))


@BOTH
def test_chains_taken_in_turn_are_those_of_a_batch(method, monkeypatch):
    monkeypatch.setattr(chain_noise, "MANY", 1)
    monkeypatch.setattr(sgmcmc_run, "LARGE", 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))
    target = to_target(cr.Problem(net, (randn(24, 3), randn(24, 1, seed=1)), Gaussian(0.5), cr.priors.Normal(1.0)))
    options = method(chains=3, draws=4, warmup=0, thin=2, step_size=1e-2, batch_size=8, compile=False)
    alone = options.sampler(target, 5)
    monkeypatch.setattr(sgmcmc_run, "LARGE", 10**6)
    together = options.sampler(target, 5)
    for process in (alone, together):
        process.start(0.3 * randn(3, target.dim, seed=2))
        while process.done < 8:
            process.advance(lambda: False)
    assert (alone.apart, together.apart) == (True, False)
    assert torch.equal(together.noise.at(5)[1:2], alone.noise.of(1, 5))
    torch.testing.assert_close(alone.theta, together.theta, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(compiler_missing(torch.device("cpu"))), reason="needs a C++ compiler")
def test_compiled_noise_is_the_same():
    """An odd number of them, the last chain's."""
    plain, fast = (
        chain_noise.LargeNoise(3, "noise", range(4, 6), 50_001, one_by_one=True, compile=c)
        for c in (False, True)
    )  # fmt: skip
    expected, found = plain.of(1, 7), fast.of(1, 7)
    assert found.shape == (1, 50_001)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(expected.mean()) == pytest.approx(0, abs=4.5 / math.sqrt(50_001))
    assert float(expected.var()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / 50_001))
    for place, iteration in ((1, 8), (0, 7)):
        assert float((plain.of(place, iteration) * found).mean()) == pytest.approx(0, abs=4.5 / math.sqrt(50_001))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@BOTH
def test_a_free_particle_of_many_dimensions(method, dtype):
    """Where the noise is drawn as bits (float32) and where it is not: variance eps t for SGLD, and that of momenta in balance.

    SGHMC: after t steps of kept momentum c, each drift half before and half after its friction.
    """
    dim, steps, size, kept = 40_001, 6, 0.3, 0.5
    flat = cr.Density(lambda w: 0.0 * w.sum(-1), dim, batched=True, dtype=dtype)
    start = torch.zeros(3, dim)
    extra = {"momentum": kept} if method is cr.SGHMC else {}
    posterior = fit(method, flat, chains=3, draws=1, warmup=0, thin=steps, step_size=size, init=start, **extra)
    end = posterior.draws[:, 0].double()
    if method is cr.SGLD:
        expected = size * steps
    else:
        lags = torch.arange(steps + 1, dtype=DOUBLE)
        weight = torch.full((steps + 1,), size, dtype=DOUBLE)
        weight[[0, -1]] /= 2
        expected = float(weight @ kept ** (lags[:, None] - lags).abs() @ weight)
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
    "method, name", [(cr.SGLD, "regression"), (cr.SGLD, "classes"), *((cr.SGHMC, name) for name in NETWORKS)]
)
def test_predictions_of_small_networks_are_those_of_the_weighted_prior(method, name):
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


# -- minibatches ---------------------------------------------------------------------------------------------------------
X, Y = randn(24, 3, dtype=DOUBLE), randn(24, seed=1, dtype=DOUBLE)


def problem(**kwargs):
    return cr.Problem(
        mlp(3, 5, 1, dtype=DOUBLE), data=(X, Y), likelihood=Gaussian(0.5), prior=cr.priors.Normal(), **kwargs
    )


@BOTH
def test_the_minibatches_of_an_epoch_average_to_the_full_gradient(method):
    p = problem(temperature=cr.Tempering(0.4, 2.0))
    target = to_target(p)
    process = method(chains=3, batch_size=8, compile=False).sampler(target, 0)
    theta = randn(3, p.dim, seed=2, dtype=DOUBLE)
    value, gradient = (
        sum(part) / 3 for part in zip(*(process._minibatch(theta, process.batches.at(t)) for t in range(3)))
    )
    known, slope = target.likelihood_and_grad(theta)
    torch.testing.assert_close(value, known, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-10)
    rows = torch.stack([process.batches.at(t) for t in range(3)], 1)  # (chain, step, row)
    assert rows.shape == (3, 3, 8)
    assert all(sorted(own.flatten().tolist()) == list(range(24)) for own in rows)
    assert not torch.equal(rows[0], rows[1])  # every chain has its own order


def test_the_batch_size_is_64_or_all_rows():
    assert cr.SGLD().batch(1000) == 64
    assert cr.SGLD().batch(24) == 24
    assert cr.SGLD(batch_size=24).batch(24) == 24
    posterior = fit(cr.SGLD, problem(), chains=2, draws=2, warmup=2, thin=1, init="prior")
    assert posterior.record.history["batch_size"] == 24


@BOTH
def test_a_minibatch_larger_than_the_data_is_refused(method):
    with pytest.raises(cr.InputError, match="batch_size: found 25 for 24 rows. Pass at most the number of rows"):
        method(batch_size=25).fit(problem(), seed=0)


# -- step-size rule ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [30, 10])
def test_the_step_size_comes_from_the_largest_curvature(conjugate, batch):
    largest = float(torch.linalg.eigvalsh(precision_of(conjugate))[-1])
    noise = 0 if batch == 30 else 30 / batch
    runs = {"chains": 2, "draws": 2, "warmup": 2, "thin": 1, "batch_size": batch, "init": "prior"}
    history = fit(cr.SGLD, conjugate.problem(), **runs).record.history
    assert history["curvature"] == pytest.approx(largest, rel=1e-6)
    assert history["step_size"] == pytest.approx(0.2 / (largest * (1 + noise)), rel=1e-6)
    history = fit(cr.SGHMC, conjugate.problem(), **runs, momentum=0.9).record.history
    assert history["curvature"] == pytest.approx(largest, rel=1e-6)
    assert history["step_size"] == pytest.approx(math.sqrt(0.1 * math.log(1 / 0.9) / (largest * (1 + noise))), rel=1e-6)


def test_the_curvature_is_tempered_with_the_problem(conjugate):
    p = conjugate.problem(temperature=cr.Tempering(0.1, 0.5))
    history = fit(cr.SGLD, p, chains=2, draws=1, warmup=1, thin=1, init="prior").record.history
    assert history["curvature"] == pytest.approx(
        float(torch.linalg.eigvalsh(precision_of(conjugate, 0.1, 0.5))[-1]), rel=1e-6
    )


def test_the_curvature_is_seen_through_the_preconditioner(conjugate):
    process = cr.SGLD(chains=3, preconditioner="rmsprop", batch_size=30, compile=False).sampler(
        to_target(conjugate.problem()), 0
    )
    process.start(exact_draws(conjugate, 3))
    root = process._preconditioner(process.squares).sqrt()
    known = torch.linalg.eigvalsh(root.unsqueeze(-1) * precision_of(conjugate) * root.unsqueeze(-2))[:, -1]
    assert process.curvature == pytest.approx(float(known.max()), rel=1e-3)


def test_the_curvature_of_many_rows_is_estimated_from_some_of_them():
    x = randn(5000, 2, dtype=DOUBLE)
    net = nn.Linear(2, 1, bias=False).double()
    p = cr.Problem(net, data=(x, x.sum(1)), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    history = fit(cr.SGLD, p, chains=1, draws=1, warmup=1, thin=1, init="prior").record.history
    largest = float(torch.linalg.eigvalsh(x.T @ x / 0.25)[-1]) + 1
    assert history["curvature"] == pytest.approx(largest, rel=0.2)  # of 1,024 rows, rescaled to 5,000


def test_where_the_density_is_not_concave_the_prior_decides():
    ridge = cr.Density(lambda w: w.square().sum(-1) - w.pow(4).sum(-1), 2, batched=True, scale=0.5)
    history = fit(cr.SGLD, ridge, chains=2, draws=1, warmup=1, thin=1, init=torch.zeros(2, 2)).record.history
    assert history["curvature"] == pytest.approx(4.0)  # 1 / 0.5^2
    assert history["step_size"] == pytest.approx(0.2 / 4)


def test_a_given_step_size_is_used_as_it_is():
    history = fit(cr.SGLD, problem(), chains=2, draws=2, warmup=2, thin=1, step_size=1e-4, init="prior").record.history
    assert history["step_size"] == 1e-4
    assert history["curvature"] is None


# -- schedules -----------------------------------------------------------------------------------------------------------
@st.composite
def schedules(draw):
    schedule = draw(st.sampled_from(["constant", "polynomial", "cyclical"]))
    cycles = draw(st.integers(1, 4))
    each = draw(st.integers(1, 5))
    return cr.SGLD(
        schedule=schedule,
        cycles=cycles,
        draws=each * cycles if schedule == "cyclical" else draw(st.integers(1, 12)),
        warmup=draw(st.integers(0, 15)),
        thin=draw(st.integers(1, 5)),
        exploration=draw(st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.9])),
    )


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_the_bookkeeping_of_draws_agrees_with_itself(options):
    total = options.resolved_schedule().steps
    taken = [done for done in range(total + 1) if options.resolved_schedule().is_draw(done)]
    assert len(taken) == options.draws
    assert taken[0] > options.warmup
    assert taken[-1] == total
    assert not options.resolved_schedule().is_draw(0)
    for done in range(total):
        assert options.resolved_schedule().next_draw(done) == next(t for t in taken if t > done)
    for done in range(total + 1):
        assert options.resolved_schedule().drawn(done) == sum(t <= done for t in taken)


@given(schedules())
@settings(max_examples=50, deadline=None)
def test_every_draw_comes_from_a_step_with_noise(options):
    for done in range(1, options.resolved_schedule().steps + 1):
        size, heat = options.resolved_schedule().at(done - 1, 2.0)
        assert 0 < size <= 2.0
        if options.resolved_schedule().is_draw(done):
            assert heat == 1.0


def test_a_cycle_is_a_cosine_that_explores_first_and_draws_at_its_end():
    options = cr.SGLD(schedule="cyclical", cycles=3, draws=12, warmup=10, thin=5, exploration=0.5)
    assert options.resolved_schedule().steps == 10 + 3 * 40
    taken = [done - 10 for done in range(131) if options.resolved_schedule().is_draw(done)]
    assert taken == [40 * c + p for c in range(3) for p in (25, 30, 35, 40)]
    for t in range(10):
        assert options.resolved_schedule().at(t, 1.0) == (1.0, 1.0)
    for c in range(3):
        for place in range(40):
            size, heat = options.resolved_schedule().at(10 + 40 * c + place, 0.1)
            assert size == pytest.approx(0.05 * (1 + math.cos(math.pi * place / 40)), abs=1e-15)
            assert heat == (1.0 if place >= 20 else 0.0)


def test_the_other_schedules():
    options = cr.SGLD(draws=90, warmup=10, thin=1)
    assert {options.resolved_schedule().at(t, 0.3) for t in range(100)} == {(0.3, 1.0)}
    falling = cr.SGLD(draws=90, warmup=10, thin=1, schedule="polynomial")
    assert falling.resolved_schedule().at(0, 0.3) == (0.3, 1.0)
    assert falling.resolved_schedule().at(10, 0.3)[0] == pytest.approx(0.3 * 2**-0.55)
    assert falling.resolved_schedule().at(90, 0.3)[0] == pytest.approx(0.3 * 10**-0.55)


@BOTH
def test_there_is_no_noise_while_a_cycle_explores(method):
    """Two seeds go the same way down with full-batch gradients, and part when the sampling phase begins."""
    options = method(
        chains=2, draws=4, cycles=1, warmup=0, thin=5, schedule="cyclical", step_size=1e-3, batch_size=24, compile=False
    )
    assert options.resolved_schedule().steps == 40
    paths = []
    for seed in (0, 1):
        process = options.sampler(to_target(problem()), seed)
        process.start(0.3 * randn(2, problem().dim, dtype=DOUBLE))
        process.momentum.zero_()  # SGHMC begins with a momentum of its own
        path = []
        for t in range(40):
            process._advance_one(t, torch.tensor(process._figures(t), dtype=DOUBLE))
            path.append(process.theta.clone())
        paths.append(path)
    assert all(torch.equal(a, b) for a, b in zip(paths[0][:20], paths[1][:20]))
    assert not torch.equal(paths[0][0], paths[0][10])
    assert not torch.equal(paths[0][20], paths[1][20])


@BOTH
def test_a_cyclical_run_keeps_what_it_promises(method):
    posterior = fit(
        method, problem(), chains=3, draws=6, cycles=3, warmup=7, thin=4, schedule="cyclical", step_size=1e-3, batch_size=8, init="prior"
    )  # fmt: skip
    assert posterior.draws.shape == (3, 6, problem().dim)
    assert posterior.record.history["steps"] == 7 + 3 * 16
    seen = posterior.statistics["step_size"][0]
    torch.testing.assert_close(seen[:2], seen[2:4], rtol=0, atol=0)
    assert seen[0] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 11 / 16)))
    assert seen[1] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 15 / 16)))


# -- the same result, however it is computed -----------------------------------------------------------------------------
SHORT = {"chains": 4, "draws": 5, "warmup": 10, "thin": 3, "batch_size": 8, "step_size": 2e-3, "init": "prior"}


@pytest.mark.parametrize("preconditioner", [None, "rmsprop"])
@BOTH
def test_batched_is_looped(method, preconditioner):
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
def test_the_same_seed_gives_the_same_bits(method):
    one, two, other = (fit(method, problem(), seed=s, **SHORT) for s in (3, 3, 4))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, other.draws)


@BOTH
def test_thinning_keeps_every_third_draw(method):
    usual = fit(method, problem(), **{**SHORT, "thin": 1, "draws": 15})
    third = fit(method, problem(), **SHORT)
    assert torch.equal(third.draws, usual.draws[:, 2::3])


def test_more_steps_than_a_block_between_two_draws():
    """Draws further apart than the hundred steps after which the run looks up."""
    far = fit(cr.SGLD, problem(), **{**SHORT, "thin": 250, "draws": 2, "warmup": 130, "step_size": 1e-4})
    near = fit(cr.SGLD, problem(), **{**SHORT, "thin": 50, "draws": 10, "warmup": 130, "step_size": 1e-4})
    assert far.draws.shape == (4, 2, problem().dim)
    assert torch.equal(far.draws, near.draws[:, 4::5])


@pytest.mark.slow
def test_compiled_is_eager():
    settings = {**SHORT, "preconditioner": "rmsprop"}
    eager = fit(cr.SGHMC, problem(), **settings)
    fast = fit(cr.SGHMC, problem(), **{**settings, "compile": True})
    assert fast.record.history["compiled"]
    assert not eager.record.history["compiled"]
    torch.testing.assert_close(fast.draws, eager.draws, rtol=1e-9, atol=1e-9)


# -- what a run leaves behind, and what is refused -----------------------------------------------------------------------
@BOTH
def test_the_record_tells_how_it_went(method):
    posterior = fit(method, problem(), **SHORT)
    history = posterior.record.history
    assert history["phases"] == [
        {"name": "warm-up", "first": 0, "end": 10},
        {"name": "sampling", "first": 10, "end": 25},
    ]
    assert history["batch_size"] == 8
    assert history["gradients"] == 25 * 4
    assert set(posterior.statistics) == {"log_likelihood", "step_size"}
    assert all(v.shape == (4, 5) for v in posterior.statistics.values())
    assert posterior.record.settings["kind"] == f"methods.{method.__name__}"


def test_the_log_likelihood_that_is_noted_is_that_of_the_point_or_the_one_before():
    """With all rows: SGHMC notes it at the draw, SGLD at the point from which the last step went."""
    p = problem()
    posterior = fit(cr.SGHMC, p, **{**SHORT, "batch_size": 24})
    known = p.log_density_and_grad(posterior.draws.flatten(0, 1)).log_likelihood.reshape(4, 5)
    torch.testing.assert_close(posterior.statistics["log_likelihood"], known)
    posterior = fit(cr.SGLD, p, **{**SHORT, "batch_size": 24, "thin": 1})
    known = p.log_density_and_grad(posterior.draws.flatten(0, 1)).log_likelihood.reshape(4, 5)
    torch.testing.assert_close(posterior.statistics["log_likelihood"][:, 1:], known[:, :-1])


@BOTH
def test_a_step_size_that_runs_away_is_told(method):
    with pytest.raises(
        cr.SamplingError, match=r"chain \d left the range of numbers by step \d+ with step_size=1e\+03. Try a tenth"
    ):
        fit(method, problem(), **{**SHORT, "warmup": 300, "step_size": 1e3})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"chains": 0}, "chains: found 0. Pass a whole number from 1 up"),
        ({"draws": 0}, "draws: found 0"),
        ({"warmup": -1}, "warmup: found -1"),
        ({"thin": 0}, "thin: found 0"),
        ({"batch_size": 0}, "batch_size: found 0"),
        ({"batch_size": 2.5}, "batch_size: found 2.5"),
        ({"step_size": 0.0}, "step_size must be a positive number, got 0.0"),
        ({"step_size": math.nan}, "step_size must be a positive number, got nan"),
        ({"schedule": "cosine"}, 'schedule: found \'cosine\'. Pass "constant", "polynomial" or "cyclical"'),
        ({"cycles": 0}, "cycles: found 0"),
        (
            {"schedule": "cyclical", "draws": 10, "cycles": 3},
            "cycles: found 3 for 10 draws. Pass a number that divides",
        ),
        ({"exploration": 1.0}, "exploration: found 1.0"),
        ({"exploration": -0.1}, "exploration: found -0.1"),
        ({"preconditioner": "adam"}, "preconditioner: found 'adam'"),
        ({"preconditioner": "rmsprop", "warmup": 0}, "warmup: found 0 with a preconditioner"),
        ({"init": "zeros"}, "init: found 'zeros'"),
        ({"draw_dtype": "int8"}, "draw_dtype: found 'int8'"),
    ],
    ids=str,
)
@BOTH
def test_settings_that_cannot_be_used(method, options, message):
    with pytest.raises(cr.InputError, match=re.escape(message)):
        method(**options)


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, math.nan])
def test_sghmc_keeps_a_share_of_its_momentum(momentum):
    with pytest.raises(cr.InputError, match="momentum: found"):
        cr.SGHMC(momentum=momentum)


@BOTH
def test_a_wrong_problem_seed_or_folder(method, tmp_path):
    with pytest.raises(cr.InputError, match="problem: found Linear. Pass a credibly.Problem or a credibly.Density"):
        method().fit(nn.Linear(1, 1), seed=0)
    with pytest.raises(cr.InputError, match="seed must be a non-negative integer .*got -1"):
        method().fit(problem(), seed=-1)
    with pytest.raises(cr.StoreError, match="out: .* exists already"):
        method().fit(problem(), seed=0, out=tmp_path)


# -- where chains begin --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [cr.SGHMC, cr.HMC])
def test_more_steps_of_the_start_begin_nearer_to_the_mode(method):
    """A step so small that a chain stays where it began shows the start: its log density rises to that of the mode."""
    options = {"chains": 2, "draws": 1, "warmup": 0, "thin": 1, "step_size": 1e-9, "init": "ensemble"}
    options |= {"trajectory_length": 1e-9} if method is cr.HMC else {}
    data = (X.float(), Y.float())
    p = cr.Problem(mlp(3, 5, 1), data=data, likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    reached = [p.log_density(fit(method, p, start_steps=s, **options).draws[:, 0]) for s in (1, 30, 3000)]
    mode = p.log_density(cr.MAP(steps=20_000).fit(p, seed=0).sample(1))
    assert bool((reached[1] > reached[0] + 1).all())
    assert bool((reached[2] > reached[1] + 1).all())
    assert bool((reached[2] > mode - 1).all())


@pytest.mark.parametrize("method", [cr.SGLD, cr.SGHMC, cr.HMC])
def test_a_start_of_no_steps_is_refused(method):
    with pytest.raises(cr.InputError, match="start_steps: found 0"):
        method(start_steps=0)
