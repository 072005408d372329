"""LOO, WAIC and evidence against closed forms of the conjugate linear model and arviz-stats; rankings; errors."""

import json
import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from torch import nn
from torch.distributions import MultivariateNormal, Normal

import credibly as cr
from conftest import mlp, randn
from credibly.comparing import compare_models, difference, entries, scores, table
from credibly.diagnostics import pareto
from credibly.errors import InputError
from credibly.gaussians.families import FullRank, MeanField, inverse_softplus
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.predictive import blocks as predictive
from credibly.storage.record import Record

f64 = torch.float64


# -- the conjugate linear model
def exact_draws(conjugate, count, seed=0, chains=1):
    """A posterior of independent draws of the exact one."""
    problem = conjugate.problem()
    mean, covariance = conjugate.exact()
    noise = randn(count, len(mean), seed=seed, dtype=f64)
    draws = (mean + noise @ torch.linalg.cholesky(covariance).T).reshape(chains, count // chains, -1)
    return DrawsPosterior(Model.of(problem), draws, Record()), problem


def exact_loo(c):
    """log p(y_i | y_-i) by a fit without each row."""
    found = []
    for i in range(len(c.y)):
        keep = torch.arange(len(c.y)) != i
        rest = type(c)(c.net, c.x[keep], c.y[keep], c.noise, c.prior)
        mean, covariance = rest.exact()
        row = c.design[i]
        found.append(Normal(row @ mean, (c.noise**2 + row @ covariance @ row).sqrt()).log_prob(c.y[i]))
    return torch.stack(found)


def exact_waic(c):
    """log p(y_i | D) - Var log p(y_i | w): with f = m + z, z ~ N(0, v), the variance is (2 v^2 + 4 e^2 v) / (4 s^4)."""
    mean, covariance = c.exact()
    v = (c.design @ covariance * c.design).sum(1)
    e = c.y - c.design @ mean
    lppd = Normal(c.design @ mean, (c.noise**2 + v).sqrt()).log_prob(c.y)
    return lppd - (2 * v**2 + 4 * e**2 * v) / (4 * c.noise**4)


def log_evidence(c):
    covariance = c.prior**2 * c.design @ c.design.T + c.noise**2 * torch.eye(len(c.y), dtype=f64)
    return float(MultivariateNormal(torch.zeros_like(c.y), covariance).log_prob(c.y))


def gaussian(conjugate, family):
    """The best Gaussian of a family, and how far its ELBO lies below the evidence."""
    mean, covariance = conjugate.exact()
    independent = torch.diag(1 / torch.linalg.inv(covariance).diagonal())
    covariance_q = independent if family == "mean-field" else covariance
    factor = torch.linalg.cholesky(covariance_q)
    deviations = torch.tensor([inverse_softplus(float(v)) for v in factor.diagonal()], dtype=f64)
    rows, columns = torch.tril_indices(len(mean), len(mean))
    packed = (factor.tril(-1) + torch.diag(deviations))[rows, columns] if family == "full-rank" else deviations
    phi = torch.cat([mean, packed]).unsqueeze(0)
    kind = FullRank() if family == "full-rank" else MeanField()
    problem = conjugate.problem()
    posterior = GaussianPosterior(Model.of(problem), kind, phi, cr.BayesByBackprop().record(problem, 0, {}))
    gap = 0.5 * (torch.logdet(covariance) - torch.logdet(covariance_q))
    return posterior, problem, float(gap)


@pytest.mark.parametrize("kind, exact", [("loo", exact_loo), ("waic", exact_waic)])
def test_rows_of_the_linear_model_are_exact(conjugate, kind, exact):
    """Every row, and the sum, within five Monte Carlo standard errors, estimated from repeats with other draws."""
    repeats = []
    for seed in range(12):
        posterior, problem = exact_draws(conjugate, 4000, seed)
        repeats.append(compare_models({"m": (posterior, problem)})["m"].figures[kind].pointwise)
    values = torch.stack(repeats)
    error = values.std(0) / math.sqrt(len(values))
    expected = exact(conjugate)
    assert ((values.mean(0) - expected).abs() / error).max() < 5
    total = values.sum(1)
    assert abs(float(total.mean() - expected.sum())) < 4 * float(total.std()) / math.sqrt(len(total))
    assert float(error.max()) < 0.02  # tight enough to fail: LOO and WAIC differ by more at some row
    assert float((exact_loo(conjugate) - exact_waic(conjugate)).abs().max()) > 0.02


def test_standard_error_and_effective_parameters(conjugate):
    posterior, problem = exact_draws(conjugate, 4000)
    found = compare_models({"m": (posterior, problem)})["m"]
    for kind in ("loo", "waic"):
        score = found.figures[kind]
        n = len(score.pointwise)
        assert score.error == pytest.approx(float(score.pointwise.std() * math.sqrt(n)), rel=1e-12)
        assert score.value == pytest.approx(float(score.pointwise.sum()), rel=1e-12)
    mean, covariance = conjugate.exact()
    v = (conjugate.design @ covariance * conjugate.design).sum(1)
    lppd = Normal(conjugate.design @ mean, (conjugate.noise**2 + v).sqrt()).log_prob(conjugate.y)
    # p_loo = lppd - elpd; 0.1 is five times the error of the sum of 30 rows of 4,000 draws
    assert found.figures["loo"].parameters == pytest.approx(float((lppd - exact_loo(conjugate)).sum()), abs=0.1)
    assert found.bad_k == 0
    assert found.k_limit == pytest.approx(0.7)


@pytest.mark.parametrize("family", ["mean-field", "full-rank"])
def test_elbo_is_the_evidence_less_what_the_family_lacks(conjugate, family):
    posterior, problem, gap = gaussian(conjugate, family)
    found = compare_models({"q": (posterior, problem)}, by="evidence", samples=2000)
    elbo = found["q"].figures["elbo"]
    assert abs(elbo.value - (log_evidence(conjugate) - gap)) < 4 * elbo.error
    assert gap > 0.5 if family == "mean-field" else gap == 0
    assert 0 < elbo.error < 0.1
    assert "log_evidence" not in found["q"].figures


def test_problem_is_rebuilt_from_the_data(conjugate):
    """The same scores from (posterior, problem), from the raw data and from a problem with another prior."""
    posterior, problem, _ = gaussian(conjugate, "full-rank")
    other = cr.Problem(conjugate.net, (conjugate.x, conjugate.y), cr.likelihoods.Gaussian(0.3), cr.priors.Normal(9.0))
    ways = [
        compare_models({"q": (posterior, problem)}),
        compare_models({"q": posterior}, (conjugate.x, conjugate.y)),
        compare_models({"q": posterior}, other),
    ]
    assert ways[0].to_dict() == ways[1].to_dict() == ways[2].to_dict()
    assert set(ways[0]["q"].figures) == {"loo", "waic", "elbo"}


# -- Pareto smoothing
def awkward(draws, rows=40, seed=0):
    """Log likelihoods (draws, rows) from light to very heavy tails, and some with ties."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(draws, rows)) - rng.gamma(1.0, size=(draws, rows))) * np.linspace(0.01, 5, rows)
    x[:, 3] = np.round(x[:, 3], 2)
    x[1::2, 4] = x[: draws - draws % 2 : 2, 4]
    x[:, 5] -= 4000.0
    return x


@pytest.mark.parametrize("draws", [25, 100, 225, 226, 1000, 4000])
@pytest.mark.parametrize("efficiency", [1.0, 0.3])
def test_psis_is_that_of_arviz(draws, efficiency):
    x = awkward(draws)
    elpd, k, p = array_stats.loo(x.T, chain_axis=None, r_eff=efficiency)
    found = pareto.loo(torch.from_numpy(x), efficiency=efficiency)
    np.testing.assert_allclose(found.elpd, elpd, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.pareto_k, k, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.lppd - found.elpd, p, rtol=1e-9, atol=1e-9)
    weights, k = pareto.psis(-torch.from_numpy(x), pareto.tail_length(draws, efficiency))
    theirs, _ = array_stats.psislw(x, axis=0, r_eff=efficiency)
    # Draws with equal ratios may get their weights in either order.
    np.testing.assert_allclose(weights.T.sort(1).values, np.sort(theirs, 1), rtol=1e-9, atol=1e-9)
    assert k.min() < 0.5 < 1 < k.max()


def test_pareto_fit_finds_the_shape():
    """Excesses drawn by the quantile function; the error of k is about (1 + k) / sqrt(n), as in maximum likelihood."""
    n, shape = 20_000, torch.tensor([-0.3, 0.2, 0.6, 1.2], dtype=f64)
    scale = torch.tensor([2.0, 0.1, 1.0, 30.0], dtype=f64)
    u = torch.rand(n, 4, generator=torch.Generator().manual_seed(0), dtype=f64)
    excess = (scale * torch.expm1(-shape * torch.log1p(-u)) / shape).sort(0).values
    k, sigma = pareto.pareto_fit(excess)
    assert ((k - shape).abs() < 5 * (1 + shape) / math.sqrt(n)).all()
    assert ((sigma / scale - 1).abs() < 5 * math.sqrt(2) * (1 + shape) / math.sqrt(n)).all()


def test_tails_of_one_value():
    """Equal weights are harmless, a constant tail above other values is not; neither is smoothed."""
    same = torch.full((100, 1), -1.3, dtype=f64)
    tail = torch.zeros(100, 1, dtype=f64)
    tail[:30] = -2.0
    found = pareto.loo(torch.cat([same, tail], 1))
    assert found.pareto_k.tolist() == [-math.inf, math.inf]
    assert found.elpd[0] == pytest.approx(-1.3)
    weights = torch.exp(-tail[:, 0])
    assert found.elpd[1] == pytest.approx(float(torch.log(100 / weights.sum())))


def test_blocks_of_rows_change_nothing(monkeypatch):
    x = torch.from_numpy(awkward(300))
    whole = pareto.loo(x)
    monkeypatch.setattr(pareto, "FIT_VALUES", 1)
    for one, other in zip(whole, pareto.loo(x)):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "bad", [torch.zeros(30), torch.zeros(24, 2), torch.full((30, 2), math.nan), torch.zeros(30, 0)]
)
def test_log_likelihoods_that_are_refused(bad):
    with pytest.raises(InputError, match="log_likelihood"):
        pareto.loo(bad)


# -- streaming and shapes
def test_streamed_is_whole(conjugate, tmp_path, monkeypatch):
    """Draws on disk, read in chunks, and rows in small blocks give the same scores as everything at once."""
    posterior, problem = exact_draws(conjugate, 400, chains=4)
    whole = compare_models({"m": (posterior, problem)})["m"]
    posterior.save(tmp_path / "run")
    stored = cr.load(tmp_path / "run", conjugate.net)
    seen = []
    monkeypatch.setattr(predictive, "BLOCK_VALUES", 2000)
    monkeypatch.setattr(predictive, "CACHE_VALUES", 0)
    monkeypatch.setattr("credibly.posterior.draws.KEPT_BYTES", 0)
    real = scores.loo
    monkeypatch.setattr(scores, "loo", lambda block, **rest: seen.append(block.shape) or real(block, **rest))
    for way in (posterior, stored):
        streamed = compare_models({"m": (way, problem)})["m"]
        for kind in ("loo", "waic"):
            torch.testing.assert_close(
                streamed.figures[kind].pointwise, whole.figures[kind].pointwise, rtol=1e-12, atol=1e-12
            )
    assert len(seen) > 8
    assert all(draws == 400 and rows <= 5 for draws, rows in seen)


@pytest.mark.parametrize("shape", ["targets", "pixels"])
def test_a_row_is_an_observation(shape):
    """Targets and pixels of a row count together: its log likelihood is their sum."""
    torch.manual_seed(0)
    if shape == "targets":
        net, x, y = mlp(2, 5, 3), randn(12, 2), randn(12, 3, seed=1)
        likelihood = cr.likelihoods.Gaussian(0.7)
    else:
        net, x = nn.Conv2d(1, 3, 3, padding=1), randn(6, 1, 4, 4)
        y, likelihood = (randn(6, 4, 4, seed=1) > 0).long(), cr.likelihoods.Categorical(axis=1)
    problem = cr.Problem(net, (x, y), likelihood, cr.priors.Normal(1.0))
    draws = 0.3 * randn(1, 60, problem.dim, seed=2)
    posterior = DrawsPosterior(Model.of(problem), draws, Record())
    found = compare_models({"m": (posterior, problem)})["m"]
    rows = problem.log_likelihood_rows(draws[0], problem.x, problem.y).double().reshape(60, len(x), -1).sum(2)
    torch.testing.assert_close(found.figures["waic"].pointwise, pareto.waic(rows).elpd, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.figures["loo"].pointwise, pareto.loo(rows).elpd, rtol=1e-5, atol=1e-5)
    assert found.rows == len(x)


def test_correlated_draws_get_a_longer_tail(conjugate):
    posterior, problem = exact_draws(conjugate, 400, chains=2)
    assert scores.efficiency(entries.Entry("m", posterior, problem, True)) > 0.5
    stuck = posterior.draws[:, ::20].repeat_interleave(20, 1)
    slow = DrawsPosterior(posterior.model, stuck, Record())
    assert 0.01 < scores.efficiency(entries.Entry("m", slow, problem, True)) < 0.15  # a twentieth of the draws are new


# -- rankings
def two_models(conjugate):
    """The linear model, and one whose tight prior keeps its weights near zero."""
    tight = type(conjugate)(conjugate.net, conjugate.x, conjugate.y, conjugate.noise, 0.05)
    return {"good": exact_draws(conjugate, 2000), "tight": exact_draws(tight, 2000, seed=1)}


def test_differences_are_paired_over_rows(conjugate):
    models = two_models(conjugate)
    found = compare_models(models)
    a, b = (found[name].figures["loo"].pointwise.tolist() for name in ("tight", "good"))
    gaps = [p - q for p, q in zip(a, b)]
    n, mean = len(gaps), sum(gaps) / len(gaps)
    error = math.sqrt(n * sum((g - mean) ** 2 for g in gaps) / (n - 1))
    assert found.differences["tight"] == pytest.approx((sum(gaps), error), rel=1e-10)
    assert found.differences["good"] == (0.0, 0.0)
    apart = math.hypot(found["tight"].figures["loo"].error, found["good"].figures["loo"].error)
    assert abs(error - apart) > 0.1  # unpaired it would be another number
    assert found.best == "good"
    assert found.tied == ("good",)
    assert "It is distinguishable from 'tight'" in found.verdict


def test_models_that_are_indistinguishable(conjugate):
    models = {"one": exact_draws(conjugate, 2000), "two": exact_draws(conjugate, 2000, seed=5)}
    found = compare_models(models, by="loo")
    assert set(found.tied) == {"one", "two"}
    assert "statistically indistinguishable" in found.verdict
    small = table.Difference(-3.0, 0.1)
    assert not small.told_apart(4.0)  # far beyond its error, and yet small
    assert not table.Difference(-10.0, 6.0).told_apart(4.0)
    assert table.Difference(-10.0, 4.0).told_apart(4.0)


def test_evidence_of_two_priors(conjugate):
    """Ranked by ELBO, with the errors of two independent estimates."""
    wide = type(conjugate)(conjugate.net, conjugate.x, conjugate.y, conjugate.noise, 50.0)
    models = {name: gaussian(c, "full-rank")[:2] for name, c in (("wide", wide), ("right", conjugate))}
    found = compare_models(models, by="evidence", samples=2000)
    assert [m.name for m in found] == ["right", "wide"]
    gap, error = found.differences["wide"]
    assert error == pytest.approx(math.hypot(*(m.figures["elbo"].error for m in found)))
    assert gap == pytest.approx(log_evidence(wide) - log_evidence(conjugate), abs=4 * error)
    assert found.tied == ("right",)


def test_log_evidence_is_read_where_there_is_one(conjugate):
    """Any posterior that has a `log_evidence`; an estimate comes before a bound."""

    class Estimated(DrawsPosterior):
        log_evidence = -40.0

    plain, problem = exact_draws(conjugate, 100)
    estimated = Estimated(plain.model, plain.draws, Record(method="laplace"))
    bound, _, _ = gaussian(conjugate, "mean-field")
    found = compare_models({"l": (estimated, problem), "q": (bound, problem)}, by="evidence")
    assert found["l"].figure("evidence").value == -40.0
    assert found["q"].evidence == "elbo"
    assert "ELBO lies below" in found.verdict


def test_laplace_is_exact_on_the_linear_model(conjugate):
    """Its evidence, and LOO from its draws, equal the closed forms; a subset of the parameters is remarked on."""
    problem = conjugate.problem()
    mean, _ = conjugate.exact()
    fitted = cr.Laplace(structure="full", start=mean).fit(problem, seed=0, progress=False)
    part = cr.Laplace(structure="full", start=mean, random="weight").fit(problem, seed=0, progress=False)
    found = compare_models({"laplace": fitted, "part": part}, problem, by="evidence", draws=4000)
    assert found["laplace"].figures["log_evidence"].value == pytest.approx(log_evidence(conjugate), abs=1e-8)
    assert found["laplace"].missing["elbo"] == "it is not variational"
    assert "'part': its evidence is over 3 of 4 parameters" in found.verdict
    # The draws' moments are exact per row, so the error is below that of independent draws: at most 0.02 per row there.
    torch.testing.assert_close(found["laplace"].figures["loo"].pointwise, exact_loo(conjugate), rtol=0, atol=0.05)


def test_the_table_reads_well(conjugate):
    found = compare_models(two_models(conjugate) | {"q": gaussian(conjugate, "mean-field")[:2]})
    text = str(found)
    assert text.splitlines()[0] == "3 models of 30 rows, by LOO, in nats over all rows"
    for word in ("good", "tight", "q", "LOO", "WAIC", "ELBO", "behind", "±", "–", "bbb"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 110
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["best"] == found.best
    assert plain["models"]["tight"]["rank"] == 3
    assert repr(found).startswith("Comparison(by loo: ")
    assert "<pre>" in found._repr_html_()
    assert "'q': its 1,000 draws are not a sampler's" in found.verdict
    assert len(found) == 3


def test_the_plot(conjugate):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    found = compare_models(two_models(conjugate))
    assert found.plot(axes) is axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["good", "tight"]
    line = axes.containers[0].lines[0].get_xdata()
    np.testing.assert_allclose(np.asarray(line, float), [0.0, found.differences["tight"].value])


def test_heavy_tails_are_reported(conjugate):
    """An outlier that the draws hardly reach has a high k, and the verdict reports it."""
    y = conjugate.y.clone()
    y[0] += 40.0
    x = conjugate.x.clone()
    x[0] *= 20
    wild = type(conjugate)(conjugate.net, x, y, conjugate.noise, conjugate.prior)
    found = compare_models({"m": exact_draws(wild, 1000)})
    assert found["m"].bad_k >= 1
    assert float(found["m"].pareto_k[0]) == float(found["m"].pareto_k.max())
    assert "have a Pareto k above" in found.verdict


def test_different_inputs_for_the_same_targets(conjugate):
    fewer = type(conjugate)(nn.Linear(2, 1).double(), conjugate.x[:, :2], conjugate.y, conjugate.noise, conjugate.prior)
    found = compare_models({"all": exact_draws(conjugate, 1000), "two": exact_draws(fewer, 1000)})
    assert "different inputs" in found.verdict


# -- errors
def refused(match, models, *args, **kwargs):
    with pytest.raises(InputError, match=match):
        compare_models(models, *args, **kwargs)


def test_what_is_refused(conjugate):
    draws, problem = exact_draws(conjugate, 100)
    bound, own, _ = gaussian(conjugate, "mean-field")
    refused("models must be a dict of posteriors by name, got an empty one", {})
    refused("models must be a dict of posteriors by name, got a list", [draws])
    refused(r"models\['a'\] must be a posterior or \(posterior, problem\), got a str", {"a": "b"})
    refused("data: none was given", {"a": draws})
    refused("by must be one of 'loo', 'waic', 'elbo', .*, got 'best'", {"a": (draws, problem)}, by="best")
    refused(r"criteria must be some of loo, waic, evidence, got \('aic',\)", {"a": (draws, problem)}, criteria=("aic",))
    refused("draws must be an integer of at least 2, got 0", {"a": (draws, problem)}, draws=0)
    refused(
        r"'a' is of draws, which has no evidence.*BayesByBackprop \(its ELBO\) and Laplace",
        {"a": (draws, problem), "b": (bound, own)},
        by="evidence",
    )
    refused("'b': variational inference bounds", {"b": (bound, own)}, by="log_evidence")


def test_other_data_is_refused(conjugate):
    bound, own, _ = gaussian(conjugate, "mean-field")
    part = own.subset(torch.arange(20))
    refused("fitted to other data", {"a": (bound, part)})
    refused("fitted to other data", {"a": bound}, (conjugate.x.flip(0), conjugate.y.flip(0)))
    draws, problem = exact_draws(conjugate, 100)
    refused("different data", {"a": (draws, problem), "b": (draws, problem.subset(torch.arange(20)))})
    moved = type(conjugate)(conjugate.net, conjugate.x, conjugate.y + 1, conjugate.noise, conjugate.prior)
    refused("different data", {"a": (draws, problem), "b": exact_draws(moved, 100)})
    wider = cr.Problem(
        mlp(3, 2, 1, dtype=f64), (conjugate.x, conjugate.y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal()
    )
    refused("parameters, the posterior", {"a": (draws, wider)})
    x, counts = randn(8, 2), torch.arange(8.0)
    kinds = {
        name: cr.Problem(nn.Linear(2, 1), (x, counts), likelihood, cr.priors.Normal())
        for name, likelihood in (("count", cr.likelihoods.Poisson()), ("real", cr.likelihoods.Gaussian(1.0)))
    }
    models = {k: (DrawsPosterior(Model.of(p), randn(1, 30, p.dim), Record()), p) for k, p in kinds.items()}
    refused("outcomes of different kinds", models)


def test_points_and_tempered_posteriors_have_no_loo(conjugate):
    problem = conjugate.problem()
    point = cr.MAP(steps=20, compile=False).fit(problem, seed=0, progress=False)
    refused("a point estimate has one draw", {"map": (point, problem)})
    good = exact_draws(conjugate, 100)
    refused("'map': a point estimate has one draw", {"map": (point, problem), "m": good}, by="loo")
    cold = conjugate.problem(temperature=0.5)
    drawn = DrawsPosterior(Model.of(cold), good[0].draws, Record(tempering={"likelihood": 0.5, "prior": 0.5}))
    refused("tempered .*T = 0.5", {"cold": (drawn, cold)})
    bound, _, _ = gaussian(conjugate, "mean-field")
    few = cr.DeepEnsemble(members=3, steps=20, compile=False).fit(problem, seed=0, progress=False)
    found = compare_models({"few": (few, problem), "q": (bound, problem)})
    assert found.by == "waic"  # the one criterion both have
    assert "it has 3 draws, and LOO needs 25" in found["few"].missing["loo"]
    assert "'few' has no LOO" in found.verdict


def test_a_prior_that_the_record_does_not_describe(conjugate):
    _, problem, _ = gaussian(conjugate, "mean-field")
    posterior = GaussianPosterior(
        Model.of(problem), MeanField(), 0.1 * torch.ones(1, 8, dtype=f64), Record(method="bbb")
    )
    found = compare_models({"q": posterior}, (conjugate.x, conjugate.y))
    assert "does not describe its prior" in found["q"].missing["elbo"]
    assert "loo" in found["q"].figures


def test_every_method_that_draws_is_compared(conjugate):
    """Dropout by its passes, an ensemble by its members, a sampler by its chains."""
    torch.manual_seed(0)
    x, y = conjugate.x.float(), conjugate.y.float()
    problem = cr.Problem(mlp(3, 8, 1), (x, y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0, fan_in=True))
    fits = {
        "dropout": cr.MCDropout(steps=30, compile=False, insert="2"),
        "hmc": cr.HMC(chains=2, warmup=20, draws=20, max_steps=5, compile=False),
        "bbb": cr.BayesByBackprop(steps=30, compile=False, learn_prior_scale=True),
    }
    fitted = {name: method.fit(problem, seed=0, progress=False) for name, method in fits.items()}
    found = compare_models(fitted, (x, y), draws=50)
    assert {m.name: m.draws for m in found} == {"dropout": 50, "hmc": 40, "bbb": 50}
    assert all(math.isfinite(m.figures["loo"].value) for m in found)
    # The prior's learned scale is read from the record: the ELBO is the one that the fit itself ended with.
    history = fitted["bbb"].record.history
    reported = scores.Score(float(history["elbo"]), float(history["elbo_standard_error"]))
    own = difference(found["bbb"].figures["elbo"], reported)
    assert abs(own.value) < 4 * own.error
