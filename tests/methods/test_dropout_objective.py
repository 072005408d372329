"""The objective of MC-Dropout is -ELBO / N: against brute force over masks, by hand, and in closed form."""

import itertools
import math

import pytest
import torch
from dropout_networks import (
    NOISE,
    NOTHING,
    PRIOR,
    ROWS,
    Heads,
    X,
    Y,
    build,
    dropped_mlp,
    every_mask,
    f64,
    gradients_at,
    objective_of,
    residual,
    scaled,
    seeded,
    some_weights,
    tiny,
)
from torch import nn
from torch.nn import functional as F

import credibly as cr
from conftest import mlp
from credibly.core.compilation import compiler_missing
from credibly.core.rng import stream
from credibly.inference.training.dropout_objective import Dropped
from credibly.likelihoods import Gaussian


def expected(objective, theta):
    """Expectation over all masks of the sum of log likelihoods, and the complexity."""
    problem, network = objective.problem, objective.network
    chance, kept = every_mask(network)
    weights = theta.expand(len(chance), -1)
    rows = objective.log_likelihood(weights, scaled(network, kept), problem.x, problem.y)
    return chance @ rows.sum(1), objective.complexity(theta.unsqueeze(0), objective.own[0])[0]


@pytest.mark.parametrize("where", ["both layers", "second layer"])
def test_objective_is_minus_the_elbo_over_n_tau(where):
    """In the terms of Gal & Ghahramani: M = W/keep, (1/N) sum 1/2 ||y - f||^2 and the decays lambda."""
    first = 0.25 if where == "both layers" else 0.0
    net = dropped_mlp(2, 3, first=0.25, second=0.4)
    problem = tiny(net if first else net[1:])
    objective = objective_of(problem)
    keep = (1 - first, 0.6)
    tau, length = 1 / NOISE**2, 1 / PRIOR
    differences = []
    for theta in some_weights(problem):
        w1, b1, w2, b2 = problem.layout.split(theta)[0].values()
        m1, m2 = w1 / keep[0], w2 / keep[1]
        squares = torch.zeros((), dtype=f64)
        for z in itertools.product((0.0, 1.0), repeat=5):
            z1, z2 = torch.tensor(z[:2], dtype=f64), torch.tensor(z[2:], dtype=f64)
            odds = [(keep[0], z1), (keep[1], z2)]
            chance = math.prod(k if v else 1 - k for k, part in odds for v in part.tolist())
            hidden = torch.tanh(problem.x @ (m1 * z1).T + b1)
            f = hidden @ (m2 * z2).T + b2
            squares += chance * 0.5 * torch.square(problem.y - f).sum() / ROWS
        decay = [k * length**2 / (2 * ROWS * tau) for k in keep]
        decay_of_biases = length**2 / (2 * ROWS * tau)
        spec = squares + decay[0] * m1.square().sum() + decay[1] * m2.square().sum()
        spec += decay_of_biases * (b1.square().sum() + b2.square().sum())
        log_lik, complexity = expected(objective, theta)
        differences.append(float((-log_lik + complexity) / (ROWS * tau) - spec))
    # The constant of the Gaussian density, log sqrt(2 pi / tau) per row, divided by tau.
    assert differences == pytest.approx([0.5 * math.log(2 * math.pi / tau) / tau] * 5, abs=1e-12)


def test_evaluate_is_that_objective_with_shared_masks_or_one_per_row():
    """Masks come from the uniform numbers of a step; the expectation of the sum is the same with one mask per row."""
    problem = tiny()
    chance, kept = every_mask(Dropped(problem, None, None))
    count = len(chance)
    objective = objective_of(problem, members=count)
    theta = some_weights(problem, 1)[0]
    log_lik, complexity = expected(objective_of(problem), theta)
    noise = tuple(torch.where(k > 0, 0.0, 0.999).double().expand(-1, ROWS, -1) for k in kept.values())
    parts, _ = objective.evaluate(theta.expand(count, -1), objective.own, problem.x, problem.y, None, noise, NOTHING)
    assert parts.shape == (count, 2)
    assert float(chance @ parts[:, 0]) == pytest.approx(float(-log_lik) / ROWS, rel=1e-12)
    assert parts[:, 1].tolist() == pytest.approx([float(complexity) / ROWS] * count, rel=1e-12)
    # Row i under mask k + i: every row still has every mask with its probability.
    turned = (torch.arange(count).unsqueeze(1) + torch.arange(ROWS)) % count
    masks = {name: m[turned].squeeze(2) for name, m in scaled(objective.network, kept).items()}
    rows = objective.log_likelihood(theta.expand(count, -1), masks, problem.x, problem.y)
    assert float((chance[turned] * rows).sum()) == pytest.approx(float(log_lik), rel=1e-12)


KL_CASES = {
    "own layers": (lambda: dropped_mlp(2, 3, first=0.25, second=0.4), None),
    "inserted": (lambda: mlp(2, 3, 1, dtype=f64), "*"),
    "inserted before the last": (lambda: mlp(2, 3, 1, dtype=f64), "2"),
    "two on one weight": (lambda: nn.Sequential(nn.Dropout(0.25), nn.Linear(2, 1)).double(), "*"),
    "two heads": (lambda: Heads().double(), None),
}


@pytest.mark.parametrize("case", KL_CASES)
def test_complexity_is_the_kl_divergence_up_to_a_constant(case):
    """E_q[-log p(w)] by brute force: the prior's density at the weights under every mask. (E_q log q is constant.)"""
    net, insert = KL_CASES[case]
    problem = tiny(net(), prior={"*weight": cr.priors.Normal(PRIOR), "*": cr.priors.Normal(1.7)})
    objective = objective_of(problem, insert=insert)
    network = objective.network
    chance, kept = every_mask(network)
    masks = scaled(network, kept)
    entries = {e.name: e for e in problem.layout.entries}
    differences = []
    for theta in some_weights(problem):
        draws = theta.expand(len(chance), -1).clone()
        for site in network.sites:
            for entry in (entries[w] for w in site.weights):
                part = draws[:, entry.start : entry.stop].reshape(-1, *entry.shape)
                draws[:, entry.start : entry.stop] = (part * masks[site.mask]).flatten(1)
        # Folding the masks into the weights gives the masked pass.
        folded = problem.forward(draws, problem.x)
        passes = network.forward.apply({**problem.layout.split(theta.expand(len(chance), -1))[0], **masks}, problem.x)
        torch.testing.assert_close(folded, passes)
        cross = -(chance @ problem.prior.log_prob(draws))
        differences.append(float(cross - objective.complexity(theta.unsqueeze(0), objective.own[0])[0]))
    assert differences == pytest.approx([differences[0]] * 5, abs=1e-11)


def test_decay_of_each_coordinate():
    """l^2/keep on the weights that torch's inverted dropout trains, l^2 on biases and on layers without dropout."""
    net = seeded(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.4), nn.Linear(3, 3), nn.Linear(3, 1)).double()
    )
    prior = {"*.bias": cr.priors.Normal(2.0), "*": cr.priors.Normal(PRIOR, fan_in=True)}
    problem = tiny(net, prior=prior, likelihood=Gaussian(scale_prior=cr.priors.Normal(1.0, -1.0)))
    objective = objective_of(problem)
    (theta,) = some_weights(problem, 1)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective.complexity(leaf.unsqueeze(0), objective.own[0]).sum(), leaf)
    # Prior variance and keep probability; the noise scale has its own prior N(-1, 1).
    expected_by_name = {
        "0.weight": (PRIOR**2 / 2, 1.0),
        "0.bias": (4.0, 1.0),
        "3.weight": (PRIOR**2 / 3, 0.6),
        "3.bias": (4.0, 1.0),
        "4.weight": (PRIOR**2 / 3, 1.0),
        "4.bias": (4.0, 1.0),
    }
    found = problem.layout.split(gradient)[0]
    weights = problem.layout.split(theta)[0]
    assert set(found) == set(expected_by_name)
    for name, (variance, keep) in expected_by_name.items():
        torch.testing.assert_close(found[name], weights[name] / (variance * keep), rtol=1e-12, atol=1e-13)
    assert float(gradient[-1]) == pytest.approx(float(theta[-1]) + 1, rel=1e-12)


def test_tied_weights_are_decayed_by_their_keep():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(2, 2, bias=False), nn.Dropout(0.5), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.drop(self.a(x))).sum(1, keepdim=True)

    problem = tiny(Tied().double())
    objective = objective_of(problem)
    theta = some_weights(problem, 1)
    square = float(theta.square().sum())
    assert float(objective.complexity(theta, objective.own[0])) == pytest.approx(square / (2 * PRIOR**2 * 0.5))


@pytest.mark.parametrize("bias", [True, False])
def test_alpha_dropout_has_the_decay_of_no_dropout(bias):
    """It replaces values, so a mask changes weights and bias: w = a W diag(z), b + W (a floor (1 - z) + shift).

    Their expected squares are ||W||^2 + ||b||^2 for any rate: the property by which it preserves the variance.
    """
    rate = 0.3
    floor = -1.7580993408473766
    a = ((1 - rate) * (1 + rate * floor**2)) ** -0.5
    shift = -a * rate * floor
    problem = tiny(nn.Sequential(nn.AlphaDropout(rate), nn.Linear(2, 1, bias=bias)).double())
    objective = objective_of(problem)
    chance, kept = every_mask(objective.network)
    (theta,) = some_weights(problem, 1)
    w, b = theta[:2], theta[2:].sum()
    square = torch.zeros((), dtype=f64)
    weights = {k: v.expand(len(chance), *v.shape) for k, v in problem.layout.split(theta)[0].items()}
    passes = objective.network.forward.apply({**weights, **kept}, problem.x).squeeze(-1)
    for p, z, f in zip(chance, kept["0.mask"][:, 0], passes):
        weight, constant = a * w * z, b + (w * (a * floor * (1 - z) + shift)).sum()
        torch.testing.assert_close(problem.x @ weight + constant, f)
        square += p * (weight.square().sum() + constant.square())
    complexity = objective.complexity(theta.unsqueeze(0), objective.own[0])
    assert float(complexity) == pytest.approx(float(square) / (2 * PRIOR**2), rel=1e-12)


def test_tempering_is_that_of_the_problem():
    cold = objective_of(tiny(temperature=cr.Tempering(0.25, 2.0)))
    plain = objective_of(tiny())
    theta = some_weights(plain.problem, 1)
    noise = plain.noise(0)
    parts, gradient = plain.evaluate(theta, plain.own, plain.problem.x, plain.problem.y, None, noise, NOTHING)
    tempered, its_gradient = cold.evaluate(theta, cold.own, cold.problem.x, cold.problem.y, None, noise, NOTHING)
    torch.testing.assert_close(tempered, parts / torch.tensor([0.25, 2.0], dtype=f64))
    decay = theta / PRIOR**2 / ROWS
    for name, keep in (("1.weight", 0.75), ("4.weight", 0.6)):
        entry = next(e for e in plain.problem.layout.entries if e.name == name)
        decay[:, entry.start : entry.stop] /= keep
    torch.testing.assert_close(its_gradient, (gradient - decay) / 0.25 + decay / 2.0)


def test_n_is_the_number_of_training_rows():
    """The first step has the network's own weights, so its decay is known: complexity / training rows."""
    problem = build(dropped_mlp())
    whole = objective_of(problem)
    start = problem.layout.read(problem.layout.module).unsqueeze(0)
    complexity = float(whole.complexity(start, whole.own[0]))
    for validation, batch, rows in ((0.0, None, 40), (0.25, None, 30), (0.0, 8, 40), (0.25, 8, 30)):
        method = cr.MCDropout(steps=1, validation=validation, batch_size=batch)
        parts = method.fit(problem, seed=0).record.history["parts"]
        assert parts["decay"] == [[pytest.approx(complexity / rows, rel=1e-12)]]


def test_minibatches_estimate_the_same_objective():
    problem = build(dropped_mlp())
    objective = objective_of(problem, batch=10)
    theta = some_weights(problem, 1)
    noise = (
        torch.rand(1, 40, 3, generator=stream(0, "a"), dtype=f64),
        torch.rand(1, 40, 8, generator=stream(0, "b"), dtype=f64),
    )
    whole = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    parts = []
    for rows in torch.arange(40).split(10):
        own = tuple(u[:, rows] for u in noise)
        parts.append(objective.evaluate(theta, objective.own, problem.x, problem.y, rows, own, NOTHING))
    torch.testing.assert_close(torch.stack([p for p, _ in parts]).mean(0), whole[0])
    torch.testing.assert_close(torch.stack([g for _, g in parts]).mean(0), whole[1])


# -- the gradient ------------------------------------------------------------------------------------------------------
RATES = [[0.2, 0.3], [0.5, 0.05], [0.9, 0.7]]


def by_hand(theta, uniforms, rates, x, y, count):
    """The loss of one member written out with F.linear, for `dropped_mlp`."""
    w1, b1, w2, b2 = (t.reshape(s) for t, s in zip(theta.split([24, 8, 8, 1]), [(8, 3), (8,), (1, 8), (1,)]))
    r1, r2 = rates
    h = torch.tanh(F.linear(x * (uniforms[0] < 1 - r1) / (1 - r1), w1, b1))
    f = F.linear(h * (uniforms[1] < 1 - r2) / (1 - r2), w2, b2).squeeze(1)
    misfit = -torch.distributions.Normal(f, NOISE).log_prob(y).mean()
    decay = w1.square().sum() / (1 - r1) + w2.square().sum() / (1 - r2) + b1.square().sum() + b2.square().sum()
    return misfit, decay / (2 * PRIOR**2 * count)


def test_gradient_is_that_of_a_network_written_by_hand():
    problem = build(dropped_mlp())
    objective = objective_of(problem, rates=RATES)
    theta = some_weights(problem, 3)
    noise = objective.noise(3)
    parts, gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    for m in range(3):
        leaf = theta[m].clone().requires_grad_()
        terms = by_hand(leaf, [u[m] for u in noise], RATES[m], X, Y, 40)
        (exact,) = torch.autograd.grad(sum(terms), leaf)
        torch.testing.assert_close(parts[m], torch.stack(terms).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient[m], exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_members_with_different_rates_are_independent(net):
    problem = build(net())
    together = objective_of(problem, rates=RATES)
    theta = some_weights(problem, 3)
    noise = together.noise(0)
    parts, gradient = together.evaluate(theta, together.own, problem.x, problem.y, None, noise, NOTHING)
    assert float((gradient[0] - gradient[1]).abs().max()) > 1e-3
    for m in range(3):
        alone = objective_of(problem, rates=RATES[m : m + 1])
        mine = tuple(u[m : m + 1] for u in noise)
        one = alone.evaluate(theta[m : m + 1], alone.own, problem.x, problem.y, None, mine, NOTHING)
        torch.testing.assert_close(one[0][0], parts[m], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(one[1][0], gradient[m], rtol=1e-10, atol=1e-12)


def test_members_share_their_uniform_numbers_and_steps_do_not():
    objective = objective_of(build(dropped_mlp()), rates=RATES, batch=8)
    u, later = objective.noise(0), objective.noise(1)
    assert [tuple(t.shape) for t in u] == [(3, 8, 3), (3, 8, 8)]
    assert torch.equal(u[0][0], u[0][2])
    assert not torch.equal(u[0], later[0])
    assert all(torch.equal(a, b) for a, b in zip(u, objective.noise(0)))


def test_training_is_gradient_descent_on_it():
    """Five steps of SGD by hand with the masks of each step."""
    problem = build(dropped_mlp())
    method = cr.MCDropout(steps=5, batch_size=40, optimiser="sgd", momentum=0.0, lr=0.05, schedule="constant")
    theta = problem.layout.read(problem.layout.module)
    objective = objective_of(problem, seed=9)
    for t in range(5):
        leaf = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            sum(by_hand(leaf, [u[0] for u in objective.noise(t)], (0.2, 0.3), X, Y, 40)), leaf
        )
        theta = theta - 0.05 * gradient
    torch.testing.assert_close(method.fit(problem, seed=9).theta, theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"rate": (0.1, 0.4)}, {"concrete": True}], ids=["grid", "concrete"])
def test_looped_equals_batched(options):
    fits = [
        cr.MCDropout(steps=25, batch_size=16, **options).fit(build(residual(), plan=plan), seed=0)
        for plan in ("batched", "looped")
    ]
    assert [f.model.forward.looped for f in fits] == [False, True]
    torch.testing.assert_close(fits[0].theta, fits[1].theta, rtol=1e-9, atol=1e-10)
    assert fits[0].rates == pytest.approx(fits[1].rates, rel=1e-9)
    if "rate" in options:
        tables = [[row["held_out_log_density"] for row in f.record.history["grid"]] for f in fits]
        assert tables[0] == pytest.approx(tables[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"concrete": True}, {"rate": (0.1, 0.3), "tau": (4.0, 9.0)}], ids=["concrete", "grid"]
)
@pytest.mark.nightly
def test_compiled_equals_eager(options, caplog):
    problem = build(dropped_mlp(), likelihood=Gaussian())
    with caplog.at_level("INFO", logger="credibly"):
        fits = [cr.MCDropout(steps=25, batch_size=16, compile=c, **options).fit(problem, seed=0) for c in (True, False)]
    if compiler_missing(torch.device("cpu")) is None:
        assert caplog.messages == []  # it compiled and did not fall back
    torch.testing.assert_close(fits[0].theta, fits[1].theta, rtol=1e-9, atol=1e-10)
    assert fits[0].rates == pytest.approx(fits[1].rates, rel=1e-9)


# -- linear regression: the optimum in closed form ---------------------------------------------------------------------
# A rate and a prior at which every part of the decay matters.
RATE, TIGHT = 0.5, 0.1


def exact_optimum(conjugate, tempering, *, weight_keep=1 - RATE, bias_keep=1.0):
    """Ridge: E_z sum (y - (x z / keep) W - b)^2 = sum (y - x W - b)^2 + rate/keep sum_j W_j^2 sum_i x_ij^2."""
    design, keep = conjugate.design, 1 - RATE
    data = conjugate.noise**2 * tempering.likelihood
    prior = TIGHT**2 * tempering.prior
    masked = (1 - keep) / keep * conjugate.x.square().sum(0) / data + 1 / (prior * weight_keep)
    penalty = torch.cat([masked, torch.tensor([1 / (prior * bias_keep)], dtype=f64)])
    hessian = design.T @ design / data + penalty.diag()
    return torch.linalg.solve(hessian, design.T @ conjugate.y / data), hessian


def linear_problem(conjugate, tempering):
    return build(
        conjugate.net,
        (conjugate.x, conjugate.y),
        Gaussian(conjugate.noise),
        cr.priors.Normal(TIGHT),
        temperature=tempering,
    )


TEMPERINGS = [cr.Tempering(), cr.Tempering(0.5, 2.0)]


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_expected_gradient_vanishes_at_the_ridge_solution(conjugate, tempering):
    """Over all 8 masks, with their probabilities: exactly."""
    best, hessian = exact_optimum(conjugate, tempering)
    problem = linear_problem(conjugate, tempering)
    network = Dropped(problem, "*", RATE)
    chance, kept = every_mask(network)
    objective = objective_of(problem, insert="*", rate=RATE, members=len(chance))
    noise = (torch.where(kept["mask"] > 0, 0.0, 0.999).double().expand(-1, problem.n, -1),)
    theta = best.expand(len(chance), -1)
    _, gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    assert float((chance @ gradient).abs().max()) < 1e-12
    away = best + 0.01
    _, gradient = objective.evaluate(away.expand(8, -1), objective.own, problem.x, problem.y, None, noise, NOTHING)
    torch.testing.assert_close(chance @ gradient * problem.n, hessian @ (away - best), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_training_converges_to_the_ridge_solution(conjugate, tempering):
    """The tolerance is the error of an average over a fifth of the steps, to which the schedule gives most weight.

    A wrong decay of the weights or of the bias lies well outside.
    """
    steps = 2000
    best, hessian = exact_optimum(conjugate, tempering)
    problem = linear_problem(conjugate, tempering)
    gradients = gradients_at(objective_of(problem, insert="*", rate=RATE, members=2000), best, 2000)
    inverse = torch.linalg.inv(hessian)
    error = (inverse @ torch.cov(gradients.T) @ inverse).diagonal().div(steps / 5).sqrt()
    posterior = cr.MCDropout(insert="*", rate=RATE, steps=steps, batch_size=30, lr=0.01).fit(problem, seed=0)
    assert float(((posterior.theta - best) / error).abs().max()) < 4
    for keeps in ({"weight_keep": 2.0}, {"weight_keep": 1.0}, {"bias_keep": 0.5}, {"weight_keep": 1e9}):
        wrong, _ = exact_optimum(conjugate, tempering, **keeps)
        assert float(((wrong - best) / error).abs().max()) > 10
