"""The level of predicted noise from held-out rows, against its closed form for one member."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.inference.training.predicted_noise import with_rescaled_noise
from credibly.inference.training.scale_outputs import scale_biases
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian, HeteroscedasticStudentT

X = randn(200, 3)
Y = X.sum(1) + 0.5 * randn(200, seed=1)


def problem(likelihood, net=None, **settings):
    return cr.Problem(net or mlp(3, 5, 2), data=(X, Y), likelihood=likelihood, prior=cr.priors.Normal(), **settings)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_factor_of_one_member_is_its_root_mean_squared_standardised_error(weighted):
    weight = torch.linspace(0.1, 3, 200) if weighted else torch.ones(200)
    p = problem(HeteroscedasticGaussian(), sample_weight=weight if weighted else None)
    theta = 0.3 * randn(1, p.dim, seed=2)
    moved, factor = with_rescaled_noise(p, theta, [(p, [0])])
    mean, log_square = p.forward(theta, X)[0].chunk(2, -1)
    z = (Y.unsqueeze(1) - mean) / torch.exp(0.5 * log_square)
    exact = math.sqrt(float((weight * z.square()[:, 0]).sum() / weight.sum()))
    assert factor == pytest.approx(exact, rel=0.003)
    after = p.forward(moved, X)[0]
    torch.testing.assert_close(after[:, :1], mean)
    torch.testing.assert_close(after[:, 1:], log_square + 2 * math.log(factor))


def test_a_mixture_is_scored_by_the_members_that_have_not_seen_the_rows():
    p = problem(HeteroscedasticStudentT(df=5.0, floor=0.1))
    theta = 0.3 * randn(3, p.dim, seed=2)
    parts = [(p.subset(torch.arange(100)), [0]), (p.subset(torch.arange(100, 200)), [1, 2])]
    place = scale_biases(p, theta[:1])
    _, factor = with_rescaled_noise(p, theta, parts)

    def density(log_factor):
        moved = theta.clone()
        moved[:, place] += 2 * log_factor
        total = 0.0
        for part, members in parts:
            output = p.forward(moved[members], part.x).double()
            rows = p.likelihood.log_prob(output, part.y.double(), {})
            total += float((torch.logsumexp(rows, 0) - math.log(len(members))).sum())
        return total

    grid = torch.linspace(-1, 2, 601).tolist()
    assert math.log(factor) == pytest.approx(max(grid, key=density), abs=0.0051)


class Doubled(nn.Module):
    """A network whose last biases reach the outputs twice as strongly."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(3, 5, 2)

    def forward(self, x):
        return 2 * self.inner(x)


def test_other_networks_and_likelihoods_stay_as_they_are():
    cases = [
        problem(Gaussian(), mlp(3, 5, 1)),
        problem(HeteroscedasticGaussian(), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))),
        problem(HeteroscedasticGaussian(), Doubled()),
    ]
    for p in cases:
        theta = 0.3 * randn(2, p.dim, seed=2)
        moved, factor = with_rescaled_noise(p, theta, [(p, [0, 1])])
        assert factor is None
        assert moved is theta


def test_fits_use_it_with_noise_from_held_out_rows():
    p = problem(HeteroscedasticGaussian())
    common = {"epochs": 30, "validation": 0.2, "batch_size": 40, "noise_from": "held-out"}
    for method in (cr.DeepEnsemble(members=4, **common), cr.MAP(**common)):
        plain = type(method)(**{**vars(method), "noise_from": "training"})
        with_level, without = (m.fit(p, seed=0, progress=False) for m in (method, plain))
        factor = with_level.record.history["noise_factor"]
        assert "noise_factor" not in without.record.history
        moved = with_level.draws.flatten(0, 1) - without.draws.flatten(0, 1)
        expected = torch.zeros_like(moved)
        expected[:, scale_biases(p, moved[:1])] = 2 * math.log(factor)
        torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-4)
