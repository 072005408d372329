"""Draws of a linearised network whose output covariance is singular."""

import torch

from conftest import randn
from credibly.posterior.linearised import _root


def test_the_root_of_a_singular_covariance_does_not_depend_on_its_rounding():
    """The rounding of a row's covariance depends on the other rows of a block, and its draws must not."""
    jacobian = randn(200, 6, 4)
    covariance = jacobian @ jacobian.mT
    rounded = covariance * (1 + 1e-7 * randn(200, 6, 6, seed=1))
    first, second = _root(covariance), _root(rounded)
    size = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt().reshape(-1, 1, 1)
    assert float(((first - second) / size).abs().max()) < 5e-3
    torch.testing.assert_close(first @ first.mT, covariance, rtol=0, atol=3e-5 * float(size.square().max()))


def test_the_root_of_a_regular_covariance_is_exact():
    jacobian = randn(20, 3, 9, dtype=torch.float64)
    covariance = jacobian @ jacobian.mT
    torch.testing.assert_close(_root(covariance), torch.linalg.cholesky(covariance), rtol=1e-14, atol=0)
    assert float(_root(torch.zeros(2, 3, 3)).abs().max()) == 0
