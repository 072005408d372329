"""The struct of an inverse mass for C++."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.backends.cpp import api
from credibly.gaussians.mass import CorrelatedMass, InverseMass

# Ranks are padded to multiples of this, which equals RANK_MULTIPLE in api.h.
RANK_MULTIPLE = 16


class MassStructs:
    """The struct of the last inverse mass, with the tensors that it points at: a mass serves many calls."""

    def __init__(self) -> None:
        self._mass: InverseMass = None
        self._struct = api.InverseMass()
        self._kept: tuple[Tensor, ...] = ()

    def of(self, inverse_mass: InverseMass) -> api.InverseMass:
        """Return the struct of an inverse mass in the dtype of the network, on the CPU."""
        if not isinstance(inverse_mass, CorrelatedMass):
            return api.InverseMass(diagonal=api.address(inverse_mass))
        if inverse_mass is not self._mass:
            scale, factors = inverse_mass.padded(RANK_MULTIPLE)
            vectors = torch.cat([factor.vectors.flatten() for factor in factors])
            gain = torch.cat([factor.values - 1 for factor in factors])
            sizes = ((f.start for f in factors), (len(f.vectors) for f in factors), (len(f.values) for f in factors))
            start, rows, rank = ((api.Int * len(factors))(*column) for column in sizes)
            self._mass, self._kept = inverse_mass, (scale.contiguous(), vectors, gain)
            scales, columns, gains = (api.address(tensor) for tensor in self._kept)
            self._struct = api.InverseMass(
                scale=scales,
                factors=len(factors),
                start=start,
                rows=rows,
                rank=rank,
                vectors=columns,
                gain=gains,
            )
        return self._struct
