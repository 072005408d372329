"""Parallel tempering: its exchanges by brute force, its ladder, and its draws against known densities."""

import itertools
import math

import pytest
import torch

import credibly as cr
from chains import assert_zero
from conftest import mlp, randn
from credibly.inference.kernels.tempering import (
    MOST,
    exchange,
    exchange_probability,
    geometric_ladder,
    interpolate,
    respace,
)
from credibly.inference.sampling.tempered_target import TemperedTarget
from credibly.inference.target import to_target
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Normal

DOUBLE = torch.float64
SIZES = {"chains": 3, "draws": 6, "warmup": 30, "temperatures": 3, "trajectory_length": 0.3, "max_steps": 6}


def tempering(target, *, seed=0, out=None, **kwargs):
    method = cr.ParallelTempering(**{"compile": False, "init": "prior", **kwargs})
    return method.fit(target, seed=seed, out=out, progress=False)


def problem(rows=12, noise=0.5, **kwargs):
    x = randn(rows, 2, dtype=DOUBLE)
    y = x.sum(1) + 0.1 * randn(rows, seed=1, dtype=DOUBLE)
    return cr.Problem(mlp(2, 4, 1).double(), (x, y), Gaussian(noise), Normal(1.0), **kwargs)


# -- exchanges and ladder ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("iteration", [0, 1])
def test_exchanges_leave_the_joint_density_invariant(iteration):
    """All joint states of three replicas, each with four possible positions, and every outcome of an iteration."""
    log_lik = torch.tensor([0.3, -1.0, 0.8, -2.5], dtype=DOUBLE)
    log_prior = torch.tensor([-0.1, 0.4, -1.2, 0.9], dtype=DOUBLE)
    beta = torch.tensor([1.0, 0.55, 0.2], dtype=DOUBLE)
    joint = list(itertools.product(range(4), repeat=3))
    log_p = torch.stack([(beta * log_lik[list(s)] + log_prior[list(s)]).sum() for s in joint])
    stationary = torch.softmax(log_p, 0)
    after = torch.zeros_like(stationary)
    for state, mass in zip(joint, stationary):
        probability = exchange_probability(log_lik[list(state)].unsqueeze(0), beta)
        for coins in itertools.product((0.0, 1.0), repeat=2):
            order = exchange(torch.full_like(probability, 0.5), torch.tensor([coins], dtype=DOUBLE), iteration)[0]
            chance = math.prod(
                float(p if coin < 0.5 else 1 - p)
                for k, (p, coin) in enumerate(zip(probability[0], coins))
                if k % 2 == iteration
            )
            # The coin of a pair that is not proposed changes nothing: each of its values counts half.
            after[joint.index(tuple(state[k] for k in order.tolist()))] += mass * chance / 2
    torch.testing.assert_close(after, stationary, rtol=1e-12, atol=0)
    # Without regard to the temperatures the density would not be invariant.
    assert float((stationary.reshape(4, 4, 4).transpose(0, 1).flatten() - stationary).abs().max()) > 0.01


def test_exchanges_follow_the_odds():
    log_lik, beta = torch.tensor([[2.0, 5.0], [5.0, 2.0]], dtype=DOUBLE), torch.tensor([1.0, 0.25], dtype=DOUBLE)
    found = exchange_probability(log_lik, beta)
    torch.testing.assert_close(found, torch.tensor([[1.0], [math.exp(-0.75 * 3)]], dtype=DOUBLE))
    assert exchange(torch.ones(1, 4), torch.zeros(1, 4), 0).tolist() == [[1, 0, 3, 2, 4]]
    assert exchange(torch.ones(1, 4), torch.zeros(1, 4), 1).tolist() == [[0, 2, 1, 4, 3]]


def test_a_ladder_is_spaced_at_equal_distances_of_the_barrier():
    def barrier(beta):
        return 3 * (-beta.log()) ** 1.7 / math.log(20) ** 1.7

    beta = geometric_ladder(9, 20.0)
    for _ in range(8):
        beta = respace(beta, barrier(beta).diff())
    assert float(beta[0]) == 1.0
    assert float(beta[-1]) == pytest.approx(1 / 20, rel=1e-12)
    torch.testing.assert_close(barrier(beta).diff(), torch.full((8,), 3 / 8, dtype=DOUBLE), rtol=0.01, atol=0)


def test_a_free_ladder_reaches_as_far_as_neighbours_exchange():
    beta = geometric_ladder(5, 10.0)
    shorter = respace(beta, torch.full((4,), 0.9, dtype=DOUBLE), 0.1)
    torch.testing.assert_close(shorter, geometric_ladder(5, 10 ** (MOST / 0.9)))
    # From there it grows again if exchanges are accepted, and no further than allowed.
    longer = respace(shorter, torch.full((4,), 0.5, dtype=DOUBLE), 0.1)
    torch.testing.assert_close(longer, geometric_ladder(5, float(1 / shorter[-1]) ** (MOST / 0.5)))
    assert float(respace(shorter, torch.full((4,), 0.1, dtype=DOUBLE), 0.1)[-1]) == pytest.approx(0.1)


def test_interpolation_is_linear_between_points():
    x, y = torch.tensor([0.0, 1.0, 4.0], dtype=DOUBLE), torch.tensor([2.0, 3.0, -3.0], dtype=DOUBLE)
    found = interpolate(torch.tensor([0.0, 0.5, 1.0, 2.5, 4.0], dtype=DOUBLE), x, y)
    assert found.tolist() == [2.0, 2.5, 3.0, 0.0, -3.0]


@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_replica_has_the_gradient_of_a_problem_at_its_temperature(compile):
    """Also where C++ evaluates the network, and after an exchange, without another evaluation."""
    own = cr.Tempering(0.5, 2.0)
    beta, theta = torch.tensor([1.0, 0.4, 0.1], dtype=DOUBLE), randn(3, 17, seed=2, dtype=DOUBLE)
    tempered = TemperedTarget(to_target(problem(temperature=own)), 3)
    tempered.set_beta(beta)
    tempered.select_backend(compile)
    tempered.select_rows(slice(0, 3))
    log_lik, gradient = tempered.likelihood_and_grad(theta)
    for k, b in enumerate(beta.tolist()):
        alone = problem(temperature=cr.Tempering(own.likelihood / b, own.prior))
        known = alone.log_density_and_grad(theta[k : k + 1])
        torch.testing.assert_close(log_lik[k], known.log_likelihood[0].double())
        torch.testing.assert_close(gradient[k], known.gradient[0])
        lik, prior = tempered.row_weights
        torch.testing.assert_close(lik[k] * log_lik[k] + prior * tempered.log_prior(theta)[k], known.log_density[0])
    order = torch.tensor([1, 0, 2])
    moved = tempered.at_other_beta(theta[order], gradient[order], beta / beta[order])
    torch.testing.assert_close(moved, tempered.likelihood_and_grad(theta[order])[1])


# -- draws -------------------------------------------------------------------------------------------------------------
WEIGHT = 0.2


def two_modes(w):
    """Two modes of unit width, 12 apart: a barrier of 18 nats."""
    left, right = (-0.5 * (w - torch.tensor([centre, 0.0])).square().sum(-1) for centre in (-6.0, 6.0))
    return torch.logaddexp(math.log(WEIGHT) + left, math.log(1 - WEIGHT) + right)


def test_two_modes_have_their_weights_where_hmc_stays_in_one():
    density = cr.Density(two_modes, 2, batched=True, scale=3.0)
    stuck = cr.HMC(chains=8, draws=60, warmup=60, compile=False).fit(density, seed=0, progress=False)
    assert set((stuck.draws[..., 0] < 0).double().mean(1).tolist()) == {0.0, 1.0}
    path = {"mass": "identity", "trajectory_length": 2.0, "max_steps": 4}
    posterior = tempering(density, chains=32, draws=250, warmup=120, temperatures=5, hottest=30.0, **path)
    left = (posterior.draws[..., :1] < 0).double()
    # The standard error comes from the variation between ladders; that of chains that stay in one mode would be 0.07.
    assert_zero(left - WEIGHT, precision=0.03)
    assert_zero(posterior.draws[..., 1:], precision=0.1)
    history = posterior.record.history
    assert min(history["round_trips"]) >= 5
    swaps = torch.tensor(history["swap_acceptance"])
    assert float(swaps.max() - swaps.min()) < 0.2
    assert history["communication_barrier"] == pytest.approx(float((1 - swaps).sum()), abs=1e-5)
    assert posterior.diagnostics().weights.rhat_worst < 1.1 < stuck.diagnostics().weights.rhat_worst


def test_a_likelihood_without_information_lets_everything_travel():
    """Every exchange is accepted, so a position moves on in every iteration: one round trip per two iterations."""
    posterior = tempering(problem(noise=1e6), **{**SIZES, "temperatures": 4, "draws": 40})
    history = posterior.record.history
    assert history["swap_acceptance"] == pytest.approx([1.0] * 3, abs=1e-6)
    assert history["communication_barrier"] < 1e-6
    assert history["round_trips"] == [20] * 3
    assert history["temperatures"] == pytest.approx([1, 10 ** (1 / 3), 10 ** (2 / 3), 10])
    # Even pairs are proposed in every other iteration, and a swap brings the position of the second replica.
    assert posterior.statistics["swapped"][0].tolist() == [1.0, 0.0] * 20
    assert history["gradients"] % 3 == 0


def test_backends_and_plans_agree():
    settings = {**SIZES, "chains": 2, "warmup": 20, "draws": 3, "max_steps": 3}
    known = tempering(problem(), **settings)
    native = tempering(problem(), **{**settings, "compile": "auto"})
    in_turn = tempering(problem(plan="looped"), **settings)
    assert in_turn.record.history["chains_at_once"] == 1
    torch.testing.assert_close(native.draws, known.draws, rtol=0, atol=1e-6)
    torch.testing.assert_close(in_turn.draws, known.draws, rtol=0, atol=1e-6)


def test_a_given_ladder_is_kept():
    posterior = tempering(problem(temperature=0.5), **{**SIZES, "temperatures": (1, 1.5, 4)})
    assert posterior.record.history["temperatures"] == pytest.approx([1.0, 1.5, 4.0])
    assert [phase["name"] for phase in posterior.record.history["phases"]] == ["step size", "sampling"]


def test_given_steps_grow_with_the_temperature_and_too_large_ones_stop_the_run():
    posterior = tempering(problem(), **{**SIZES, "temperatures": (1, 4), "warmup": 0, "step_size": 0.05})
    assert posterior.record.history["step_size"] == pytest.approx([0.05, 0.1])
    with pytest.raises(cr.SamplingError, match="every trajectory diverged in the first 10 iterations after warm-up"):
        tempering(problem(), **{**SIZES, "draws": 20, "step_size": 1e4})


def test_until_mixed_adds_rounds():
    density = cr.Density(lambda w: -0.5 * w.square().sum(-1), 3, batched=True)
    posterior = tempering(density, chains=4, draws=40, warmup=40, temperatures=2, until="mixed")
    found = posterior.record.history["until"]
    assert found["met"]
    assert len(found["rounds"]) > 1


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"chains": 0}, "chains must be a positive integer, got 0"),
        ({"temperatures": 1}, "temperatures must be an integer of at least 2, got 1"),
        ({"temperatures": (1.0,)}, "temperatures must be at least two, got"),
        ({"temperatures": (1.0, 4.0, 2.0)}, "temperatures must increase, got"),
        ({"temperatures": (4.0, 2.0, 1.0)}, "temperatures must begin with 1, the problem's own temperature, got 4.0"),
        ({"temperatures": (0.5, 1.0)}, "temperatures must not be below 1, the problem's own temperature, got 0.5"),
        ({"temperatures": (1.0, math.nan)}, "temperatures must be a positive number"),
        ({"temperatures": "many"}, "temperatures must be an integer of at least 2, got 'many'"),
        ({"temperatures": (1.0, 2.0), "hottest": 3.0}, "hottest must be None if all temperatures are given, got 3.0"),
        (
            {"temperatures": 3, "hottest": 4.0, "warmup": 0, "step_size": 0.1},
            "warmup must be an integer of at least 20, got 0. Temperatures are spaced during warm-up",
        ),
        ({"hottest": 1.0}, "hottest must be a finite number above 1, the problem's own temperature, got 1.0"),
        ({"hottest": math.inf}, "hottest must be a finite number above 1"),
        ({"step_size": 0.0}, "step_size must be a positive number"),
        ({"trajectory_length": "tuned"}, "trajectory_length must be a positive number"),
        ({"warmup": 5}, "warmup must be an integer of at least 20"),
        ({"mass": "heavy"}, "mass must be one of"),
        ({"budget": "1min"}, 'budget must be None without until="mixed"'),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(cr.InputError, match=words):
        cr.ParallelTempering(**settings)


def test_densities_that_cannot_be_sampled_are_refused():
    nowhere = cr.Density(lambda w: w.sum(-1) * 0 - torch.inf, 2, batched=True)
    with pytest.raises(cr.InputError, match="the likelihood is -inf at the starting point of chain 0"):
        tempering(nowhere, chains=2)
    with pytest.raises(cr.SamplingError, match="no step size was found"):
        tempering(cr.Density(lambda w: 0 * w.sum(-1), 2, batched=True), chains=2)
