"""Chains that agree about the predicted means and nothing else, that started at one point, or that never moved."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.diagnostics import verdict
from credibly.diagnostics.summary import diagnose
from credibly.posterior.draws import DensityPosterior, DrawsPosterior
from credibly.posterior.model import Model
from credibly.storage.record import Record
from simulated_chains import autoregressive

f64 = torch.float64
X = torch.linspace(-1, 1, 40, dtype=f64)[:, None]
Y = X[:, 0] + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=f64)
WEIGHTS, MEANS, NOISE = (autoregressive(4, 500, k, 0.0, seed) for seed, k in enumerate((20, 120, 30)))
APART = 0.5 * torch.arange(4, dtype=f64)[:, None]


def made(likelihood, outputs, spread, *, chains=4, draws=500, shift=None, record=None):
    """A linear network whose draws are independent around zero weights; `shift` moves the last parameter by chain."""
    net = nn.Linear(1, outputs).double()
    problem = cr.Problem(net, (X, Y), likelihood, cr.priors.Normal(1.0))
    generator = torch.Generator().manual_seed(1)
    theta = spread * torch.randn(chains, draws, problem.layout.dim, generator=generator, dtype=f64)
    if shift is not None:
        theta[..., -1] += shift
    return DrawsPosterior(Model.of(problem), theta, record or Record())


def test_quantities_decide_next_to_predictions():
    good = diagnose(WEIGHTS, MEANS, quantities={"variances": NOISE})
    assert good.ok
    assert good.verdict.startswith("Good: the chains agree about the predictions and variances (R-hat up to 1.0")
    assert good.judged == {"predictions": good.functions, "variances": good.quantities["variances"]}
    bad = diagnose(WEIGHTS, MEANS, quantities={"variances": NOISE + APART.numpy()[..., None]})
    assert not bad.ok
    assert bad.verdict.startswith("Not mixed: the chains disagree about the variances (R-hat above 1.1 for 100%")
    assert "although they agree about the predictions" in bad.verdict
    plain = bad.to_dict()
    assert plain["quantities"]["variances"]["rhat_worst"] == pytest.approx(bad.quantities["variances"].rhat_worst)
    assert "rhat" not in plain["quantities"]["variances"]
    assert "variances" in str(bad).splitlines()[1]


def test_few_effective_draws_of_one_quantity_are_named():
    slow = autoregressive(4, 500, 30, 0.9, seed=3)
    found = diagnose(WEIGHTS, MEANS, quantities={"log densities": slow})
    assert not found.ok
    assert "of the log densities: ESS is only" in found.verdict or "about the log densities" in found.verdict


def test_constant_and_broken_quantities():
    still = diagnose(WEIGHTS, MEANS, quantities={"variances": NOISE[..., :1] * 0})
    assert still.verdict == diagnose(WEIGHTS, MEANS).verdict
    assert list(still.judged) == ["predictions"]
    broken = NOISE.copy()
    broken[0, 0, 0] = math.nan
    assert diagnose(WEIGHTS, MEANS, quantities={"variances": broken}).verdict.startswith(
        "Broken: NaN or infinite draws in 1 of the 30 variances"
    )
    with pytest.raises(cr.InputError, match="variances must be of the same 4 chains"):
        diagnose(WEIGHTS, MEANS, quantities={"variances": NOISE[:2]})


def test_chains_that_disagree_about_a_learned_scale():
    mixed = made(cr.likelihoods.Gaussian(), 1, 0.1)
    assert mixed.diagnostics(X, Y).verdict.startswith("Good: the chains agree about the predictions, noise scale and")
    apart = made(cr.likelihoods.Gaussian(), 1, 0.1, shift=APART)
    found = apart.diagnostics(X)
    assert found.functions.rhat_most < 1.01
    assert not found.ok
    assert found.verdict.startswith("Not mixed: the chains disagree about the noise scale (R-hat 2")
    assert apart.diagnostics(X, Y).quantities["log densities"].rhat_most > 1.1


@pytest.mark.parametrize("given", [(X,), (X, Y)])
def test_chains_that_disagree_about_a_predicted_variance(given):
    likelihood = cr.likelihoods.HeteroscedasticGaussian()
    assert made(likelihood, 2, 0.1).diagnostics(*given).verdict.startswith("Good: the chains agree about the predic")
    found = made(likelihood, 2, 0.1, shift=APART).diagnostics(*given)
    assert found.functions.rhat_most < 1.01
    assert not found.ok
    assert found.verdict.startswith("Not mixed: the chains disagree about the ")
    assert found.quantities["variances"].rhat_most > 1.1
    assert ("log densities" in found.quantities) is (len(given) > 1)


def test_a_well_mixed_fit_stays_good_and_uses_the_recorded_log_likelihood():
    problem = cr.Problem(nn.Linear(1, 2).double(), (X, Y), cr.likelihoods.HeteroscedasticGaussian(), cr.priors.Normal())
    method = cr.HMC(chains=4, draws=500, warmup=200, start_steps=50, mass="diagonal")
    posterior = method.fit(problem, seed=0, progress=False)
    found = posterior.diagnostics(X, Y)
    assert set(found.judged) == {"predictions", "variances", "log densities", "log likelihood"}
    assert found.ok
    assert found.verdict.startswith("Good: ")
    changed = {**posterior.statistics, "log_likelihood": posterior.statistics["log_likelihood"] + 9 * APART}
    apart = DrawsPosterior(posterior.model, posterior.draws, posterior.record, changed).diagnostics(X)
    assert apart.verdict.startswith("Not mixed: the chains disagree about the log likelihood (R-hat ")


def test_y_needs_x():
    with pytest.raises(cr.InputError, match="x must be given with y"):
        made(cr.likelihoods.Gaussian(), 1, 0.1).diagnostics(y=Y)


def test_noise_of_infinite_variance_is_judged_by_its_scale():
    found = made(cr.likelihoods.StudentT(df=1.5), 1, 0.1).diagnostics(X, Y)
    assert set(found.quantities) == {"noise scale", "log densities"}
    assert found.ok


def two_modes(theta):
    """An equal mixture of N(-20, 1) and N(20, 1), which no chain crosses."""
    return torch.logaddexp(-0.5 * (theta - 20).square().sum(-1), -0.5 * (theta + 20).square().sum(-1))


def test_one_start_cannot_reveal_a_second_mode():
    density = cr.Density(two_modes, 1, batched=True)

    def verdict_from(init):
        method = cr.HMC(chains=4, draws=200, warmup=50, init=init, compile=False)
        posterior = method.fit(density, seed=0, progress=False)
        return posterior.record.history["starts"], posterior.diagnostics()

    starts, found = verdict_from(torch.full((4, 1), 19.0))
    assert starts == {"init": "tensor", "identical": True}
    assert found.one_start
    assert found.verdict.startswith(("Good from one start: ", "Usable from one start: "))
    assert verdict.ONE_START in found.verdict
    starts, found = verdict_from(torch.tensor([[-19.0], [-21.0], [19.0], [21.0]]))
    assert starts == {"init": "tensor", "identical": False}
    assert found.verdict.startswith("Not mixed: ")
    assert verdict.ONE_START not in found.verdict


@pytest.mark.parametrize(
    "init, identical", [("map", True), ("network", True), ("fresh", False), ("prior", False), ("ensemble", False)]
)
def test_the_record_says_whether_starts_are_identical(init, identical, tmp_path):
    problem = cr.Problem(nn.Linear(1, 1).double(), (X, Y), cr.likelihoods.Gaussian(), cr.priors.Normal())
    method = cr.HMC(chains=3, draws=5, warmup=20, start_steps=5, init=init)
    posterior = method.fit(problem, seed=0, progress=False, out=tmp_path / "run")
    assert posterior.record.history["starts"] == {"init": init, "identical": identical}
    found = cr.load(tmp_path / "run").diagnostics(X)
    assert found.one_start is identical
    assert (verdict.ONE_START in found.verdict) is identical
    one = cr.HMC(chains=1, draws=5, warmup=20, start_steps=5, init=init).fit(problem, progress=False)
    assert not one.record.history["starts"]["identical"]


def test_starts_from_a_point_estimate_are_identical():
    problem = cr.Problem(nn.Linear(1, 1).double(), (X, Y), cr.likelihoods.Gaussian(0.3), cr.priors.Normal())
    point = cr.MAP(steps=5).fit(problem, progress=False)
    posterior = cr.HMC(chains=2, draws=5, warmup=20, init=point).fit(problem, progress=False)
    assert posterior.record.history["starts"] == {"init": "posterior", "identical": True}


def test_a_posterior_with_a_frozen_chain_fails_by_name():
    draws = torch.from_numpy(WEIGHTS).clone()
    draws[2] = draws[2, :1]
    acceptance = torch.full((4, 500), 0.9)
    acceptance[2] = 0.0
    found = DensityPosterior(None, draws, Record(), {"acceptance": acceptance}).diagnostics()
    assert found.still == (2,)
    assert not found.ok
    assert found.verdict.startswith("Not mixed: chain 2 never moved")


def test_rows_whose_noise_overflows_do_not_count_against_the_chains():
    posterior = made(cr.likelihoods.HeteroscedasticGaussian(), 2, 0.1)
    far = torch.cat([X, torch.tensor([[1e5]], dtype=f64)])
    assert not bool(posterior.predict(far).variance.isfinite().all())
    found = posterior.diagnostics(far, torch.cat([Y, torch.zeros(1, dtype=f64)]))
    assert set(found.quantities) == set(posterior.diagnostics(X, Y).quantities) >= {"variances", "log densities"}
    assert found.quantities["variances"].nonfinite == 0
    assert not found.verdict.startswith("Broken")
