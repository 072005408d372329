"""`continual-mnist`: tasks one after another; how much of the first is left after the last, with and without a posterior as prior?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credibly import plot
from credibly.continual import MultiHead, learn
from credibly.coresets import joined
from credibly.errors import InputError
from credibly.likelihoods import Categorical
from credibly.methods import MAP, BayesByBackprop, Laplace, Method
from credibly.posterior import Posterior
from credibly.priors import Normal
from credibly.problem import Problem
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture
from credibly.rng import global_stream, stream, stream_seed
from credibly.studies import side_by_side as side
from credibly.studies.ood import HOME, arrays
from credibly.studies.study import Options, Result, Study, mean_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = {
    "fine-tuning": "plain fine-tuning",
    "vcl": "VCL",
    "vcl-coreset": "VCL with a coreset",
    "laplace": "online Laplace",
    "joint": "joint training",
}
PUZZLES = {"permuted": "permuted MNIST", "split": "split MNIST"}
SEEDS, QUICK_SEEDS = 3, 2
HIDDEN = 100  # units of each of two layers
PRIOR = 3.0  # deviation of the weights before division by the root of the fan-in
DRAWS = 20  # of the weights, for a prediction

# Accuracy by puzzle and way: for each seed, of every task after the last one.
Figures = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True)
class Size:
    """How large the study is."""

    tasks: int
    rows: int
    test: int
    steps: int
    coreset: int
    hidden: int = HIDDEN


@dataclass(frozen=True, eq=False)
class Puzzle:
    """Tasks for training and test, and what is learned on them."""

    tasks: list[tuple[Any, Tensor]]
    tests: list[tuple[Any, Tensor]]
    net: nn.Module
    heads: list[str] | None


def size_of(puzzle: str, options: Options) -> Size:
    """The size of a puzzle; rows, steps and the number of tasks may be set."""
    if options.quick:
        return Size(2, 60, 30, 10, 10, hidden=10)
    tasks = min(_number(options, "tasks", 10), 10 if puzzle == "permuted" else 5)
    coreset = 200 if puzzle == "permuted" else 40
    return Size(tasks, _number(options, "rows", 10_000), 2_000, _number(options, "steps", 400), coreset)


def _number(options: Options, name: str, default: int) -> int:
    text = options.extra.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise InputError("--set", f"{name}={text!r}", f"Pass a whole number, such as {name}={default}")
    return int(text)


def permuted(data: list[Tensor], size: Size, seed: int, device: str) -> Puzzle:
    """Every task has the pixels in an order of its own; all of them have ten classes and share one head."""
    x, y, x_test, y_test = data
    tasks, tests = [], []
    for t in range(size.tasks):
        generator = stream(seed, "permutation", t)
        order = torch.randperm(x.shape[1], generator=generator)
        rows = torch.randperm(len(x), generator=generator)[: size.rows]
        seen = torch.randperm(len(x_test), generator=generator)[: size.test]
        tasks.append((x[rows][:, order].to(device), y[rows].to(device)))
        tests.append((x_test[seen][:, order].to(device), y_test[seen].to(device)))
    with global_stream(seed, "study network"):
        net = _body(x.shape[1], size.hidden).append(nn.Linear(size.hidden, 10))
    return Puzzle(tasks, tests, net.to(device), None)


def split(data: list[Tensor], size: Size, seed: int, device: str) -> Puzzle:
    """Task t tells digit 2t from 2t + 1, with a head of its own on a body that all share."""
    x, y, x_test, y_test = data
    tasks: list[tuple[Any, Tensor]] = []
    tests: list[tuple[Any, Tensor]] = []
    for t in range(size.tasks):
        generator = stream(seed, "split rows", t)
        for images, labels, most, kept in ((x, y, size.rows, tasks), (x_test, y_test, size.test, tests)):
            mine = ((labels == 2 * t) | (labels == 2 * t + 1)).nonzero().squeeze(1)
            if not len(mine):
                raise InputError("--root", f"{HOME} has no digits {2 * t} and {2 * t + 1}", "Pass the whole set")
            rows = mine[torch.randperm(len(mine), generator=generator)[:most]]
            task = torch.full((len(rows),), t)
            kept.append(((images[rows].to(device), task.to(device)), (labels[rows] - 2 * t).to(device)))
    with global_stream(seed, "study network"):
        net = MultiHead(_body(x.shape[1], size.hidden), [nn.Linear(size.hidden, 2) for _ in range(size.tasks)])
    return Puzzle(tasks, tests, net.to(device), [f"heads.{t}.*" for t in range(size.tasks)])


def _body(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())


MAKERS: dict[str, Callable[[list[Tensor], Size, int, str], Puzzle]] = {"permuted": permuted, "split": split}


def method_of(way: str, size: Size) -> Method:
    """What each way fits a task with."""
    if way.startswith("vcl"):
        return BayesByBackprop(steps=size.steps, lr=1e-2, init_scale=0.05, compile=False)
    training: dict[str, Any] = {"steps": size.steps, "lr": 3e-3, "compile": False}
    return Laplace(**training, structure="kron") if way == "laplace" else MAP(**training)


def fitted(way: str, puzzle: Puzzle, size: Size, seed: int) -> Posterior:
    """What a way knows after the last task."""
    likelihood, prior, method = Categorical(), Normal(PRIOR, fan_in=True), method_of(way, size)
    if isinstance(method, MAP):
        problems = [Problem(puzzle.net, task, likelihood, prior) for task in puzzle.tasks]
        if way == "joint":
            steps = size.steps * size.tasks  # as many as the others take over all tasks
            return replace(method, steps=steps).fit(joined(problems), seed=seed, progress=False)
        theta: Tensor | str = "network"
        for t, problem in enumerate(problems):
            posterior = replace(method, init=theta).fit(problem, seed=stream_seed(seed, "task", t), progress=False)
            theta = posterior.draws[0]
        return posterior
    coreset = size.coreset if way == "vcl-coreset" else 0
    return learn(
        puzzle.tasks, method, puzzle.net, likelihood, prior, coreset=coreset, heads=puzzle.heads, seed=seed, progress=False
    ).posterior  # fmt: skip


def accuracies(posterior: Posterior, puzzle: Puzzle) -> list[float]:
    """On the test images of every task."""
    found = []
    for x, y in puzzle.tests:
        several = {} if posterior.record.method == "map" else {"draws": DRAWS}
        p = posterior.predict(x, **several)
        found.append(float((p.probabilities.argmax(-1) == y).double().mean()))
    return found


def run(options: Options) -> Result:
    """Learns both puzzles in every way, for several seeds."""
    data = arrays(options, HOME, "x_train", "y_train", "x_test", "y_test")
    seeds = QUICK_SEEDS if options.quick else _number(options, "seeds", SEEDS)
    figures: Figures = {name: {way: [] for way in WAYS} for name in PUZZLES}
    total, done = len(PUZZLES) * seeds * len(WAYS), 0
    with side.one_thread():
        for number in range(seeds):
            for name in PUZZLES:
                size, seed = size_of(name, options), stream_seed(options.seed, "continual", number)
                puzzle = MAKERS[name](data, size, seed, options.device)
                for way in WAYS:
                    options.tell(f"{PUZZLES[name]}: {WAYS[way]}, seed {number}", done, total)
                    figures[name][way].append(accuracies(fitted(way, puzzle, size, seed), puzzle))
                    done += 1
    sentences, held = judge(figures)
    big, small = (size_of(name, options) for name in PUZZLES)
    return Result(
        sentences, held, _table(figures), (_bars(figures), _by_task(figures)), {"accuracy": figures},
        (
            f"Permuted MNIST: {big.tasks} tasks, each with the pixels in a random order of its own, ten classes, one head. Split MNIST: "
            f"{small.tasks} tasks, each of two digits, with a head of its own (the task of an image is known at test). A task has "
            f"{big.rows:,} training images at most, and {big.test:,} test images. {seeds} seeds change orders, images, starts and minibatches.",
            f"Network: 784-{big.hidden}-{big.hidden} with ReLU; prior N(0, {PRIOR:g}²) divided by the fan-in. A task is trained for "
            f"{big.steps} steps of Adam with batches of 128, from where the last one ended.",
            "VCL: mean-field Bayes by Backprop whose prior is the posterior of the task before; with a "
            f"coreset, {big.coreset} ({small.coreset} for split) random images of a task are left out of it and fitted last, all tasks "
            "together, as long as a task. Online Laplace: the same with Laplace approximations by Kronecker factors, of which the "
            f"next posterior keeps the diagonal. Both predict by {DRAWS} draws. Fine-tuning: MAP, the prior stays as it was. Joint: "
            "MAP on all tasks at once, for as many steps as the others take in all.",
            "The rate and the first scale of VCL and the prior's scale were chosen on three permuted tasks of another draw of rows and "
            "orders, by accuracy on test images; fine-tuning and joint training had no such search. Nguyen et al. train on "
            "all 60,000 images of a task for 100 epochs, with 256 units a layer for split MNIST. Their figures are not repeated here.",
        ),
    )  # fmt: skip


def judge(figures: Figures) -> tuple[tuple[str, ...], bool]:
    """The answer in words, by a rule fixed before the runs.

    The finding holds when on both puzzles VCL is above plain fine-tuning in accuracy over all tasks after the last, by more than
    two standard errors over seeds (paired), and so is VCL with a coreset above fine-tuning.
    """
    means = {
        name: {way: [sum(s) / len(s) for s in seeds] for way, seeds in ways.items()} for name, ways in figures.items()
    }
    gains = {
        name: {
            way: side.difference(means[name][way], means[name]["fine-tuning"]) for way in WAYS if way != "fine-tuning"
        }
        for name in means
    }
    held = all(gains[name][way][0] - 2 * gains[name][way][1] > 0 for name in gains for way in ("vcl", "vcl-coreset"))
    told = [
        f"{PUZZLES[name]}: {side.listed([f'{WAYS[way]} {side.told(values, 3)}' for way, values in ways.items()])}"
        for name, ways in means.items()
    ]
    more = [
        f"{WAYS[way]} {mean:+.3f} ± {error:.3f} on {PUZZLES[name]}"
        for name in gains
        for way, (mean, error) in gains[name].items()
        if way != "joint"
    ]
    core = [
        f"{side.difference(means[name]['vcl-coreset'], means[name]['vcl'])[0]:+.3f} on {PUZZLES[name]}"
        for name in means
    ]
    return (
        f"{side.first_words(held)}: accuracy over all tasks after the last one is, on {'; on '.join(told)}.",
        f"Above plain fine-tuning: {side.listed(more)}.",
        f"The coreset changes VCL by {side.listed(core)}.",
    ), held  # fmt: skip


def _table(figures: Figures) -> Table:
    rows = []
    for name, ways in figures.items():
        for way, seeds in ways.items():
            first, last = [s[0] for s in seeds], [s[-1] for s in seeds]
            every = [sum(s) / len(s) for s in seeds]
            rows.append((PUZZLES[name], WAYS[way], *(side.told(v, 3) for v in (every, first, last))))
    titles = ("puzzle", "way", "accuracy over all tasks", "first task", "last task")
    return Table(tuple(Column(title) for title in titles), tuple(rows))


def _bars(figures: Figures) -> Picture:
    def paint(axes: list[Axes]) -> None:
        for axis, (name, ways) in zip(axes, figures.items()):
            for place, seeds in enumerate(ways.values()):
                mean, error = mean_error([sum(s) / len(s) for s in seeds])
                spread = 2 * error if math.isfinite(error) else 0.0
                look: dict[str, Any] = {
                    "color": plot.PALETTE[place],
                    "marker": "os^Dv"[place],
                    "capsize": 3,
                    "linestyle": "none",
                }
                axis.errorbar([place], [mean], yerr=[spread], **look)
            axis.set_xticks(range(len(ways)), [WAYS[way] for way in ways], rotation=30, ha="right")
            axis.set(title=PUZZLES[name], ylabel="accuracy over all tasks")
            axis.grid(axis="y", alpha=0.3)

    return side.panels(
        "continual", paint, columns=2, size=(8.4, 4.2), legend=0,
        alt="Accuracy over all tasks after the last one, of each way on each puzzle",
        caption="After the last task. Bars are two standard errors over seeds.",
    )  # fmt: skip


def _by_task(figures: Figures) -> Picture:
    def paint(axes: list[Axes]) -> None:
        for axis, (name, ways) in zip(axes, figures.items()):
            for place, (way, seeds) in enumerate(ways.items()):
                mean = [sum(column) / len(column) for column in zip(*seeds)]
                look: dict[str, Any] = {
                    "color": plot.PALETTE[place],
                    "linestyle": plot.DASHES[place % len(plot.DASHES)],
                }
                axis.plot(range(1, len(mean) + 1), mean, label=WAYS[way], linewidth=1.6, marker="os^Dv"[place], **look)
            axis.set(title=PUZZLES[name], xlabel="task", ylabel="accuracy after the last task")
            axis.grid(axis="y", alpha=0.3)

    return side.panels(
        "continual-tasks", paint, columns=2, size=(8.4, 4.0), legend=3, shared=False,
        alt="Accuracy on each task after the last one",
        caption="What is left of each task; the mean over seeds. Forgetting is a fall to the left.",
    )  # fmt: skip


STUDIES = {
    "continual-mnist": Study(
        "continual-mnist",
        "Tasks one after another: what is left of the first?",
        "With the posterior of the tasks so far as the prior of the next, a network forgets less than by plain fine-tuning; a coreset "
        "of a few old images helps further (Nguyen et al. 2018, variational continual learning; Ritter et al. 2018, online Laplace).",
        run,
        (HOME,),
    )
}
