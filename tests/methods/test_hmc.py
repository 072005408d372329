"""HMC end to end: known posteriors, the same result however it is computed, and what it refuses."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
import credibly.problem
from chains import assert_moments, assert_weighted_prior, assert_zero
from conftest import mlp, randn
from credibly.inference.adaptation import LengthTrial
from credibly.inference.sampling.noise import ChainNoise
from credibly.inference.sampling.trajectory import even_chunk
from credibly.inference.target import ProblemTarget, to_target
from credibly.likelihoods import Categorical, Gaussian

DOUBLE = torch.float64


def hmc(target, *, seed=0, out=None, **kwargs):
    return cr.HMC(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out)


# -- targets whose moments are known -------------------------------------------------------------------------------------
SHAPE = torch.tensor([2.0, 5.0], dtype=DOUBLE)


def skewed(w):
    """Logarithms of Gamma(2) and Gamma(5) variables, and a normal variable that leans on the first."""
    a, b = SHAPE.to(w)
    lean = w[:, 2] - 0.5 * w[:, 0]
    return a * w[:, 0] - w[:, 0].exp() + b * w[:, 1] - w[:, 1].exp() - 0.5 * (lean / 0.6) ** 2


def skewed_moments():
    centre, spread = torch.digamma(SHAPE), torch.polygamma(1, SHAPE)
    mean = torch.stack([centre[0], centre[1], 0.5 * centre[0]])
    covariance = torch.diag(torch.stack([spread[0], spread[1], 0.25 * spread[0] + 0.36]))
    covariance[0, 2] = covariance[2, 0] = 0.5 * spread[0]
    return mean, covariance


def density(dtype=DOUBLE, **kwargs):
    return cr.Density(skewed, 3, batched=True, dtype=dtype, **kwargs)


SIZES = {"chains": 32, "draws": 150, "warmup": 100}
VARIANTS = {
    "as it comes": {},
    "jittered": {"jitter": 0.4},
    "momentum kept": {"refresh": 0.3, "trajectory_length": 1.0},
    "length tuned": {"trajectory_length": "tuned"},
    "length tuned, unit mass": {"trajectory_length": "tuned", "mass": "identity"},
    "own step sizes": {"pooled": False},
    "minimum error": {"integrator": "minimum-error"},
    "unit mass": {"mass": "identity"},
    "mass of the prior": {"mass": "prior"},
    "thinned": {"thin": 3, "draws": 60},
    "step size given": {"step_size": 0.4, "mass": "prior"},
    "step size given, mass adapted": {"step_size": 0.4, "mass": "diagonal"},
    "trajectories cut": {"max_steps": 1, "thin": 4},
    "low acceptance": {"step_size": 0.8, "mass": "identity", "trajectory_length": 2.4, "thin": 4},
    "started at one point": {"init": torch.ones(32, 3)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skewed_target_whatever_the_settings(variant):
    posterior = hmc(density(), **{**SIZES, **VARIANTS[variant]})
    assert_moments(posterior.draws, *skewed_moments())


def test_a_skewed_target_in_float32():
    posterior = hmc(density(torch.float32), **SIZES)
    assert posterior.draws.dtype == torch.float32
    assert_moments(posterior.draws, *skewed_moments())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_correlated_gaussian_of_very_different_scales(dtype):
    scale = torch.logspace(-1, 1, 5, dtype=DOUBLE)
    covariance = (0.4 * torch.eye(5, dtype=DOUBLE) + 0.6) * scale[:, None] * scale
    precision, mean = torch.linalg.inv(covariance), torch.tensor([3.0, 0.0, -2.0, 10.0, 1.0], dtype=DOUBLE)
    bowl = cr.Density(
        lambda w: -0.5 * (((w - mean.to(w)) @ precision.to(w)) * (w - mean.to(w))).sum(-1), 5, batched=True, dtype=dtype
    )
    posterior = hmc(bowl, mass="diagonal", jitter=0.3, chains=32, draws=200, warmup=200)
    assert_moments(posterior.draws, mean, covariance)
    low, high = posterior.record.history["inverse_mass_range"]
    assert low == pytest.approx(0.01, rel=0.3)
    assert high == pytest.approx(100.0, rel=0.3)


def test_the_energy_that_is_noted_is_the_hamiltonian():
    """Its kinetic part has mean D/2 in equilibrium, whatever the mass."""
    noted = hmc(density(), **SIZES).statistics
    kinetic = noted["energy"] + noted["log_likelihood"] + noted["log_prior"]
    assert float(kinetic.min()) > 0
    assert_zero((kinetic - 1.5).unsqueeze(-1), precision=0.05)


# -- acceptance and adaptation -------------------------------------------------------------------------------------------
def wide(dim=40):
    return cr.Density(lambda w: -0.5 * w.square().sum(-1), dim, batched=True)


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


@pytest.mark.parametrize("target", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("pooled", [True, False])
def test_warm_up_reaches_the_acceptance_asked_for(target, pooled):
    posterior = hmc(
        wide(), chains=8, draws=100, warmup=250, target_accept=target, pooled=pooled, jitter=0.5, mass="identity"
    )
    assert float(posterior.statistics["acceptance"].mean()) == pytest.approx(target, abs=0.05)
    sizes = set(posterior.record.history["step_size"])
    assert len(sizes) == (1 if pooled else 8)


def test_step_size_and_mass_adapt_in_warm_up_and_are_frozen_after():
    target = to_target(density())
    process = cr.HMC(chains=4, draws=30, warmup=60, compile=False).sampler(target, 0)
    process.start(randn(4, 3, dtype=DOUBLE))
    sizes, masses = [], []
    while process.done < process.total:
        process.advance(lambda: False)
        sizes.append(process.size.tolist())
        masses.append(process.inverse_mass.tolist())
    assert len({str(s) for s in sizes[:60]}) == 60  # it moves with every iteration
    assert all(s == sizes[59] for s in sizes[59:])
    assert all(m == masses[59] for m in masses[59:])
    ends = [b for name, _, b in process.phases if name == "mass"]
    changes = [t + 1 for t in range(1, 90) if masses[t] != masses[t - 1]]
    assert changes == ends
    assert sizes[59] == process.dual.final.expand(4).tolist()  # the average, not the last one tried


def test_the_mass_is_the_variance_of_the_last_window_alone():
    options = cr.HMC(chains=4, draws=5, warmup=150, compile=False)
    process = options.sampler(to_target(density(scale=3.0)), 0)
    process.start(randn(4, 3, dtype=DOUBLE))
    assert process.inverse_mass.tolist() == [9.0] * 3  # the guess, until there are draws
    path = []
    while process.done < process.total:
        process.advance(lambda: False)
        path.append(process.theta.clone())
    windows = [(a, b) for name, a, b in process.phases if name == "mass"]
    assert len(windows) > 1
    first, end = windows[-1]
    seen = torch.stack(path[first:end], 1)
    weight = seen[..., 0].numel() / (seen[..., 0].numel() + 5)
    known = weight * seen.var(1).mean(0) + (1 - weight) * 1e-3 * 9.0
    torch.testing.assert_close(process.inverse_mass, known, rtol=1e-10, atol=0)


def test_a_kept_momentum_goes_on_from_one_trajectory_to_the_next():
    """Nearly nothing is refreshed: short trajectories go on in the same direction instead of wandering."""
    settings = {"chains": 64, "draws": 20, "warmup": 0, "mass": "identity", "init": torch.zeros(64, 10)}
    drift, wander = (
        hmc(wide(10), **settings, step_size=0.02, trajectory_length=0.02, refresh=r).draws for r in (1e-6, 1.0)
    )

    def turn(draws):
        step = draws.diff(dim=1)
        return float((step[:, 1:] * step[:, :-1]).sum() / step.square().sum())

    assert turn(drift) > 0.9
    assert abs(turn(wander)) < 0.1
    # The very first momentum is a whole one: its first step has the length of any other.
    assert float(drift[:, 0].square().sum(-1).mean()) == pytest.approx(10 * 0.02**2, rel=4.5 * math.sqrt(2 / 640))


def test_jitter_lengthens_and_shortens_trajectories():
    options = cr.HMC(chains=2, draws=200, warmup=0, step_size=0.01, trajectory_length=1.0, jitter=0.3, compile=False)
    process = options.sampler(to_target(density()), 0)
    steps = torch.tensor([list(process._steps(t)) for t in range(200)], dtype=DOUBLE)
    assert torch.equal(steps[:, 0], steps[:, 1])  # alike for all chains, which run together
    assert 70 <= float(steps.min()) < 76
    assert 124 < float(steps.max()) <= 131
    assert float(steps[:, 0].mean()) == pytest.approx(100.5, abs=4.5 * 60 / math.sqrt(12 * 200))


def test_lengths_are_jittered_by_a_fifth_unless_they_are_given():
    assert cr.HMC().jitter_fraction == 0.2
    assert cr.HMC(trajectory_length=1.0).jitter_fraction == 0.0
    assert cr.HMC(trajectory_length=1.0, jitter=0.1).jitter_fraction == 0.1
    assert cr.HMC(jitter=0.0).jitter_fraction == 0.0


def test_steps_are_the_length_over_the_step_size():
    for length, size, steps in ((1.0, 0.1, 10), (1.0, 0.3, 4), (0.3, 0.1, 3), (1e-3, 1.0, 1), (5.0, 0.001, 5000)):
        options = cr.HMC(chains=2, draws=1, warmup=0, step_size=size, trajectory_length=length, compile=False)
        assert list(options.sampler(to_target(density()), 0)._steps(0)) == [steps, steps]


def test_a_given_step_size_is_never_touched():
    posterior = hmc(density(), chains=2, draws=10, warmup=40, step_size=0.3)
    assert posterior.record.history["step_size"] == [0.3, 0.3]


def test_rejected_proposals_repeat_the_draw():
    posterior = hmc(wide(10), chains=32, draws=100, warmup=0, step_size=1.7, mass="identity", trajectory_length=5.1)
    draws, noted = posterior.draws, posterior.statistics
    same = (draws[:, 1:] == draws[:, :-1]).all(-1)
    partly = (draws[:, 1:] == draws[:, :-1]).any(-1)
    assert torch.equal(same, partly)
    assert 0.1 < float(same.double().mean()) < 0.9
    # A draw repeats with one minus the noted probability.
    assert_zero((same.double() - (1 - noted["acceptance"][:, 1:])).unsqueeze(-1), precision=0.02)
    repeated = noted["log_likelihood"][:, 1:] == noted["log_likelihood"][:, :-1]
    assert torch.equal(repeated, same)


def test_divergences_are_counted_and_never_kept():
    """A wall at 2: trajectories that run into it are rejected."""
    wall = cr.Density(lambda w: torch.where(w[:, 0] < 2, -0.5 * w.square().sum(-1), -torch.inf), 2, batched=True)
    posterior = hmc(wall, chains=8, draws=200, warmup=0, step_size=0.4, mass="identity", init=torch.zeros(8, 2))
    assert float(posterior.draws[..., 0].max()) < 2
    noted = posterior.statistics["divergent"]
    assert 10 < int(noted.sum()) < 1000
    assert noted.sum(1).long().tolist() == posterior.record.history["divergences"]
    assert bool((posterior.statistics["acceptance"][noted.bool()] == 0).all())


# -- the same result, however it is computed -----------------------------------------------------------------------------
X, Y = randn(25, 3, dtype=DOUBLE), randn(25, 3, dtype=DOUBLE).sum(1) + 0.1 * randn(25, seed=1, dtype=DOUBLE)
SHORT = {"chains": 5, "draws": 8, "warmup": 20, "init": "prior", "trajectory_length": 0.5}


def problem(net=None, **kwargs):
    return cr.Problem(
        net or mlp(3, 6, 1, dtype=DOUBLE), data=(X, Y), likelihood=Gaussian(0.5), prior=cr.priors.Normal(), **kwargs
    )


def test_batched_is_looped_is_micro_batched_is_chunked(monkeypatch):
    # No adaptation and short paths: what differs by rounding alone is not yet magnified.
    settings = {"chains": 5, "draws": 6, "warmup": 0, "init": "prior", "step_size": 0.03, "trajectory_length": 0.3}
    usual = hmc(problem(plan="batched"), **settings)
    history = usual.record.history
    assert (history["chains_at_once"], history["one_piece"]) == (5, True)
    looped = hmc(problem(plan="looped"), **settings)
    assert looped.record.history["chains_at_once"] == 1
    assert looped.record.history["plan"].startswith("looped")
    pieces = hmc(problem(micro_batch=7), **settings)
    assert not pieces.record.history["one_piece"]
    width = problem().forward.row_width
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 2 * 25 * width)
    chunks = hmc(problem(), **settings)
    assert (chunks.record.history["chains_at_once"], chunks.record.history["one_piece"]) == (2, True)
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 10 * width)
    least = hmc(problem(), **settings)
    assert (least.record.history["chains_at_once"], least.record.history["one_piece"]) == (1, False)
    for other in (looped, pieces, chunks, least):
        torch.testing.assert_close(other.draws, usual.draws, rtol=1e-9, atol=1e-9)
        for name, values in usual.statistics.items():
            torch.testing.assert_close(other.statistics[name], values, rtol=1e-7, atol=1e-7)
    assert 0 < float(usual.statistics["acceptance"].mean()) < 1


def test_chunks_are_of_one_length_where_that_costs_little():
    for chains in range(1, 40):
        for most in range(1, 40):
            share = even_chunk(chains, most)
            assert 1 <= share <= most
            fewest = math.ceil(chains / most)
            assert math.ceil(chains / share) <= 1.5 * fewest
            assert chains % share == 0 or all(chains % k for k in range(fewest, int(1.5 * fewest) + 1))
    assert [even_chunk(8, most) for most in (8, 7, 4, 3, 1)] == [8, 4, 4, 2, 1]
    assert even_chunk(7, 4) == 4  # seven chunks of one would be many


def test_chunks_of_chains_adapt_together(monkeypatch):
    """One step size for all of them, from the acceptance of all of them."""
    settings = {**SHORT, "draws": 2}
    usual = hmc(problem(), **settings)
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 2 * 25 * problem().forward.row_width)
    chunks = hmc(problem(), **settings)
    assert chunks.record.history["chains_at_once"] == 2
    assert chunks.record.history["step_size"] == pytest.approx(usual.record.history["step_size"], rel=1e-4)
    torch.testing.assert_close(chunks.draws, usual.draws, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"pooled": False},
        {"pooled": False, "jitter": 0.3, "refresh": 0.5},
        {"step_size": 0.05},
        {"step_size": 0.05, "integrator": "minimum-error"},
    ],
    ids=str,
)
def test_a_chain_does_not_depend_on_the_others_where_nothing_is_pooled(settings):
    start = 0.1 * randn(6, problem().dim, dtype=DOUBLE)
    start[2:] *= 30  # the others stand where steps have to be much smaller
    many = hmc(problem(), **{**SHORT, "chains": 6, "init": start, **settings})
    few = hmc(problem(), **{**SHORT, "chains": 2, "init": start[:2], **settings})
    # Rounding differs with the number of chains, and adaptation magnifies it; a shared step size would give 1e-1.
    torch.testing.assert_close(few.draws, many.draws[:2], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        torch.tensor(few.record.history["step_size"]), torch.tensor(many.record.history["step_size"][:2])
    )


def test_the_same_seed_gives_the_same_bits():
    one, two, other = (hmc(problem(), seed=s, **SHORT) for s in (3, 3, 4))
    assert torch.equal(one.draws, two.draws)
    assert all(torch.equal(one.statistics[k], two.statistics[k]) for k in one.statistics)
    assert not torch.equal(one.draws, other.draws)
    assert len({tuple(row.tolist()) for row in one.draws[:, 0]}) == 5  # chains have streams of their own


def test_the_noise_of_a_chain_is_its_own():
    def noise(chains, seed=0, dim=3, purpose="momentum", **kwargs):
        return ChainNoise(seed, purpose, chains, dim, device=torch.device("cpu"), dtype=DOUBLE, **kwargs)

    many = noise(range(4))
    values = torch.stack([many.at(t).clone() for t in range(600)], 1)  # more than two blocks
    assert values.shape == (4, 600, 3)
    assert len(set(values.flatten().tolist())) == values.numel()  # none comes twice
    limit = 4.5 / math.sqrt(values.numel())
    assert abs(float(values.mean())) < limit
    assert abs(float(values.square().mean()) - 1) < math.sqrt(2) * limit
    assert torch.equal(noise(range(2, 3)).at(599)[0], values[2, 599])  # whichever chains run beside it, in any order
    assert torch.equal(many.at(0), values[:, 0])
    assert not torch.equal(noise(range(4), seed=1).at(0), values[:, 0])
    assert not torch.equal(noise(range(4), purpose="other").at(0), values[:, 0])
    flat = noise(range(50), dim=40, uniform=True).at(5)
    assert 0 <= float(flat.min()) < 0.01
    assert 0.99 < float(flat.max()) < 1


def test_torchs_own_generator_is_not_touched():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    hmc(problem(), **{**SHORT, "jitter": 0.3})
    assert torch.equal(torch.random.get_rng_state(), before)


def test_thinning_keeps_every_third_draw():
    usual = hmc(density(), chains=3, draws=30, warmup=40)
    third = hmc(density(), chains=3, draws=10, warmup=40, thin=3)
    assert torch.equal(third.draws, usual.draws[:, 2::3])
    assert torch.equal(third.statistics["energy"], usual.statistics["energy"][:, 2::3])


def test_a_run_can_be_cut_short_without_changing_its_beginning():
    long, short = (hmc(density(), chains=3, draws=n, warmup=40) for n in (30, 12))
    assert torch.equal(long.draws[:, :12], short.draws)


@pytest.mark.slow
@pytest.mark.usefixtures("no_native")
def test_compiled_is_eager():
    """Eleven steps a trajectory: eight in one call and three alone."""
    settings = {**SHORT, "step_size": 0.05, "trajectory_length": 0.55, "warmup": 0}
    eager, fast = hmc(problem(), **settings), hmc(problem(), **{**settings, "compile": True})
    assert eager.record.history["steps"] == 11
    assert fast.record.history["compiled"]
    assert not eager.record.history["compiled"]
    torch.testing.assert_close(fast.draws, eager.draws, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fast.statistics["energy"], eager.statistics["energy"], rtol=1e-8, atol=1e-8)


# -- what a run leaves behind --------------------------------------------------------------------------------------------
def test_the_record_tells_how_it_went():
    posterior = hmc(density(), chains=3, draws=20, warmup=100, thin=2, jitter=0.2)
    history = posterior.record.history
    assert history["phases"][0]["name"] == "step size"
    assert "mass" in [p["name"] for p in history["phases"]]
    assert history["phases"][-1] == {"name": "sampling", "first": 100, "end": 140}
    assert [p["first"] for p in history["phases"][1:]] == [p["end"] for p in history["phases"][:-1]]
    assert len(history["step_size"]) == len(history["acceptance"]) == len(history["divergences"]) == 3
    assert all(0 < a <= 1 for a in history["acceptance"])
    assert history["trajectory_length"] == pytest.approx(math.pi / 2)
    assert history["steps"] == math.ceil(math.pi / 2 / history["step_size"][0])
    assert history["mass"] == "diagonal"
    assert history["gradients"] > 140 * 3
    assert history["seconds"] > 0
    assert not history["trajectory_shortened"]
    assert posterior.record.settings["chains"] == 3
    assert posterior.record.fingerprint == to_target(density()).fingerprint()
    for name in ("acceptance", "divergent", "energy", "log_likelihood", "log_prior"):
        assert posterior.statistics[name].shape == (3, 20)


def test_a_trajectory_that_was_cut_is_told():
    posterior = hmc(density(), chains=2, draws=5, warmup=30, max_steps=2, trajectory_length=10.0)
    assert posterior.record.history["trajectory_shortened"]
    assert posterior.record.history["steps"] == 2


def test_the_parts_that_are_noted_are_those_of_the_draws():
    p = problem(temperature=cr.Tempering(0.5, 2.0))
    posterior = hmc(p, **SHORT)
    known = p.log_density_and_grad(posterior.draws.flatten(0, 1))
    torch.testing.assert_close(posterior.statistics["log_likelihood"].flatten(), known.log_likelihood)
    torch.testing.assert_close(posterior.statistics["log_prior"].flatten(), known.log_prior)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_draws_in_another_dtype_predict_all_the_same(name, out, tmp_path):
    net = mlp(3, 6, 1)
    p = cr.Problem(net, data=(X.float(), Y.float()), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    settings = {**SHORT, "warmup": 0, "step_size": 0.05}
    usual = hmc(p, **settings)
    posterior = hmc(p, **settings, draw_dtype=name, out=tmp_path / "run" if out else None)
    error = torch.finfo(getattr(torch, name)).eps
    torch.testing.assert_close(posterior.draws.to(usual.draws), usual.draws, rtol=max(error, 1e-6), atol=1e-6)
    if name in ("float16", "bfloat16"):
        assert not torch.equal(posterior.draws.to(usual.draws), usual.draws)
    assert posterior.predict(X.float()).mean.dtype == torch.float32
    torch.testing.assert_close(
        posterior.predict(X.float()).mean, usual.predict(X.float()).mean, rtol=0, atol=20 * error + 1e-5
    )
    assert posterior.module(0, -1)(X.float()).dtype == torch.float32
    if not out:
        posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 6, 1, seed=5))
    assert torch.equal(loaded.predict(X.float()).mean, posterior.predict(X.float()).mean)


# -- networks, against importance sampling from the prior ----------------------------------------------------------------
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def picture():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2))


INPUT = randn(5, 2)
NETWORKS = {
    "regression": (lambda: mlp(2, 3, 1), INPUT, INPUT.sum(1), Gaussian(1.0), 40_000),
    "classes": (lambda: mlp(2, 3, 3), INPUT, torch.tensor([0, 1, 2, 0, 0]), Categorical(), 40_000),
    "convolution": (picture, randn(4, 1, 4, 4), torch.tensor([0, 1, 1, 0]), Categorical(), 2000),
    "recurrent": (Sequence, randn(4, 3, 2), torch.tensor([0.5, -1.0, 0.3, 1.5]), Gaussian(0.8), 2000),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_of_small_networks_are_those_of_the_weighted_prior(name):
    make, x, y, likelihood, count = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = cr.Problem(make(), data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.7))
    looped = name in ("convolution", "recurrent")
    assert p.forward.looped == looped
    settings = {"chains": 8, "draws": 25} if looped else {"chains": 24, "draws": 100}
    posterior = hmc(p, **settings, warmup=10, init="prior", step_size=0.3, trajectory_length=1.2, jitter=0.3)
    assert_weighted_prior(p, posterior.draws, count)
    assert posterior.predict(x).mean.shape[0] == len(x)


def test_a_noise_scale_that_is_learned():
    """A linear model: given the scale all is Gaussian, and over the scale there is one integral to do on a grid."""
    x = randn(12, 2, dtype=DOUBLE)
    y = x @ torch.tensor([1.0, -0.5], dtype=DOUBLE) + 0.7 * randn(12, seed=4, dtype=DOUBLE)
    net = nn.Linear(2, 1, bias=False).double()
    p = cr.Problem(net, data=(x, y), likelihood=Gaussian(), prior=cr.priors.Normal(0.8))
    grid = torch.linspace(-4, 3, 4001, dtype=DOUBLE)  # of the log scale, whose prior is N(-1, 1)
    noise = grid.exp().square()[:, None, None] * torch.eye(12, dtype=DOUBLE)
    covariance = 0.64 * x @ x.T + noise
    evidence = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=DOUBLE), covariance).log_prob(y)
    weight = torch.softmax(evidence - 0.5 * (grid + 1).square(), 0)
    inside = torch.linalg.inv(x.T @ x / grid.exp().square()[:, None, None] + torch.eye(2, dtype=DOUBLE) / 0.64)
    middle = inside @ x.T @ y / grid.exp().square()[:, None]
    known = torch.cat([middle, grid[:, None]], 1)
    mean = weight @ known
    total = torch.einsum("g,gi,gj->ij", weight, known - mean, known - mean)
    total[:2, :2] += torch.einsum("g,gij->ij", weight, inside)
    posterior = hmc(p, chains=32, draws=100, warmup=60, jitter=0.3, init=torch.zeros(32, 3))
    assert posterior.record.history["mass"] == "prior"  # the scales of the two priors differ
    assert_moments(posterior.draws, mean, total)


# -- where chains begin --------------------------------------------------------------------------------------------------
def start_of(p, init, chains=3, seed=0):
    """A run that does not move: its one draw is its start."""
    settings = {"chains": chains, "draws": 1, "warmup": 0, "step_size": 1e-12, "trajectory_length": 1e-12}
    return hmc(p, init=init, seed=seed, **settings).draws[:, 0]


def test_chains_begin_where_they_are_told_to():
    p = problem()
    own = p.layout.read(p.layout.module)
    given = randn(3, p.dim, dtype=DOUBLE)
    torch.testing.assert_close(start_of(p, given), given, rtol=0, atol=1e-9)
    torch.testing.assert_close(start_of(p, "network"), own.expand(3, -1), rtol=0, atol=1e-9)
    drawn = start_of(p, "prior", chains=40)
    assert float(drawn.std()) == pytest.approx(1.0, abs=4.5 / math.sqrt(2 * drawn.numel()))
    fresh = start_of(p, "fresh")
    assert float((fresh - own).abs().min(0).values.max()) > 0.01
    assert not torch.equal(fresh[0], fresh[1])
    bound = 1 / math.sqrt(3)  # of nn.Linear(3, ...)
    assert float(fresh.abs().max()) < bound
    point = start_of(p, "map")
    torch.testing.assert_close(point, point[:1].expand(3, -1), rtol=0, atol=1e-9)
    members = start_of(p, "ensemble")
    assert float((members[0] - members[1]).abs().max()) > 0.1
    for found in (point, members):
        assert float(p.log_density(found).min()) > float(p.log_density(fresh).max()) + 10


def test_chains_begin_at_draws_of_a_posterior():
    p = problem()
    earlier = cr.DeepEnsemble(members=4, steps=20).fit(p, seed=0)
    begun = start_of(p, earlier)
    gaps = torch.cdist(begun, earlier.draws[:, 0])
    assert float(gaps.min(1).values.max()) < 1e-9


def test_a_density_begins_at_its_scale():
    flat = cr.Density(lambda w: -0.5 * w.square().sum(-1), 2, batched=True, scale=torch.tensor([1.0, 50.0]))
    begun = start_of(flat, "prior", chains=400)
    assert float(begun[:, 0].std()) == pytest.approx(1.0, rel=0.16)
    assert float(begun[:, 1].std()) == pytest.approx(50.0, rel=0.16)
    assert not torch.equal(begun, start_of(flat, "prior", chains=400, seed=1))


def test_a_tuned_length_is_a_part_of_the_full_one_and_short_where_the_target_is_narrow():
    full = hmc(density(), **{**SIZES, "draws": 5}).record.history["trajectory_length"]
    tuned = hmc(density(), **{**SIZES, "draws": 5}, trajectory_length="tuned").record.history["trajectory_length"]
    assert tuned / full in LengthTrial.PARTS
    # A Gaussian of a tenth of the scale that it is told to have: the full length makes five half turns, which only mirrors it,
    # half of that ends on a quarter turn, where all is forgotten.
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


# -- what is refused -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"chains": 0}, "chains: found 0. Pass a whole number from 1 up"),
        ({"chains": 2.0}, "chains: found 2.0"),
        ({"chains": True}, "chains: found True"),
        ({"draws": 0}, "draws: found 0"),
        ({"draws": -3}, "draws: found -3"),
        ({"warmup": -1}, "warmup: found -1"),
        ({"warmup": 10}, "warmup: found 10 without a step_size. Pass at least 20, or a step_size"),
        ({"thin": 0}, "thin: found 0"),
        ({"max_steps": 0}, "max_steps: found 0"),
        ({"step_size": 0.0}, "step_size must be a positive number, got 0.0"),
        ({"step_size": -0.1}, "step_size must be a positive number, got -0.1"),
        ({"step_size": math.nan}, "step_size must be a positive number, got nan"),
        ({"step_size": math.inf}, "step_size must be a positive number, got inf"),
        ({"trajectory_length": 0}, "trajectory_length must be a positive number, got 0"),
        ({"trajectory_length": "long"}, "trajectory_length: found 'long'. Pass a positive number, None or \"tuned\""),
        ({"trajectory_length": "tuned", "warmup": 50}, "warmup: found 50 to tune the trajectory length in"),
        ({"target_accept": 1.0}, "target_accept: found 1.0. Pass a number between 0 and 1"),
        ({"target_accept": math.nan}, "target_accept: found nan"),
        ({"jitter": 1.0}, "jitter: found 1.0"),
        ({"jitter": -0.1}, "jitter: found -0.1"),
        ({"refresh": 0.0}, "refresh: found 0.0"),
        ({"refresh": 1.1}, "refresh: found 1.1"),
        ({"mass": "dense"}, "mass: found 'dense'"),
        ({"integrator": "yoshida"}, "integrator: found 'yoshida'"),
        ({"init": "zeros"}, "init: found 'zeros'. Pass one of prior, map, ensemble, network, fresh"),
        ({"init": None}, "init: found None"),
        ({"init": np.zeros((4, 2))}, "init: found"),
        ({"draw_dtype": "int8"}, "draw_dtype: found 'int8'"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(cr.InputError, match=re.escape(message)):
        cr.HMC(**settings)


@pytest.mark.parametrize("kind", ["problem", "density"])
def test_a_step_size_that_diverges_at_once_is_told_with_one_that_works(kind):
    target = problem() if kind == "problem" else wide()
    settings = {"chains": 4, "draws": 30, "warmup": 0, "mass": "identity"}
    with pytest.raises(cr.SamplingError, match=r"every trajectory diverged in the first 10 iterations") as error:
        hmc(target, step_size=50.0, trajectory_length=500.0, init="prior", **settings)
    message = str(error.value)
    assert "with step size 50 " in message
    found = float(re.search(r"energy error ([\d.e+]+|inf) in the median chain", message)[1])
    assert found > 1000
    hint = float(re.search(r"Try step_size=([\d.e-]+) or less", message)[1])
    assert hint < 5
    posterior = hmc(target, step_size=hint, trajectory_length=10 * hint, init="prior", **settings)
    assert float(posterior.statistics["acceptance"].mean()) > 0.3


def test_one_chain_that_goes_on_is_enough_to_go_on():
    """Half of the chains begin where every step diverges; the run goes on and counts them."""
    cliff = cr.Density(lambda w: -0.5 * w[:, 0] ** 2 * torch.where(w[:, 0].abs() < 50, 1.0, 1e12), 1, batched=True)
    start = torch.tensor([[0.0], [100.0]])
    posterior = hmc(cliff, chains=2, draws=40, warmup=0, step_size=0.5, mass="identity", init=start)
    assert posterior.record.history["divergences"] == [0, 40]
    assert bool((posterior.draws[1] == 100.0).all())


class Hidden(nn.Module):
    """Dropout that is not a module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, training=True))


RANDOM = {
    "a dropout layer": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
        r"net: has active dropout \(1\)",
    ),
    "an LSTM's own": (lambda: nn.Sequential(nn.LSTM(3, 4, num_layers=2, dropout=0.3)), "net: has active dropout"),
    "a function's": (Hidden, "net: its log likelihood changed by .* between two evaluations at one point"),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("method", [cr.HMC, cr.SGLD, cr.SGHMC])
def test_networks_with_dropout_are_refused(name, method):
    make, message = RANDOM[name]
    x, y = (randn(6, 2, 3), randn(6, 2, 4)) if "LSTM" in name else (randn(6, 3), randn(6))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            out = self.inner(x)
            return out[0] if isinstance(out, tuple) else out

    net = First() if "LSTM" in name else make()
    p = cr.Problem(net, data=(x, y), likelihood=Gaussian(1.0), prior=cr.priors.Normal())
    with pytest.raises(cr.InputError, match=message):
        method(chains=2, draws=5, init="prior", compile=False).fit(p, seed=0)


def test_dropout_of_rate_zero_is_none():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 1)).double()
    assert hmc(problem(net), **SHORT).draws.shape == (5, 8, 21)


def test_batch_norm_is_refused():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with pytest.raises(cr.InputError, match="net: 1 layer keeps batch statistics"):
        problem(net)


def test_a_start_that_is_not_finite_names_the_chain():
    hole = cr.Density(lambda w: torch.log(w).sum(-1) - w.sum(-1), 2, batched=True)
    start = torch.ones(3, 2)
    start[2, 0] = -1.0
    for method in (cr.HMC, cr.SGLD, cr.SGHMC):
        with pytest.raises(cr.InputError, match="init: the likelihood is nan at the starting point of chain 2"):
            method(chains=3, draws=5, init=start, compile=False).fit(hole, seed=0)


def test_a_gradient_that_is_not_finite_names_the_chain():
    kink = cr.Density(lambda w: -w.abs().sqrt().sum(-1), 2, batched=True)
    start = torch.ones(3, 2)
    start[1] = 0.0
    with pytest.raises(cr.InputError, match="init: the gradient is nan at the starting point of chain 1"):
        hmc(kink, chains=3, draws=5, init=start)


@pytest.mark.parametrize("target", [density, problem])
def test_starts_of_the_wrong_shape(target):
    target = target()
    dim = target.dim
    for wrong in (torch.zeros(2, dim), torch.zeros(3, dim + 1), torch.zeros(dim), torch.full((3, dim), torch.nan)):
        with pytest.raises(cr.InputError, match=rf"init: has shape .* Pass a finite \(3, {dim}\) tensor"):
            hmc(target, chains=3, draws=2, warmup=20, init=wrong)


def test_a_posterior_of_another_network_is_no_start():
    other = cr.MAP(steps=5).fit(problem(mlp(3, 2, 1, dtype=DOUBLE)), seed=0)
    with pytest.raises(cr.InputError, match="init: has shape"):
        hmc(problem(), chains=3, draws=2, warmup=20, init=other)


def test_a_folder_that_exists_and_seeds_that_are_none(tmp_path):
    for seed in (-1, 1.5, True, None):
        with pytest.raises(cr.InputError, match="seed must be a non-negative integer .*got "):
            cr.HMC(draws=2).fit(density(), seed=seed)
    with pytest.raises(cr.StoreError, match="out: .* exists already"):
        hmc(density(), draws=2, out=tmp_path)
    with pytest.raises(cr.InputError, match="problem: found function. Pass a credibly.Problem or a credibly.Density"):
        cr.HMC(draws=2).fit(skewed, seed=0)


def test_a_start_that_is_refused_leaves_no_folder(tmp_path):
    """So that the same call can be made again once the start is mended."""
    hole = cr.Density(lambda w: torch.log(w).sum(-1) - w.sum(-1), 2, batched=True)
    with pytest.raises(cr.InputError, match="init: the likelihood is nan"):
        hmc(hole, chains=2, draws=5, init=-torch.ones(2, 2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_density_that_is_flat_has_no_step_size():
    flat = cr.Density(lambda w: 0.0 * w.sum(-1), 2, batched=True)
    with pytest.raises(cr.SamplingError, match="no step size was found: even at .* accepted. The density may be flat"):
        hmc(flat, chains=2, draws=5)


def test_a_density_posterior_does_not_predict():
    posterior = hmc(density(), chains=2, draws=5, warmup=20)
    assert posterior.draws.shape == (2, 5, 3)
    assert posterior.sample(7, seed=1).shape == (7, 3)
    with pytest.raises(cr.InputError, match="predict: a density has no network"):
        posterior.predict(X)


# -- calibration ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_simulation_based_calibration_of_a_tiny_network():
    """Weights from the prior, data from the weights: among draws given the data, the truth has a uniform rank.

    One chain a data set, all of them at once: chain c sees the targets of data set c.
    """
    from scipy import stats

    sets, rows, kept = 1000, 5, 19
    net = mlp(1, 2, 1, dtype=DOUBLE, activation=nn.Tanh)
    layout = cr.Layout(net)
    x = torch.linspace(-2, 2, rows, dtype=DOUBLE).unsqueeze(1)

    def one(weights):
        named = {k: v[0] for k, v in layout.split(weights[None])[0].items()}
        return torch.func.functional_call(net, named, (x,)).squeeze(-1)

    output = torch.func.vmap(one)
    truth = randn(sets, layout.dim, seed=11, dtype=DOUBLE)
    y = output(truth) + randn(sets, rows, seed=12, dtype=DOUBLE)

    def log_prob(theta):
        return -0.5 * (y[: len(theta)] - output(theta)).square().sum(-1) - 0.5 * theta.square().sum(-1)

    target = cr.Density(log_prob, layout.dim, batched=True)
    settings = {"mass": "identity", "step_size": 0.3, "trajectory_length": 1.8, "jitter": 0.4}
    posterior = hmc(target, chains=sets, draws=kept, thin=10, warmup=100, **settings)
    assert min(posterior.record.history["acceptance"]) > 0.2  # no chain was stuck

    def functions(theta):
        near = output(theta)
        return torch.cat([near, theta.square().sum(-1, keepdim=True), log_prob(theta).unsqueeze(-1)], -1)

    known = functions(truth)
    seen = torch.stack([functions(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (seen < known.unsqueeze(1)).sum(1)  # (set, function), 0 to 19
    for column in ranks.T:
        counts = torch.bincount(column, minlength=kept + 1).numpy()
        assert stats.chisquare(counts).pvalue > 1e-4


def test_gradients_in_bf16_have_energies_in_full_precision():
    """Draws are exact for the network as it is: what decides about them is its own log likelihood, not that of rounded outputs."""
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1)
    net = mlp(3, 20, 1)
    low, full = (
        cr.Problem(net, (x, y), cr.likelihoods.Gaussian(0.1), cr.priors.Normal(1.0), precision=p)
        for p in ("bf16", None)
    )
    method = cr.HMC(chains=2, draws=6, warmup=0, step_size=2e-3, trajectory_length=2e-2, init="network", compile=False)
    posterior = method.fit(low, seed=0, progress=False)
    theta = posterior.draws.flatten(0, 1)
    found = posterior.statistics["log_likelihood"].flatten()
    exact = ProblemTarget(full).likelihood_and_grad(theta)[0]
    rounded = ProblemTarget(low).likelihood_and_grad(theta)[0]
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-4)
    assert float((rounded - exact).abs().max()) > 0.1
    assert ProblemTarget(full).full_likelihood(theta) is None
