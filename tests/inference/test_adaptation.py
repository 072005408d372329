"""Adaptation during warm-up: step sizes reach the target acceptance, variances match the draws, phases have no gaps."""

import itertools
import math

import pytest
import torch

from conftest import randn
from credibly.inference.adaptation import (
    DualAveraging,
    LengthTrial,
    PooledAcceptance,
    Welford,
    variance_with_gradients,
    windows,
)

DOUBLE = torch.float64


def acceptance_of(size, scale):
    """Metropolis acceptance in high dimension: falls smoothly from 1 as the step size grows."""
    return torch.erfc((size / scale) ** 2 / math.sqrt(2))


@pytest.mark.parametrize("target", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("first", [1e-4, 1.0, 1e3])
def test_dual_averaging_reaches_the_target_acceptance(target, first):
    scale = torch.tensor([0.01, 1.0, 30.0], dtype=DOUBLE)
    dual = DualAveraging(torch.full((3,), first), target)
    noise = 0.05 * randn(600, 3, dtype=DOUBLE)
    for step in noise:
        dual.update((acceptance_of(dual.size, scale) + step).clamp(0, 1))
    torch.testing.assert_close(
        acceptance_of(dual.final, scale), torch.full((3,), target, dtype=DOUBLE), rtol=0, atol=0.03
    )


def test_the_average_varies_less_than_the_last_iterate():
    dual = DualAveraging(torch.ones(1), 0.8)
    sizes, finals = [], []
    for step in 0.2 * randn(500, 1, dtype=DOUBLE):
        dual.update((acceptance_of(dual.size, 1.0) + step).clamp(0, 1))
        sizes.append(float(dual.size.log()))
        finals.append(float(dual.final.log()))
    assert torch.tensor(finals[200:]).std() < 0.2 * torch.tensor(sizes[200:]).std()


def test_two_updates_by_hand():
    """Hoffman and Gelman's recursion with gamma = 0.05, t0 = 10, kappa = 0.75 and mu = log(10 eps)."""
    dual = DualAveraging(torch.tensor([0.1]), 0.8)
    assert float(dual.size) == pytest.approx(0.1, rel=1e-7)
    dual.update(torch.tensor([0.3], dtype=DOUBLE))
    h1 = 0.5 / 11
    log1 = -math.sqrt(1) / 0.05 * h1  # mu = log(1) = 0
    assert float(dual.size.log()) == pytest.approx(log1, abs=1e-7)
    assert float(dual.final.log()) == pytest.approx(log1, abs=1e-7)
    dual.update(torch.tensor([1.0], dtype=DOUBLE))
    h2 = (1 - 1 / 12) * h1 + (0.8 - 1.0) / 12
    log2 = -math.sqrt(2) / 0.05 * h2
    assert float(dual.size.log()) == pytest.approx(log2, abs=1e-7)
    weight = 2**-0.75
    assert float(dual.final.log()) == pytest.approx(weight * log2 + (1 - weight) * log1, abs=1e-7)


def test_step_sizes_of_several_chains_are_independent():
    together, alone = DualAveraging(torch.ones(2), 0.8), DualAveraging(torch.ones(1), 0.8)
    for value in torch.linspace(0, 1, 20, dtype=DOUBLE):
        together.update(torch.stack([1 - value, value]))
        alone.update(value.reshape(1))
    assert torch.equal(together.final[1:], alone.final)
    assert float(together.final[0]) != float(together.final[1])


def test_a_restart_resets_the_state():
    used, fresh = DualAveraging(torch.ones(1), 0.7), DualAveraging(torch.full((1,), 0.02), 0.7)
    for _ in range(30):
        used.update(torch.zeros(1))
    used.restart(torch.full((1,), 0.02))
    for dual in (used, fresh):
        dual.update(torch.tensor([0.4]))
    assert torch.equal(used.size, fresh.size)
    assert torch.equal(used.final, fresh.final)


def test_dual_averaging_resumes_from_its_tensors():
    first, second = DualAveraging(torch.ones(2), 0.8), DualAveraging(torch.full((2,), 9.0), 0.8)
    for row in randn(7, 2).abs().clamp(max=1):
        first.update(row)
    second.restore({k: v.clone() for k, v in first.tensors().items()})
    for dual in (first, second):
        dual.update(torch.tensor([0.1, 0.9]))
    assert torch.equal(first.size, second.size)
    assert torch.equal(first.final, second.final)


# -- variance ----------------------------------------------------------------------------------------------------------
def welford(draws):
    """Running variance of draws (chain, draw, D)."""
    running = Welford(draws.shape[0], draws.shape[2], torch.device("cpu"))
    for draw in draws.unbind(1):
        running.update(draw)
    return running


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_running_variance_is_that_of_each_chain_about_its_own_mean(dtype):
    draws = randn(3, 40, 5, dtype=dtype) * torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0], dtype=dtype)
    draws += 1000 * torch.arange(3, dtype=dtype).reshape(3, 1, 1)  # chains in different modes do not inflate it
    prior = torch.full((5,), 7.0, dtype=DOUBLE)
    weight = 120 / 125
    expected = weight * draws.double().var(1).mean(0) + (1 - weight) * 1e-3 * prior
    torch.testing.assert_close(welford(draws).variance(prior), expected, rtol=1e-10, atol=0)


def test_the_running_variance_survives_a_large_offset():
    """A sum of squares less a squared sum would lose all digits here."""
    draws = randn(2, 100, 1, dtype=DOUBLE) + 1e9
    seen = float(welford(draws).variance(torch.zeros(1, dtype=DOUBLE)))
    assert seen == pytest.approx(200 / 205 * float(draws.var(1).mean()), rel=1e-6)


def test_without_two_draws_the_guess_is_returned():
    prior = torch.tensor([2.0, 3.0], dtype=DOUBLE)
    assert torch.equal(welford(randn(4, 0, 2)).variance(prior), prior)
    assert torch.equal(welford(randn(4, 1, 2)).variance(prior), prior)


def test_a_chain_that_stands_still_leaves_a_positive_variance():
    seen = welford(torch.ones(2, 30, 3)).variance(torch.full((3,), 4.0, dtype=DOUBLE))
    assert bool((seen > 0).all())
    assert bool((seen < 0.01).all())


def test_the_running_variance_resumes_from_its_tensors():
    draws, prior = randn(2, 20, 3), torch.ones(3, dtype=DOUBLE)
    first, second = welford(draws[:, :8]), Welford(2, 3, torch.device("cpu"))
    second.restore({k: v.clone() for k, v in first.tensors().items()})
    for draw in draws[:, 8:].unbind(1):
        second.update(draw)
    assert torch.equal(second.variance(prior), welford(draws).variance(prior))


# -- pooled acceptance -------------------------------------------------------------------------------------------------
def test_chains_that_do_equally_well_pool_to_their_mean():
    pool = PooledAcceptance(4, 0.8)
    for _ in range(200):
        pooled = pool.update(torch.full((4,), 0.8))
    assert float(pooled) == pytest.approx(0.8, rel=1e-6)


def test_a_chain_that_is_always_rejected_cannot_hide_among_others():
    """The arithmetic mean of these would be 0.86, above any usual target."""
    pool = PooledAcceptance(16, 0.8)
    for _ in range(100):
        pooled = pool.update(torch.tensor([0.92] * 15 + [0.0]))
    assert float(pooled) < 0.01


def test_single_rejections_hardly_lower_the_pooled_acceptance():
    """A harmonic mean of each iteration would be near 0 whenever any chain is rejected."""
    pool, seen = PooledAcceptance(10, 0.8), []
    for t in range(400):
        acceptance = torch.full((10,), 1.0)
        acceptance[[t % 10, (t + 5) % 10]] = 0.0
        seen.append(float(pool.update(acceptance)))
    assert sum(seen[100:]) / 300 == pytest.approx(0.8, abs=1e-6)


# -- variance from draws and gradients ---------------------------------------------------------------------------------
def test_draws_and_gradients_give_the_variance_before_the_chains_have_crossed_the_density():
    scale = torch.logspace(-4, 4, 9, dtype=DOUBLE)
    draws = scale * 0.01 * randn(500, 9, dtype=DOUBLE)  # far narrower than the density
    gradients = -draws / scale**2
    found = variance_with_gradients(draws.var(0), gradients.var(0), torch.ones(9, dtype=DOUBLE))
    torch.testing.assert_close(found, scale**2, rtol=1e-10, atol=0)


def test_with_correlations_the_variance_of_the_draws_counts():
    draws = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    gradients = torch.tensor([500.0, 500.0], dtype=DOUBLE)
    assert torch.equal(variance_with_gradients(draws, gradients, torch.ones(2, dtype=DOUBLE)), draws)


def test_coordinates_that_did_not_move_keep_another_estimate():
    zero, one = torch.zeros(2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
    assert torch.equal(variance_with_gradients(zero, one, 7 * one), 7 * one)
    assert torch.equal(variance_with_gradients(one, zero, 7 * one), 7 * one)


# -- phases ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mass", [False, True])
def test_phases_cover_the_warm_up_exactly_once(mass):
    for warmup in range(1500):
        phases = windows(warmup, mass)
        assert [i for _, a, b in phases for i in range(a, b)] == list(range(warmup))
        assert all(a < b for _, a, b in phases)
        assert {name for name, _, _ in phases} <= {"step size", "mass"}
        assert any(name == "mass" for name, _, _ in phases) == (mass and warmup >= 20)


def test_windows_of_the_mass_double_and_the_last_phase_adapts_the_step_size():
    for warmup in range(20, 1500):
        phases = windows(warmup, True)
        assert (phases[0][0], phases[-1][0]) == ("step size", "step size")
        lengths = [b - a for name, a, b in phases if name == "mass"]
        assert lengths[0] >= 10
        assert len(phases) == len(lengths) + 2
        assert all(b == 2 * a for a, b in itertools.pairwise(lengths[:-1]))
        assert lengths[-1] >= 2 * lengths[-2] if len(lengths) > 1 else True  # the last takes the remainder
        assert 0.7 * warmup <= sum(lengths) <= 0.8 * warmup


class TestLengthTrial:
    """Chains of f' = a f + sqrt(1 - a^2) z, with a of each length: the correlation left after a block is a^n."""

    def run(self, keep, chains=64, rounds=40):
        generator = torch.Generator().manual_seed(4)
        trial = LengthTrial(chains, 3, torch.device("cpu"))
        scale = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
        f = torch.randn(chains, 3, generator=generator, dtype=torch.float64)
        for _ in range(rounds * len(trial.BLOCKS)):
            a = keep[trial.part]
            after = a * f + (1 - a**2) ** 0.5 * torch.randn(chains, 3, generator=generator, dtype=torch.float64)
            trial.update(f * scale, after * scale)
            f = after
        return trial, trial.remaining(trial.jumps, trial.values.mean, trial.values.squares)

    def test_the_remaining_correlation(self):
        keep = {1.0: 0.5, 0.5: 0.9, 0.25: 0.6, 0.125: 0.95}
        _, left = self.run(keep)
        wanted = torch.tensor([keep[part] ** round(1 / part) for part in LengthTrial.PARTS], dtype=torch.float64)
        # 64 chains, 40 blocks and 3 features: a mean of 7,680 squares of normal numbers, with a relative error of 1.6 %
        # of (1 - left), which is at most 1; the error of the variance is about the same.
        assert float((left - wanted).abs().max()) < 4 * 0.016 * 1.5

    def test_the_longest_of_those_within_the_slack_is_chosen(self):
        trial, _ = self.run(dict.fromkeys(LengthTrial.PARTS, 0.5), chains=2, rounds=1)
        assert trial.choice(torch.tensor([0.30, 0.14, 0.11, 0.10])) == 0.5
        assert trial.choice(torch.tensor([0.12, 0.14, 0.11, 0.10])) == 1.0
        assert trial.choice(torch.tensor([0.9, 0.8, 0.7, 0.1])) == 0.125

    def test_resumes_from_its_tensors(self):
        whole, left = self.run({1.0: 0.5, 0.5: 0.6, 0.25: 0.7, 0.125: 0.8}, chains=4, rounds=2)
        again = LengthTrial(4, 3, torch.device("cpu"))
        again.restore({k: v.clone() for k, v in whole.tensors().items()})
        assert torch.equal(again.remaining(again.jumps, again.values.mean, again.values.squares), left)
        assert again.part == whole.part
