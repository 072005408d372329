"""Predictives with given outputs, and simulated repetitions: every target is a calibration set of its own.

Scores and ranks are per target, so R targets of the same rows are R independent repetitions through the real code.
"""

import math

import torch

import credibly as cr


class FixedSource:
    """Outputs (S, N, ..., K) by row; the inputs are row numbers."""

    def __init__(self, outputs, likelihood):
        self.values, self.likelihood, self.count = outputs, likelihood, len(outputs)

    def outputs(self, x, start, stop, first_row=0):
        return self.values[start:stop, x[:, 0].long()]

    def extra(self, start, stop):
        return {}

    def row_width(self):
        return self.values[:1, :1].numel()


def gaussian(mean, std):
    """Mixtures of Gaussians over draws; mean and std (S, N) or (S, N, K) that broadcast against each other."""
    mean, std = torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(std))
    squeeze = mean.ndim == 2
    parts = [part.unsqueeze(-1) if squeeze else part for part in (mean, 2 * std.log())]
    likelihood = cr.likelihoods.HeteroscedasticGaussian(squeeze=squeeze)
    return predictive(torch.cat(parts, -1).double(), likelihood)


def labels(probabilities):
    """Probabilities (N, ..., K) of one draw."""
    p = probabilities.double().unsqueeze(0)
    return predictive(p.log(), cr.likelihoods.Categorical(classes=p.shape[-1]))


def predictive(outputs, likelihood):
    rows = torch.arange(outputs.shape[1], dtype=torch.float64).unsqueeze(1)
    return cr.Predictive(FixedSource(outputs, likelihood), rows)


def coverage_error(rows, rank, tests, repetitions):
    """Standard error of the mean coverage: per repetition `tests` trials whose probability is Beta(k, n + 1 - k)."""
    p = rank / (rows + 1)
    of_beta = p * (1 - p) / (rows + 2)
    return math.sqrt((of_beta + (p * (1 - p) - of_beta) / tests) / repetitions)


def stream(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, generator=stream(seed), dtype=torch.float64)
