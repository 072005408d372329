"""Nested intervals from the quantiles of a predictive, indexed by a generalised z-score.

For each row, Q(t) is the predictive quantile at probability Phi(t), computed at a few nodes t and linear between them.
Outside of the nodes it continues with the slope of the last segment, so every real y has an index, and an interval is
infinite only if the predictive's scale overflows. The interval of index t is

    [Q(-t), Q(t)],        and the score of y is the smallest t whose interval contains it.

Between the nodes this is the score |F(y | x) - 1/2| of distributional conformal prediction (Chernozhukov, Wuethrich and
Zhu 2021) on another scale, F being the predictive CDF. For a Gaussian predictive the score is |y - mean| / std, far
outside of the nodes too, where F itself rounds to 0 or 1. Widths stay adaptive: an interval that covers too little is
stretched in proportion to the width of the predictive.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.predictive.quantiles import mixture_quantiles

# Symmetric around the median. Predictives are close to Gaussian, whose quantiles are linear in t.
NODES = (-3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
# Number of evenly spaced draws behind the quantiles: each contributes a whole distribution, so more change little.
DRAWS = 256
# Smallest slope of Q outside of the nodes, relative to its values: a predictive without any width has an index too.
LEAST_SLOPE = 1e-9
# Stands for the infinite quantiles of a predictive whose scale overflows: indices and slopes stay finite.
OVERFLOW = 1e100


class Bands:
    """Quantiles of N rows at nodes t (G,) or, where the nodes differ between rows, (G, N, ...).

    Args:
        nodes: increasing; the middle one is the median.
        values: Q at the nodes, (G, N, ...), in float64.
    """

    def __init__(self, nodes: Tensor, values: Tensor) -> None:
        self.values = values
        self.nodes = nodes.reshape(-1, *[1] * (values.ndim - 1)).expand_as(values) if nodes.ndim == 1 else nodes

    @classmethod
    def of(cls, predictive: Predictive) -> Bands:
        """Return the bands of a predictive, on the CPU."""
        nodes = torch.tensor(NODES, dtype=torch.float64)
        values = _quantiles(predictive, torch.special.ndtr(nodes).tolist()).double().cpu().clamp(-OVERFLOW, OVERFLOW)
        # Quantiles are found one by one to rounding, which may swap close ones.
        return cls(nodes, values.cummax(0).values)

    def rows(self, chosen: Tensor) -> Bands:
        """Return the bands of some rows."""
        return Bands(self.nodes[:, chosen], self.values[:, chosen])

    def flat(self) -> Bands:
        """Return the bands with all targets and pixels on one axis, (G, N, E)."""
        shape = (*self.values.shape[:2], -1)
        return Bands(self.nodes.reshape(shape), self.values.reshape(shape))

    def mirrored(self) -> Bands:
        """Return the bands of -y, whose `upper_index` at -y is minus `lower_index` at y."""
        return Bands(-self.nodes.flip(0), -self.values.flip(0))

    def at(self, t: Tensor | float) -> Tensor:
        """Return Q(t), (N, ...); t broadcasts against that shape."""
        wanted = torch.as_tensor(t, dtype=torch.float64).expand(self.values.shape[1:])
        return _interpolate(wanted, self.nodes, self.values, 1 / self._slopes[0], 1 / self._slopes[1])

    def upper_index(self, y: Tensor) -> Tensor:
        """Return the smallest t with Q(t) >= y."""
        return _interpolate(y, self.values, self.nodes, *self._slopes)

    def lower_index(self, y: Tensor) -> Tensor:
        """Return the largest t with Q(t) <= y."""
        return -self.mirrored().upper_index(-y)

    def score(self, y: Tensor) -> Tensor:
        """Return the smallest t >= 0 with Q(-t) <= y <= Q(t), in the shape of y."""
        return torch.maximum(self.upper_index(y), -self.lower_index(y)).clamp_min(0)

    @cached_property
    def _slopes(self) -> tuple[Tensor, Tensor]:
        """dQ/dt below and above the nodes: that of the last segment, at least the mean slope from the median on."""
        q, t, middle = self.values, self.nodes, len(self.values) // 2
        least = LEAST_SLOPE * (1 + q.abs().amax(0))
        below = torch.maximum(_ratio(q[1] - q[0], t[1] - t[0]), _ratio(q[middle] - q[0], t[middle] - t[0]))
        above = torch.maximum(_ratio(q[-1] - q[-2], t[-1] - t[-2]), _ratio(q[-1] - q[middle], t[-1] - t[middle]))
        return torch.maximum(below, least), torch.maximum(above, least)


def _quantiles(predictive: Predictive, levels: list[float]) -> Tensor:
    """Return quantiles (levels, N, ...) of at most `DRAWS` draws."""
    if predictive.draws <= DRAWS or isinstance(predictive, JoinedPredictive):
        return predictive.quantile(levels)
    step = -(-predictive.draws // DRAWS)

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        some = {name: value[::step] for name, value in extra.items()}
        return mixture_quantiles(predictive.likelihood, output[::step], some, levels)

    result = torch.cat(list(predictive.map_blocks(block)), 1)
    return torch.stack([predictive.likelihood.restore(quantile) for quantile in result])


def _ratio(rise: Tensor, run: Tensor) -> Tensor:
    """Return rise / run, and 0 where the nodes coincide."""
    return torch.where(run > 0, rise / torch.where(run > 0, run, 1.0), 0.0)


def _interpolate(point: Tensor, known: Tensor, values: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return the smallest value at which the increasing function through (known, values) reaches `point`.

    `known` and `values` are (G, N, ...), `point` (N, ...). Outside, `known` rises by `below` and `above` per value.
    """
    place = (known < point).sum(0)
    right = place.clamp(1, len(known) - 1).unsqueeze(0)
    x0, x1 = known.gather(0, right - 1)[0], known.gather(0, right)[0]
    y0, y1 = values.gather(0, right - 1)[0], values.gather(0, right)[0]
    inside = y0 + (y1 - y0) * _ratio(point - x0, x1 - x0)
    low, high = values[0] + (point - known[0]) / below, values[-1] + (point - known[-1]) / above
    return torch.where(place == 0, low, torch.where(place == len(known), high, inside))
