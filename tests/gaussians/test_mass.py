"""Inverse masses: products against dense matrices, storage, and the covariances of Gaussian posteriors."""

import pytest
import torch

from conftest import randn
from credibly.gaussians.block_precisions import Blocks, Kronecker
from credibly.gaussians.mass import (
    CorrelatedMass,
    Factor,
    covariance_mass,
    fresh_momentum,
    mass_of_tensors,
    mass_tensors,
    most_extreme,
    velocity,
)
from credibly.gaussians.precisions import Dense, Diagonal, LowRankPlusDiagonal

DOUBLE = torch.float64
DIM = 9


def orthonormal(rows, columns, seed=0):
    return torch.linalg.qr(randn(rows, columns, seed=seed, dtype=DOUBLE)).Q


def correlated():
    """Factors on coordinates 1 to 4 and 5 to 8; coordinate 0 has none."""
    values = torch.tensor([20.0, 0.05], dtype=DOUBLE)
    factors = (Factor(1, orthonormal(4, 2), values), Factor(5, orthonormal(4, 1, seed=1), values[:1]))
    return CorrelatedMass(torch.linspace(0.1, 3, DIM, dtype=DOUBLE), factors)


def dense(mass):
    inner = torch.eye(DIM, dtype=DOUBLE)
    for start, vectors, values in mass.factors:
        own = slice(start, start + len(vectors))
        inner[own, own] += (vectors * (values - 1)) @ vectors.mT
    return mass.scale[:, None] * inner * mass.scale


def test_velocity_and_momentum_are_products_with_dense_matrices():
    mass = correlated()
    inverse, vector = dense(mass), randn(5, DIM, dtype=DOUBLE)
    torch.testing.assert_close(mass.matrix(), inverse)
    torch.testing.assert_close(velocity(vector, mass), vector @ inverse)
    torch.testing.assert_close(mass.diagonal(), inverse.diagonal())
    # The square root R of M has R R' = M.
    root = fresh_momentum(torch.eye(DIM, dtype=DOUBLE), mass)
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(inverse))


def test_a_chain_does_not_depend_on_those_beside_it():
    mass, vector = correlated().to(torch.device("cpu"), torch.float32), randn(7, DIM)
    for function in (velocity, fresh_momentum):
        together = function(vector, mass)
        for c in range(7):
            assert torch.equal(function(vector[c : c + 1], mass)[0], together[c])


def test_padding_changes_nothing_but_the_shape():
    mass = correlated()
    padded = mass.padded(8)
    assert [tuple(f.vectors.shape) for f in padded.factors] == [(4, 8), (4, 8)]
    torch.testing.assert_close(padded.matrix(), mass.matrix(), rtol=1e-14, atol=1e-14)
    assert (mass.rank, mass.padded(1).rank) == (3, 3)


@pytest.mark.parametrize("mass", [None, torch.linspace(1, 2, DIM), correlated()], ids=["identity", "diagonal", "full"])
def test_tensors_restore_it(mass):
    again = mass_of_tensors(mass_tensors(mass), torch.device("cpu"))
    vector = randn(3, DIM, dtype=DOUBLE)
    assert torch.equal(velocity(vector, again), velocity(vector, mass))


def test_covariances_of_all_structures_are_exact():
    factor = randn(DIM, 2, dtype=DOUBLE)
    std = torch.linspace(0.5, 2, DIM, dtype=DOUBLE)
    kronecker = Kronecker(
        orthonormal(3, 3), orthonormal(2, 2), torch.linspace(0.1, 9, 6, dtype=DOUBLE).reshape(3, 2), std[:2]
    )
    root = torch.linalg.cholesky(torch.diag(std) + factor @ factor.mT)
    small = Dense.of_root(root[:3, :3].contiguous())
    # The blocks' coordinates are interleaved.
    order = torch.tensor([8, 1, 4, 0, 2, 3, 5, 6, 7])
    for precision in (
        Diagonal(std),
        LowRankPlusDiagonal.of(std, factor),
        Dense.of_root(root),
        kronecker,
        Blocks(small, kronecker, indices=order),
    ):
        mass = covariance_mass(precision)
        found = torch.diag(mass) if isinstance(mass, torch.Tensor) else mass.matrix()
        torch.testing.assert_close(found, torch.linalg.inv(precision.matrix()))


def test_the_most_extreme_eigenvalues_are_kept_and_the_others_are_the_median():
    vectors, values = orthonormal(DIM, DIM), torch.ones(DIM, dtype=DOUBLE) * 3
    values[0], values[1], values[2] = 300.0, 0.3, 4.0
    scale, factors = most_extreme(torch.ones(DIM, dtype=DOUBLE), vectors, values, 2, cutoff=2.0)
    torch.testing.assert_close(scale, torch.full((DIM,), 3**0.5, dtype=DOUBLE))
    assert sorted(factors[0].values.tolist()) == pytest.approx([0.1, 100.0])
    kept = values.clone()
    kept[2] = 3.0
    torch.testing.assert_close(CorrelatedMass(scale, tuple(factors)).matrix(), (vectors * kept) @ vectors.mT)
    assert most_extreme(scale, vectors, torch.full_like(values, 7.0), 2, cutoff=2.0)[1] == []
