"""Real parameters that are viewed as complex numbers, wherever they lie in the flat vector."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from tests.networks.module_cases import QUICK

X, Y = randn(8, 8), randn(8, seed=1)


class Filter(nn.Module):
    """A filter of frequencies, after `before` other parameters."""

    def __init__(self, before):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(before))
        self.filter = nn.Parameter(randn(5, 2, seed=2))
        self.head = nn.Linear(8, 1)
        nn.init.ones_(self.head.weight)

    def forward(self, x):
        frequencies = torch.fft.rfft(x + self.shift.sum()) * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(frequencies, n=8))


def problem(before, **kwargs):
    return cr.Problem(Filter(before), (X, Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0), **kwargs)


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("plan", ["batched", "looped"])
def test_the_density_is_that_of_the_network(before, plan):
    made = problem(before, plan=plan)
    theta = randn(3, made.dim)
    for row, found in zip(theta, made.log_density_and_grad(theta).log_density, strict=True):
        residual = made.layout.write(row)(X).squeeze(1).detach() - Y
        want = -0.5 * (residual / 0.5).square().sum() - 0.5 * row.square().sum()
        constant = -8 * torch.tensor(0.5).log() - 0.5 * (8 + made.dim) * torch.tensor(2 * torch.pi).log()
        torch.testing.assert_close(found.float(), want + constant, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", QUICK)
def test_every_method_at_an_odd_offset(method, tmp_path):
    made = problem(3)
    settings = {**QUICK[method], **({"insert": "head"} if method == "dropout" else {})}
    posterior = cr.METHODS[method](**settings).fit(made, seed=0, progress=False)
    posterior.save(tmp_path / "run")
    same = cr.load(tmp_path / "run", Filter(3))
    assert torch.equal(same.predict(X).mean, posterior.predict(X).mean)


def test_other_parameters_stay_views():
    assert problem(3).layout.apart == {"filter"}
    plain = cr.Problem(nn.Linear(2, 1), (X[:, :2], Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    assert plain.layout.apart == set()
