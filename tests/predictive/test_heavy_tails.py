"""Student-t noise without a variance or a mean: right intervals, an infinite variance, and nothing undefined."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import credibly as cr
from credibly.likelihoods import Likelihood, StudentT
from credibly.likelihoods.base import IndependentTargets
from credibly.metrics.evaluation import evaluate
from credibly.predictive import Predictive
from credibly.predictive.quantiles import mixture_quantiles
from credibly.predictive.rescaling import in_units
from credibly.report.uncertainty import uncertainty_section
from tabular import facts_of

f64 = torch.float64
DF = [0.5, 1.0, 1.5, 2.0, 2.0001, 2.5, 3.0]
LEVELS = (0.001, 0.05, 0.5, 0.95, 0.999)


@dataclasses.dataclass
class Outputs:
    """Draws given by their outputs (S, rows, 1)."""

    likelihood: Likelihood
    values: torch.Tensor

    @property
    def count(self):
        return len(self.values)

    def outputs(self, x, start, stop, first_row=0):
        return self.values[start:stop, x[:, 0].long()]

    def extra(self, start, stop):
        return {}

    def row_width(self):
        return 1


def predictive(df, values, scale=1.0):
    rows = torch.arange(values.shape[1], dtype=values.dtype)[:, None]
    return Predictive(Outputs(StudentT(scale, df=df, squeeze=True), values), rows)


@pytest.mark.parametrize("dtype, close", [(f64, 1e-10), (torch.float32, 2e-6)])
@pytest.mark.parametrize("df", DF)
def test_quantiles_of_one_component(df, dtype, close):
    p = predictive(df, torch.zeros(1, 3, 1, dtype=dtype), scale=2.0)
    expected = torch.from_numpy(2 * stats.t(df).ppf(LEVELS))[:, None].expand(5, 3)
    torch.testing.assert_close(p.quantile(LEVELS).double(), expected, rtol=close, atol=close)
    lower, upper = p.interval(0.9)
    assert float(upper[0]) == pytest.approx(2 * stats.t(df).ppf(0.95), rel=1e-5)
    assert float(lower[0]) == pytest.approx(-float(upper[0]), rel=1e-5)


@pytest.mark.parametrize("df", DF)
def test_quantiles_of_a_mixture(df):
    """Against a root of scipy's CDFs, for components far apart, close together, and equal."""
    loc = np.array([[-30.0, 0.1, 2.0], [0.0, 0.0, 2.0], [5.0, -0.1, 2.0], [200.0, 0.3, 2.0]])
    p = predictive(df, torch.from_numpy(loc)[..., None], scale=0.5)
    found = p.quantile(LEVELS).numpy()
    for i, level in enumerate(LEVELS):
        for row in range(3):
            ends = loc[:, row] + 0.5 * stats.t(df).ppf(level)
            low, high = ends.min() - 1e-3, ends.max() + 1e-3

            def excess(y, row=row, level=level):
                return stats.t(df).cdf((y - loc[:, row]) / 0.5).mean() - level

            expected = optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-14)
            assert found[i, row] == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("df", [0.5, 1.0, 1.5, 2.0])
def test_an_infinite_variance_is_stated(df):
    values = torch.randn(50, 4, 1, generator=torch.Generator().manual_seed(0), dtype=f64)
    p = predictive(df, values)
    for part in (p.variance, p.std, p.total, p.aleatoric):
        assert bool(part.isposinf().all())
    torch.testing.assert_close(p.mean, values[..., 0].mean(0))
    torch.testing.assert_close(p.epistemic, values[..., 0].var(0, correction=0))
    assert bool((predictive(df, values[:1]).epistemic == 0).all())
    units = in_units(p, 10.0, 3.0)
    torch.testing.assert_close(units.epistemic, 9 * p.epistemic)
    torch.testing.assert_close(units.interval(0.9)[1], 10 + 3 * p.interval(0.9)[1])
    metrics = evaluate(p, torch.zeros(4, dtype=f64))
    assert not any(math.isnan(value) for value in metrics.values())


def test_pages_and_pictures_survive_an_infinite_variance():
    facts = facts_of("wave", "map")
    values = torch.randn(20, len(facts.y), 1, generator=torch.Generator().manual_seed(0), dtype=f64)
    p = predictive(1.5, values)
    section = uncertainty_section(dataclasses.replace(facts, predictive=p))
    assert section.findings[0].startswith("The noise has infinite variance")
    x = torch.arange(len(facts.y), dtype=f64)
    axes = cr.plot.bands(p, x)
    assert np.isfinite(axes.get_ylim()).all()
    cr.plot.uncertainty_parts(p).figure.canvas.draw()
    assert np.isfinite(np.asarray(cr.plot.predicted_observed(p, facts.y).get_ylim())).all()


def test_a_likelihood_without_moments_of_its_own():
    """Cauchy noise that reports neither mean nor variance."""

    class Cauchy(IndependentTargets):
        support = "real"

        def log_prob(self, output, y, extra):
            return -torch.log(math.pi * (1 + (y - output).square())).sum(-1)

        def moments(self, output, extra):
            return torch.full_like(output, math.nan), torch.full_like(output, math.inf)

        def entropy(self, output, extra):
            return torch.full_like(output, math.log(4 * math.pi))

        def sample(self, output, extra, generator):
            raise NotImplementedError

        def cdf(self, output, value, extra):
            return 0.5 + torch.atan(value - output) / math.pi

    output = torch.tensor([100.0, -3.0], dtype=f64).reshape(1, 2, 1)
    found = mixture_quantiles(Cauchy(), output, {}, LEVELS)[..., 0]
    expected = output[:, :, 0] + torch.from_numpy(stats.cauchy.ppf(LEVELS))[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
