"""ChEES-HMC: its criterion against autograd, its length against closed forms, its draws against known moments."""

import dataclasses
import math

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, density, problem, simulated_networks, skewed_moments

import credibly as cr
from chains import assert_moments
from conftest import mlp, randn
from credibly.backends.cpp.library import library
from credibly.inference.kernels.chees import chees, van_der_corput, weighted_mean
from credibly.inference.sampling.chees import LengthAscent
from credibly.likelihoods import Gaussian


def sample(target, *, seed=0, out=None, **kwargs):
    return cr.ChEES(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out, progress=False)


# -- the criterion -----------------------------------------------------------------------------------------------------
def test_the_slope_is_the_derivative_of_the_criterion():
    """Trajectories on a Gaussian are known: w(t) = w cos t + p sin t, so autograd can differentiate along them."""
    w, p, h = randn(50, 4, dtype=DOUBLE), randn(50, 4, seed=1, dtype=DOUBLE), 0.6
    log_length = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    t = h * log_length.exp()
    after, velocity = w * t.cos() + p * t.sin(), p * t.cos() - w * t.sin()
    value, slope = chees(w, after, t * velocity)
    (expected,) = torch.autograd.grad(value.mean(), log_length)
    torch.testing.assert_close(slope.mean(), expected)
    brute = (after.square().sum(1) - w.square().sum(1)).square() / 4
    torch.testing.assert_close(value, brute)


def test_the_criterion_of_a_gaussian_is_the_squared_sine():
    w, p, t = randn(400_000, 1, dtype=DOUBLE), randn(400_000, 1, seed=1, dtype=DOUBLE), 0.8
    value, _ = chees(w, w * math.cos(t) + p * math.sin(t), p)
    assert float(value.mean()) == pytest.approx(math.sin(t) ** 2, abs=5 * float(value.std()) / math.sqrt(400_000))


def test_chains_without_acceptance_or_with_infinite_ends_do_not_count():
    values = torch.tensor([[1.0, 2.0, torch.nan, 9.0, torch.inf], [3.0, 5.0, 0.0, 9.0, 0.0]], dtype=DOUBLE)
    weight = torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0], dtype=DOUBLE)
    torch.testing.assert_close(weighted_mean(values, weight), torch.tensor([2.0, 5.5], dtype=DOUBLE) / 1.5)
    assert weighted_mean(values, 0 * weight).tolist() == [0.0, 0.0]


def test_the_jitter_covers_the_unit_interval_evenly():
    assert [van_der_corput(t) for t in range(7)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    seen = sorted(van_der_corput(t) for t in range(1023))
    assert seen == [k / 1024 for k in range(1, 1024)]


def test_the_length_neither_leaves_the_range_of_steps_nor_is_pulled_back_into_it():
    ascent = LengthAscent()
    ascent.begin(1.0)
    for _ in range(200):
        ascent.update(1.0, 5.0, least=0.1, most=8.0)
    assert ascent.length == pytest.approx(8.0)
    ascent.update(1.0, 5.0, least=0.1, most=2.0)
    assert ascent.length == pytest.approx(8.0)
    for _ in range(400):
        ascent.update(1.0, -5.0, least=0.5, most=2.0)
    assert ascent.length == pytest.approx(0.5)
    ascent.update(0.0, 0.0, least=0.1, most=2.0)
    assert ascent.count == 601


def test_an_outlier_does_not_stop_the_ascent():
    """The criterion of a far start is many orders of magnitude larger than that of the rest of the run."""
    ascent = LengthAscent()
    ascent.begin(1.0)
    ascent.update(1e12, -1e13, least=1e-3, most=1e3)
    for _ in range(100):
        ascent.update(1.0, 2.0, least=1e-3, most=1e3)
    assert ascent.length > 10


# -- the learned length ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["density", "network"])
def test_a_gaussian_has_the_length_of_the_closed_form(kind):
    """C per unit of T is largest at T = pi/2 for lengths spread over (0, T).

    Steps are rounded up, by half a step of 0.1 on average, so mean lengths are 0.05 longer and T is up to 0.1 shorter.
    Learned lengths vary from run to run by less than a tenth.
    """
    if kind == "density":
        target = cr.Density(lambda w: -0.5 * w.square().sum(-1), 20, batched=True)
    else:
        # A linear network with hardly any data: the posterior is the prior.
        data = randn(2, 19, dtype=DOUBLE), randn(2, dtype=DOUBLE)
        net = torch.nn.Linear(19, 1).double()
        target = cr.Problem(net, data, Gaussian(1e3), cr.priors.Normal(1.0))
    posterior = sample(target, chains=16, draws=1, warmup=120, step_size=0.1, mass="identity", init="prior")
    assert posterior.record.history["trajectory_length"] == pytest.approx(math.pi / 2 - 0.05, rel=0.25)


def test_lengths_are_in_units_of_the_mass():
    scale = torch.logspace(-2, 1, 10, dtype=DOUBLE)
    bowl = cr.Density(lambda w: -0.5 * (w / scale).square().sum(-1), 10, batched=True)
    posterior = sample(bowl, chains=32, draws=100, warmup=200)
    assert_moments(posterior.draws, torch.zeros(10, dtype=DOUBLE), torch.diag(scale**2))
    history = posterior.record.history
    assert 0.5 < history["trajectory_length"] < 4.0
    assert not history["trajectory_shortened"]


def test_lengths_that_max_steps_cuts_are_recorded():
    wide = cr.Density(lambda w: -0.5 * (w / torch.tensor([1e-3, 1.0])).square().sum(-1), 2, batched=True)
    history = sample(wide, chains=8, draws=5, warmup=120, mass="identity", max_steps=20).record.history
    assert history["trajectory_shortened"]
    assert history["steps"] == 20


def test_proposals_that_leave_the_density_do_not_spoil_the_length():
    def walled(w):
        return torch.where(w.abs().amax(-1) < 1.5, -0.5 * w.square().sum(-1), -torch.inf)

    start = torch.zeros(8, 3, dtype=DOUBLE)
    posterior = sample(cr.Density(walled, 3, batched=True), chains=8, draws=60, warmup=100, init=start, step_size=0.3)
    history = posterior.record.history
    assert sum(history["divergences"]) > 0
    assert math.isfinite(history["trajectory_length"])
    assert float(posterior.draws.abs().max()) < 1.5
    assert float(posterior.draws.std((0, 1)).min()) > 0.5


# -- known posteriors --------------------------------------------------------------------------------------------------
VARIANTS = {
    "defaults": {},
    "step size per chain, short trajectories": {"pooled": False, "max_steps": 8},
    "unit mass, thinned": {"mass": "identity", "thin": 2, "draws": 100},
    "fixed step size": {"step_size": 0.4, "mass": "prior"},
    "float32, minimum error": {"integrator": "minimum-error"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skewed_target_whatever_the_settings(variant):
    target = density(torch.float32) if variant.startswith("float32") else density()
    posterior = sample(target, **{**SIZES, **VARIANTS[variant]})
    assert_moments(posterior.draws, *skewed_moments())


def test_chains_evaluated_in_turn_and_together_agree():
    settings = {"chains": 3, "draws": 6, "warmup": 25, "max_steps": 12, "init": "prior"}
    together, in_turn = (sample(problem(plan=plan), **settings) for plan in ("batched", "looped"))
    torch.testing.assert_close(together.draws, in_turn.draws, rtol=0, atol=1e-6)


def test_cpp_trajectories_are_those_of_torch():
    if library() is None:
        pytest.skip("no C++ compiler")
    x = randn(30, 3, dtype=DOUBLE)
    p = cr.Problem(mlp(3, 6, 1, dtype=DOUBLE), (x, x.sum(1)), Gaussian(0.5), cr.priors.Normal(0.7, 0.1))
    settings = {"chains": 3, "draws": 8, "warmup": 30, "step_size": 0.05, "init": "prior", "max_steps": 20}
    native, plain = (sample(p, compile=compile, **settings) for compile in ("auto", False))
    assert native.record.history["native"]
    assert not plain.record.history["native"]
    torch.testing.assert_close(native.draws, plain.draws, rtol=0, atol=1e-7)
    lengths = [one.record.history["trajectory_length"] for one in (native, plain)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-9)


def test_simulation_based_calibration_of_a_tiny_network():
    """One chain per data set, all at once; the rank of the truth among the draws is uniform."""
    from scipy import stats

    sets, kept = 400, 9
    target, output, truth = simulated_networks(sets)
    posterior = sample(target, chains=sets, draws=kept, thin=10, warmup=60, mass="identity", step_size=0.3)
    functions = torch.stack([output(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (functions < output(truth).unsqueeze(1)).sum(1)
    for column in ranks.T:
        assert stats.chisquare(torch.bincount(column, minlength=kept + 1).numpy()).pvalue > 1e-4


def test_until_mixed_adds_rounds():
    posterior = sample(density(), chains=4, draws=60, warmup=60, until="mixed")
    found = posterior.record.history["until"]
    assert found["met"]
    assert len(found["rounds"]) > 1


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"trajectory_length": 1.0},
            "trajectory_length must not be passed to ChEES, which learns it in warm-up, got 1.0",
        ),
        ({"chains": 1}, "chains must be an integer of at least 2, got 1.*use NUTS or HMC for a single one"),
        ({"warmup": 0, "step_size": 0.1}, "warmup must be an integer of at least 20, got 0"),
        ({"max_steps": 0}, "max_steps must be a positive integer, got 0"),
        ({"mass": "dense"}, "mass must be one of"),
        ({"target_accept": 1.2}, "target_accept must be strictly between 0 and 1"),
        ({"budget": "1min"}, 'budget must be None without until="mixed"'),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(cr.InputError, match=words):
        cr.ChEES(**settings)
    assert "trajectory_length" not in {field.name for field in dataclasses.fields(cr.ChEES)}


def test_a_density_without_support_is_refused():
    nowhere = cr.Density(lambda w: w.sum(-1) * 0 - torch.inf, 2, batched=True)
    with pytest.raises(cr.InputError, match="the likelihood is -inf at the starting point of chain 0"):
        sample(nowhere, chains=2)


def test_a_stuck_chain_is_restarted_from_another():
    def needle(w):
        return torch.logaddexp(-0.5 * w.square().sum(-1), 60 - 0.5 * (1e9 * (w - 30)).square().sum(-1))

    start = torch.zeros(4, 2, dtype=DOUBLE)
    start[2] = 30.0
    posterior = sample(cr.Density(needle, 2, batched=True), chains=4, draws=10, warmup=60, init=start, max_steps=50)
    assert [one["chain"] for one in posterior.record.history["restarted"]] == [2]
    assert float(posterior.draws.abs().max()) < 6
