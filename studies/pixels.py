"""A small per-pixel regression task from real images: predict a second noisy copy of an image from a first one.

Digits are downsampled to 14 x 14 pixels. The network sees one noisy copy and a ramp that encodes the column of a pixel;
it predicts the mean and the log-variance of every pixel of another noisy copy. The standard deviation of the noise
grows from the left column to the right one and is a lower bound of the aleatoric part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from credibly.core.rng import global_stream, stream
from credibly.errors import InputError
from credibly.likelihoods import HeteroscedasticGaussian
from credibly.posterior.base import Posterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.study import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 14
LEAST, MOST = 0.05, 0.3  # standard deviation of the noise in the leftmost and the rightmost column
CHANNELS, PRIOR = 16, 2.0
HERE = "mnist"
FAR = {"fashion": "fashion_mnist_test.npz", "kmnist": "kmnist_test.npz"}
FILES = ("mnist.npz", *FAR.values())


class Pair(NamedTuple):
    """Inputs (N, 2, 14, 14): a noisy copy and the ramp; targets (N, 1, 14, 14): another copy; and clean images."""

    x: Tensor
    y: Tensor
    clean: Tensor


def read(options: Options) -> dict[str, Tensor]:
    """Return the raw images (N, H, W): the training images as "train", test images by data set."""
    wanted = {"train": (FILES[0], "x_train"), HERE: (FILES[0], "x_test")} | {k: (v, "x_test") for k, v in FAR.items()}
    found = {}
    for name, (file, key) in wanted.items():
        with np.load(options.file(file), allow_pickle=False) as archive:
            if key not in archive.files:
                raise InputError(
                    "--root", f"{file} has no {key}", f"It contains {', '.join(archive.files) or 'nothing'}"
                )
            found[name] = torch.from_numpy(archive[key])
    return found


def small(raw: Tensor) -> Tensor:
    """Downsample images to (N, 1, 14, 14) in [0, 1]."""
    whole = raw.unsqueeze(1).float() / 255
    return nn.functional.avg_pool2d(whole, whole.shape[-1] // SIDE)


def noise_levels() -> Tensor:
    """Return the standard deviation of the noise per column, (14,)."""
    return torch.linspace(LEAST, MOST, SIDE)


def noisy(clean: Tensor, seed: int, purpose: str) -> Pair:
    """Return two copies with independent noise, and the ramp."""
    one, two = (
        clean + noise_levels() * torch.randn(clean.shape, generator=stream(seed, f"pixel noise: {purpose}", copy))
        for copy in (0, 1)
    )
    ramp = torch.linspace(-0.5, 0.5, SIDE).expand_as(clean)
    return Pair(torch.cat([one, ramp], 1), two, clean)


def pairs(raw: dict[str, Tensor], seed: int, most: int, test: int) -> tuple[Pair, dict[str, Pair]]:
    """Return `most` training pairs in an order fixed by the seed, and test pairs of every data set."""
    order = torch.randperm(len(raw["train"]), generator=stream(seed, "pixel rows"))[:most]
    places = {name: noisy(small(found[:test]), seed, name) for name, found in raw.items() if name != "train"}
    return noisy(small(raw["train"][order]), seed, "train"), places


def problem_of(train: Pair, size: int, seed: int, device: str) -> Problem:
    """Return the problem of the first `size` pairs: three convolutions predict mean and log-variance per pixel."""
    with global_stream(seed, "study network"):
        net = nn.Sequential(
            nn.Conv2d(2, CHANNELS, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(CHANNELS, 2, 3, padding=1),
        )
    data, prior = (train.x[:size], train.y[:size]), Normal(PRIOR, fan_in=True)
    return Problem(net.to(device), data=data, likelihood=HeteroscedasticGaussian(axis=1), prior=prior)


def maps(posterior: Posterior, places: dict[str, Pair], method: str) -> Picture:
    """Draw the input, the mean and both standard deviations per pixel, for one image of each data set."""
    titles = ("input", "mean", "aleatoric sd", "epistemic sd")

    def paint(axes: list[Axes]) -> None:
        rows = []
        for name, pair in places.items():
            p = posterior.predict(pair.x[:1])
            parts = (pair.x[0, 0], p.mean[0, 0], p.aleatoric[0, 0].sqrt(), p.epistemic[0, 0].sqrt())
            rows.append((name, [part.detach().cpu().numpy() for part in parts]))
        most = [max(float(arrays[i].max()) for _, arrays in rows) for i in range(4)]
        for r, (name, arrays) in enumerate(rows):
            for c, (title, part) in enumerate(zip(titles, arrays)):
                axis = axes[4 * r + c]
                low, high = (-0.3, 1.3) if c < 2 else (0.0, most[c])
                look = "gray" if c < 2 else "magma"
                image = axis.imshow(part, cmap=look, vmin=low, vmax=high, interpolation="none")
                axis.set(xticks=[], yticks=[], title=title if r == 0 else "", ylabel=name if c == 0 else "")
                if r == len(rows) - 1 and c >= 2:
                    axis.figure.colorbar(image, ax=[axes[4 * k + c] for k in range(len(rows))], shrink=0.6)

    return side.panels(
        "pixels",
        paint,
        rows=len(places),
        columns=4,
        size=(8.2, 1.9 * len(places) + 0.5),
        shared=False,
        legend=0,
        alt="Maps of aleatoric and epistemic standard deviation for a digit, a piece of clothing and a Japanese "
        "character",
        caption=f"One image per data set, predicted by the {side.label(method)} trained on all digits of the study. "
        f"Noise grows from left to right (standard deviation {LEAST} to {MOST}); epistemic uncertainty is at features "
        "that digits do not have.",
    )


__all__ = ["FAR", "FILES", "HERE", "Pair", "maps", "noise_levels", "pairs", "problem_of", "read"]
