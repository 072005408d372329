"""Shared parts of the HMC studies: tasks, evaluation of fits, paired differences over repeats, and pictures.

There are two kinds of tasks. Tables: data sets of the UCI benchmark with their standard splits, one hidden layer of 50
units, learned noise. Images: MNIST downsampled to a few pixels, a few hundred training images per repeat (disjoint
subsets of the training set), one small hidden layer. All networks have SiLU activations and the prior N(0, scale^2 /
fan-in). The scales were fixed in advance: 2 for tables; 5 for images, chosen on images 50,000 to 52,000 of the training
set, which no study uses.

Differences are paired over repeats (splits, or subsets of the training set). A difference is called significant if it
exceeds two standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.core.rng import global_stream
from credibly.core.threads import cores, torch_threads
from credibly.core.threads import one_thread as one_thread
from credibly.data import uci
from credibly.errors import InputError
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods import HMC
from credibly.networks.zoo import mlp
from credibly.posterior.draws import DrawsPosterior
from credibly.predictive.base import Predictive
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.report.pictures import Picture, picture
from studies.study import Options, mean_error, plus_minus

TABLE_SCALE, IMAGE_SCALE = 2.0, 5.0
SOURCE = "Izmailov et al. 2021, What are Bayesian neural network posteriors really like?"
SMALLER = (
    "Published: ResNet-20-FRN on 40,960 CIFAR-10 images with 70,248 leapfrog steps per trajectory. Here networks have "
    "about a thousand weights and trajectories some hundred steps, so only the direction of the effects is comparable."
)
MNIST = "mnist.npz"
OUTCOMES = {True: "Reproduced", False: "Not reproduced", None: "Inconclusive"}
LAST_ROW = 50_000  # training images from here on were used to choose the prior scale

Cells = Mapping[str, Mapping[str, Sequence[float]]]  # setting -> measure -> one value per repeat
Estimate = tuple[float, float]  # a mean over repeats and its standard error


@dataclass(frozen=True, eq=False)
class Task:
    """A training and test set, with the network and prior that every method uses.

    Attributes:
        group: the data set that repeats are averaged over, such as "boston".
        repeat: the index of the split or subset.
        scale: the prior scale, before division by the square root of the fan-in.
        y_std: the standard deviation of a table's target, to report densities in its units; 1 for labels.
        mean, std: of the training images' pixels; inputs are (pixels - mean) / std.
    """

    group: str
    repeat: int
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    labels: bool
    hidden: int
    scale: float
    seed: int
    y_std: float = 1.0
    device: str = "cpu"
    mean: Tensor | float = 0.0
    std: Tensor | float = 1.0

    def pixels(self, x: Tensor) -> Tensor:
        """Return the inputs for pixels (N, P) between 0 and 1."""
        return (x - self.mean) / self.std

    def problem(self, scale: float | None = None, temperature: float = 1.0, rows: Tensor | None = None) -> Problem:
        """Return the problem, optionally with only the given training rows."""
        with global_stream(self.seed, "study network", self.repeat):
            net = mlp(self.x.shape[1], (self.hidden,), 10 if self.labels else 1)
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        return Problem(
            net,
            data=(x, y),
            likelihood=Categorical() if self.labels else Gaussian("learned"),
            prior=Normal(scale or self.scale, fan_in=True),
            temperature=temperature,
            device=self.device,
        )

    def judge(self, predictive: Predictive, y: Tensor | None = None) -> dict[str, float]:
        """Return the mean log density per test row in the units of the data, and the accuracy or RMSE."""
        target = (self.y_test if y is None else y).to(predictive.mean.device)
        found = {"log_density": float(predictive.log_prob(target).double().mean()) - math.log(self.y_std)}
        if self.labels:
            right = predictive.probabilities.argmax(-1) == target
            return found | {"accuracy": float(right.double().mean())}
        wrong = (predictive.mean.reshape(target.shape) - target).double()
        return found | {"rmse": float(wrong.square().mean().sqrt()) * self.y_std}


def table_task(options: Options, name: str, split: int) -> Task:
    """Return a split of a data set of the UCI benchmark."""
    options.file(f"uci/{name}.npz")
    assert options.root is not None
    d = uci(options.root, name, split)
    return Task(
        name,
        split,
        d.x_train,
        d.y_train[:, 0],
        d.x_test,
        d.y_test[:, 0],
        False,
        d.n_hidden or 50,
        TABLE_SCALE,
        options.seed,
        d.y_std,
        options.device,
    )


def image_task(
    options: Options, part: int, rows: int = 500, *, side: int = 7, hidden: int = 20, test: int = 2000
) -> Task:
    """Return a subset of `rows` MNIST training images at side x side pixels; all subsets have the same test images."""
    x, y = mnist(options, "train")
    count = min(len(x), LAST_ROW)
    if (part + 1) * rows > count:
        raise InputError("--root", f"{MNIST} has {count:,} images", f"Subset {part} needs {(part + 1) * rows:,}")
    order = np.random.default_rng([options.seed, 0x4D]).permutation(count)[part * rows : (part + 1) * rows]
    x_test, y_test = mnist(options, "test")
    small = shrunk(x[order], side)
    mean, std = small.mean(0), small.std()
    return Task(
        "mnist",
        part,
        (small - mean) / std,
        labels_of(y[order]),
        (shrunk(x_test[:test], side) - mean) / std,
        labels_of(y_test[:test]),
        True,
        hidden,
        IMAGE_SCALE,
        options.seed,
        device=options.device,
        mean=mean,
        std=std,
    )


def boston_and_mnist(options: Options, splits: int, parts: int) -> list[Task]:
    """Return splits of Boston housing and subsets of MNIST; one tiny task of each if `quick`."""
    if options.quick:
        return [table_task(options, "boston", 0), image_task(options, 0, 100, side=4, hidden=8, test=100)]
    tables = [table_task(options, "boston", i) for i in range(splits)]
    return [*tables, *(image_task(options, i) for i in range(parts))]


def mnist(options: Options, part: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the images (N, 28, 28), uint8, and labels of "train" or "test"."""
    path = options.file(MNIST)
    with np.load(path, allow_pickle=False) as arrays:
        missing = [key for key in (f"x_{part}", f"y_{part}") if key not in arrays.files]
        if missing:
            raise InputError(
                "--root", f"{path} has no {' and no '.join(missing)}", "Pass the folder with the MNIST file"
            )
        return arrays[f"x_{part}"], arrays[f"y_{part}"]


def labels_of(y: np.ndarray[Any, Any]) -> Tensor:
    """Convert labels to an int64 tensor."""
    return torch.from_numpy(y.astype(np.int64))


def shrunk(images: np.ndarray[Any, Any] | Tensor, side: int) -> Tensor:
    """Average images (N, 28, 28), uint8 or in [0, 1], over blocks, to side x side pixels in [0, 1], (N, side^2)."""
    x = images if isinstance(images, Tensor) else torch.from_numpy(images).float() / 255
    block = x.shape[-1] // side
    return x.reshape(-1, side, block, side, block).mean((2, 4)).flatten(1)


# -- fits --------------------------------------------------------------------------------------------------------------
def hmc(problem: Problem, seed: int, **settings: Any) -> DrawsPosterior:
    """Sample by HMC with trajectories of length pi / 2, unless set otherwise, from randomly initialised networks.

    All weights are sampled together, as in the article: step sizes and lengths are those of the weights.
    """
    known: dict[str, Any] = {
        "init": "fresh",
        "jitter": 0.2,
        "max_steps": 2000,
        "target_accept": 0.7,
        "collapse": False,
    }
    # Chains of small networks run in C++, a chain per thread.
    with torch_threads(cores()):
        posterior = HMC(**known | settings).fit(problem, seed=seed, progress=False)
    assert isinstance(posterior, DrawsPosterior)
    return posterior


def part_of(posterior: DrawsPosterior, draws: Tensor) -> DrawsPosterior:
    """Return the posterior restricted to the given draws, (chain, draw, D)."""
    return DrawsPosterior(posterior.model, draws, posterior.record)


def acceptance_of(posterior: DrawsPosterior) -> float:
    """Return the mean acceptance over all chains and draws."""
    return float(posterior.statistics["acceptance"].double().mean())


# -- statistics over repeats -------------------------------------------------------------------------------------------
class Tally:
    """Values by group, setting and measure, one per repeat."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, group: str, setting: str, values: Mapping[str, float]) -> None:
        """Add the values of one repeat."""
        row = self.groups.setdefault(group, {}).setdefault(setting, {})
        for key, value in values.items():
            row.setdefault(key, []).append(float(value))


def summary(cells: Cells, setting: str, measure: str) -> Estimate:
    """Return the mean over repeats and its standard error."""
    return mean_error(list(cells[setting][measure]))


def difference(cells: Cells, setting: str, other: str, measure: str) -> Estimate:
    """Return the mean of setting minus other, paired over repeats, and its standard error."""
    pairs = zip(cells[setting][measure], cells[other][measure], strict=True)
    return mean_error([a - b for a, b in pairs])


def clear(estimate: Estimate) -> bool:
    """Return whether an estimate exceeds zero by more than two standard errors; always False for a single repeat."""
    return estimate[0] > 2 * estimate[1]


def clearly_below(estimate: Estimate) -> bool:
    """Return whether an estimate is below zero by more than two standard errors."""
    return clear((-estimate[0], estimate[1]))


def signed(estimate: Estimate, digits: int = 3) -> str:
    """Format an estimate with its sign and standard error."""
    sign = "+" if estimate[0] > 0 else ""
    return sign + plus_minus(*estimate, digits)


def verdict(reproduced: bool | None, finding: str) -> str:
    """Return the first sentence."""
    return f"{OUTCOMES[reproduced]} at this size: {finding}."


def all_reproduced(each: Sequence[bool | None]) -> bool | None:
    """Return True if all are True, False if one is False, None otherwise."""
    return False if False in each else None if None in each else True


def score_of(group: str) -> tuple[str, str, int]:
    """Return the second metric of a group: its key, name and digits."""
    return ("accuracy", "accuracy", 3) if group == "mnist" else ("rmse", "RMSE", 2)


def size_note(tasks: Sequence[Task]) -> str:
    """Describe the tasks, the network and the prior."""
    text = []
    for group in dict.fromkeys(t.group for t in tasks):
        of = [t for t in tasks if t.group == group]
        t, d = of[0], of[0].problem().dim
        what = f"subsets of {len(t.x):,} training images" if t.labels else f"splits of {len(t.x):,} training rows"
        text.append(f"{group}: {len(of)} {what}, {len(t.x_test):,} test rows, {t.x.shape[1]} inputs, {d:,} parameters")
    scales = (
        f"prior scale {TABLE_SCALE:g} for tables, {IMAGE_SCALE:g} for images, divided by the square root of the fan-in"
    )
    return (
        f"{'; '.join(text)}; one hidden layer, SiLU; {scales}, fixed in advance; ± is one standard error over repeats."
    )


# -- pictures ----------------------------------------------------------------------------------------------------------
def curves(
    name: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[Estimate]],
    *,
    xlabel: str,
    ylabel: str,
    alt: str,
    title: str = "",
    caption: str = "",
    log: bool = True,
    mark: float | None = None,
    ticks: Sequence[str] | None = None,
    size: tuple[float, float] = (4.6, 3.4),
) -> Picture:
    """Draw lines with error bars of one standard error over the settings of a study; `mark` highlights a setting."""

    def paint(ax: Any) -> None:
        for (label, values), marker in zip(lines.items(), "osD^vPX*", strict=False):
            errors = [0.0 if math.isnan(e) else e for _, e in values]
            style_of = {"linestyle": ":", "color": "0.5"} if "published" in label else {}
            ax.errorbar(x, [m for m, _ in values], errors, marker=marker, ms=4, capsize=3, label=label, **style_of)
        if mark is not None:
            ax.axvline(mark, color="0.5", lw=0.8, ls=(0, (2, 2)))
        if log:
            ax.set_xscale("log")
        ax.set_xticks(list(x), ticks or [f"{v:g}" for v in x])
        ax.minorticks_off()
        ax.set(xlabel=xlabel, ylabel=ylabel)
        if len(lines) > 1:
            ax.legend()

    return picture(name, paint, alt=alt, title=title, caption=caption, size=size)


def dots(
    name: str,
    rows: Sequence[str],
    lines: Mapping[str, Sequence[Estimate]],
    *,
    xlabel: str,
    alt: str,
    title: str = "",
    caption: str = "",
    size: tuple[float, float] = (4.6, 3.4),
    zero: bool = False,
) -> Picture:
    """Draw one row per name, with a dot and error bar for each line."""

    def paint(ax: Any) -> None:
        offsets = np.linspace(-0.18, 0.18, len(lines)) if len(lines) > 1 else [0.0]
        for (label, values), marker, shift in zip(lines.items(), "osD^v", offsets, strict=False):
            errors = [0.0 if math.isnan(e) else e for _, e in values]
            places = np.arange(len(rows)) + shift
            look = {"color": "0.5"} if "published" in label else {}
            ax.errorbar([m for m, _ in values], places, xerr=errors, fmt=marker, ms=5, capsize=3, label=label, **look)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.locator_params(axis="x", nbins=6)
        if zero:
            ax.axvline(0, color="0.5", lw=0.8)
        ax.set(xlabel=xlabel)
        if len(lines) > 1:
            ax.legend()

    return picture(name, paint, alt=alt, title=title, caption=caption, size=size)
