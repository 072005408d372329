"""The data set of the tests of streams.

It is in a module that imports no other module of the tests. Where workers of a data loader are not forked, as on Linux
from Python 3.14 on, they import it by name, and may find another `conftest` than the tests do.
"""

import random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rows(Dataset):
    """Rows whose first input is their index; `noise` augments the others."""

    def __init__(self, n=20, noise=0.0, source="torch"):
        self.x = torch.cat([torch.arange(n).unsqueeze(1).float(), normals(n, 2, seed=0)], 1)
        self.y, self.noise, self.source = normals(n, 1, seed=1), noise, source

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i].clone()
        if self.noise:
            draws = {
                "torch": lambda: float(torch.randn(())),
                "numpy": lambda: float(np.random.randn()),
                "python": lambda: random.gauss(0, 1),
            }
            x[1:] += self.noise * draws[self.source]()
        return x, self.y[i]
