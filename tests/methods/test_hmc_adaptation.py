"""HMC: acceptance, adaptation of step size and mass, trajectory lengths, momentum refreshment and divergences."""

import itertools
import math

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, X, Y, density, hmc, wide

import credibly as cr
from chains import assert_zero
from conftest import mlp, randn
from credibly.inference.adaptation import LengthTrial
from credibly.inference.target import to_target
from credibly.likelihoods import Gaussian


def test_acceptance_falls_as_the_step_grows():
    start = randn(16, 40, dtype=DOUBLE)
    rates = [
        float(
            hmc(wide(), chains=16, draws=60, warmup=0, step_size=s, init=start, jitter=0.5, mass="identity")
            .statistics["acceptance"]
            .mean()
        )
        for s in (0.1, 0.4, 0.8, 1.2, 1.6)
    ]
    assert rates[0] > 0.99
    assert all(a > b + 0.01 for a, b in itertools.pairwise(rates))
    assert rates[-1] < 0.5


@pytest.mark.parametrize("target", [0.6, pytest.param(0.8, marks=pytest.mark.nightly), 0.9])
@pytest.mark.parametrize("pooled", [True, False])
def test_warm_up_reaches_the_target_acceptance(target, pooled):
    posterior = hmc(
        wide(), chains=8, draws=100, warmup=250, target_accept=target, pooled=pooled, jitter=0.5, mass="identity"
    )
    assert float(posterior.statistics["acceptance"].mean()) == pytest.approx(target, abs=0.05)
    sizes = set(posterior.record.history["step_size"])
    assert len(sizes) == (1 if pooled else 8)


def test_step_size_and_mass_adapt_in_warm_up_and_are_frozen_after():
    target = to_target(density())
    sampler = cr.HMC(chains=4, draws=30, warmup=60, compile=False).sampler(target, 0)
    sampler.start(randn(4, 3, dtype=DOUBLE))
    sizes, masses = [], []
    while sampler.done < sampler.total:
        sampler.advance(lambda: False)
        sizes.append(sampler.adaptation.size.tolist())
        masses.append(sampler.adaptation.inverse_mass.tolist())
    assert len({str(s) for s in sizes[:60]}) == 60  # it changes at every iteration
    assert all(s == sizes[59] for s in sizes[59:])
    assert all(m == masses[59] for m in masses[59:])
    ends = [b for name, _, b in sampler.adaptation.phases if name == "mass"]
    changes = [t + 1 for t in range(1, 90) if masses[t] != masses[t - 1]]
    assert changes == ends
    assert sizes[59] == sampler.adaptation.dual.final.expand(4).tolist()  # the average, not the last value


def test_the_mass_comes_from_the_last_window_only():
    options = cr.HMC(chains=4, draws=5, warmup=150, compile=False)
    sampler = options.sampler(to_target(density(scale=3.0)), 0)
    sampler.start(randn(4, 3, dtype=DOUBLE))
    assert sampler.adaptation.inverse_mass.tolist() == [9.0] * 3  # the initial value
    path, slopes = [], []
    while sampler.done < sampler.total:
        sampler.advance(lambda: False)
        path.append(sampler.theta.clone())
        slopes.append(sampler.state.gradient.clone())
    windows = [(a, b) for name, a, b in sampler.adaptation.phases if name == "mass"]
    assert len(windows) > 1
    first, end = windows[-1]
    seen, changed = (torch.stack(each[first:end], 1).var(1).mean(0) for each in (path, slopes))
    known = torch.maximum(seen, torch.sqrt(seen / changed))
    torch.testing.assert_close(sampler.adaptation.inverse_mass, known, rtol=1e-10, atol=0)


def test_partial_refreshment_keeps_the_momentum_across_trajectories():
    """With almost no refreshment, short trajectories continue in one direction instead of a random walk."""
    settings = {"chains": 64, "draws": 20, "warmup": 0, "mass": "identity", "init": torch.zeros(64, 10)}
    drift, wander = (
        hmc(wide(10), **settings, step_size=0.02, trajectory_length=0.02, refresh=r).draws for r in (1e-6, 1.0)
    )

    def turn(draws):
        step = draws.diff(dim=1)
        return float((step[:, 1:] * step[:, :-1]).sum() / step.square().sum())

    assert turn(drift) > 0.9
    assert abs(turn(wander)) < 0.1
    # The first momentum is fully resampled: the first step is as long as any other.
    assert float(drift[:, 0].square().sum(-1).mean()) == pytest.approx(10 * 0.02**2, rel=4.5 * math.sqrt(2 / 640))


def test_jitter_lengthens_and_shortens_trajectories():
    options = cr.HMC(chains=2, draws=200, warmup=0, step_size=0.01, trajectory_length=1.0, jitter=0.3, compile=False)
    sampler = options.sampler(to_target(density()), 0)
    steps = torch.tensor([list(sampler._steps(t)) for t in range(200)], dtype=DOUBLE)
    assert torch.equal(steps[:, 0], steps[:, 1])  # the same for all chains, which run in one batch
    assert 70 <= float(steps.min()) < 76
    assert 124 < float(steps.max()) <= 131
    assert float(steps[:, 0].mean()) == pytest.approx(100.5, abs=4.5 * 60 / math.sqrt(12 * 200))


def test_only_default_lengths_are_jittered_by_default():
    assert cr.HMC().jitter_fraction == 0.2
    assert cr.HMC(trajectory_length=1.0).jitter_fraction == 0.0
    assert cr.HMC(trajectory_length=1.0, jitter=0.1).jitter_fraction == 0.1
    assert cr.HMC(jitter=0.0).jitter_fraction == 0.0


def test_steps_are_the_length_over_the_step_size():
    for length, size, steps in ((1.0, 0.1, 10), (1.0, 0.3, 4), (0.3, 0.1, 3), (1e-3, 1.0, 1), (5.0, 0.001, 5000)):
        options = cr.HMC(chains=2, draws=1, warmup=0, step_size=size, trajectory_length=length, compile=False)
        assert list(options.sampler(to_target(density()), 0)._steps(0)) == [steps, steps]


def test_a_given_step_size_is_not_adapted():
    posterior = hmc(density(), chains=2, draws=10, warmup=40, step_size=0.3)
    assert posterior.record.history["step_size"] == [0.3, 0.3]


def test_rejected_proposals_repeat_the_draw():
    posterior = hmc(wide(10), chains=32, draws=100, warmup=0, step_size=1.7, mass="identity", trajectory_length=5.1)
    draws, statistics = posterior.draws, posterior.statistics
    same = (draws[:, 1:] == draws[:, :-1]).all(-1)
    partly = (draws[:, 1:] == draws[:, :-1]).any(-1)
    assert torch.equal(same, partly)
    assert 0.1 < float(same.double().mean()) < 0.9
    # A draw repeats with probability one minus the recorded acceptance.
    assert_zero((same.double() - (1 - statistics["acceptance"][:, 1:])).unsqueeze(-1), precision=0.02)
    repeated = statistics["log_likelihood"][:, 1:] == statistics["log_likelihood"][:, :-1]
    assert torch.equal(repeated, same)


def test_divergences_are_counted_and_rejected():
    """A wall at 2: trajectories that run into it are rejected."""
    wall = cr.Density(lambda w: torch.where(w[:, 0] < 2, -0.5 * w.square().sum(-1), -torch.inf), 2, batched=True)
    posterior = hmc(wall, chains=8, draws=200, warmup=0, step_size=0.4, mass="identity", init=torch.zeros(8, 2))
    assert float(posterior.draws[..., 0].max()) < 2
    divergent = posterior.statistics["divergent"]
    assert 10 < int(divergent.sum()) < 1000
    assert divergent.sum(1).long().tolist() == posterior.record.history["divergences"]
    assert bool((posterior.statistics["acceptance"][divergent.bool()] == 0).all())


def test_a_tuned_length_is_a_fraction_of_the_default_and_short_for_a_narrow_target():
    full = hmc(density(), **{**SIZES, "draws": 5}).record.history["trajectory_length"]
    tuned = hmc(density(), **{**SIZES, "draws": 5}, trajectory_length="tuned").record.history["trajectory_length"]
    assert tuned / full in LengthTrial.PARTS
    # A Gaussian with a tenth of its declared scale: the full length makes five half turns, which only mirrors the
    # position; half of it ends on a quarter turn, where the position is independent of the start.
    narrow = cr.Density(lambda t: -50 * (t**2).sum(-1), 4, batched=True, scale=1.0)
    settings = {"chains": 16, "draws": 5, "warmup": 150, "mass": "prior", "jitter": 0.0, "target_accept": 0.99}
    history = hmc(narrow, **settings, trajectory_length="tuned").record.history
    assert history["trajectory_length"] == pytest.approx(math.pi / 4)


def test_the_default_trajectory_length_is_a_quarter_turn_of_the_prior():
    narrow = to_target(
        cr.Problem(mlp(3, 4, 1), data=(X.float(), Y.float()), likelihood=Gaussian(0.5), prior=cr.priors.Normal(0.3))
    )
    assert cr.HMC().length(narrow) == pytest.approx(math.pi * 0.3 / 2)
    assert cr.HMC().mass_kind(narrow) == "identity"
    assert cr.HMC().inverse_mass(narrow) is None
    prior = {"0.*": cr.priors.Normal(0.1), "2.*": cr.priors.Normal(2.0)}
    mixed = to_target(cr.Problem(mlp(3, 4, 1), data=(X.float(), Y.float()), likelihood=Gaussian(0.5), prior=prior))
    assert cr.HMC().mass_kind(mixed) == "prior"
    assert cr.HMC().length(mixed) == pytest.approx(math.pi / 2)
    assert sorted(set(cr.HMC().inverse_mass(mixed).tolist())) == pytest.approx([0.01, 4.0])
    assert cr.HMC().mass_kind(to_target(density())) == "diagonal"
    assert cr.HMC(trajectory_length=3.0).length(mixed) == 3.0
