"""Networks for tables: periodic embeddings of numeric columns (Gorishniy et al. 2022) and a multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.checks import check_integer, check_positive, is_integer
from credibly.errors import InputError
from credibly.networks.zoo import mlp


class PeriodicEmbedding(nn.Module):
    """Embed numeric columns by sines and cosines, so that a network can follow steep and wavy effects.

    Each of the given columns x_j becomes `width` units relu(W_j [cos(2 pi c x_j), sin(2 pi c x_j)] + b_j), which are
    appended to the inputs. The frequencies c are fixed: quantiles of a half-normal distribution. Inputs are clipped
    first, since a network that extrapolates to an absurd outlier may be certain of an absurd prediction.

    Args:
        inputs: number of inputs.
        columns: indices of the columns to embed.
        frequencies: number of frequencies per column.
        width: units per column.
        scale: standard deviation of the frequencies, in cycles per unit of a standardised column.
        limit: inputs are clipped to this distance from 0.
    """

    def __init__(
        self,
        inputs: int,
        columns: Sequence[int],
        frequencies: int = 16,
        width: int = 8,
        scale: float = 0.1,
        limit: float = 8.0,
    ) -> None:
        super().__init__()
        for name, value in (("inputs", inputs), ("frequencies", frequencies), ("width", width)):
            check_integer(name, value)
        check_positive("scale", scale)
        check_positive("limit", limit)
        columns = list(columns)
        if not columns or not all(is_integer(c) and 0 <= c < inputs for c in columns):
            raise InputError("columns", f"must be indices from 0 to {inputs - 1}, at least one, got {columns!r}")
        self.inputs, self.columns, self.frequencies = inputs, columns, frequencies
        self.width, self.scale, self.limit = width, scale, limit
        # A row per unit, so that its fan-in is that of its own column.
        self.weight = nn.Parameter(torch.empty(len(columns) * width, 2 * frequencies))
        self.bias = nn.Parameter(torch.empty(len(columns) * width))
        normal = NormalDist(0, scale)
        self.frequency = [normal.inv_cdf(0.5 + (k + 0.5) / (2 * frequencies)) for k in range(frequencies)]
        self.reset_parameters()

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.inputs + len(self.columns) * self.width

    def reset_parameters(self) -> None:
        """Draw initial values: weights of variance 1 / fan-in, and small biases."""
        bound = (2 * self.frequencies) ** -0.5
        nn.init.uniform_(self.weight, -math.sqrt(3) * bound, math.sqrt(3) * bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def waves(self, x: Tensor) -> Tensor:
        """Return cosines and sines of the columns, (N, columns, 2 frequencies)."""
        angles = 2 * math.pi * x[..., self.columns].unsqueeze(-1) * x.new_tensor(self.frequency)
        return torch.cat([angles.cos(), angles.sin()], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs with the embedded columns appended, (N, outputs)."""
        x = x.clamp(-self.limit, self.limit)
        weight = self.weight.reshape(len(self.columns), self.width, 2 * self.frequencies)
        embedded = torch.einsum("...ck,cwk->...cw", self.waves(x), weight).flatten(-2) + self.bias
        return torch.cat([x, F.relu(embedded)], -1)


def tabular_mlp(
    inputs: int,
    hidden: int | Sequence[int] = (256, 256),
    outputs: int = 1,
    activation: str = "relu",
    *,
    embedded: Sequence[int] = (),
) -> nn.Sequential:
    """Return a multilayer perceptron, (N, inputs) -> (N, outputs), with periodic embeddings of the given columns."""
    if not len(embedded):
        return mlp(inputs, hidden, outputs, activation)
    embedding = PeriodicEmbedding(inputs, embedded)
    return nn.Sequential(embedding, *mlp(embedding.outputs, hidden, outputs, activation))
