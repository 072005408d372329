"""Output weights integrated out: the density against the joint one, C++ against torch, chains against quadrature."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credibly as cr
from credibly.diagnostics.convergence import measure
from credibly.inference.collapsed import CollapsedTarget, refusal

LIKELIHOODS = {
    "fixed": cr.likelihoods.Gaussian(scale=0.3),
    "learned": cr.likelihoods.Gaussian(),
    "heteroscedastic": cr.likelihoods.HeteroscedasticGaussian(),
    "floor": cr.likelihoods.HeteroscedasticGaussian(floor=0.05),
}


def problem_of(
    kind: str, *, rows: int = 70, bias: bool = True, weighted: bool = False, **options: object
) -> cr.Problem:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.3 * torch.randn(rows, generator=generator, dtype=torch.float64)
    outputs = 2 if kind in ("heteroscedastic", "floor") else 1
    last = nn.Linear(7, outputs, bias=bias)
    net = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 7), nn.Tanh(), last).double()
    weight = torch.rand(rows, generator=generator) + 0.5 if weighted else None
    prior = cr.priors.Normal(1.5, loc=0.1)
    return cr.Problem(net, (x, y), LIKELIHOODS[kind], prior, sample_weight=weight, **options)


def points_of(problem: cr.Problem, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return 0.5 * torch.randn(count, problem.dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"weighted": True}, {"temperature": 0.5}], ids=str)
def test_marginal_times_conditional_is_the_joint_density(kind: str, options: dict[str, Any]) -> None:
    problem = problem_of(kind, **options)
    target, theta = CollapsedTarget(problem), points_of(problem)
    points = target.encode(theta)
    assert torch.allclose(target.decode(points), theta, atol=1e-10)
    likelihood, _ = target.likelihood_and_grad(points)
    collapsed = likelihood + target.weights[1] * target.log_prior(points)
    # log p(theta) = log p(points) + log |d points / d theta|, up to a constant; the Jacobian is the factor of A.
    size, output = len(target.output), target.output

    def standardised(weights: Tensor) -> Tensor:
        moved = theta.clone()
        moved[:, output] = weights
        return target.encode(moved)[:, output]

    columns = []
    for j in range(size):
        ahead, behind = theta[:, output].clone(), theta[:, output].clone()
        ahead[:, j] += 0.5
        behind[:, j] -= 0.5
        columns.append(standardised(ahead) - standardised(behind))  # linear in the weights, so differences are exact
    jacobian = torch.linalg.slogdet(torch.stack(columns, -1)).logabsdet
    gap = problem.log_density(theta).double() - collapsed - jacobian
    assert float(gap.max() - gap.min()) < 1e-8


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("options", [{}, {"weighted": True}, {"temperature": 0.5}], ids=str)
def test_gradient_against_differences(kind: str, options: dict[str, Any]) -> None:
    problem = problem_of(kind, **options)
    target = CollapsedTarget(problem)
    points = target.encode(points_of(problem))
    direction = torch.randn(points.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value(at: Tensor) -> Tensor:
        return target.likelihood_and_grad(at)[0] + target.weights[1] * target.log_prior(at)

    slope = (value(points + 1e-5 * direction) - value(points - 1e-5 * direction)) / 2e-5
    exact = (target.likelihood_and_grad(points)[1] * direction).sum(-1)
    assert torch.allclose(slope, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("options", [{"rows": 700}, {"bias": False}, {"weighted": True}, {"temperature": 0.5}], ids=str)
def test_cpp_equals_torch(kind: str, options: dict[str, Any]) -> None:
    problem = problem_of(kind, **options)
    plain, native = CollapsedTarget(problem), CollapsedTarget(problem)
    if not native.select_backend("auto").fused:
        pytest.skip("no C++ compiler")
    points = plain.encode(points_of(problem))
    for mine, theirs in zip(native.likelihood_and_grad(points), plain.likelihood_and_grad(points)):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))
    assert torch.allclose(native.decode(points), plain.decode(points), rtol=1e-8, atol=1e-10)
    torch.set_num_threads(2)
    shared = native.likelihood_and_grad(points[:1])
    torch.set_num_threads(1)
    alone = native.likelihood_and_grad(points[:1])
    assert all(torch.equal(a, b) for a, b in zip(shared, alone))


def test_micro_batches_add_up_to_the_full_batch() -> None:
    whole, parts = CollapsedTarget(problem_of("learned")), CollapsedTarget(problem_of("learned", micro_batch=20))
    assert not parts.whole(3)
    points = whole.encode(points_of(whole.problem))
    for one, other in zip(whole.likelihood_and_grad(points), parts.likelihood_and_grad(points)):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def quadrature(x: Tensor, y: Tensor, x_new: Tensor, noise: float, scale: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of f(x_new) for y = w tanh(a x + b) + c: w and c in closed form, a and b on a grid."""
    grid = torch.linspace(-5 * scale, 5 * scale, 301, dtype=torch.float64)
    a, b = (g.flatten() for g in torch.meshgrid(grid, grid, indexing="ij"))

    def features(x: Tensor) -> Tensor:
        hidden = torch.tanh(a[:, None] * x + b[:, None])
        return torch.stack([hidden, torch.ones_like(hidden)], -1)

    phi = features(x)
    precision = phi.mT @ phi / noise**2 + torch.eye(2, dtype=torch.float64) / scale**2
    moment = phi.mT @ y / noise**2
    mean = torch.linalg.solve(precision, moment)
    log_weight = 0.5 * (moment * mean).sum(-1) - 0.5 * torch.logdet(precision) - 0.5 * (a**2 + b**2) / scale**2
    weight = torch.softmax(log_weight, 0)
    new = features(x_new)
    means = (new @ mean.unsqueeze(-1)).squeeze(-1)
    variances = (new * torch.linalg.solve(precision, new.mT).mT).sum(-1)
    centre = weight @ means
    return centre, weight @ (variances + (means - centre) ** 2)


@pytest.mark.parametrize("method", [cr.HMC, cr.NUTS])
def test_chains_against_quadrature(method: type) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)
    y = 0.8 * torch.tanh(2 * x) + 0.1 * torch.sin(9 * x)
    x_new = torch.tensor([-1.5, 0.2, 2.0], dtype=torch.float64)
    mean, variance = quadrature(x, y, x_new, noise=0.3, scale=1.0)
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    likelihood, prior = cr.likelihoods.Gaussian(scale=0.3), cr.priors.Normal(1.0)
    problem = cr.Problem(net, (x.unsqueeze(1), y), likelihood, prior)
    draws = 1500
    posterior = method(chains=4, warmup=200, draws=draws, init="prior").fit(problem, seed=0)
    assert posterior.record.history["collapsed"]
    values = posterior.predict(x_new.unsqueeze(1)).functions().reshape(4, draws, 3).double()
    error = variance.sqrt() / measure(values).bulk.sqrt()
    assert bool(((values.mean((0, 1)) - mean).abs() < 4 * error).all())
    squares = (values - mean) ** 2
    spread = squares.flatten(0, 1).std(0) / measure(squares).bulk.sqrt()
    assert bool(((squares.mean((0, 1)) - variance).abs() < 4 * spread).all())


def test_draws_of_the_output_layer_have_their_conditional_distribution() -> None:
    problem = problem_of("learned", rows=30)
    target = CollapsedTarget(problem)
    one = target.encode(points_of(problem, 1))
    noise = torch.randn(20_000, len(target.output), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weights = target.decode(one.expand(len(noise), -1).index_copy(1, target.output, noise))[:, target.output]
    # The conditional distribution by brute force: the log density is quadratic in the output weights.
    theta = target.decode(one)[0]
    index = target.output

    def density(w: Tensor) -> Tensor:
        moved = theta.index_copy(0, index, w)
        likelihood, prior = problem.parts(moved[None], problem.x, problem.y)
        return (likelihood + prior).sum()

    precision = -torch.autograd.functional.hessian(density, theta[index])
    mean = theta[index] + torch.linalg.solve(precision, torch.autograd.functional.jacobian(density, theta[index]))
    covariance = torch.linalg.inv(precision)
    assert bool(((weights.mean(0) - mean).abs() < 4.5 * (covariance.diagonal() / len(noise)).sqrt()).all())
    relative = weights.var(0) / covariance.diagonal()
    assert bool(((relative - 1).abs() < 4.5 * math.sqrt(2 / len(noise))).all())


def test_draws_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    problem = problem_of("learned", rows=40)
    method = cr.HMC(chains=2, warmup=30, draws=20, init="prior")
    whole = method.fit(problem, seed=0)
    stored = method.fit(problem, seed=0, out=tmp_path / "run")
    assert torch.equal(whole.draws, stored.draws[:])


def test_what_is_not_collapsed() -> None:
    x, y = torch.randn(20, 2), torch.randn(20)
    prior = cr.priors.Normal(1.0)
    deep = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    wide = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 1))
    linear = nn.Sequential(nn.Linear(2, 1))
    gaussian = cr.likelihoods.Gaussian()
    for net, likelihood, targets, given, reason in (
        (deep, cr.likelihoods.StudentT(), y, prior, "Gaussian"),
        (deep, gaussian, y, cr.priors.Laplace(1.0), "Normal"),
        (linear, gaussian, y, prior, "stack of Linear layers"),
        (wide, gaussian, y, prior, "fewer than 128 units, got 128"),
    ):
        problem = cr.Problem(net, (x, targets), likelihood, given)
        assert reason in refusal(problem)
        with pytest.raises(cr.InputError, match="collapse"):
            cr.HMC(collapse=True).fit(problem)
    problem = cr.Problem(deep, (x, y), gaussian, prior)
    assert not refusal(problem)
    given = cr.HMC(chains=1, warmup=0, draws=2, step_size=0.01, trajectory_length=0.02, init="prior")
    assert not given.fit(problem).record.history["collapsed"]
    with pytest.raises(cr.InputError, match="collapse must be 'auto'"):
        cr.HMC(collapse="yes")
    density = cr.Density(lambda t: -t.square().sum(), dim=2)
    with pytest.raises(cr.InputError, match="collapse"):
        cr.HMC(collapse=True).fit(density)


def test_a_checkpoint_knows_whether_it_is_collapsed() -> None:
    problem = problem_of("learned", rows=20)
    method = cr.HMC(chains=2, warmup=20, draws=2, init="prior")
    samplers = [method.sampler(target, 0) for target in (CollapsedTarget(problem), CollapsedTarget(problem).plain)]
    for sampler in samplers:
        sampler.start(points_of(problem, 2))
    states = [sampler.tensors() for sampler in samplers]
    for sampler, state in zip(samplers, reversed(states)):
        with pytest.raises(cr.StoreError, match="the run was sampling with"):
            sampler.restore(state)
    del states[0]["collapsed"]
    with pytest.raises(KeyError, match="collapsed"):
        samplers[0].restore(states[0])
