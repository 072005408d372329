"""Bayes by Backprop on MNIST: the images, the settings of a fit, the fits and their metrics."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import credibly as cr

PIXELS = 126.0  # divisor of the pixels, as published
BATCH = 128
VALIDATION = 10_000  # the last rows of the training set
FRACTIONS = (0.0, 0.5, 0.75, 0.95, 0.98)


# -- data --------------------------------------------------------------------------------------------------------------
class Images(NamedTuple):
    """Pixels (N, 784) divided by 126 and labels (N,), on the device."""

    x: Tensor
    y: Tensor

    def rows(self, start: int, stop: int) -> Images:
        return Images(self.x[start:stop], self.y[start:stop])


def load(root: Path, device: torch.device) -> tuple[Images, Images]:
    """Return the training and test images."""
    path = root / "mnist.npz"
    form = "x_train (60000, 28, 28) uint8, y_train (60000,), x_test (10000, 28, 28) uint8, y_test (10000,)"
    if not path.is_file():
        sys.exit(f"{path} was not found. --root must be a folder with mnist.npz, an npz file with {form}")
    with np.load(path, allow_pickle=False) as arrays:
        missing = {"x_train", "y_train", "x_test", "y_test"} - set(arrays.files)
        if missing:
            sys.exit(f"{path} lacks {', '.join(sorted(missing))}; it must have {form}")
        parts = []
        for part, rows in (("train", 60_000), ("test", 10_000)):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if x.shape != (rows, 28, 28) or x.dtype != np.uint8 or y.shape != (rows,):
                sys.exit(f"{path}: x_{part} is {x.shape} {x.dtype} and y_{part} is {y.shape}; it must have {form}")
            pixels = torch.from_numpy(x.reshape(rows, 784)).to(device).float() / PIXELS
            parts.append(Images(pixels, torch.from_numpy(y.astype(np.int64)).to(device)))
    return parts[0], parts[1]


# -- fits --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    """Settings of one Bayes by Backprop fit."""

    prior: str
    pi: float
    scale1: float
    scale2: float
    optimiser: str
    momentum: float
    lr: float
    samples: int
    estimator: str
    kl_weights: str
    kl_warmup: float  # fraction of the steps
    init_scale: float

    def prior_density(self) -> cr.priors.Prior:
        if self.prior == "normal":
            return cr.priors.Normal(self.scale1)
        return cr.priors.ScaleMixture(pi=self.pi, scale1=self.scale1, scale2=self.scale2)

    def __str__(self) -> str:
        scales = f"N(0, {self.scale1:.3g}^2)"
        if self.prior == "mixture":
            scales = f"{self.pi:g} {scales} + {1 - self.pi:g} N(0, {self.scale2:.3g}^2)"
        return (
            f"{scales}, {self.optimiser} {self.lr:g} (momentum {self.momentum:g}), {self.samples} x {self.estimator}, "
            f"KL {self.kl_weights} (warm-up {self.kl_warmup:g}), sigma from {self.init_scale:g}"
        )


def problem_of(train: Images, units: int, prior: cr.priors.Prior) -> cr.Problem:
    net = nn.Sequential(nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 10))
    return cr.Problem(
        net, (train.x, train.y), likelihood=cr.likelihoods.Categorical(), prior=prior, device=train.x.device
    )


def fit_bbb(train: Images, settings: Settings, epochs: int, args: argparse.Namespace) -> cr.GaussianPosterior:
    steps = epochs * (len(train.y) // BATCH)
    method = cr.BayesByBackprop(
        epochs=epochs,
        batch_size=BATCH,
        optimiser=settings.optimiser,
        momentum=settings.momentum,
        lr=settings.lr,
        schedule=args.schedule,
        samples=settings.samples,
        estimator=settings.estimator,
        kl_weights=settings.kl_weights,
        kl_warmup=min(steps - 1, round(settings.kl_warmup * steps)),
        init="fresh",
        init_scale=settings.init_scale,
        compile=args.compile,
    )
    return method.fit(problem_of(train, args.units, settings.prior_density()), seed=args.seed, progress=args.progress)


def fit_baseline(train: Images, name: str, args: argparse.Namespace) -> cr.DrawsPosterior:
    """Fit the same network by SGD with momentum: maximum likelihood, or MAP under N(0, 1)."""
    method = (cr.MAP if name == "MAP" else cr.MLE)(
        epochs=args.baseline_epochs,
        batch_size=BATCH,
        optimiser="sgd",
        momentum=0.9,
        lr=args.baseline_lr,
        init="fresh",
        compile=args.compile,
    )
    return method.fit(problem_of(train, args.units, cr.priors.Normal(1.0)), seed=args.seed, progress=args.progress)


# -- metrics -----------------------------------------------------------------------------------------------------------
def evaluate(predictive: cr.Predictive, y: Tensor) -> dict[str, float]:
    """Return the error in %, the negative log likelihood per row and the expected calibration error."""
    found = cr.evaluate(predictive, y)
    return {"error": 100 * (1 - found["accuracy"]), "nll": -found["log_density"], "ece": found["ece"]}


def at_mean(posterior: cr.GaussianPosterior) -> cr.DrawsPosterior:
    """Return the mean weights as a posterior of one draw."""
    return cr.DrawsPosterior(posterior.model, posterior.loc.unsqueeze(1), posterior.record)


def measure(posterior: cr.GaussianPosterior, images: Images, args: argparse.Namespace) -> dict[str, Any]:
    average = posterior.predict(images.x, draws=args.draws, seed=args.seed)
    found: dict[str, Any] = evaluate(average, images.y)
    found["mean_weights"] = evaluate(at_mean(posterior).predict(images.x), images.y)
    return found


def prune(posterior: cr.GaussianPosterior, images: Images, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the metrics with the least certain weights removed, by fraction removed."""
    lines = []
    for fraction in FRACTIONS:
        kept = posterior.prune(fraction) if fraction else posterior
        left = int((kept.loc != 0).sum())
        lines.append({"removed": fraction, "weights_left": left, **measure(kept, images, args)})
    return lines


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
