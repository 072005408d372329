"""Kinetic and configurational temperature of SG-MCMC: 1 on the posterior, more with gradient noise."""

import math

import pytest
import torch

import credibly as cr
from conftest import randn

SETTINGS = {"chains": 64, "draws": 40, "warmup": 300, "thin": 20, "compile": False}


@pytest.mark.parametrize("method, size", [(cr.SGHMC, 0.3), (cr.SGLD, 0.09)])
def test_full_batches_have_the_temperature_of_the_posterior(method, size):
    # Weights near the prior's mean: the error of the configurational temperature grows with their distance from it.
    x, y = randn(40, 4, dtype=torch.float64), 0.5 * randn(40, seed=1, dtype=torch.float64)
    net = torch.nn.Linear(4, 1, bias=False).double()
    problem = cr.Problem(net, (x, y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    precision = x.T @ x / 0.25 + torch.eye(4)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    start = mean + randn(64, 4, seed=2, dtype=mean.dtype) @ torch.linalg.cholesky(torch.linalg.inv(precision)).T
    stiffest = float(torch.linalg.eigvalsh(precision)[-1])
    step = size / math.sqrt(stiffest) if method is cr.SGHMC else size / stiffest
    momentum = {"momentum": 0.8} if method is cr.SGHMC else {}
    posterior = method(step_size=step, init=start, **momentum, **SETTINGS).fit(problem, seed=0)
    found = {k: torch.tensor(v) for k, v in posterior.record.history["temperature"].items()}
    assert set(found) == ({"kinetic", "configurational"} if method is cr.SGHMC else {"configurational"})
    for values in found.values():
        # Chains are independent, so their spread gives the error of the mean; momenta at a step of h omega = 0.3 are
        # cooler by up to a fourth of its square.
        error = float(values.std()) / 8
        assert error < 0.05
        assert float((values.mean() - 1).abs()) < 4 * error + 0.03


def test_a_step_that_is_too_large_for_its_batch_is_seen():
    """With noise of known variance V in the gradients the kinetic temperature is 1 + h V / (2 friction)."""
    x = randn(400, 1, dtype=torch.float64)
    net = torch.nn.Linear(1, 1, bias=False).double()
    y = 2 * x[:, 0] + 0.5 * randn(400, seed=1, dtype=torch.float64)
    problem = cr.Problem(net, (x, y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    precision = float((x**2).sum() / 0.25 + 1)
    mode = float((x[:, 0] * y).sum() / 0.25 / precision)
    slopes = x[:, 0] * (y - mode * x[:, 0]) / 0.25
    size, kept = 0.3 / math.sqrt(precision), 0.9
    noise = 400**2 / 8 * (1 - 8 / 400) * float(slopes.var())
    method = cr.SGHMC(step_size=size, momentum=kept, batch_size=8, init=torch.full((64, 1), mode), **SETTINGS)
    posterior = method.fit(problem, seed=0)
    kinetic = torch.tensor(posterior.record.history["temperature"]["kinetic"])
    expected = 1 + size * noise / (2 * -math.log(kept) / size)
    # The formula is for small steps: h omega = 0.3 changes it by a few per cent.
    assert expected > 1.3
    assert float(kinetic.mean()) == pytest.approx(expected, rel=0.2)
    assert "too hot" in posterior.diagnostics().verdict
