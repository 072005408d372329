"""The transition kernels, against Hamilton's equations, detailed balance and the fluctuation-dissipation relation."""

import itertools
import math

import pytest
import torch

from conftest import randn
from credibly.errors import InputError
from credibly.inference.kernels.hmc import (
    DIVERGENT,
    INTEGRATORS,
    LEAPFROG,
    MINIMUM_ERROR,
    State,
    integrator,
    kinetic,
    metropolis,
    refresh,
)
from credibly.inference.kernels.langevin import langevin

DOUBLE = torch.float64
MASS = torch.tensor([0.3, 1.0, 4.0], dtype=DOUBLE)  # the inverse mass
MASSES = pytest.mark.parametrize("inverse_mass", [None, MASS], ids=["unit mass", "diagonal mass"])
SCHEMES = pytest.mark.parametrize("scheme", INTEGRATORS.values(), ids=INTEGRATORS)


def wells(theta):
    """A log density that is neither Gaussian nor symmetric nor a product, and its gradient by hand."""
    a, b, c = theta.unbind(-1)
    value = -(0.5 * a**2 + 0.25 * b**4 + 0.5 * torch.exp(c) - 0.5 * c + 0.3 * a * b + 0.2 * torch.sin(b) * c)
    gradient = torch.stack(
        [
            -(a + 0.3 * b),
            -(b**3 + 0.3 * a + 0.2 * torch.cos(b) * c),
            -(0.5 * torch.exp(c) - 0.5 + 0.2 * torch.sin(b)),
        ],
        -1,
    )
    return value, gradient


def points(count, seed=0):
    return randn(count, 3, seed=seed, dtype=DOUBLE), randn(count, 3, seed=seed + 1, dtype=DOUBLE)


def travel(scheme, theta, momentum, size, steps, inverse_mass, evaluate=wells):
    size = torch.as_tensor(size, dtype=DOUBLE).reshape(-1, 1)
    gradient = evaluate(theta)[1]
    for _ in range(steps):
        theta, momentum, gradient, value = scheme.step(theta, momentum, gradient, size, inverse_mass, evaluate)
    return theta, momentum, gradient, value


def energy(theta, momentum, inverse_mass):
    return kinetic(momentum, inverse_mass) - wells(theta)[0]


def energy_error(scheme, steps, inverse_mass, length=1.2):
    """Root mean square over many trajectories of one length: the coefficient of a single one may be close to zero."""
    theta, momentum = points(200)
    after = travel(scheme, theta, momentum, length / steps, steps, inverse_mass)
    change = energy(*after[:2], inverse_mass) - energy(theta, momentum, inverse_mass)
    return float(change.square().mean().sqrt())


# -- integrators -------------------------------------------------------------------------------------------------------
def test_the_gradient_of_the_test_density():
    theta = points(5)[0].requires_grad_()
    value, gradient = wells(theta)
    torch.testing.assert_close(gradient, torch.autograd.grad(value.sum(), theta)[0])


@MASSES
@SCHEMES
def test_a_trajectory_run_backwards_ends_where_it_began(scheme, inverse_mass):
    theta, momentum = points(20)
    size = torch.linspace(0.01, 0.2, 20)  # one per chain
    there = travel(scheme, theta, momentum, size, 25, inverse_mass)
    assert float((there[0] - theta).abs().min(-1).values.max()) > 0.05  # it moved
    back = travel(scheme, there[0], -there[1], size, 25, inverse_mass)
    torch.testing.assert_close(back[0], theta, rtol=0, atol=1e-10)
    torch.testing.assert_close(back[1], -momentum, rtol=0, atol=1e-10)


@MASSES
@SCHEMES
def test_halving_the_step_quarters_the_energy_error(scheme, inverse_mass):
    coarse, fine = energy_error(scheme, 40, inverse_mass), energy_error(scheme, 80, inverse_mass)
    assert fine > 1e-9  # above rounding
    assert coarse / fine == pytest.approx(4.0, rel=0.03)


@MASSES
@SCHEMES
def test_a_step_preserves_volume_and_the_symplectic_form(scheme, inverse_mass):
    def move(state):
        return torch.cat(travel(scheme, state[None, :3], state[None, 3:], 0.3, 2, inverse_mass)[:2], -1)[0]

    form = torch.zeros(6, 6, dtype=DOUBLE)
    form[:3, 3:], form[3:, :3] = torch.eye(3, dtype=DOUBLE), -torch.eye(3, dtype=DOUBLE)
    for theta, momentum in zip(*points(5)):
        jacobian = torch.autograd.functional.jacobian(move, torch.cat([theta, momentum]))
        assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-12)
        torch.testing.assert_close(jacobian.T @ form @ jacobian, form, rtol=0, atol=1e-12)
        assert float((jacobian - torch.eye(6, dtype=DOUBLE)).abs().max()) > 0.1  # not the identity


@MASSES
def test_the_minimum_error_scheme_beats_leapfrog_at_equal_gradients(inverse_mass):
    assert MINIMUM_ERROR.gradients == 2 * LEAPFROG.gradients
    assert energy_error(MINIMUM_ERROR, 20, inverse_mass) < energy_error(LEAPFROG, 40, inverse_mass) / 2


def test_the_coefficient_is_the_published_one():
    """Omelyan, Mryglod and Folk 2002; the same as McLachlan's 1995."""
    assert MINIMUM_ERROR.kicks[0] == pytest.approx(0.193183327503783574, abs=1e-15)


@SCHEMES
def test_kicks_and_drifts_sum_to_a_step_and_are_palindromic(scheme):
    assert sum(scheme.kicks) == pytest.approx(1.0, abs=1e-15)
    assert sum(scheme.drifts) == pytest.approx(1.0, abs=1e-15)
    assert scheme.kicks == pytest.approx(scheme.kicks[::-1], abs=1e-15)
    assert len(scheme.kicks) == len(scheme.drifts) + 1


@MASSES
def test_a_leapfrog_step_by_hand(inverse_mass):
    theta, momentum = points(4)
    speed = torch.ones(3, dtype=DOUBLE) if inverse_mass is None else inverse_mass
    half = momentum + 0.05 * wells(theta)[1]
    after = theta + 0.1 * speed * half
    found = travel(LEAPFROG, theta, momentum, 0.1, 1, inverse_mass)
    torch.testing.assert_close(found[0], after, rtol=0, atol=1e-15)
    torch.testing.assert_close(found[1], half + 0.05 * wells(after)[1], rtol=0, atol=1e-15)


@MASSES
@SCHEMES
def test_a_harmonic_oscillator_follows_the_exact_solution(scheme, inverse_mass):
    """w'' = -M^-1 w from w = 0, m = 1: w = sqrt(M^-1) sin(sqrt(M^-1) t)."""
    rate = torch.ones(3, dtype=DOUBLE) if inverse_mass is None else inverse_mass.sqrt()
    start = torch.zeros(1, 3, dtype=DOUBLE)
    after = travel(
        scheme, start, start + 1, 0.001, 700, inverse_mass, lambda theta: (-0.5 * theta.square().sum(-1), -theta)
    )
    torch.testing.assert_close(after[0][0], rate * torch.sin(rate * 0.7), rtol=0, atol=3e-6)
    torch.testing.assert_close(after[1][0], torch.cos(rate * 0.7), rtol=0, atol=3e-6)


@SCHEMES
def test_one_gradient_per_drift_and_the_last_one_is_returned(scheme):
    calls = []

    def counted(theta):
        calls.append(theta)
        return wells(theta)

    theta, momentum = points(2)
    size = torch.full((2, 1), 0.1, dtype=DOUBLE)
    after, _, gradient, value = scheme.step(theta, momentum, wells(theta)[1], size, None, counted)
    assert len(calls) == scheme.gradients
    assert torch.equal(calls[-1], after)
    assert torch.equal(gradient, wells(after)[1])
    assert torch.equal(value, wells(after)[0])


@SCHEMES
def test_a_chain_with_step_size_zero_stays_put(scheme):
    theta, momentum = points(2)
    after = travel(scheme, theta, momentum, [0.1, 0.0], 3, MASS)
    assert torch.equal(after[0][1], theta[1])
    assert torch.equal(after[1][1], momentum[1])
    assert not torch.equal(after[0][0], theta[0])


def test_integrators_by_name():
    assert integrator("leapfrog") is LEAPFROG
    assert integrator("minimum-error") is MINIMUM_ERROR
    with pytest.raises(InputError, match="integrator must be one of 'leapfrog', 'minimum-error', got 'verlet'"):
        integrator("verlet")


# -- Metropolis --------------------------------------------------------------------------------------------------------
def state(count=6, seed=0, dtype=DOUBLE, **parts):
    values = {
        "theta": randn(count, 3, seed=seed, dtype=dtype),
        "gradient": randn(count, 3, seed=seed + 1, dtype=dtype),
        "log_likelihood": randn(count, seed=seed + 2, dtype=DOUBLE),
        "log_prior": randn(count, seed=seed + 3, dtype=DOUBLE),
        "momentum": randn(count, 3, seed=seed + 4, dtype=dtype),
    }
    return State(**{**values, **{k: torch.as_tensor(v, dtype=values[k].dtype) for k, v in parts.items()}})


def uniform(value, count=6):
    return torch.full((count,), value, dtype=DOUBLE)


@MASSES
@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 2.0), (5.0, 1.0), (1.0, 0.25)])
def test_acceptance_is_the_ratio_of_densities_on_phase_space(inverse_mass, weights):
    one, two = state(200), state(200, seed=50)
    inverse = torch.ones(3, dtype=DOUBLE) if inverse_mass is None else inverse_mass

    def log_joint(s):
        parts = weights[0] * s.log_likelihood + weights[1] * s.log_prior
        return parts - 0.5 * (s.momentum**2 * inverse).sum(-1)

    ratio = torch.exp(log_joint(two) - log_joint(one)).clamp(max=1)
    below = metropolis(one, two, inverse_mass, (ratio - 1e-9).clamp(min=0), weights)[1]
    above = metropolis(one, two, inverse_mass, ratio + 1e-9, weights)[1]
    torch.testing.assert_close(below.acceptance, ratio, rtol=1e-12, atol=0)
    assert bool(below.accepted.all())
    assert not bool(above.accepted.any())
    torch.testing.assert_close(below.energy_error, log_joint(one) - log_joint(two), rtol=0, atol=1e-12)
    torch.testing.assert_close(below.energy, -log_joint(two), rtol=0, atol=1e-12)
    torch.testing.assert_close(above.energy, -log_joint(one), rtol=0, atol=1e-12)
    assert 20 < int((ratio < 1).sum()) < 180  # both branches of the minimum occur


def test_a_rejected_proposal_repeats_the_draw_bit_for_bit_and_flips_the_momentum():
    here = state(2, dtype=torch.float32, log_likelihood=[0.0, 0.0], log_prior=[-1.0, -2.0])
    away = state(2, seed=9, dtype=torch.float32, log_likelihood=[-50.0, 500.0], log_prior=[-3.0, -4.0])
    after, info = metropolis(here, away, None, uniform(0.5, 2), (1.0, 1.0))
    assert info.accepted.tolist() == [False, True]
    for name in ("theta", "gradient", "log_likelihood", "log_prior"):
        assert torch.equal(getattr(after, name)[0], getattr(here, name)[0])
        assert torch.equal(getattr(after, name)[1], getattr(away, name)[1])
    assert torch.equal(after.momentum[0], -here.momentum[0])
    assert torch.equal(after.momentum[1], away.momentum[1])


@pytest.mark.parametrize(
    "broken",
    [
        {"log_likelihood": [math.nan]},
        {"log_likelihood": [-math.inf]},
        {"log_likelihood": [math.inf]},
        {"log_prior": [math.nan]},
        {"log_prior": [-math.inf]},
        {"momentum": [[math.inf, 0.0, 0.0]]},
        {"momentum": [[0.0, math.nan, 0.0]]},
    ],
    ids=str,
)
def test_an_energy_that_is_not_finite_is_rejected_and_a_divergence(broken):
    here = state(1)
    after, info = metropolis(here, state(1, seed=9, **broken), None, uniform(0.0, 1), (1.0, 1.0))
    assert not bool(info.accepted)
    assert bool(info.divergent)
    assert float(info.acceptance) == 0.0
    assert torch.equal(after.theta, here.theta)
    assert bool(torch.isfinite(info.energy).all())


def test_an_energy_that_grows_beyond_a_thousand_is_a_divergence():
    still = torch.zeros(3, 3, dtype=DOUBLE)
    here = state(3, log_likelihood=[0.0] * 3, log_prior=[0.0] * 3, momentum=still)
    away = state(3, log_likelihood=[-999.0, -1001.0, 1001.0], log_prior=[0.0] * 3, momentum=still)
    info = metropolis(here, away, None, uniform(0.9, 3), (1.0, 1.0))[1]
    assert DIVERGENT == 1000.0
    assert info.divergent.tolist() == [False, True, False]  # a drop in energy is no divergence
    assert info.accepted.tolist() == [False, False, True]


def test_small_differences_of_large_energies_decide():
    """In float32 a sum of 4e7 has a resolution of 4, and in float64 one of 1e17 has 16."""
    still = torch.zeros(3, 3, dtype=torch.float32)
    here = state(
        3, dtype=torch.float32, log_likelihood=[-4e7, -1e17, -1e17], log_prior=[-4e7, -3.0, 0.0], momentum=still
    )
    after = here._replace(
        log_likelihood=here.log_likelihood + torch.tensor([-1.5, 0.0, 0.0], dtype=DOUBLE),
        log_prior=here.log_prior + torch.tensor([1.0, -0.25, 0.0], dtype=DOUBLE),
        momentum=torch.tensor([[0.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0]]),
    )
    info = metropolis(here, after, None, uniform(0.0, 3), (1.0, 1.0))[1]
    expected = torch.tensor([math.exp(-0.5), math.exp(-0.25), math.exp(-0.5)], dtype=DOUBLE)
    torch.testing.assert_close(info.acceptance, expected, rtol=1e-7, atol=0)


def test_kinetic_energy_is_summed_in_float64():
    momentum = torch.ones(1, 101)
    momentum[0, 0] = 2.0**14  # its square has a resolution of 32 in float32
    assert kinetic(momentum, None).dtype == DOUBLE
    assert float(kinetic(momentum, None)) == 0.5 * (2.0**28 + 100)
    weighted = 0.25 * torch.ones(101)
    assert float(kinetic(momentum, weighted)) == 0.125 * (2.0**28 + 100)


# -- momentum ----------------------------------------------------------------------------------------------------------
@MASSES
@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_a_refresh_keeps_the_distribution_of_the_momentum(inverse_mass, fraction):
    count = 100_000
    mass = torch.ones(3, dtype=DOUBLE) if inverse_mass is None else 1 / inverse_mass
    old = randn(count, 3, dtype=DOUBLE) * mass.sqrt()
    new = refresh(old, randn(count, 3, seed=1, dtype=DOUBLE), inverse_mass, fraction)
    assert float((new.var(0) / mass - 1).abs().max()) < 4.5 * math.sqrt(2 / count)
    assert float((new.mean(0) / mass.sqrt()).abs().max()) < 4.5 / math.sqrt(count)
    kept = (old * new).mean(0) / mass
    assert float((kept - math.sqrt(1 - fraction)).abs().max()) < 4.5 * math.sqrt(2 / count)


def test_a_full_refresh_forgets_the_old_momentum():
    noise = randn(4, 3, dtype=DOUBLE)
    fresh = refresh(torch.full((4, 3), torch.inf, dtype=DOUBLE), noise, MASS, 1.0)
    torch.testing.assert_close(fresh, noise / MASS.sqrt(), rtol=1e-14, atol=0)


# -- Langevin ----------------------------------------------------------------------------------------------------------
PRECONDITIONER = torch.tensor([0.25, 1.0, 3.0], dtype=DOUBLE)
PRECONDITIONERS = pytest.mark.parametrize("preconditioner", [None, PRECONDITIONER], ids=["plain", "preconditioned"])
ONE = torch.ones((), dtype=DOUBLE)
CHAINS = 20_000
# Relative tolerance of a variance over that many independent chains.
TOLERANCE = 4.5 * math.sqrt(2 / CHAINS)


def run(gradient, steps, size, kept, preconditioner, theta, seed=0, heat=1.0):
    """Chains with exact gradients, from stationary momenta; returns positions and momenta."""
    generator = torch.Generator().manual_seed(seed)
    root = None if preconditioner is None else preconditioner.sqrt()

    def draw():
        return torch.randn(theta.shape, generator=generator, dtype=DOUBLE)

    momentum, slope = draw(), gradient(theta)
    for _ in range(steps):
        controls = size * ONE, kept * ONE, heat * ONE
        theta, momentum, slope, _ = langevin(
            theta, momentum, slope, draw(), *controls, root, lambda w: (w, gradient(w))
        )
    return theta, momentum


def run_sgld(gradient, steps, size, preconditioner, theta, seed=0, heat=1.0):
    """SGLD keeps no momentum, and its step size is a square."""
    return run(gradient, steps, math.sqrt(size), 0.0, preconditioner, theta, seed, heat)[0]


def flat(theta):
    return torch.zeros_like(theta)


def of_gaussian(precision):
    return lambda theta: -precision * theta


def skewed(shape):
    """Gradient of log p for the logarithm of a Gamma(shape, 1) variable, whose mean is digamma(shape)."""
    return lambda theta: shape - theta.exp()


def log_gamma_draws(shape, count=CHAINS, seed=5):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.distributions.Gamma(shape, torch.ones_like(shape)).sample((count,)).log()


@PRECONDITIONERS
@pytest.mark.parametrize("size", [0.01, 4.0])
def test_a_free_sgld_particle_diffuses_by_the_step_size_per_step(size, preconditioner):
    """Half of the noise of the first and the last of 7 steps belongs to the steps before and after."""
    theta = run_sgld(flat, 7, size, preconditioner, torch.zeros(CHAINS, 3, dtype=DOUBLE))
    expected = size * 6.5 * (torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner)
    assert float((theta.var(0) / expected - 1).abs().max()) < TOLERANCE


@PRECONDITIONERS
def test_two_steps_of_sgld_by_hand(preconditioner):
    """w <- w + (eps/2) P g + sqrt(eps P) (xi + xi') / 2, with the noise of the last step and of this one."""
    theta = points(4)[0]
    metric = torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner
    root = None if preconditioner is None else preconditioner.sqrt()
    noise = randn(3, 4, 3, seed=7, dtype=DOUBLE)
    # The momentum that the step before left: its noise, and a half kick.
    start = noise[0] + 0.15 * metric.sqrt() * wells(theta)[1]
    state = theta, start, wells(theta)[1]
    for xi, fresh in itertools.pairwise(noise):
        expected = state[0] + 0.045 * metric * state[2] + 0.3 * metric.sqrt() * (xi + fresh) / 2
        state = langevin(*state, fresh, 0.3 * ONE, 0 * ONE, ONE, root, wells)[:3]
        torch.testing.assert_close(state[0], expected, rtol=0, atol=1e-14)


@PRECONDITIONERS
@pytest.mark.parametrize("size", [1.0, 0.2])
def test_sgld_on_a_gaussian_has_exactly_the_right_variance(size, preconditioner):
    """1/a; independent noise would give (1/a) / (1 - eps a / 4): a third too wide at eps a = 1."""
    metric = torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner
    precision = torch.tensor([1.0, 0.5, 4.0], dtype=DOUBLE) / metric / 4
    slowest = float((size * metric * precision).min())
    start = randn(CHAINS, 3, seed=3, dtype=DOUBLE) / precision.sqrt()
    theta = run_sgld(of_gaussian(precision), math.ceil(8 / slowest), size, preconditioner, start)
    assert float((theta.var(0) * precision - 1).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kept", [0.0, 0.9])
def test_gradient_noise_heats_by_as_much_as_the_step_size_rule_assumes(kept):
    """h V / (2 friction) for SGHMC, eps V / 4 for SGLD, on a Gaussian of precision 1 with small steps."""
    size, noise = (0.3, 4.0) if kept == 0 else (0.05, 8.0)
    generator = torch.Generator().manual_seed(1)

    def noisy(theta):
        return -theta + math.sqrt(noise) * torch.randn(theta.shape, generator=generator, dtype=DOUBLE)

    theta, _ = run(noisy, 400, size, kept, None, randn(CHAINS, 1, seed=3, dtype=DOUBLE))
    heat = size**2 * noise / 4 if kept == 0 else size * noise / (2 * -math.log(kept) / size)
    assert float(theta.var()) == pytest.approx(1 + heat, rel=0.02 + TOLERANCE)


def test_sgld_stays_on_a_skewed_target():
    """A wrong sign or factor of the gradient would move the mean away from digamma."""
    shape = torch.tensor([0.8, 2.0, 6.0], dtype=DOUBLE)
    theta = run_sgld(skewed(shape), 400, 0.01, None, log_gamma_draws(shape))
    std = torch.polygamma(1, shape).sqrt()
    gap = (theta.mean(0) - torch.digamma(shape)) / std
    assert float(gap.abs().max()) < 4.5 / math.sqrt(CHAINS) + 0.01  # the second term allows for the bias of order eps
    assert float((theta.var(0) / std**2 - 1).abs().max()) < 3 * TOLERANCE


# -- SGHMC -------------------------------------------------------------------------------------------------------------
@PRECONDITIONERS
@pytest.mark.parametrize("size, kept", [(0.1, 0.95), (3.0, 0.5), (0.01, 0.01)])
def test_a_free_sghmc_particle_has_the_stationary_variance_of_momentum(size, kept, preconditioner):
    metric = torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner
    start = torch.zeros(CHAINS, 3, dtype=DOUBLE)
    steps = 20
    theta, momentum = run(flat, steps, size, kept, preconditioner, start)
    assert float((momentum.var(0) - 1).abs().max()) < TOLERANCE
    # The position is a sum of velocities with correlation c^|i - j| between steps, with half of each drift before and
    # half after the friction: increment i is (h/2) R (m_i + m_{i+1}).
    lags = torch.arange(steps + 1, dtype=DOUBLE)
    correlation = kept ** (lags[:, None] - lags).abs()
    weight = torch.full((steps + 1,), size, dtype=DOUBLE)
    weight[[0, -1]] /= 2
    expected = metric * (weight @ correlation @ weight)
    assert float((theta.var(0) / expected - 1).abs().max()) < TOLERANCE


def test_friction_and_noise_balance_exactly():
    """kept^2 + noise^2 = 1 for any step, so the variance 1 is exact, without an Euler error."""
    zero, one = torch.zeros(1, 3, dtype=DOUBLE), torch.ones(1, 3, dtype=DOUBLE)
    for kept in (0.1, 0.9, 0.999):
        push = [
            langevin(zero, m, zero, n, ONE, kept * ONE, ONE, None, lambda w: (w, flat(w)))[1]
            for m, n in ((one, zero), (zero, one))
        ]
        torch.testing.assert_close(push[0], kept * one, rtol=1e-14, atol=0)
        torch.testing.assert_close(push[0] ** 2 + push[1] ** 2, one, rtol=1e-12, atol=0)


@PRECONDITIONERS
def test_a_step_of_sghmc_by_hand(preconditioner):
    theta, momentum = points(4)
    noise = randn(4, 3, seed=7, dtype=DOUBLE)
    root = torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner.sqrt()
    calls = []

    def evaluate(w):
        calls.append(w)
        return wells(w)

    for heat in (1.0, 0.0):
        given = None if preconditioner is None else root
        controls = 0.2 * ONE, 0.6 * ONE, heat * ONE
        found = langevin(theta, momentum, wells(theta)[1], noise, *controls, given, evaluate)
        kicked = momentum + 0.1 * root * wells(theta)[1]
        turned = 0.6 * kicked + 0.8 * heat * noise
        after = theta + 0.1 * root * kicked + 0.1 * root * turned
        torch.testing.assert_close(found[0], after, rtol=0, atol=1e-14)
        torch.testing.assert_close(found[1], turned + 0.1 * root * wells(after)[1], rtol=0, atol=1e-14)
        assert torch.equal(found[2], wells(found[0])[1])
        assert torch.equal(found[3], wells(found[0])[0])
    assert len(calls) == 2  # one gradient per step


@PRECONDITIONERS
@pytest.mark.parametrize("size", [1.2, 0.3])
def test_sghmc_on_a_gaussian_has_exactly_the_right_variance(size, preconditioner):
    """BAOAB: no bias in the positions at any stable step; at 1.2 plain SGLD would be far off."""
    metric = torch.ones(3, dtype=DOUBLE) if preconditioner is None else preconditioner
    precision = torch.tensor([1.5, 0.7, 0.3], dtype=DOUBLE) / metric
    start = 2 * randn(CHAINS, 3, seed=3, dtype=DOUBLE) / precision.sqrt()  # too wide: it has to contract
    theta, _ = run(of_gaussian(precision), int(80 / size), size, 0.7 if size > 1 else 0.9, preconditioner, start)
    assert float((theta.var(0) * precision - 1).abs().max()) < TOLERANCE


def test_sghmc_stays_on_a_skewed_target():
    shape = torch.tensor([0.8, 2.0, 6.0], dtype=DOUBLE)
    theta, momentum = run(skewed(shape), 100, 0.15, 0.8, None, log_gamma_draws(shape))
    std = torch.polygamma(1, shape).sqrt()
    gap = (theta.mean(0) - torch.digamma(shape)) / std
    assert float(gap.abs().max()) < 4.5 / math.sqrt(CHAINS) + 0.01  # bias of order eps^2
    assert float((theta.var(0) / std**2 - 1).abs().max()) < 3 * TOLERANCE
    assert float((momentum.var(0) - 1).abs().max()) < TOLERANCE + 0.15**2


def test_without_noise_both_dynamics_converge_to_the_mode():
    precision = torch.tensor([1.0, 2.0, 4.0], dtype=DOUBLE)
    start = randn(5, 3, dtype=DOUBLE)
    assert float(run_sgld(of_gaussian(precision), 200, 0.2, None, start, heat=0.0).abs().max()) < 1e-6
    theta, momentum = run(of_gaussian(precision), 300, 0.3, 0.8, None, start, heat=0.0)
    assert float(theta.abs().max()) < 1e-6
    assert float(momentum.abs().max()) < 1e-6
