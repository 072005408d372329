"""MILE: MCLMC from the members of an ensemble, and a verdict on chains that need not mix with each other."""

import dataclasses

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, density, problem, simulated_networks, skewed_moments

import credibly as cr
from chains import assert_moments
from conftest import randn
from credibly.backends.cpp.library import library
from credibly.inference.sampling.starts import starts

SHORT = {"chains": 3, "draws": 6, "warmup": 40, "max_steps": 5, "start_steps": 30}


def mile(target, *, seed=0, out=None, **kwargs):
    return cr.MILE(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out, progress=False)


def test_it_is_mclmc_from_the_members_of_an_ensemble():
    members = starts(problem(), "ensemble", 3, 0, False, steps=30)
    assert float((members[0] - members[1]).abs().max()) > 0.1
    found = mile(problem(), **SHORT)
    settings = {**{f.name: getattr(cr.MILE(**SHORT), f.name) for f in dataclasses.fields(cr.MILE)}, "init": members}
    same = cr.MCLMC(**{**settings, "compile": False}).fit(problem(), seed=0, progress=False)
    assert torch.equal(found.draws, same.draws)
    assert found.record.history["local"]
    assert "local" not in same.record.history
    given = mile(problem(), **{**SHORT, "init": members})
    assert torch.equal(given.draws, found.draws)


@pytest.mark.parametrize("settings", [{"adjusted": True}, {"energy_variance": 1e-5, "draws": 100}])
def test_a_density_of_one_mode_is_sampled(settings):
    posterior = mile(density(), **{**SIZES, "max_steps": 50, **settings})
    assert_moments(posterior.draws, *skewed_moments())


def test_cpp_gradients_give_the_chains_of_torch():
    if library() is None:
        pytest.skip("no C++ compiler")
    settings = {**SHORT, "init": 0.3 * randn(3, problem().dim, dtype=DOUBLE)}
    native, plain = (mile(problem(), compile=compile, **settings) for compile in ("auto", False))
    assert native.record.history["native"]
    assert not plain.record.history["native"]
    torch.testing.assert_close(native.draws, plain.draws, rtol=0, atol=1e-7)


def test_simulation_based_calibration_of_a_tiny_network():
    """Adjusted, and long enough for every chain to forget its start; the rank of the truth is uniform."""
    from scipy import stats

    sets, kept = 400, 9
    target, output, truth = simulated_networks(sets)
    settings = {"adjusted": True, "step_size": 1.0, "trajectory_length": 4.0, "warmup": 30, "thin": 8}
    posterior = mile(target, seed=3, chains=sets, draws=kept, **settings)
    functions = torch.stack([output(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (functions < output(truth).unsqueeze(1)).sum(1)
    for column in ranks.T:
        assert stats.chisquare(torch.bincount(column, minlength=kept + 1).numpy()).pvalue > 1e-4


def test_the_verdict_is_about_local_posteriors():
    posterior = mile(problem(), **{**SHORT, "draws": 12, "init": randn(3, problem().dim, dtype=DOUBLE)})
    found = posterior.diagnostics(problem().x)
    assert found.local is not None
    assert 0 <= found.local.between <= found.local.between_most <= 1
    assert "of the variance of a prediction lies between the chains" in found.verdict


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"chains": 1}, "chains must be an integer of at least 2, got 1.*use MCLMC or NUTS for a single chain"),
        ({"mass": "diagonal"}, "mass must not be passed to MILE, which has a direction instead of a momentum"),
        ({"init": "map"}, "init must be \"ensemble\".*got 'map'"),
        ({"until": "mixed"}, "until must be None for MILE, whose chains need not mix with each other"),
        ({"budget": "1min"}, "budget must be None for MILE, whose chains have a fixed length, got '1min'. Set chains"),
        ({"start_steps": 0}, "start_steps must be a positive integer, got 0"),
        ({"warmup": 10}, "warmup must be an integer of at least 40"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(cr.InputError, match=words):
        cr.MILE(**settings)


def test_a_single_parameter_is_refused_by_name():
    with pytest.raises(cr.InputError, match="must have at least two parameters for MILE, got 1"):
        mile(cr.Density(lambda w: -w.square().sum(-1), 1, batched=True))
