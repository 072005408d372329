"""NUTS against a recursive reference, known posteriors, HMC's targets and simulation-based calibration."""

import dataclasses
import math

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, density, problem, simulated_networks, skewed_moments

import credibly as cr
from chains import assert_moments, assert_zero
from conftest import mlp, randn
from credibly.backends.cpp.library import library
from credibly.inference.kernels.hmc import LEAPFROG, State
from credibly.inference.kernels.nuts import Segment, join, transition, turns, uniforms
from credibly.inference.sampling.nuts import NUTSSampler
from credibly.inference.target import to_target
from credibly.likelihoods import Gaussian


def nuts(target, *, seed=0, out=None, **kwargs):
    return cr.NUTS(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out, progress=False)


# -- the kernel, against a recursive construction of the same tree -----------------------------------------------------
DIM = 3
MASS = torch.tensor([0.5, 1.0, 2.0], dtype=DOUBLE)


def evaluate(theta):
    theta = theta.detach().requires_grad_()
    value = -0.5 * theta[:, 0] ** 2 - 0.5 * (theta[:, 1:] - theta[:, :1] ** 2).square().sum(-1)
    return value.detach(), torch.autograd.grad(value.sum(), theta)[0]


def states(chains):
    theta, momentum = randn(chains, DIM, seed=3, dtype=DOUBLE), randn(chains, DIM, seed=4, dtype=DOUBLE)
    value, gradient = evaluate(theta)
    return State(theta, gradient, value, torch.zeros_like(value), momentum * MASS.rsqrt())


def step(at, signed, moving):
    size = (signed * moving).unsqueeze(1)
    theta, momentum, gradient, value = LEAPFROG.step(*at, size, MASS, evaluate)
    return State(theta, gradient, value, torch.zeros_like(value), momentum)


def recursive(start, size, uniform, depth):
    """One chain, as the definition has it: all points of a half in a list, and a test of every aligned run of 2^k."""

    def energy(point):
        return float(0.5 * (point.momentum**2 * MASS).sum() - point.log_likelihood)

    def run_turns(points):
        def ends(run):
            total = MASS * sum(p.momentum for p in run)
            return float((total * run[0].momentum).sum()) <= 0 or float((total * run[-1].momentum).sum()) <= 0

        half = len(points) // 2
        return ends(points) or ends(points[: half + 1]) or ends(points[half - 1 :])

    def half_turns(points):
        if len(points) < 2:
            return False
        half = len(points) // 2
        return half_turns(points[:half]) or half_turns(points[half:]) or run_turns(points)

    before, path, chosen, total, count = energy(start), [start], start, 1.0, 0
    for level in range(depth):
        forward = float(uniform[2 * level]) < 0.5
        at, new = path[-1] if forward else path[0], []
        signed = torch.full((1,), size if forward else -size, dtype=DOUBLE)
        candidate, weight = None, 0.0
        for n in range(2**level):
            at = step((at.theta, at.momentum, at.gradient), signed, torch.ones(1))
            new.append(at)
            mass = math.exp(before - energy(at))
            weight += mass
            if float(uniform[2 * depth + 2**level - 1 + n]) < mass / weight:
                candidate = at
        points = new if forward else new[::-1]
        if half_turns(points):
            break
        if float(uniform[2 * level + 1]) < weight / total:
            chosen = candidate
        total, count = total + weight, count + 1
        path = path + points if forward else points + path
        if run_turns(path):
            break
    return chosen, count


@pytest.mark.parametrize("size", [0.1, 0.4])
def test_the_iterative_tree_is_the_recursive_one(size):
    chains, depth = 24, 6
    start = states(chains)
    uniform = torch.rand(chains, uniforms(depth), generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    sizes = torch.full((chains,), size, dtype=DOUBLE)
    found, info, tree = transition(start, step, sizes, MASS, uniform, (1.0, 1.0), depth)
    assert len(set(tree.depth.tolist())) > 1
    for c in range(chains):
        chosen, count = recursive(State(*(v[c : c + 1] for v in start)), size, uniform[c], depth)
        assert int(tree.depth[c]) == count
        torch.testing.assert_close(found.theta[c : c + 1], chosen.theta, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.gradient[c : c + 1], chosen.gradient, rtol=0, atol=1e-9)
        # A chain does not depend on those beside it.
        alone = transition(
            State(*(v[c : c + 1] for v in start)), step, sizes[:1], MASS, uniform[c : c + 1], (1.0, 1.0), depth
        )
        assert torch.equal(alone[0].theta[0], found.theta[c])
        assert float(alone[2].steps) == float(tree.steps[c])
    assert bool((info.acceptance > 0.5).all())


def test_turns_do_not_depend_on_the_direction_of_time():
    a, b = (Segment(*(randn(50, DIM, seed=s + k, dtype=DOUBLE) for k in range(3))) for s in (1, 7))
    mirrored = [Segment(-s.last, -s.first, -s.total) for s in (b, a)]
    assert torch.equal(turns(a, b, MASS), turns(*mirrored, MASS))
    assert torch.equal(join(a, b).total, a.total + b.total)
    assert 0 < int(turns(a, b, MASS).sum()) < 50


def test_a_density_that_falls_off_a_cliff_diverges_and_stays():
    start, sizes = states(2), torch.full((2,), 1e3, dtype=DOUBLE)
    found, info, tree = transition(start, step, sizes, None, torch.rand(2, uniforms(3)), (1.0, 1.0), 3)
    assert bool(info.divergent.all())
    assert torch.equal(found.theta, start.theta)
    assert tree.steps.tolist() == [1, 1]
    assert not bool(tree.capped.any())


# -- known posteriors --------------------------------------------------------------------------------------------------
# Draws are nearly independent.
FEW = {**SIZES, "draws": 60, "warmup": 60}
VARIANTS = {
    "defaults": {},
    "step size per chain": {"pooled": False},
    "unit mass, thinned": {"mass": "identity", "thin": 2, "draws": 40},
    "fixed step size": {"step_size": 0.4, "mass": "prior", "warmup": 40},
    "short trees": {"max_depth": 1, "thin": 4, "draws": 100},
    "float32": {},
}


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.nightly) if v == "step size per chain" else v for v in VARIANTS]
)
def test_a_skewed_target_whatever_the_settings(variant):
    target = density(torch.float32) if variant == "float32" else density()
    posterior = nuts(target, **{**FEW, **VARIANTS[variant]})
    assert_moments(posterior.draws, *skewed_moments())
    statistics = posterior.statistics
    kinetic = statistics["energy"] + statistics["log_likelihood"] + statistics["log_prior"]
    assert float(kinetic.min()) > -1e-3
    history = posterior.record.history
    reached = [int(n) for n in (statistics["tree_depth"] == history["max_depth"]).sum(1)]
    if variant == "short trees":
        assert history["max_depth_reached"] > reached  # draws are every fourth iteration
    else:
        assert history["max_depth_reached"] == [0] * 32
        assert_zero((kinetic - 1.5).unsqueeze(-1), precision=0.1)


def test_a_correlated_gaussian_of_very_different_scales():
    scale = torch.logspace(-1, 1, 5, dtype=DOUBLE)
    covariance = (0.4 * torch.eye(5, dtype=DOUBLE) + 0.6) * scale[:, None] * scale
    precision, mean = torch.linalg.inv(covariance), torch.tensor([3.0, 0.0, -2.0, 10.0, 1.0], dtype=DOUBLE)
    bowl = cr.Density(lambda w: -0.5 * (((w - mean) @ precision) * (w - mean)).sum(-1), 5, batched=True)
    posterior = nuts(bowl, chains=32, draws=50, warmup=100)
    assert_moments(posterior.draws, mean, covariance)
    assert posterior.record.history["inverse_mass_range"][0] == pytest.approx(0.01, rel=0.4)


def test_a_funnel_of_a_learned_scale():
    """v ~ N(0, 1), w_i ~ N(0, exp(v)): the scale of w changes by orders of magnitude along v."""

    def funnel(w):
        v, rest = w[:, :1], w[:, 1:]
        return -0.5 * v[:, 0].square() - 0.5 * (rest.square() * (-v).exp() + v).sum(-1)

    target = cr.Density(funnel, 4, batched=True)
    posterior = nuts(target, chains=32, draws=70, warmup=70, target_accept=0.9)
    # The scale, and the rest in its units, which are independent standard normal.
    v, rest = posterior.draws[..., :1], posterior.draws[..., 1:]
    white = torch.cat([v, rest * (-0.5 * v).exp()], -1)
    assert_moments(white, torch.zeros(4, dtype=DOUBLE), torch.eye(4, dtype=DOUBLE), precision=0.2)


def test_chains_evaluated_in_turn_and_together_agree():
    settings = {"chains": 3, "draws": 3, "warmup": 20, "max_depth": 3, "init": "prior"}
    together, in_turn = (nuts(problem(plan=plan), **settings) for plan in ("batched", "looped"))
    torch.testing.assert_close(together.draws, in_turn.draws, rtol=0, atol=1e-6)
    assert together.record.history["gradients"] > in_turn.record.history["gradients"]  # nobody waits in turn


@pytest.mark.parametrize("dtype, atol", [(DOUBLE, 1e-9), (torch.float32, 5e-3)], ids=["float64", "float32"])
@pytest.mark.parametrize("mass", ["identity", "prior"])
def test_cpp_trees_are_those_of_torch(dtype, atol, mass):
    """The same random numbers and the same trees, one from each of 32 points: along a chain, rounding would grow."""
    if library() is None:
        pytest.skip("no C++ compiler")
    x = randn(30, 3, dtype=dtype)
    data, tempering = (x, x.sum(1)), cr.Tempering(0.5, 2.0)
    prior = cr.priors.Normal(0.7, 0.1, fan_in=True)
    p = cr.Problem(mlp(3, 6, 1, dtype=dtype), data, Gaussian(0.5), prior, temperature=tempering)
    settings = {"chains": 32, "draws": 1, "warmup": 0, "step_size": 0.05, "init": "prior", "max_depth": 6, "mass": mass}
    native, plain = (nuts(p, compile=compile, **settings) for compile in ("auto", False))
    assert native.record.history["native"]
    assert not plain.record.history["native"]
    torch.testing.assert_close(native.draws, plain.draws, rtol=0, atol=atol)
    for name in ("tree_depth", "steps", "divergent"):
        assert torch.equal(native.statistics[name], plain.statistics[name])
    assert len(native.statistics["tree_depth"].unique()) > 2
    for name in ("energy", "acceptance", "log_prior"):
        torch.testing.assert_close(native.statistics[name], plain.statistics[name], rtol=1e-3, atol=10 * atol)
    assert native.record.history["gradients"] < plain.record.history["gradients"]  # no chain waits


def test_cpp_trees_end_at_a_divergence_or_the_maximum_depth():
    if library() is None:
        pytest.skip("no C++ compiler")
    settings = {"chains": 2, "draws": 5, "warmup": 0, "init": "prior", "compile": "auto"}
    cut = nuts(problem(), step_size=1e-4, max_depth=3, **settings)
    assert cut.record.history["max_depth_reached"] == [5, 5]
    assert cut.record.history["steps"] == [7, 7]
    lost = nuts(problem(), step_size=1e5, **settings)
    assert lost.record.history["divergences"] == [5, 5]
    assert torch.equal(lost.draws[:, 0], lost.draws[:, 4])


def test_simulation_based_calibration_of_a_tiny_network():
    """One chain per data set, all at once; the rank of the truth among the draws is uniform."""
    from scipy import stats

    sets, kept = 400, 9
    target, output, truth = simulated_networks(sets)
    posterior = nuts(target, chains=sets, draws=kept, thin=4, warmup=20, mass="identity", step_size=0.4)
    functions = torch.stack([output(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (functions < output(truth).unsqueeze(1)).sum(1)
    for column in ranks.T:
        assert stats.chisquare(torch.bincount(column, minlength=kept + 1).numpy()).pvalue > 1e-4


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"trajectory_length": 1.0}, "trajectory_length must not be passed to NUTS"),
        ({"max_depth": 0}, "max_depth must be an integer from 1 to 16, got 0"),
        ({"max_depth": 30}, "max_depth must be an integer from 1 to 16, got 30"),
        ({"mass": "dense"}, "mass must be one of"),
        ({"warmup": 3}, "warmup must be an integer of at least 20"),
        ({"target_accept": 1.2}, "target_accept must be strictly between 0 and 1"),
        ({"budget": "1min"}, 'budget must be None without until="mixed"'),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(cr.InputError, match=words):
        cr.NUTS(**settings)


def test_settings_can_be_replaced_and_are_recorded():
    method = dataclasses.replace(cr.NUTS(), max_depth=3)
    assert method.max_depth == 3
    assert "trajectory_length" not in {field.name for field in dataclasses.fields(method)}


def test_a_density_without_support_is_refused():
    nowhere = cr.Density(lambda w: w.sum(-1) * 0 - torch.inf, 2, batched=True)
    with pytest.raises(cr.InputError, match="the likelihood is -inf at the starting point of chain 0"):
        nuts(nowhere, chains=2)


def test_a_step_size_that_is_too_large_is_reported():
    with pytest.raises(cr.SamplingError, match="every trajectory diverged in the first 10 iterations"):
        nuts(density(), chains=2, draws=30, warmup=0, step_size=1e6)


def test_a_stuck_chain_is_restarted_from_another():
    """A chain that starts in a needle, whose step size suits no other place, goes on from the position of another."""

    def needle(w):
        return torch.logaddexp(-0.5 * w.square().sum(-1), 60 - 0.5 * (1e9 * (w - 30)).square().sum(-1))

    start = torch.zeros(4, 2, dtype=DOUBLE)
    start[2] = 30.0
    posterior = nuts(cr.Density(needle, 2, batched=True), chains=4, draws=10, warmup=60, init=start)
    assert [one["chain"] for one in posterior.record.history["restarted"]] == [2]
    assert float(posterior.draws.abs().max()) < 6


@pytest.mark.nightly  # the rounds are those of every sampler
def test_until_mixed_adds_rounds():
    posterior = nuts(density(), chains=4, draws=40, warmup=40, until="mixed")
    found = posterior.record.history["until"]
    assert found["met"]
    assert len(found["rounds"]) > 1


def test_the_maximum_depth_is_smaller_while_the_mass_is_a_guess():
    sampler = cr.NUTS(warmup=100, compile=False).sampler(to_target(density()), 0)
    assert isinstance(sampler, NUTSSampler)
    assert (sampler._most_doublings(0), sampler._most_doublings(80), sampler._most_doublings(200)) == (6, 10, 10)
