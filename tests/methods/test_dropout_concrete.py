"""Concrete Dropout: rates learned with the weights (Gal, Hron & Kendall 2017)."""

import math

import pytest
import torch
from dropout_networks import (
    LABELS,
    NOTHING,
    X,
    build,
    convolutional,
    dropped_mlp,
    f64,
    gradients_at,
    masks_of,
    objective_of,
    residual,
    some_weights,
)
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core.rng import stream
from credibly.likelihoods import Categorical, Gaussian


def test_relaxed_masks_are_nearly_binary_with_the_threshold_of_hard_ones():
    objective = objective_of(build(dropped_mlp()), concrete=True)
    u = tuple(torch.rand(1, 5000, n, generator=stream(0, "u", n), dtype=f64) for n in (3, 8))
    soft, hard = objective.masks(objective.own[0], u), objective.masks(objective.own[0], u, hard=True)
    for (name, mask), rate in zip(soft.items(), (0.2, 0.3)):
        kept = mask * (1 - rate)
        assert 0 <= float(kept.min()) <= float(kept.max()) <= 1
        assert torch.equal(kept > 0.5, hard[name] > 0)
        assert sorted(hard[name].unique().tolist()) == [0.0, 1 / (1 - rate)]
        # Values in between need a uniform number near the threshold: |logit u - logit keep| < 0.1 logit 0.95.
        reach, centre = 0.1 * math.log(0.95 / 0.05), math.log((1 - rate) / rate)
        fraction = 1 / (1 + math.exp(-centre - reach)) - 1 / (1 + math.exp(-centre + reach))
        between = ((kept > 0.05) & (kept < 0.95)).double().mean()
        assert float(between) == pytest.approx(fraction, abs=4 * math.sqrt(fraction / kept.numel()))
        assert fraction < 0.13


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_the_gradient_reaches_the_rates(net):
    """By central differences in float64 at fixed uniform numbers, for weights and rates."""
    problem = build(net(), likelihood=Gaussian(), temperature=cr.Tempering(0.7, 2.0))
    objective = objective_of(problem, members=2, concrete=True)
    logits = torch.tensor([[-1.0, 0.3], [0.5, -2.0]], dtype=f64)
    theta = torch.cat([0.5 * randn(2, problem.dim, seed=7, dtype=f64), logits], -1)
    noise = objective.noise(0)

    def value(point):
        return objective.evaluate(point, objective.own, problem.x, problem.y, None, noise, NOTHING)[0].sum(-1)

    gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)[1]
    assert gradient.shape == theta.shape
    step = 1e-6
    for j in range(theta.shape[1]):
        away = torch.zeros_like(theta)
        away[:, j] = step
        numeric = (value(theta + away) - value(theta - away)) / (2 * step)
        torch.testing.assert_close(gradient[:, j], numeric, rtol=1e-6, atol=1e-8)
    assert float(gradient[:, -2:].abs().min()) > 1e-4


def test_entropy_of_the_masks_is_in_the_objective_and_not_tempered():
    """E_q[log q - (1/T) log p]: one entropy for each of the K masked inputs of a site, at any temperature."""
    for t in (1.0, 0.25):
        problem = build(dropped_mlp(), temperature=t)
        theta = some_weights(problem, 1)
        learned, fixed = objective_of(problem, concrete=True), objective_of(problem)
        rates = learned.own[0]
        entropy = sum(k * float(torch.distributions.Bernoulli(r).entropy()) for k, r in zip((3, 8), rates[0]))
        difference = fixed.complexity(theta, rates) - learned.complexity(theta, rates)
        assert float(difference) == pytest.approx(entropy, rel=1e-12)
    image = cr.Problem(convolutional(), (randn(5, 36), LABELS[:5]), Categorical(), cr.priors.Normal())
    assert objective_of(image, concrete=True).inputs.tolist() == [4, 16]  # whole channels, then values


WEIGHTS = torch.tensor([1.0, -0.5, 0.25], dtype=f64)


def linear_data(n, noise):
    x = randn(n, 3, dtype=f64)
    return x, x @ WEIGHTS + 0.2 + noise * randn(n, seed=1, dtype=f64)


def concrete_objective(v, x, y, noise, tempering):
    """-ELBO of linear regression with relaxed masks on its inputs, in closed form except for two moments of a mask.

    v holds three weights, the bias and the logit of the rate. E (y - sum_j x_j z_j W_j / keep - b)^2 needs the mean and
    the variance of z / keep, which are integrals over one uniform number.
    """
    u = (torch.arange(20_000, dtype=f64) + 0.5) / 20_000
    w, b, rate = v[:3], v[3], torch.sigmoid(v[4])
    z = (1 - torch.sigmoid((v[4] + torch.log(u) - torch.log1p(-u)) / 0.1)) / (1 - rate)
    mean, variance = z.mean(), z.var(correction=0)
    squares = torch.square(y - x @ (w * mean) - b).sum() + variance * (x.square() * w.square()).sum()
    entropy = torch.special.entr(rate) + torch.special.entr(1 - rate)
    decay = (w.square().sum() / (1 - rate) + b.square()) / 2  # the prior is N(0, 1)
    return squares / (2 * noise**2 * tempering.likelihood) + decay / tempering.prior - 3 * entropy


def concrete_optimum(*args):
    v = torch.tensor([*WEIGHTS.tolist(), 0.2, -2.0], dtype=f64, requires_grad=True)
    rule = torch.optim.LBFGS(
        [v], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        rule.zero_grad()
        loss = concrete_objective(v, *args)
        loss.backward()
        return loss

    rule.step(closure)
    hessian = torch.autograd.functional.hessian(lambda p: concrete_objective(p, *args), v.detach())
    return v.detach(), hessian


CONCRETE_CASES = [
    (20, cr.Tempering()),
    (60, cr.Tempering()),
    (20, cr.Tempering(1.0, 0.25)),
    (60, cr.Tempering(2.0, 0.5)),
]


@pytest.mark.parametrize(
    "n, tempering",
    [
        pytest.param(*case, marks=pytest.mark.nightly) if case == (60, cr.Tempering()) else case
        for case in CONCRETE_CASES
    ],
    ids=str,
)
def test_learned_rates_have_the_optimum_of_the_closed_form(n, tempering):
    """At the optimum of the linear model's -ELBO the mean gradient over masks is zero, for rate and weights."""
    noise, count = 3.0, 20_000
    x, y = linear_data(n, noise)
    best, _ = concrete_optimum(x, y, noise, tempering)
    assert 0.1 < float(torch.sigmoid(best[4])) < 0.6
    problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(noise), cr.priors.Normal(1.0), temperature=tempering)
    objective = objective_of(problem, insert="*", members=count, concrete=True)

    def distance(point):
        gradients = gradients_at(objective, point, count)
        return float((gradients.mean(0) / (gradients.std(0) / math.sqrt(count))).abs().max())

    assert distance(best) < 4.5
    for j in range(5):  # and it is not zero elsewhere
        away = best.clone()
        away[j] += 0.2
        assert distance(away) > 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, tempering", [pytest.param(*CONCRETE_CASES[1], marks=pytest.mark.nightly), CONCRETE_CASES[2]], ids=str
)
def test_concrete_dropout_converges_to_that_optimum(n, tempering):
    """The tolerance is the error of an average over a fifth of the steps, to which the schedule gives most weight."""
    noise, steps = 3.0, 1500
    x, y = linear_data(n, noise)
    best, hessian = concrete_optimum(x, y, noise, tempering)
    problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(noise), cr.priors.Normal(1.0), temperature=tempering)
    gradients = gradients_at(objective_of(problem, insert="*", members=2000, concrete=True), best, 2000)
    inverse = torch.linalg.inv(hessian)
    error = (inverse @ torch.cov(gradients.T) @ inverse).diagonal().div(steps / 5).sqrt()
    method = cr.MCDropout(insert="*", rate=0.05, concrete=True, steps=steps, batch_size=n, lr=0.02)
    posterior = method.fit(problem, seed=0)
    reached = torch.cat([posterior.theta, torch.logit(torch.tensor([posterior.rates[""]], dtype=f64))])
    assert float(((reached - best) / error).abs().max()) < 4
    assert float(((math.log(0.05 / 0.95) - best[4]) / error[4]).abs()) > 8  # it did not start there


def test_rates_go_to_one_half_without_data_and_down_with_plenty():
    """Without data only the entropy of the masks is left; with plenty of data masks cost likelihood."""
    x, y = linear_data(400, 0.1)
    options = {"insert": "*", "rate": 0.2, "concrete": True, "steps": 250, "lr": 0.05}
    found = {}
    for name, tempering in (("no data", cr.Tempering(1e9, 1.0)), ("plenty", cr.Tempering())):
        problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(0.1), cr.priors.Normal(1.0), temperature=tempering)
        posterior = cr.MCDropout(**options).fit(problem, seed=0)
        assert posterior.record.history["rates"] == posterior.rates
        (found[name],) = posterior.rates.values()
    assert found["no data"] == pytest.approx(0.5, abs=0.02)
    assert 0 < found["plenty"] < 0.05


def test_each_layer_learns_its_own_rate_and_predicts_with_it():
    posterior = cr.MCDropout(steps=100, lr=0.03, concrete=True).fit(build(dropped_mlp()), seed=0)
    assert set(posterior.rates) == {"0", "3"}
    assert all(0 < r < 1 for r in posterior.rates.values())
    assert abs(posterior.rates["0"] - 0.2) > 0.02
    assert abs(posterior.rates["3"] - 0.3) > 0.02
    assert posterior.theta.shape == (41,)
    masks = masks_of(posterior, X, 4000, 0)["0.mask"]
    rate = posterior.rates["0"]
    assert float((masks == 0).double().mean()) == pytest.approx(rate, abs=4 * math.sqrt(0.25 / masks.numel()))
    assert float(masks.max()) == 1 / (1 - rate)


def test_concrete_with_early_stopping_keeps_the_rates_of_the_best():
    method = cr.MCDropout(steps=60, concrete=True, validation=0.25, batch_size=10)
    problem = build(dropped_mlp())
    posterior = method.fit(problem, seed=0)
    scores = [row[0] for row in posterior.record.history["validation"]]
    held = problem.subset(torch.randperm(40, generator=stream(0, "validation split"))[:10].sort().values)
    kept = torch.cat([posterior.theta, torch.logit(torch.tensor(list(posterior.rates.values()), dtype=f64))])
    objective = objective_of(problem, concrete=True)
    assert float(objective.score(kept.unsqueeze(0), held)) == pytest.approx(max(scores), rel=1e-9)
