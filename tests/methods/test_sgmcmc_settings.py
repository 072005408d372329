"""SGLD and SGHMC: schedules, and settings that raise an error."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgmcmc_problems import BOTH, DOUBLE, SHORT, fit, problem
from torch import nn

import credibly as cr
from conftest import randn
from credibly.inference.target import to_target


# -- schedules ---------------------------------------------------------------------------------------------------------
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
def test_steps_and_draws_of_a_schedule_are_consistent(options):
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


def test_a_cycle_is_a_cosine_that_explores_first_and_samples_at_its_end():
    options = cr.SGLD(schedule="cyclical", cycles=3, draws=12, warmup=10, thin=5, exploration=0.5)
    assert options.resolved_schedule().steps == 10 + 3 * 40
    taken = [done - 10 for done in range(131) if options.resolved_schedule().is_draw(done)]
    assert taken == [40 * c + p for c in range(3) for p in (25, 30, 35, 40)]
    for t in range(10):
        assert options.resolved_schedule().at(t, 1.0) == (1.0, 1.0)
    for c in range(3):
        for step in range(40):
            size, heat = options.resolved_schedule().at(10 + 40 * c + step, 0.1)
            assert size == pytest.approx(0.05 * (1 + math.cos(math.pi * step / 40)), abs=1e-15)
            assert heat == (1.0 if step >= 20 else 0.0)


def test_constant_and_polynomial_schedules():
    options = cr.SGLD(draws=90, warmup=10, thin=1)
    assert {options.resolved_schedule().at(t, 0.3) for t in range(100)} == {(0.3, 1.0)}
    falling = cr.SGLD(draws=90, warmup=10, thin=1, schedule="polynomial")
    assert falling.resolved_schedule().at(0, 0.3) == (0.3, 1.0)
    assert falling.resolved_schedule().at(10, 0.3)[0] == pytest.approx(0.3 * 2**-0.55)
    assert falling.resolved_schedule().at(90, 0.3)[0] == pytest.approx(0.3 * 10**-0.55)


@BOTH
def test_exploration_adds_no_noise(method):
    """With full-batch gradients two seeds follow the same path, until the sampling phase starts."""
    options = method(
        chains=2, draws=4, cycles=1, warmup=0, thin=5, schedule="cyclical", step_size=1e-3, batch_size=24, compile=False
    )
    assert options.resolved_schedule().steps == 40
    paths = []
    for seed in (0, 1):
        sampler = options.sampler(to_target(problem()), seed)
        sampler.start(0.3 * randn(2, problem().dim, dtype=DOUBLE))
        sampler.momentum.zero_()  # SGHMC starts with a random momentum
        path = []
        for t in range(40):
            sampler._advance_one(t, torch.tensor(sampler._controls(t), dtype=DOUBLE))
            path.append(sampler.theta.clone())
        paths.append(path)
    assert all(torch.equal(a, b) for a, b in zip(paths[0][:20], paths[1][:20]))
    assert not torch.equal(paths[0][0], paths[0][10])
    assert not torch.equal(paths[0][20], paths[1][20])


@BOTH
def test_a_cyclical_run_has_the_steps_and_draws_of_its_schedule(method):
    posterior = fit(
        method,
        problem(),
        chains=3,
        draws=6,
        cycles=3,
        warmup=7,
        thin=4,
        schedule="cyclical",
        step_size=1e-3,
        batch_size=8,
        init="prior",
    )
    assert posterior.draws.shape == (3, 6, problem().dim)
    assert posterior.record.history["steps"] == 7 + 3 * 16
    seen = posterior.statistics["step_size"][0]
    torch.testing.assert_close(seen[:2], seen[2:4], rtol=0, atol=0)
    assert seen[0] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 11 / 16)))
    assert seen[1] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 15 / 16)))


# -- invalid settings --------------------------------------------------------------------------------------------------
@BOTH
def test_a_minibatch_larger_than_the_data_raises(method):
    with pytest.raises(cr.InputError, match="batch_size must be at most the number of rows, 24, got 25"):
        method(batch_size=25).fit(problem(), seed=0)


@BOTH
def test_a_diverging_step_size_raises(method):
    with pytest.raises(
        cr.SamplingError, match=r"chain \d diverged to non-finite values by step \d+ with step_size=1e\+03. Try a tenth"
    ):
        fit(method, problem(), **{**SHORT, "warmup": 300, "step_size": 1e3})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"chains": 0}, "chains must be a positive integer, got 0"),
        ({"draws": 0}, "draws must be a positive integer, got 0"),
        ({"warmup": -1}, "warmup must be a non-negative integer, got -1"),
        ({"thin": 0}, "thin must be a positive integer, got 0"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive integer, got 2.5"),
        ({"step_size": 0.0}, "step_size must be a positive number, got 0.0"),
        ({"step_size": math.nan}, "step_size must be a positive number, got nan"),
        ({"schedule": "cosine"}, "schedule must be one of 'constant', 'polynomial', 'cyclical', got 'cosine'"),
        ({"cycles": 0}, "cycles must be a positive integer, got 0"),
        (
            {"schedule": "cyclical", "draws": 10, "cycles": 3},
            "cycles must divide the number of draws, 10, got 3",
        ),
        ({"exploration": 1.0}, "exploration must be a fraction from 0 to below 1, got 1.0"),
        ({"exploration": -0.1}, "exploration must be a fraction from 0 to below 1, got -0.1"),
        (
            {"preconditioner": "adam"},
            "preconditioner must be one of 'auto', 'prior', 'rmsprop', got 'adam'. Or pass None",
        ),
        ({"max_steps": 0}, "max_steps must be a positive integer, got 0"),
        ({"control_variate": "svrg"}, "control_variate must be True or False, got 'svrg'"),
        (
            {"preconditioner": "rmsprop", "warmup": 0},
            "warmup must be a positive integer, got 0. The preconditioner is estimated during warm-up",
        ),
        ({"init": "zeros"}, "a (chains, D) tensor or a posterior, got 'zeros'"),
        ({"draw_dtype": "int8"}, "draw_dtype must be one of 'float64', 'float32', 'float16', 'bfloat16', got 'int8'"),
    ],
    ids=str,
)
@BOTH
def test_invalid_settings(method, options, message):
    with pytest.raises(cr.InputError, match=re.escape(message)):
        method(**options)


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, math.nan])
def test_invalid_momentum(momentum):
    with pytest.raises(cr.InputError, match=f"momentum must be strictly between 0 and 1, got {momentum!r}"):
        cr.SGHMC(momentum=momentum)


@BOTH
def test_an_invalid_problem_seed_or_folder(method, tmp_path):
    with pytest.raises(cr.InputError, match="problem must be a credibly.Problem or a credibly.Density, got Linear"):
        method().fit(nn.Linear(1, 1), seed=0)
    with pytest.raises(cr.InputError, match="seed must be a non-negative integer .*got -1"):
        method().fit(problem(), seed=-1)
    with pytest.raises(cr.StoreError, match="out: .* already exists"):
        method().fit(problem(), seed=0, out=tmp_path)


@pytest.mark.parametrize("method", [cr.SGLD, cr.SGHMC, cr.HMC])
def test_zero_start_steps_raise(method):
    with pytest.raises(cr.InputError, match="start_steps must be a positive integer, got 0"):
        method(start_steps=0)
