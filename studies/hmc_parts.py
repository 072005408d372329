"""What the studies of HMC share: their tasks, how fits are judged, paired differences over repeats, and their pictures.

Two kinds of tasks. Tables: data sets of the UCI benchmark in their standard splits, one hidden layer of 50 units, the noise
learned. Images: MNIST averaged down to a few pixels, a few hundred training images a repeat (disjoint parts of the training
set), one small hidden layer. All networks have SiLU and the prior N(0, scale^2 / fan-in). The scales were fixed beforehand:
2 for tables; 5 for images, by images 50,000 to 52,000 of the training set, which no study trains or tests on.

Over repeats (splits, or parts of the training set) differences are paired. A difference is called clear where it is more than
two of its standard errors.
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
MNIST = "mnist.npz"
LAST_ROW = 50_000  # training images from here on served to choose the prior's scale

Cells = Mapping[str, Mapping[str, Sequence[float]]]  # setting -> measure -> a value for each repeat
Estimate = tuple[float, float]  # a mean difference and its standard error


@dataclass(frozen=True, eq=False)
class Task:
    """A training set with its test rows, and the network and prior that every method gets.

    Attributes:
        group: what its repeats are averaged under, such as "boston". repeat: which split or part it is.
        y_std: of a table's target, so that densities can be told in its units; 1 for labels.
        scale: of the prior, before division by the root of the fan-in.
        mean, deviation: of the training images' pixels; inputs are (pixels - mean) / deviation.
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
    deviation: Tensor | float = 1.0

    def pixels(self, x: Tensor) -> Tensor:
        """Inputs from pixels (N, P) between 0 and 1."""
        return (x - self.mean) / self.deviation

    def problem(self, scale: float | None = None, temperature: float = 1.0, rows: Tensor | None = None) -> Problem:
        """The density; with `rows`, of those training rows alone."""
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
        """Log density of a test row in the units of the data, and accuracy or root mean squared error."""
        target = (self.y_test if y is None else y).to(predictive.mean.device)
        found = {"log_density": float(predictive.log_prob(target).double().mean()) - math.log(self.y_std)}
        if self.labels:
            right = predictive.probabilities.argmax(-1) == target
            return found | {"accuracy": float(right.double().mean())}
        wrong = (predictive.mean.reshape(target.shape) - target).double()
        return found | {"rmse": float(wrong.square().mean().sqrt()) * self.y_std}


def table_task(options: Options, name: str, split: int) -> Task:
    """A split of a data set of the UCI benchmark."""
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
    """A part of the MNIST training set, of `rows` images of side x side pixels; all parts have the same test images."""
    x, y = mnist(options, "train")
    count = min(len(x), LAST_ROW)
    if (part + 1) * rows > count:
        raise InputError("--root", f"{MNIST} has {count:,} images", f"Part {part} needs {(part + 1) * rows:,}")
    order = np.random.default_rng([options.seed, 0x4D]).permutation(count)[part * rows : (part + 1) * rows]
    x_test, y_test = mnist(options, "test")
    small = shrunk(x[order], side)
    mean, deviation = small.mean(0), small.std()
    return Task(
        "mnist",
        part,
        (small - mean) / deviation,
        labels_of(y[order]),
        (shrunk(x_test[:test], side) - mean) / deviation,
        labels_of(y_test[:test]),
        True,
        hidden,
        IMAGE_SCALE,
        options.seed,
        device=options.device,
        mean=mean,
        deviation=deviation,
    )


def mnist(options: Options, part: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images (N, 28, 28) uint8 and labels of "train" or "test"."""
    path = options.file(MNIST)
    with np.load(path, allow_pickle=False) as arrays:
        missing = [key for key in (f"x_{part}", f"y_{part}") if key not in arrays.files]
        if missing:
            raise InputError("--root", f"{path} has no {' and no '.join(missing)}", "Name the folder of the MNIST file")
        return arrays[f"x_{part}"], arrays[f"y_{part}"]


def labels_of(y: np.ndarray[Any, Any]) -> Tensor:
    """Labels as torch has them."""
    return torch.from_numpy(y.astype(np.int64))


def shrunk(images: np.ndarray[Any, Any] | Tensor, side: int) -> Tensor:
    """Images (N, 28, 28), uint8 or from 0 to 1, averaged down to side x side pixels from 0 to 1, (N, side^2)."""
    x = images if isinstance(images, Tensor) else torch.from_numpy(images).float() / 255
    block = x.shape[-1] // side
    return x.reshape(-1, side, block, side, block).mean((2, 4)).flatten(1)


# -- fits ----------------------------------------------------------------------------------------------------------------
def hmc(problem: Problem, seed: int, **settings: Any) -> DrawsPosterior:
    """Draws by HMC with the trajectory length of the rule, chains begun at fresh networks."""
    known: dict[str, Any] = {"init": "fresh", "jitter": 0.2, "max_steps": 2000, "target_accept": 0.7}
    posterior = HMC(**known | settings).fit(problem, seed=seed, progress=False)
    assert isinstance(posterior, DrawsPosterior)
    return posterior


def part_of(posterior: DrawsPosterior, draws: Tensor) -> DrawsPosterior:
    """The posterior of some of its draws, (chain, draw, D)."""
    return DrawsPosterior(posterior.model, draws, posterior.record)


def acceptance_of(posterior: DrawsPosterior) -> float:
    """Mean acceptance of all chains and draws."""
    return float(posterior.statistics["acceptance"].double().mean())


# -- figures over repeats ------------------------------------------------------------------------------------------------
class Tally:
    """Values by group, setting and measure, one for each repeat."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, group: str, setting: str, values: Mapping[str, float]) -> None:
        """The values of one repeat."""
        row = self.groups.setdefault(group, {}).setdefault(setting, {})
        for key, value in values.items():
            row.setdefault(key, []).append(float(value))


def summary(cells: Cells, setting: str, measure: str) -> Estimate:
    """Mean and standard error over repeats."""
    return mean_error(list(cells[setting][measure]))


def difference(cells: Cells, setting: str, other: str, measure: str) -> Estimate:
    """Mean of setting minus other, paired over repeats, and its standard error."""
    pairs = zip(cells[setting][measure], cells[other][measure], strict=True)
    return mean_error([a - b for a, b in pairs])


def clear(difference: Estimate) -> bool:
    """Whether a difference is above zero by more than two standard errors; with a single repeat none is."""
    return difference[0] > 2 * difference[1]


def clearly_below(difference: Estimate) -> bool:
    """Whether a difference is below zero by more than two standard errors."""
    return clear((-difference[0], difference[1]))


def signed(estimate: Estimate, digits: int = 3) -> str:
    """A difference with its sign and standard error."""
    sign = "+" if difference[0] > 0 else ""
    return sign + plus_minus(*difference, digits)


def verdict(reproduced: bool | None, finding: str) -> str:
    """The first sentence."""
    words = {
        True: f"The finding that {finding} reproduced at this size.",
        False: f"The finding that {finding} did not hold at this size.",
        None: f"At this size the numbers cannot tell whether {finding}.",
    }
    return words[reproduced]


def all_reproduced(each: Sequence[bool | None]) -> bool | None:
    """True where all are, False where one is, None otherwise."""
    return False if False in each else None if None in each else True


def score_of(group: str) -> tuple[str, str, int]:
    """The second measure of a group: its key, its name and its digits."""
    return ("accuracy", "accuracy", 3) if group == "mnist" else ("rmse", "RMSE", 2)


def size_note(tasks: Sequence[Task]) -> str:
    """What the tasks are, in words."""
    said = []
    for group in dict.fromkeys(t.group for t in tasks):
        of = [t for t in tasks if t.group == group]
        t, d = of[0], of[0].problem().dim
        what = f"parts of {len(t.x):,} training images" if t.labels else f"splits of {len(t.x):,} training rows"
        said.append(f"{group}: {len(of)} {what}, {len(t.x_test):,} test rows, {t.x.shape[1]} inputs, {d:,} parameters")
    scales = f"prior scale {TABLE_SCALE:g} for tables and {IMAGE_SCALE:g} for images, over the root of the fan-in"
    return f"{'; '.join(said)}; one hidden layer, SiLU; {scales}, fixed beforehand; ± is a standard error over repeats."


# -- pictures ------------------------------------------------------------------------------------------------------------
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
    """Lines with error bars of one standard error over the settings of a study; `mark` is the setting in question."""

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
    """A row for each name, with a dot and its error bar for each line."""

    def paint(ax: Any) -> None:
        spread = np.linspace(-0.18, 0.18, len(lines)) if len(lines) > 1 else [0.0]
        for (label, values), marker, shift in zip(lines.items(), "osD^v", spread, strict=False):
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
