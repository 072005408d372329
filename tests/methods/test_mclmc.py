"""MCLMC: its integrator against the formulas, and its draws against known posteriors."""

import dataclasses
import math

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, density, problem, simulated_networks, skewed_moments

import credibly as cr
from chains import assert_moments
from conftest import randn
from credibly.inference.kernels.hmc import LEAPFROG, MINIMUM_ERROR
from credibly.inference.kernels.mclmc import isokinetic, kick, refresh_partly, unit


def mclmc(target, *, seed=0, out=None, **kwargs):
    return cr.MCLMC(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out, progress=False)


# -- the kernel --------------------------------------------------------------------------------------------------------
def test_a_kick_is_the_closed_form():
    u, g, size = unit(randn(20, 5, dtype=DOUBLE)), 4 * randn(20, 5, seed=1, dtype=DOUBLE), 0.7
    norm = g.norm(dim=-1, keepdim=True)
    e, delta = g / norm, size * norm / 4
    cosine = (e * u).sum(-1, keepdim=True)
    below = delta.cosh() + cosine * delta.sinh()
    expected = (u + e * (delta.sinh() + cosine * (delta.cosh() - 1))) / below
    found, change = kick(u, g, size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(change, 4 * below.log().squeeze(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(20, dtype=DOUBLE))


def test_a_kick_of_any_force_is_finite():
    u = unit(randn(4, 3, dtype=DOUBLE))
    for factor in (0.0, 1e-200, 1e6, 1e12):
        found, change = kick(u, factor * randn(4, 3, seed=2, dtype=DOUBLE), 1.0)
        assert bool(torch.isfinite(found).all() & torch.isfinite(change).all())
    assert torch.equal(kick(u, torch.zeros_like(u), 1.0)[0], u)


def banana(theta):
    theta = theta.detach().requires_grad_()
    value = -0.5 * theta[:, 0] ** 2 - 0.5 * (theta[:, 1:] - theta[:, :1] ** 2).square().sum(-1)
    return value.detach(), torch.autograd.grad(value.sum(), theta)[0]


def path(scheme, theta, u, size, steps):
    """Return the end of a path and its energy error."""
    before, gradient = banana(theta)
    error, value = torch.zeros_like(before), before
    scale = torch.tensor([1.0, 0.5, 2.0], dtype=DOUBLE)
    for _ in range(steps):
        theta, u, gradient, value, change = isokinetic(scheme, theta, u, gradient, size, scale, banana)
        error = error + change
    return theta, u, error + before - value


@pytest.mark.parametrize("scheme", [LEAPFROG, MINIMUM_ERROR], ids=lambda s: s.name)
def test_paths_are_reversible_and_of_second_order(scheme):
    # Near the mode: a strong force turns all directions towards one, and going back amplifies rounding.
    theta, u = 0.5 * randn(50, 3, dtype=DOUBLE), unit(randn(50, 3, seed=1, dtype=DOUBLE))
    end, direction, error = path(scheme, theta, u, 0.1, 12)
    back, turned, undone = path(scheme, end, -direction, 0.1, 12)
    torch.testing.assert_close(back, theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(turned, -u, rtol=0, atol=1e-9)
    torch.testing.assert_close(undone, -error, rtol=0, atol=1e-9)
    # The error of a path of fixed length falls with the square of the step size.
    coarse, fine = (path(scheme, theta, u, size, round(0.4 / size))[2].abs().mean() for size in (0.02, 0.01))
    assert float(coarse / fine) == pytest.approx(4, rel=0.05)


def test_the_energy_error_is_the_change_of_volume():
    """det of the map of (theta, angle) in the plane = exp(-kinetic change): what the Metropolis step corrects."""

    def flat(z):
        theta, u = z[:2].unsqueeze(0), torch.stack([z[2].cos(), z[2].sin()]).unsqueeze(0)

        def evaluate(t):
            return -0.5 * (t[:, 0] ** 2 + 3 * t[:, 1] ** 2), torch.stack([-t[:, 0], -3 * t[:, 1]], 1)

        new, v, _, _, change = isokinetic(LEAPFROG, theta, u, evaluate(theta)[1], 0.4, None, evaluate)
        return torch.cat([new[0], torch.atan2(v[0, 1], v[0, 0]).unsqueeze(0)]), change[0]

    for seed in range(5):
        z = randn(3, seed=seed, dtype=DOUBLE)
        jacobian = torch.func.jacfwd(lambda p: flat(p)[0])(z)
        torch.testing.assert_close(torch.linalg.det(jacobian).abs().log(), -flat(z)[1], rtol=0, atol=1e-10)


def test_directions_persist_over_the_given_length():
    """u . u' = 1 / sqrt(1 + d nu^2) = exp(-eps / L) in many dimensions, with a spread of about 1/sqrt(d)."""
    u = unit(randn(40, 2000, dtype=DOUBLE))
    after = refresh_partly(u, randn(40, 2000, seed=1, dtype=DOUBLE), 0.5, 2.0)
    assert float((u * after).sum(-1).mean()) == pytest.approx(math.exp(-0.25), abs=4 / math.sqrt(40 * 2000))


# -- known posteriors --------------------------------------------------------------------------------------------------
VARIANTS = {
    "adjusted": {"adjusted": True},
    "adjusted, leapfrog, thinned": {"adjusted": True, "integrator": "leapfrog", "thin": 2},
    "adjusted, all given": {"adjusted": True, "step_size": 0.7, "trajectory_length": 2.0, "warmup": 20},
    "adjusted, float32": {"adjusted": True},
    "unadjusted, small steps": {"energy_variance": 1e-6, "draws": 150},
}


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.nightly) if v == "adjusted, float32" else v for v in VARIANTS]
)
def test_a_skewed_target(variant):
    target = density(torch.float32) if variant.endswith("float32") else density()
    posterior = mclmc(target, **{**SIZES, **VARIANTS[variant]})
    assert_moments(posterior.draws, *skewed_moments())


def test_large_steps_without_a_correction_have_a_bias():
    """Otherwise the test above could not see one. The check by a short adjusted run agrees with the known bias."""
    posterior = mclmc(density(), chains=64, draws=400, warmup=60, energy_variance=0.5)
    with pytest.raises(AssertionError):
        assert_moments(posterior.draws, *skewed_moments())
    history = posterior.record.history
    assert sum(history["energy_variance"]) / 64 == pytest.approx(0.5, rel=0.7)
    check = history["bias_check"]
    mean, covariance = skewed_moments()
    known = ((posterior.draws.mean((0, 1)) - mean) / covariance.diagonal().sqrt()).square().mean().sqrt()
    assert abs(check["difference"] - float(known)) < 4 * check["standard_error"] < 0.2
    assert check["difference"] <= check["worst_difference"]
    assert (check["iterations"], check["draws"]) == (46, 23)


def test_a_correlated_gaussian_in_its_scale():
    scale = torch.logspace(-1, 1, 5, dtype=DOUBLE)
    covariance = (0.4 * torch.eye(5, dtype=DOUBLE) + 0.6) * scale[:, None] * scale
    precision = torch.linalg.inv(covariance)
    bowl = cr.Density(lambda w: -0.5 * ((w @ precision) * w).sum(-1), 5, batched=True, scale=scale)
    posterior = mclmc(bowl, chains=32, draws=150, warmup=100, adjusted=True)
    assert_moments(posterior.draws, torch.zeros(5, dtype=DOUBLE), covariance)
    # The width of the density in its scale is sqrt(5), and paths are 1.6 times as long.
    assert posterior.record.history["trajectory_length"] == pytest.approx(1.6 * math.sqrt(5), rel=0.2)


def test_chains_evaluated_in_turn_and_together_agree():
    settings = {"chains": 3, "draws": 4, "warmup": 40, "max_steps": 5, "init": "prior"}
    together, in_turn = (mclmc(problem(plan=plan), **settings) for plan in ("batched", "looped"))
    torch.testing.assert_close(together.draws, in_turn.draws, rtol=0, atol=1e-6)


def test_simulation_based_calibration_of_a_tiny_network():
    """One chain per data set, all at once; the rank of the truth among the draws is uniform."""
    from scipy import stats

    sets, kept = 400, 9
    target, output, truth = simulated_networks(sets)
    settings = {"adjusted": True, "step_size": 1.0, "trajectory_length": 4.0, "warmup": 30, "thin": 8}
    posterior = mclmc(target, chains=sets, draws=kept, **settings)
    functions = torch.stack([output(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (functions < output(truth).unsqueeze(1)).sum(1)
    for column in ranks.T:
        assert stats.chisquare(torch.bincount(column, minlength=kept + 1).numpy()).pvalue > 1e-4


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"mass": "diagonal"}, "mass must not be passed to MCLMC"),
        ({"adjusted": "yes"}, "adjusted must be True or False, got 'yes'"),
        ({"energy_variance": 0.0}, "energy_variance must be a positive number"),
        ({"warmup": 10}, "warmup must be an integer of at least 40"),
        ({"step_size": 0.1, "warmup": 10}, "warmup must be an integer of at least 40"),
        ({"trajectory_length": -1.0}, "trajectory_length must be a positive number"),
        ({"integrator": "euler"}, "integrator must be one of"),
        ({"budget": "1min"}, 'budget must be None without until="mixed"'),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(cr.InputError, match=words):
        cr.MCLMC(**settings)
    assert "mass" not in {field.name for field in dataclasses.fields(cr.MCLMC)}


def test_densities_that_cannot_be_sampled_are_refused():
    nowhere = cr.Density(lambda w: w.sum(-1) * 0 - torch.inf, 2, batched=True)
    with pytest.raises(cr.InputError, match="the likelihood is -inf at the starting point of chain 0"):
        mclmc(nowhere, chains=2)
    with pytest.raises(cr.InputError, match="must have at least two parameters for MCLMC, got 1"):
        mclmc(cr.Density(lambda w: -w.square().sum(-1), 1, batched=True))
    with pytest.raises(cr.SamplingError, match="no step size was found"):
        mclmc(cr.Density(lambda w: 0 * w.sum(-1), 2, batched=True), chains=2)


def test_chains_that_leave_the_density_are_recorded_and_a_run_of_nothing_else_stops():
    def walled(w):
        """A Gaussian with walls that a path may cross but no draw."""
        return torch.where(w.abs().amax(-1) < 1.5, -0.5 * w.square().sum(-1), -torch.inf)

    start = torch.zeros(4, 3, dtype=DOUBLE)
    settings = {"chains": 4, "warmup": 0, "init": start, "trajectory_length": 2.0}
    posterior = mclmc(cr.Density(walled, 3, batched=True), draws=60, step_size=0.5, **settings)
    assert min(posterior.record.history["divergences"]) > 0
    assert float(posterior.draws.abs().max()) < 1.5
    with pytest.raises(cr.SamplingError, match="every chain diverged in 10 iterations in a row"):
        mclmc(density(), draws=60, step_size=1e6, **settings)


def test_until_mixed_adds_rounds():
    posterior = mclmc(density(), chains=4, draws=150, warmup=100, until="mixed", adjusted=True)
    found = posterior.record.history["until"]
    assert found["met"]
    assert len(found["rounds"]) > 1
