"""Masses from draws and gradients: exact on Gaussians, robust against chains that are elsewhere."""

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.gaussians.mass import CorrelatedMass
from credibly.inference import mass_estimates
from credibly.inference.mass_estimates import far_chains, geometric_mean, spectral_estimate
from credibly.inference.sampling.mass import layer_blocks
from credibly.networks.layout import Layout

DOUBLE = torch.float64


def covariance(dim, seed=0):
    """Eigenvalues over four orders of magnitude, in directions of no coordinate."""
    vectors = torch.linalg.qr(randn(dim, dim, seed=seed, dtype=DOUBLE)).Q
    return (vectors * torch.logspace(-3, 1, dim, dtype=DOUBLE)) @ vectors.mT


def condition(sigma, scale, factors):
    """Return the condition number of the density in the coordinates of the mass: 1 if it is right."""
    mass = CorrelatedMass(scale, tuple(factors))
    root = mass.momentum(torch.eye(len(scale), dtype=DOUBLE))
    values = torch.linalg.eigvalsh(root @ sigma @ root.mT)
    return float(values[-1] / values[0])


def test_the_geometric_mean_solves_its_equation():
    x, g = covariance(6), covariance(6, seed=1)
    found = geometric_mean(x, g)
    torch.testing.assert_close(found @ g @ found, x)
    torch.testing.assert_close(found, found.mT)


@pytest.mark.parametrize("reach, most", [(1.0, 1.5), (0.05, 1.001)], ids=["everywhere", "in a corner"])
def test_a_gaussian_is_found_wherever_the_draws_are(reach, most, monkeypatch):
    """The draws cover a fraction of the density; their gradients tell the rest.

    Where they cover all of it, their own variances, which 20 draws of a chain know to about 30 %, may be larger.
    """
    monkeypatch.setattr(mass_estimates, "MORE_DRAWS", 1e-9)
    monkeypatch.setattr(mass_estimates, "CUTOFF", 1.0)
    dim, sigma = 12, covariance(12)
    draws = reach * randn(3, 20, dim, dtype=DOUBLE) @ torch.linalg.cholesky(sigma).mT + 5
    gradients = -(draws - 1) @ torch.linalg.inv(sigma)
    found = spectral_estimate(draws, gradients, torch.ones(dim), dim)
    assert condition(sigma, *found) < most


@pytest.mark.parametrize("rank, most", [(1, 7000), (12, 500), (30, 6)])
def test_more_eigenvectors_leave_less(rank, most):
    """30 dimensions with a condition number of 10,000; the cutoff leaves a factor of four."""
    dim, sigma = 30, covariance(30)
    draws = randn(4, 100, dim, dtype=DOUBLE) @ torch.linalg.cholesky(sigma).mT
    found = spectral_estimate(draws, -draws @ torch.linalg.inv(sigma), torch.ones(dim), rank)
    assert condition(sigma, *found) < most
    assert len(found[1][0].values) <= rank


def test_fewer_draws_than_coordinates_give_the_directions_that_they_show():
    """Three wide directions among 200 coordinates from 60 draws: found in the space that these span."""
    dim = 200
    wide = torch.linalg.qr(randn(dim, 3, dtype=DOUBLE)).Q
    root = torch.eye(dim, dtype=DOUBLE) + 29 * wide @ wide.mT
    sigma = root @ root
    draws = randn(4, 15, dim, dtype=DOUBLE) @ root
    found = spectral_estimate(draws, -draws @ torch.linalg.inv(sigma), torch.ones(dim), 10)
    assert condition(sigma, torch.ones(dim, dtype=DOUBLE), ()) == pytest.approx(900)
    # Scales of coordinates alone make it worse.
    assert condition(sigma, found[0], ()) > 900
    assert condition(sigma, *found) < 100


def test_coordinates_that_do_not_move_keep_the_scale_of_the_prior():
    draws, gradients = randn(2, 20, 3, dtype=DOUBLE), -randn(2, 20, 3, dtype=DOUBLE)
    draws[..., 1] = 4.0
    otherwise = torch.tensor([7.0, 7.0, 7.0], dtype=DOUBLE)
    scale, factors = spectral_estimate(draws, gradients, otherwise, 3)
    assert scale[1] / scale[0] == pytest.approx(7.0, rel=0.1)
    assert factors == []


def test_one_chain_cannot_decide_for_the_others():
    """A chain on its way from far away crosses a part of the density that is flat: wide steps, small gradients."""
    dim, sigma = 8, covariance(8)
    precision = torch.linalg.inv(sigma)
    draws = randn(4, 50, dim, dtype=DOUBLE) @ torch.linalg.cholesky(sigma).mT
    gradients = -draws @ precision
    clean = condition(sigma, *spectral_estimate(draws, gradients, torch.ones(dim), dim))
    draws[2] = 1e3 * randn(50, dim, seed=3, dtype=DOUBLE).cumsum(0)
    gradients[2] = 1e-3 * randn(50, dim, seed=4, dtype=DOUBLE)
    robust = condition(sigma, *spectral_estimate(draws, gradients, torch.ones(dim), dim))
    assert clean < 5
    assert robust < 100
    pooled = draws - draws.mean(1, keepdim=True), gradients - gradients.mean(1, keepdim=True)
    together = [part.reshape(1, -1, dim) for part in pooled]
    naive = condition(sigma, *spectral_estimate(*together, torch.ones(dim), dim))
    assert naive > 5 * robust


def test_far_chains_are_those_whose_density_is_far_below():
    dim = 50
    usual = [-100.0, -105.0, -95.0, -98.0]
    assert not bool(far_chains(torch.tensor(usual, dtype=DOUBLE), dim).any())
    assert far_chains(torch.tensor([*usual, -900.0], dtype=DOUBLE), dim).tolist() == [False] * 4 + [True]
    # One that is better than the others is no reason to leave it out, and of two neither is known to be wrong.
    assert not bool(far_chains(torch.tensor([*usual, 900.0], dtype=DOUBLE), dim).any())
    assert not bool(far_chains(torch.tensor([0.0, -1e6], dtype=DOUBLE), dim).any())


def test_blocks_are_layers_with_their_biases():
    layout = Layout(mlp(3, 5, 2), extra={"likelihood.log_scale": (2,)})
    blocks = layer_blocks(layout, 7)
    assert [(b.start, b.size, b.rank) for b in blocks] == [(0, 20, 20), (20, 12, 12), (32, 2, 2)]
    large = layer_blocks(Layout(cr.zoo.mlp(30, (40,), 1)), 7)
    assert [(b.start, b.size, b.rank) for b in large] == [(0, 1240, 7), (1240, 41, 41)]
