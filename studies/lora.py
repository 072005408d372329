"""`lora-calibration`: LoRA fine-tuning of a small language model on few labels. Which methods are calibrated?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from credibly import plot
from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.lora_fits import BATCH, BBB_SCALES, DRAWS, MEMBERS, METHODS, RATE, SCALES, STEPS, cell
from studies.lora_text import FAR, FILE, QUICK, Size
from studies.study import Options, Result, Study, mean_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = ("accuracy", "nll", "ece", *FAR)
# ECE in percent on Winogrande-S with LLaMA2-7B, by Yang et al. (2024).
PUBLISHED = {"plain": 30.8, "temperature": 12.8, "laplace": 6.9}
SEEDS, QUICK_SEEDS = 4, 2

# By method, for each seed: every metric.
Values = dict[str, list[dict[str, float]]]


def run(options: Options) -> Result:
    """Train the language model, then fit every method for every seed.

    `--set cells=DIR` keeps the language model and finished seeds in a folder, and a second run resumes from it. `--set
    seeds=N` and `--set methods=plain,laplace` change the amount of work.
    """
    size, folder, names = size_of(options), folder_of(options), methods_of(options)
    numbers = range(options.seed, options.seed + seeds_of(options))
    with TemporaryDirectory() as scratch:
        kept = folder or Path(scratch)
        cells = []
        for place, seed in enumerate(numbers):
            options.report(f"seed {seed}", place, len(numbers))
            cells.append(cell(options, size, seed, kept, names))
    return result_of(cells, names, size, options)


def methods_of(options: Options) -> tuple[str, ...]:
    """Return the methods to fit, all by default; the three of the published pattern are always among them."""
    asked = options.extra.get("methods", ",".join(METHODS)).split(",")
    for name in asked:
        check_choice("--set methods", name, METHODS)
    return tuple(name for name in METHODS if name in asked or name in PUBLISHED)


def seeds_of(options: Options) -> int:
    """Return the number of seeds."""
    text = options.extra.get("seeds", str(QUICK_SEEDS if options.quick else SEEDS))
    if not text.isdigit() or int(text) < 2:
        raise InputError("--set seeds", f"must be an integer of at least 2, got {text!r}")
    return int(text)


def size_of(options: Options) -> Size:
    """Return the sizes of a run."""
    return QUICK if options.quick else Size()


def folder_of(options: Options) -> Path | None:
    """Return the folder of `--set cells=DIR`, which keeps the language model and finished seeds."""
    if "cells" not in options.extra:
        return None
    folder = Path(options.extra["cells"])
    if not folder.is_dir():
        raise InputError("--set cells", f"must be an existing folder, got {options.extra['cells']!r}")
    return folder


def result_of(cells: list[dict[str, Any]], names: tuple[str, ...], size: Size, options: Options) -> Result:
    """Return the result, by a rule fixed before the runs.

    The pattern is reproduced if, paired over seeds, the ECE of LoRA-Laplace is below that of plain LoRA and below that
    of temperature scaling, each by more than two standard errors; in part if only the first holds.
    """
    values: Values = {name: [cell["metrics"][name] for cell in cells] for name in names}
    gaps = {
        name: side.difference(column(values, name, "ece"), column(values, "laplace", "ece"))
        for name in ("plain", "temperature")
    }
    first, second = (gap - 2 * error > 0 for gap, error in gaps.values())
    means = {name: mean_error(column(values, name, "ece"))[0] for name in names}
    others = [f"{METHODS[m]} {percent(values, m)}" for m in names if m not in PUBLISHED]
    best = {metric: best_of(values, metric) for metric in METRICS}
    sentences = (
        f"{side.verdict(first and second, first)}: the ECE of plain LoRA is {percent(values, 'plain')}, with "
        f"temperature scaling {percent(values, 'temperature')}, of LoRA-Laplace {percent(values, 'laplace')} "
        f"(published, on another task and with 7 billion weights: {PUBLISHED['plain']} %, {PUBLISHED['temperature']} % "
        f"and {PUBLISHED['laplace']} %).",
        f"Paired over seeds, the ECE of plain LoRA minus that of LoRA-Laplace is {signed(gaps['plain'])}, that of "
        f"temperature scaling minus that of LoRA-Laplace {signed(gaps['temperature'])}.",
        *([f"ECE of the others: {side.listed(others)}."] if others else []),
        f"Highest accuracy: {METHODS[best['accuracy']]}; lowest NLL: {METHODS[best['nll']]}; lowest ECE: "
        f"{METHODS[best['ece']]}.",
        "Other texts: "
        + side.listed([f"{title} are detected best by {METHODS[best[name]]}" for name, title in FAR.items()])
        + " (entropy of the predictions, AUROC "
        + side.listed([f"{mean_error(column(values, best[name], name))[0]:.3f}" for name in FAR])
        + ").",
    )
    numbers = {"cells": cells, "mean_ece": means, "published_ece_percent": PUBLISHED}
    return Result(
        sentences, first and second, table_of(values), (picture_of(values),), numbers, notes(cells, size, options)
    )


def column(values: Values, method: str, metric: str) -> list[float]:
    """Return a metric of a method for every seed."""
    return [found[metric] for found in values[method]]


def best_of(values: Values, metric: str) -> str:
    """Return the method with the best mean of a metric."""
    sign = -1 if metric in ("nll", "ece") else 1
    return max(values, key=lambda name: sign * mean_error(column(values, name, metric))[0])


def percent(values: Values, method: str) -> str:
    """Format the mean ECE in percent with its standard error."""
    mean, error = mean_error([100 * v for v in column(values, method, "ece")])
    return f"{mean:.1f} ± {error:.1f} %"


def signed(gap: tuple[float, float]) -> str:
    """Format a difference of ECE in percentage points."""
    return f"{100 * gap[0]:+.1f} ± {100 * gap[1]:.1f} points"


def table_of(values: Values) -> Table:
    """Return the table of all methods."""
    rows = [
        (
            METHODS[name],
            *(side.mean_text(column(values, name, metric), 3) for metric in ("accuracy", "nll")),
            side.mean_text([100 * v for v in column(values, name, "ece")], 1),
            *(side.mean_text(column(values, name, metric), 3) for metric in FAR),
        )
        for name in values
    ]
    titles = ("method", "accuracy", "NLL", "ECE, %", *(f"AUROC, {title}" for title in FAR.values()))
    return Table(tuple(Column(title) for title in titles), tuple(rows))


def picture_of(values: Values) -> Picture:
    """Draw calibration error against NLL, one point per seed and method."""

    def paint(axes: list[Axes]) -> None:
        for axis, metric in zip(axes, ("nll", "accuracy")):
            for place, (name, title) in enumerate(METHODS.items()):
                if name not in values:
                    continue
                ece = [100 * v for v in column(values, name, "ece")]
                look: dict[str, Any] = {"linestyle": "none", "marker": "os^Dv<>P"[place], "markersize": 6}
                axis.plot(column(values, name, metric), ece, label=title, color=plot.PALETTE[place % 8], **look)
            axis.set(xlabel={"nll": "NLL, nats", "accuracy": "accuracy"}[metric], ylabel="ECE, %")
            axis.grid(alpha=0.3)

    return side.panels(
        "lora-calibration",
        paint,
        columns=2,
        size=(8.6, 4.4),
        legend=4,
        alt="Expected calibration error of each method and seed against its negative log likelihood and its accuracy",
        caption="One point per seed. Lower is better calibrated.",
    )


def notes(cells: list[dict[str, Any]], size: Size, options: Options) -> tuple[str, ...]:
    """Return the setup, and where it falls short of the published one."""
    held_out, many = size.rows // 5, int(all("ensemble" in cell["metrics"] for cell in cells))
    scales = {
        name: [cell["chosen"][name] for cell in cells]
        for name in ("last-layer", "laplace", "bbb")
        if all(name in cell["chosen"] for cell in cells)
    }
    temperatures = side.mean_text([cell["chosen"]["temperature"] for cell in cells])
    grids = f"of {_numbers(SCALES)}; Bayes by Backprop of {_numbers(BBB_SCALES)}"
    by_method = [f"{METHODS[name]} {_numbers(found)}" for name, found in scales.items()]
    return (
        f"Language model: GPT-2 of transformers with {size.layers} layers of width {size.width} and {size.words:,} "
        f"words, trained for {size.epochs} epochs to predict the next word of {size.texts:,} IMDB training reviews "
        "(the last 100 words of each), without labels.",
        f"Per seed, {size.rows} labelled reviews: {size.rows - held_out} for training and {held_out} for validation. "
        "Adapter: LoRA of peft, rank 8, on the attention layers, with a new head; both are random, all else is fixed. "
        f"Test: {size.test:,} test reviews. Other texts: {size.far:,} further test reviews with their words in random "
        "order, and texts of the same lengths with words drawn by frequency. Means over "
        f"{len(cells)} seeds, which select labelled rows and test rows and initialise the adapter, ± standard errors.",
        f"Plain LoRA: maximum likelihood, {STEPS:,} Adam steps at a rate of {RATE:g} with batches of {BATCH}, without "
        "early stopping. Temperature scaling and both Laplace approximations use its weights. Chosen on the "
        f"validation rows: the temperature ({temperatures}) and the prior scale by seed ({'; '.join(by_method)}; "
        f"{grids}). No choice used test rows.",
        f"MC-Dropout trains with the rates of GPT-2 and of the adapter (0.1) and averages {DRAWS} passes. "
        + (
            f"The ensemble has {MEMBERS} adapters: the plain one and others trained alike from new initial values. "
            * many
        )
        + f"Bayes by Backprop takes twice the steps, SWAG starts from the plain adapter; both average {DRAWS} draws.",
        "Smaller than the published experiment: Yang et al. (2024) adapt LLaMA2-7B, and their numbers are for "
        "common-sense questions (Winogrande-S, 640 training rows).",
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


STUDIES = {
    "lora-calibration": Study(
        "lora-calibration",
        "LoRA on few labels: which methods are calibrated?",
        "Fine-tuning a language model by LoRA on a small set is overconfident; temperature scaling helps, and a "
        "Laplace approximation over the adapter's weights helps more (Yang et al. 2024, Winogrande-S with LLaMA2-7B: "
        "ECE 30.8 % plain, 12.8 % with temperature scaling, 6.9 % with LoRA-Laplace).",
        run,
        (FILE,),
    )
}
