"""Quantiles of mixtures: Halley's method and bracketing agree, in any shape."""

import pytest
import torch

from conftest import randn
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian, HeteroscedasticStudentT, StudentT
from credibly.predictive import quantiles

LEVELS = (0.001, 0.05, 0.5, 0.95, 0.999)


# At 0.999 a CDF in float32 is accurate to 6e-8, and the density there is 3e-3: 4e-5 for the two methods together.
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 4e-5)])
@pytest.mark.parametrize(
    "spread", [0.0, pytest.param(0.1, marks=pytest.mark.nightly), 3.0]
)  # std of the components' locations, in units of their scale
@pytest.mark.parametrize(
    "likelihood, width",
    [
        (Gaussian(0.2), 1),
        (Gaussian((0.1, 2.0)), 2),
        (StudentT(0.2, df=3.0), 1),
        (HeteroscedasticGaussian(), 2),
        (HeteroscedasticStudentT(), 2),
    ],
)
def test_halley_and_bracketing_agree(likelihood, width, spread, dtype, close):
    output = 0.2 * spread * randn(50, 7, width, dtype=dtype) + randn(1, 7, width, dtype=dtype)
    halley = quantiles._by_halley(likelihood, output, {}, LEVELS)
    bracketing = quantiles._by_bracketing(likelihood, output, {}, LEVELS)
    mean, variance = likelihood.moments(output, {})
    std = (variance.mean(0) + mean.var(0, correction=0)).sqrt()
    assert halley.shape == bracketing.shape
    assert float(((halley - bracketing).abs() / std).max()) < close


def test_blocks_of_rows_give_the_same_quantiles(monkeypatch):
    output, extra = randn(20, 30, 1, dtype=torch.float64), {"log_scale": 0.1 * randn(20, dtype=torch.float64)}
    whole = quantiles.mixture_quantiles(Gaussian(), output, extra, LEVELS)
    monkeypatch.setattr(quantiles, "BLOCK_VALUES", 60)
    again = quantiles.mixture_quantiles(Gaussian(), output, extra, LEVELS)
    assert torch.allclose(again, whole, rtol=0, atol=1e-11)  # a block stops when all its rows have converged


def test_rows_that_do_not_converge_fall_back_to_bracketing():
    """Two narrow components far apart: the density between them, by which a step divides, vanishes."""
    output = torch.tensor([[[-100.0]], [[100.0]], [[100.0]]], dtype=torch.float64)
    found = quantiles.mixture_quantiles(Gaussian(0.01), output, {}, (0.2, 0.5))
    expected = [
        -100 + 0.01 * float(torch.special.ndtri(torch.tensor(0.6, dtype=torch.float64))),
        100 + 0.01 * float(torch.special.ndtri(torch.tensor(0.25, dtype=torch.float64))),
    ]
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-8)


def test_a_scale_that_overflows_puts_half_of_its_probability_at_either_infinity():
    """exp(200) is infinite in float32: of four components two are N(0, 1), so a quarter is at either end."""
    output = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 200.0], [5.0, 200.0]]).unsqueeze(1)
    found = quantiles.mixture_quantiles(HeteroscedasticGaussian(floor=0.1), output, {}, (0.05, 0.3, 0.5, 0.7, 0.95))
    scale = (0.1**2 + 1) ** 0.5
    tail = scale * float(torch.special.ndtri(torch.tensor(0.9, dtype=torch.float64)))
    assert found.flatten().tolist() == pytest.approx([-torch.inf, -tail, 0.0, tail, torch.inf], abs=1e-6)
