"""Compare the scores of conformal intervals: width and interval score at the same promised coverage.

    python -m benchmarks.conformal_scores

Data with known noise, and models of it from correct to badly wrong. Each cell is an average over 20 calibration sets
of 200 rows. The interval score (Gneiting and Raftery 2007) is the width plus 2 / (1 - level) times the distance by
which y lies outside; lower is better. "worst third" is the coverage in the third of the rows where it is lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import credibly as cr
from credibly.conformal import CalibratedPredictive, Settings, calibrate

ROWS, NEW, REPETITIONS = 200, 500, 20
SCORES = ("pit", "cqr")


class Given:
    """Means and log variances (1, N, 2) by row number."""

    def __init__(self, outputs: Tensor) -> None:
        self.values, self.count = outputs, 1
        self.likelihood = cr.likelihoods.HeteroscedasticGaussian(squeeze=True)

    def outputs(self, x: Tensor, start: int, stop: int, first_row: int = 0) -> Tensor:
        return self.values[start:stop, x[:, 0].long()]

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return {}

    def row_width(self) -> int:
        return 2


def predictive(mean: Tensor, std: Tensor) -> cr.Predictive:
    outputs = torch.stack([mean, 2 * std.expand_as(mean).log()], -1).unsqueeze(0)
    return cr.Predictive(Given(outputs), torch.arange(len(mean), dtype=torch.float64).unsqueeze(1))


def heavy(z: Tensor, generator: torch.Generator) -> Tensor:
    """Sample Student-t noise with 3 degrees of freedom."""
    chi = torch.randn(3, *z.shape, generator=generator, dtype=z.dtype).square().mean(0)
    return z / chi.sqrt()


def skewed(z: Tensor, generator: torch.Generator) -> Tensor:
    """Sample centred log-normal noise."""
    return z.exp() - 1.65


def plain(z: Tensor, generator: torch.Generator) -> Tensor:
    return z


# Noise scale by x, shape of the noise; the model's bias, and its std given x.
Noise = Callable[[Tensor, torch.Generator], Tensor]
WORLDS: dict[str, tuple[Callable[[Tensor], Tensor], Noise, float, Callable[[Tensor], Tensor]]] = {
    "right": (lambda x: 0.2 + x, plain, 0.0, lambda x: 0.2 + x),
    "three times too narrow": (lambda x: 0.2 + x, plain, 0.0, lambda x: (0.2 + x) / 3),
    "ten times too narrow, mean off": (lambda x: 0.2 + x, plain, 0.5, lambda x: (0.2 + x) / 10),
    "three times too wide": (lambda x: 0.2 + x, plain, 0.0, lambda x: 3 * (0.2 + x)),
    "constant noise for varying": (lambda x: 0.2 + x, plain, 0.0, lambda x: 0 * x + 0.8),
    "varying noise for constant": (lambda x: 0 * x + 1, plain, 0.0, lambda x: 0.2 + x),
    "half of the variation": (lambda x: 0.2 + x, plain, 0.0, lambda x: 0.5 + 0.5 * x),
    "Gaussian for heavy tails": (lambda x: 0.2 + x, heavy, 0.0, lambda x: 0.2 + x),
    "Gaussian for skewed noise": (lambda x: 0.2 + x, skewed, 0.0, lambda x: 0.2 + x),
}


def data(world: str, rows: int, seed: int) -> tuple[cr.Predictive, Tensor, Tensor]:
    scale, shape, bias, std = WORLDS[world]
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(rows, generator=generator, dtype=torch.float64)
    z = shape(torch.randn(rows, generator=generator, dtype=torch.float64), generator)
    return predictive(torch.sin(3 * x) + bias, std(x)), torch.sin(3 * x) + scale(x) * z, x


def measured(level: float) -> Iterator[tuple[str, list[float]]]:
    for world in WORLDS:
        sums = torch.zeros(len(SCORES), 4, dtype=torch.float64)
        for seed in range(REPETITIONS):
            p, y, _ = data(world, ROWS, 2 * seed)
            new, y_new, x = data(world, NEW, 2 * seed + 1)
            for place, score in enumerate(SCORES):
                lower, upper = CalibratedPredictive(new, calibrate(p, y, settings=Settings(score))).interval(level)
                outside = (lower - y_new).clamp_min(0) + (y_new - upper).clamp_min(0)
                covered = (outside == 0).double()
                worst = min(float(part.mean()) for part in covered[x.argsort()].chunk(3))
                loss = float((upper - lower + 2 / (1 - level) * outside).mean())
                row = (float(covered.mean()), float((upper - lower).mean()), loss, worst)
                sums[place] += torch.tensor(row, dtype=torch.float64) / REPETITIONS
        yield world, sums.T.flatten().tolist()


if __name__ == "__main__":
    for level in (0.5, 0.9):
        print(f"\nlevel {level}: coverage, width, interval score and coverage of the worst third, each for {SCORES}")
        for world, numbers in measured(level):
            print(f"{world:32}" + "  ".join(f"{value:6.3f}" for value in numbers))
