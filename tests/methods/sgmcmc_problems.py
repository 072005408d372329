"""A small problem and a short call, shared by the tests of SGLD and SGHMC."""

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian

DOUBLE = torch.float64
BOTH = pytest.mark.parametrize("method", [cr.SGLD, cr.SGHMC])


def fit(method, target, *, seed=0, **kwargs):
    return method(**{"compile": False, **kwargs}).fit(target, seed=seed)


X, Y = randn(24, 3, dtype=DOUBLE), randn(24, seed=1, dtype=DOUBLE)


def problem(net=None, **kwargs):
    net = net or mlp(3, 5, 1, dtype=DOUBLE)
    return cr.Problem(net, data=(X, Y), likelihood=Gaussian(0.5), prior=cr.priors.Normal(), **kwargs)


SHORT = {"chains": 4, "draws": 5, "warmup": 10, "thin": 3, "batch_size": 8, "step_size": 2e-3, "init": "prior"}
