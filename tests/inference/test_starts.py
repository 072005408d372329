"""Starting points of chains on a plain density."""

import pytest
import torch

import credibly as cr
from credibly.inference.sampling.starts import starts


def half_plane(theta):
    return torch.where(theta[0] > 0, -theta.square().sum() / 2, -torch.inf)


def test_random_starts_outside_the_support_are_drawn_again():
    everywhere = starts(cr.Density(lambda theta: -theta.square().sum() / 2, 2), "prior", 8, 0, False)
    inside = starts(cr.Density(half_plane, 2), "prior", 8, 0, False)
    kept = everywhere[:, 0] > 0
    assert 0 < int(kept.sum()) < 8
    assert torch.equal(inside[kept], everywhere[kept])
    assert bool((inside[:, 0] > 0).all())
    assert len(inside.unique(dim=0)) == 8


def test_a_density_without_support_is_refused():
    nowhere = cr.Density(lambda theta: theta.sum() * 0 - torch.inf, 2)
    with pytest.raises(cr.InputError, match="-inf at the starting point of chain 0"):
        cr.HMC(warmup=30, draws=10).fit(nowhere, seed=0, progress=False)
