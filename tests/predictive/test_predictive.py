"""The Bayesian model average: identities, quantiles of the mixture, streaming."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    Poisson,
    StudentT,
)
from credibly.predictive import blocks as module
from credibly.predictive.rescaling import in_units

f64 = torch.float64


def make(likelihood, outputs, y, draws=7, dtype=f64, seed=1, scale=1.0):
    """A posterior of arbitrary draws on a small network."""
    net = mlp(2, 4, outputs, dtype=dtype)
    problem = cr.Problem(net, data=(randn(len(y), 2, dtype=dtype), y), likelihood=likelihood, prior=cr.priors.Normal())
    point = cr.MAP(steps=1).fit(problem, seed=0)
    return cr.DrawsPosterior(point.model, scale * randn(1, draws, problem.dim, seed=seed, dtype=dtype), point.record)


REAL, LABELS, COUNTS = randn(6, dtype=f64), torch.tensor([0, 2, 1, 0, 1, 2]), torch.tensor([0, 3, 1, 7, 2, 0])
CASES = {
    "gaussian": (Gaussian(0.4), 1, REAL),
    "learned": (Gaussian(), 1, REAL),
    "two targets": (Gaussian((0.1, 0.7)), 2, randn(6, 2, dtype=f64)),
    "student": (StudentT(0.4, df=5.0), 1, REAL),
    "hetero": (HeteroscedasticGaussian(), 2, REAL),
    "bernoulli": (Bernoulli(), 1, LABELS.clamp(max=1)),
    "labels": (Bernoulli(), 3, torch.randint(2, (6, 3), generator=torch.Generator().manual_seed(0))),
    "classes": (Categorical(), 3, LABELS),
    "noisy classes": (HeteroscedasticCategorical(), 6, LABELS),
    "counts": (Poisson(), 1, COUNTS),
}


@pytest.mark.parametrize("name", CASES)
def test_decomposition_identities(name):
    p = make(*CASES[name]).predict(randn(5, 2, seed=3, dtype=f64))
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert bool((p.epistemic >= 0).all())
    assert float(p.epistemic.max()) > 1e-4  # the draws differ
    if p.likelihood.ordered:
        torch.testing.assert_close(p.variance, p.total)
    else:
        torch.testing.assert_close(p.variance, p.mean * (1 - p.mean))


@pytest.mark.parametrize("name", CASES)
def test_the_mean_alone_is_that_of_the_summary(name):
    posterior, x = make(*CASES[name], dtype=torch.float32), randn(5, 2, seed=3)
    views = [lambda p: p] + ([lambda p: in_units(p, 7.0, 3.0)] if posterior.likelihood.support == "real" else [])
    for view in views:
        alone, first = view(posterior.predict(x)).mean, view(posterior.predict(x))
        assert bool((first.variance > 0).all())
        assert "_mean" not in vars(first)
        assert torch.equal(first.mean, alone)
        assert alone.dtype == first.mean.dtype


@pytest.mark.parametrize("name", CASES)
def test_one_draw_has_no_epistemic_uncertainty(name):
    p = make(*CASES[name], draws=1).predict(randn(5, 2, seed=3, dtype=f64))
    assert bool((p.epistemic == 0).all())
    torch.testing.assert_close(p.total, p.aleatoric)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.01, 30.0))
def test_mutual_information_is_never_negative(seed, draws, scale):
    p = make(Categorical(), 3, LABELS, draws=draws, seed=seed, scale=scale, dtype=torch.float32).predict(
        randn(4, 2, seed=seed)
    )
    assert bool((p.epistemic >= 0).all())
    assert bool((p.epistemic <= math.log(3) + 1e-5).all())


@pytest.mark.parametrize("name", CASES)
def test_moments_and_log_density_by_brute_force(name):
    """Against a loop over draws with torch modules, written without any of the package's predictive code."""
    posterior = make(*CASES[name])
    likelihood, x = posterior.likelihood, randn(6, 2, seed=3, dtype=f64)
    y = CASES[name][2]
    p = posterior.predict(x)
    densities, means = [], []
    for s in range(7):
        theta = posterior.draws[0, s]
        out = posterior.layout.write(theta)(x).unsqueeze(0)
        extra = {k.split(".")[1]: v.unsqueeze(0) for k, v in posterior.layout.split(theta)[1].items()}
        densities.append(likelihood.log_prob(out, likelihood.prepare(y, f64), extra)[0].exp())
        means.append(likelihood.restore(likelihood.moments(out, extra)[0][0]))
    torch.testing.assert_close(p.log_prob(y), torch.stack(densities).mean(0).log().detach())
    torch.testing.assert_close(p.mean, torch.stack(means).mean(0).detach())
    if likelihood.ordered:
        torch.testing.assert_close(p.epistemic, torch.stack(means).var(0, correction=0).detach())
    torch.testing.assert_close(p.functions(), torch.stack(means).detach())


@pytest.mark.parametrize("name", ["gaussian", "learned", "two targets", "student", "hetero"])
@pytest.mark.parametrize("level", [0.001, 0.05, 0.5, 0.9, 0.999])
def test_quantiles_invert_the_distribution_function(name, level):
    posterior = make(*CASES[name])
    p = posterior.predict(randn(6, 2, seed=3, dtype=f64))
    q = p.quantile(level)
    assert q.shape == p.mean.shape
    torch.testing.assert_close(p.cdf(q), torch.full_like(q, level), rtol=0, atol=1e-9)


def test_quantiles_of_counts_are_the_smallest_that_reach_the_level():
    p = make(Poisson(), 1, COUNTS).predict(randn(6, 2, seed=3, dtype=f64))
    for level in (0.05, 0.5, 0.95):
        q = p.quantile(level)
        assert torch.equal(q, q.round())
        assert bool((p.cdf(q) >= level).all())
        below = q > 0
        assert bool((p.cdf((q - 1).clamp_min(0))[below] < level).all())


def test_interval_is_of_the_mixture_and_not_of_a_normal():
    """The central interval of two distant draws spans both; mean +- 1.64 std would be far off."""
    net = nn.Linear(1, 1).double()
    problem = cr.Problem(
        net,
        data=(torch.zeros(2, 1, dtype=f64), torch.zeros(2, dtype=f64)),
        likelihood=Gaussian(0.1),
        prior=cr.priors.Normal(),
    )
    point = cr.MAP(steps=1).fit(problem, seed=0)
    posterior = cr.DrawsPosterior(point.model, torch.tensor([[[0.0, -3.0], [0.0, 5.0]]], dtype=f64), point.record)
    p = posterior.predict(torch.zeros(1, 1, dtype=f64))
    lower, upper = p.interval(0.9)
    z = stats.norm.ppf(0.9)  # 10 % of one of the two equal components lies beyond each bound
    assert float(lower) == pytest.approx(-3 - 0.1 * z, abs=1e-6)
    assert float(upper) == pytest.approx(5 + 0.1 * z, abs=1e-6)
    assert float(p.mean) == pytest.approx(1.0)
    assert float(p.epistemic) == pytest.approx(16.0)


def test_samples_come_from_the_mixture():
    p = make(Gaussian(0.4), 1, REAL).predict(randn(3, 2, seed=3, dtype=f64))
    draws = p.sample(8000, seed=2)
    assert draws.shape == (8000, 3)
    u = torch.stack([p.cdf(d) for d in draws[:2000]])
    for row in range(3):
        assert stats.kstest(u[:, row].numpy(), "uniform").pvalue > 1e-3
    torch.testing.assert_close(draws.mean(0), p.mean, rtol=0, atol=float(4.5 * p.std.max() / math.sqrt(8000)))
    assert torch.equal(p.sample(5, seed=2), p.sample(5, seed=2))
    assert not torch.equal(p.sample(5, seed=2), p.sample(5, seed=3))


def test_samples_share_a_draw_across_rows():
    """With tiny noise, samples at two rows are tied together by the function they come from."""
    posterior = make(Gaussian(1e-6), 1, REAL, draws=40)
    x = randn(1, 2, seed=3, dtype=f64)
    draws = posterior.predict(torch.cat([x, x])).sample(200)
    torch.testing.assert_close(draws[:, 0], draws[:, 1], rtol=0, atol=1e-4)
    assert float(draws[:, 0].std()) > 0.1


def test_prediction_sets_reach_their_level_and_are_minimal():
    p = make(Categorical(), 3, LABELS).predict(randn(6, 2, seed=3, dtype=f64))
    chosen = p.prediction_set(0.8)
    held = (p.probabilities * chosen).sum(-1)
    assert bool((held >= 0.8).all())
    smallest = torch.where(chosen, p.probabilities, torch.inf).min(-1).values
    assert bool((held - smallest < 0.8).all())


@pytest.mark.parametrize("name", CASES)
def test_streaming_in_small_blocks_changes_nothing(name, monkeypatch):
    posterior, x, y = make(*CASES[name]), randn(6, 2, seed=3, dtype=f64), CASES[name][2]
    whole = posterior.predict(x)
    results = [whole.mean, whole.variance, whole.aleatoric, whole.epistemic, whole.log_prob(y), whole.functions(3)]
    results += [whole.quantile([0.1, 0.7]), whole.cdf(y)] if whole.likelihood.ordered else [whole.probabilities]
    monkeypatch.setattr(module, "BLOCK_VALUES", 40)
    monkeypatch.setattr(module, "CACHE_VALUES", 1)
    streamed = posterior.predict(x)
    assert streamed._block_rows < 6  # otherwise this would not test streaming
    again = [
        streamed.mean,
        streamed.variance,
        streamed.aleatoric,
        streamed.epistemic,
        streamed.log_prob(y),
        streamed.functions(3),
    ]
    again += [streamed.quantile([0.1, 0.7]), streamed.cdf(y)] if whole.likelihood.ordered else [streamed.probabilities]
    for a, b in zip(results, again):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert streamed.sample(4).shape == whole.sample(4).shape


@pytest.mark.parametrize("name", ["learned", "two targets", "classes"])
def test_map_blocks_covers_every_row_once_and_in_order(name, monkeypatch):
    posterior, x = make(*CASES[name]), randn(6, 2, seed=3, dtype=f64)
    ((outputs, extra, first),) = posterior.predict(x).map_blocks(lambda *block: block)
    assert first == 0
    assert outputs.shape[:2] == (7, 6)
    torch.testing.assert_close(outputs, posterior.predict(x).source.outputs(x, 0, 7))
    assert {k: v.shape[0] for k, v in extra.items()} == ({"log_scale": 7} if name == "learned" else {})
    monkeypatch.setattr(module, "BLOCK_VALUES", 40)
    monkeypatch.setattr(module, "CACHE_VALUES", 1)
    blocks = list(posterior.predict(x).map_blocks(lambda *block: block))
    sizes = [block.shape[1] for block, _, _ in blocks]
    assert len(blocks) > 1
    assert [start for _, _, start in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]
    torch.testing.assert_close(torch.cat([block for block, _, _ in blocks], 1), outputs, rtol=1e-9, atol=1e-9)
    for _, same, _ in blocks:
        assert all(torch.equal(same[k], extra[k]) for k in extra)


def test_map_blocks_is_lazy_and_takes_no_gradient(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_VALUES", 1)
    monkeypatch.setattr(module, "CACHE_VALUES", 1)
    seen = []
    blocks = make(*CASES["gaussian"]).predict(randn(6, 2, dtype=f64)).map_blocks(lambda o, e, start: seen.append(start))
    assert seen == []
    next(blocks)
    assert seen == [0]
    assert not next(make(*CASES["gaussian"]).predict(randn(6, 2)).map_blocks(lambda o, e, s: torch.is_grad_enabled()))


@pytest.mark.parametrize("name", CASES)
def test_a_subset_predicts_as_its_rows_alone(name):
    posterior, x, y = make(*CASES[name]), randn(6, 2, seed=3, dtype=f64), CASES[name][2]
    whole, rows = posterior.predict(x), torch.tensor([4, 1, 1])
    part, alone = whole.subset(rows), posterior.predict(x[rows])
    assert part.rows == len(part) == 3
    assert part.source is whole.source
    assert torch.equal(part.x, x[rows])
    for quantity in ("mean", "variance", "aleatoric", "epistemic"):
        assert torch.equal(getattr(part, quantity), getattr(alone, quantity))
        torch.testing.assert_close(getattr(part, quantity), getattr(whole, quantity)[rows])
    torch.testing.assert_close(part.log_prob(y[rows]), whole.log_prob(y)[rows])
    mask = torch.tensor([True, False, False, True, False, True])
    torch.testing.assert_close(whole.subset(mask).mean, whole.mean[mask])


def test_source_and_inputs_are_read_only():
    p = make(*CASES["gaussian"]).predict(randn(6, 2, dtype=f64))
    for name in ("source", "x"):
        with pytest.raises(AttributeError):
            setattr(p, name, None)


class PerPixel(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("task", ["segmentation", "depth", "noisy depth"])
def test_per_pixel_outputs_decompose_pixel_by_pixel(task):
    x = randn(4, 1, 5, 6)
    y = (x[:, 0] > 0).long() if task == "segmentation" else x[:, 0]
    likelihood, channels = {
        "segmentation": (Categorical(axis=1), 3),
        "depth": (Gaussian(0.2, axis=1), 1),
        "noisy depth": (HeteroscedasticGaussian(axis=1), 2),
    }[task]
    problem = cr.Problem(PerPixel(channels), data=(x, y), likelihood=likelihood, prior=cr.priors.Normal())
    posterior = cr.DeepEnsemble(members=3, steps=30).fit(problem, seed=0)
    p = posterior.predict(x)
    assert p.mean.shape == ((4, 3, 5, 6) if task == "segmentation" else (4, 5, 6))
    assert p.aleatoric.shape == p.epistemic.shape == p.log_prob(y).shape == (4, 5, 6)
    assert p.sample(2).shape == (2, 4, 5, 6)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert p.ood_score("epistemic").shape == (4,)
    if task == "segmentation":
        assert p.probabilities.shape == (4, 5, 6, 3)
        assert p.prediction_set(0.9).shape == (4, 5, 6, 3)
        members = torch.stack([torch.softmax(posterior.module(m)(x), 1) for m in range(3)]).mean(0)
        torch.testing.assert_close(p.mean, members)
    else:
        assert p.interval(0.9)[0].shape == (4, 5, 6)


def test_ood_scores():
    p = make(Categorical(), 3, LABELS).predict(randn(5, 2, seed=3, dtype=f64))
    torch.testing.assert_close(p.ood_score("total"), p.total)
    torch.testing.assert_close(p.ood_score("epistemic"), p.epistemic)
    torch.testing.assert_close(p.ood_score("max_probability"), 1 - p.probabilities.max(-1).values)


def test_bad_requests_are_refused():
    real = make(Gaussian(0.4), 1, REAL).predict(randn(5, 2, dtype=f64))
    classes = make(Categorical(), 3, LABELS).predict(randn(5, 2, dtype=f64))
    with pytest.raises(cr.InputError, match=r"level must be strictly between 0 and 1, got 1\.5"):
        real.interval(1.5)
    with pytest.raises(cr.InputError, match=r"level must be strictly between 0 and 1, got \[\]"):
        real.quantile([])
    with pytest.raises(cr.InputError, match="prediction_set"):
        classes.interval(0.9)
    with pytest.raises(cr.InputError, match="prediction_set"):
        classes.cdf(torch.zeros(5))
    with pytest.raises(cr.InputError, match="probabilities: the likelihood is Gaussian"):
        real.prediction_set(0.9)
    with pytest.raises(cr.InputError, match="count must be a positive integer, got 0"):
        real.sample(0)
    with pytest.raises(cr.InputError, match=r"y must have shape \(5,\), got \(4,\)"):
        real.log_prob(torch.zeros(4))
    with pytest.raises(cr.InputError, match=r"y must have shape \(5,\), got \(5, 1\)"):
        real.log_prob(torch.zeros(5, 1))
    with pytest.raises(cr.InputError, match=r"y must have shape \(5,\), got \(4,\)"):
        classes.log_prob(torch.zeros(4))
    with pytest.raises(cr.InputError, match="y: has 1 values that are NaN"):
        real.log_prob(torch.tensor([0.0, 1.0, math.nan, 0.0, 0.0]))
    with pytest.raises(cr.InputError, match="kind must be one of 'total', 'epistemic', 'max_probability', got 'odd'"):
        classes.ood_score("odd")
