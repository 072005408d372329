"""The prior on a learned noise scale follows the units of y; standardised targets have the prior they always had."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.likelihoods import Gaussian, StudentT
from credibly.likelihoods.continuous import STANDARD
from credibly.problem import Problem

DOUBLE = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(30, 2, generator=GENERATOR, dtype=DOUBLE)
Y = X @ torch.tensor([[0.8], [-0.5]], dtype=DOUBLE) + 0.5 * torch.randn(30, 1, generator=GENERATOR, dtype=DOUBLE)


def problem(y=Y, likelihood=None, scale=1.0, x=X, **options):
    net = nn.Linear(x.shape[1], y.shape[1], bias=False).to(DOUBLE)
    return Problem(net, (x, y), likelihood or Gaussian(), cr.priors.Normal(scale), **options)


def noise_estimate(p, scale):
    """Return E[log noise | y] of the linear model by quadrature: the weights are integrated out in closed form."""
    eigenvalues, basis = torch.linalg.eigh(scale**2 * p.x @ p.x.T)
    squares = (basis.T @ p.y).square().squeeze(1)
    log_noise = math.log(scale) + torch.linspace(-6, 4, 4001, dtype=DOUBLE)
    variance = eigenvalues + log_noise.mul(2).exp().unsqueeze(1)
    theta = torch.zeros(len(log_noise), p.dim, dtype=DOUBLE)
    theta[:, -1] = log_noise
    weight = torch.softmax(p.prior.log_prob(theta) - 0.5 * (variance.log() + squares / variance).sum(1), 0)
    return float((weight * log_noise).sum())


@pytest.mark.parametrize("scale", [1e3, 1e-3, 1e-6, 2.54])
def test_the_noise_in_units_of_y_does_not_depend_on_them(scale):
    """The priors of the weights are scaled with y. The prior N(-1, 1) moved the estimate by 11 %, 15 % and 41 %."""
    known = math.exp(noise_estimate(problem(), 1.0))
    assert known == pytest.approx(0.5, rel=0.2)
    found = math.exp(noise_estimate(problem(scale * Y, scale=scale), scale)) / scale
    assert found == pytest.approx(known, rel=2e-4)


def test_standardised_targets_have_the_prior_of_the_unit_scale():
    for y in ((Y - Y.mean()) / Y.std(correction=0), Y.new_ones(30, 1), ((Y - Y.mean()) / Y.std(correction=0)).float()):
        net = nn.Linear(2, 1, bias=False).to(y.dtype)
        p = Problem(net, (X.to(y.dtype), y), Gaussian(), cr.priors.Normal())
        assert p.likelihood.scale_prior == STANDARD
        assert float(p.prior.loc[-1]) == -1.0
    assert problem(likelihood=Gaussian(0.3)).likelihood.scale_prior is None


def test_a_given_prior_is_kept():
    given = cr.priors.StudentT(3.0, 0.5, 0.2)
    assert problem(1e6 * Y, Gaussian(scale_prior=given)).likelihood.scale_prior == given


def test_every_target_has_its_own_units(tmp_path):
    y = torch.cat([Y * 1e-4, Y, Y * 1e4], 1)
    p = problem(y, Gaussian(per_target=True))
    base = round(float(Y.std(correction=0).log()), 2)
    expected = torch.tensor([base - 1 + round(k * math.log(10), 2) for k in (-4, 0, 4)], dtype=DOUBLE)
    torch.testing.assert_close(p.prior.loc[-3:], expected, rtol=0, atol=0.011)
    start = cr.MAP(steps=1, lr=1e-6).fit(p, progress=False)
    torch.testing.assert_close(start.draws[0, 0, -3:], expected, rtol=0, atol=0.02)
    start.save(tmp_path / "run")
    assert cr.load(tmp_path / "run", p.layout.module).likelihood == p.likelihood
    # Targets that share a scale share its prior: the geometric mean of their standard deviations.
    shared = problem(y, StudentT())
    assert float(shared.prior.loc[-1]) == pytest.approx(base - 1, abs=0.011)


def test_weights_of_rows_weigh_the_standard_deviation():
    counts = torch.arange(30) % 4
    rows = torch.arange(30).repeat_interleave(counts)
    weighted, repeated = problem(100 * Y, sample_weight=counts), problem(100 * Y[rows], x=X[rows])
    assert weighted.likelihood == repeated.likelihood


def test_several_priors_need_several_scales():
    with pytest.raises(cr.InputError, match="scale_prior must be one prior unless per_target=True"):
        Gaussian(scale_prior=(STANDARD, STANDARD))
    with pytest.raises(cr.InputError, match="scale_prior: has 2 priors for 1 targets"):
        problem(likelihood=Gaussian(scale_prior=(STANDARD, STANDARD), per_target=True))
