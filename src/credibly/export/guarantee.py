"""Intervals with a coverage guarantee inside a graph: split conformal and CV+ from stored calibration scores.

The interval of a calibration row with score r is [Q(-r), Q(r)], where Q interpolates the quantiles of the predictive at
fixed nodes (see `credibly.conformal.bands`). r is a constant of the graph, so an end is a fixed linear combination of
the quantiles at the nodes and of the two slopes beyond them: one matrix product gives all ends, and CV+ takes the m-th
smallest or largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credibly.conformal.bands import DRAWS, LEAST_SLOPE, NODES
from credibly.conformal.calibration import Calibration
from credibly.conformal.predictive import FARTHEST
from credibly.conformal.ranks import rank, threshold
from credibly.export.quantiles import Fit, graph_quantiles
from credibly.likelihoods import Likelihood


def draw_stride(draws: int) -> int:
    """Return the stride between the draws whose quantiles are used for intervals."""
    return -(-draws // DRAWS)


class GuaranteeGraph(nn.Module):
    """Bounds (rows, targets) at each level, from the outputs of one or several fits.

    Args:
        calibration: scores of kind "pit", (n,) or (n, targets).
        likelihood: of the target in its own units.
        levels: the coverages promised.
        targets: number of targets.
    """

    def __init__(
        self, calibration: Calibration, likelihood: Likelihood, levels: Sequence[float], targets: int = 1
    ) -> None:
        super().__init__()
        self.likelihood, self.levels, self.targets = likelihood, tuple(levels), targets
        scores = calibration.scores.reshape(calibration.rows, -1)
        self.folds = max(1, calibration.folds)
        self.crossed = calibration.folds > 0
        self.counts = [calibration.rows + 1 - rank(calibration.rows, level) for level in self.levels]
        nodes = torch.tensor(NODES, dtype=torch.float64)
        self.probabilities: list[float] = torch.special.ndtr(nodes).tolist()
        for target in range(targets):
            for fold in range(self.folds):
                own = scores[:, target]
                if calibration.fold is not None:
                    own = own[calibration.fold == fold]
                else:
                    own = torch.stack([threshold(own, level) for level in self.levels])
                for sign, side in ((-1, "lower"), (1, "upper")):
                    self.register_buffer(f"{side}_{target}_{fold}", _weights(sign * own, nodes))

    def forward(self, fits: Sequence[Fit]) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds, (levels, rows, targets) each, in float64."""
        features = self._features(fits)
        lower = torch.stack([self._ends(features, "lower", t) for t in range(self.targets)], -1)
        upper = torch.stack([self._ends(features, "upper", t) for t in range(self.targets)], -1)
        increasing = self.likelihood.increasing()
        if increasing is not None:
            low, high = increasing[1](
                torch.tensor([[-FARTHEST], [FARTHEST]], dtype=torch.float64).expand(2, self.targets)
            )
            lower = torch.maximum(lower, low.nan_to_num(-math.inf))
            upper = torch.minimum(upper, high.nan_to_num(math.inf))
        middle, crossed = 0.5 * (lower + upper), lower > upper
        return torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)

    def _features(self, fits: Sequence[Fit]) -> list[Tensor]:
        """Return the quantiles at the nodes and the slopes beyond them of each fit, (nodes + 2, rows, targets)."""
        q = graph_quantiles(self.likelihood, fits, self.probabilities)
        # Quantiles are found one by one to rounding, which may swap close ones; ONNX has no running maximum.
        ordered = [q[0]]
        for value in q[1:]:
            ordered.append(torch.maximum(ordered[-1], value))
        q = torch.stack(ordered)
        least, middle = LEAST_SLOPE * (1 + q.abs().amax(0)), len(NODES) // 2
        slopes = []
        for near, end in ((1, 0), (-2, -1)):
            steps = [(q[other] - q[end]) / (NODES[other] - NODES[end]) for other in (near, middle)]
            slopes.append(torch.maximum(torch.maximum(steps[0], steps[1]), least))
        return list(torch.cat([q, torch.stack(slopes)]).unbind(1))

    def _ends(self, features: Sequence[Tensor], side: str, target: int) -> Tensor:
        """Return the ends of one target on one side, (levels, rows)."""
        parts = [getattr(self, f"{side}_{target}_{k}") @ f[:, :, target] for k, f in enumerate(features)]
        if not self.crossed:
            return torch.as_tensor(parts[0])
        ends: Tensor = torch.cat(parts).mT
        return torch.stack([torch.topk(ends, count, largest=side == "upper").values[:, -1] for count in self.counts])


def thinned(fit: Fit) -> Fit:
    """Return the outputs and own parameters of the draws that intervals use."""
    output, extra = fit
    step = draw_stride(len(output))
    return output[::step], {name: value[::step] for name, value in extra.items()}


def _weights(t: Tensor, nodes: Tensor) -> Tensor:
    """Return the weights (n, nodes + 2) that turn quantiles at the nodes and the slopes beyond them into Q(t)."""
    found = torch.zeros(len(t), len(nodes) + 2, dtype=torch.float64)
    for row, value in enumerate(t.tolist()):
        place = int((nodes < value).sum())
        if place == 0:
            found[row, 0], found[row, len(nodes)] = 1, value - float(nodes[0])
        elif place == len(nodes):
            found[row, place - 1], found[row, -1] = 1, value - float(nodes[-1])
        else:
            part = (value - float(nodes[place - 1])) / float(nodes[place] - nodes[place - 1])
            found[row, place - 1], found[row, place] = 1 - part, part
    return found
