"""Seven rows with targets of every kind, shared by the tests of curvature and of scores."""

import torch

from conftest import randn
from credibly.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Poisson,
    StudentT,
)

DOUBLE = torch.float64
X = randn(7, 3, dtype=DOUBLE)
REAL = randn(7, seed=1, dtype=DOUBLE) + 0.4
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2, 2])
# likelihood, outputs of the network, targets
CASES = {
    "two targets": (Gaussian((0.3, 0.7)), 2, torch.stack([REAL, REAL**2], 1)),
    "learned noise": (Gaussian(), 1, REAL),
    "student": (StudentT(0.4, df=3.0), 1, REAL),
    "heteroscedastic": (HeteroscedasticGaussian(), 2, REAL),
    "heteroscedastic student": (HeteroscedasticStudentT(df=5.0, floor=0.1), 2, REAL),
    "bernoulli": (Bernoulli(), 1, (REAL > 0).long()),
    "poisson": (Poisson(), 1, REAL.exp().round()),
    "categorical": (Categorical(), 3, CLASSES),
}
