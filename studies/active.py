"""`active-mnist`: how many labels does active learning need, compared with random acquisition?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from credibly import __version__, plot
from credibly.core.rng import stream
from credibly.core.specs import to_spec
from credibly.errors import InputError
from credibly.report.page import Column, Table, Value
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.active_cell import ARMS, DRAWS, METHODS, PRIOR, QUICK, RULES, Size, method_of, prepared, run_cell
from studies.study import Options, Result, Study, mean_error, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "mnist.npz"
SEEDS = 5
ROWS = 20_000  # training images that the pools of all seeds are sampled from

Cells = dict[str, list[dict[str, Any]]]  # by arm: one entry per seed


def run(options: Options) -> Result:
    """Run every arm for every seed, except those found in the folder of cells."""
    size, seeds, arms, folder = _plan(options)
    todo = [(arm, seed) for seed in seeds for arm in arms if folder is None or not _place(folder, arm, seed).is_file()]
    cells: Cells = {arm: [] for arm in arms}
    made: dict[tuple[str, int], dict[str, Any]] = {}
    if todo:
        options.report("reading images", 0, len(todo))
        digits = prepared(*_read(options, size))
    for done, (arm, seed) in enumerate(todo):
        options.report(f"{arm}, seed {seed}", done, len(todo))
        made[arm, seed] = run_cell(arm, seed, digits, size, options.device)
        if folder is not None:
            write_json(_place(folder, arm, seed), made[arm, seed])
    for arm in arms:
        for seed in seeds:
            known = made.get((arm, seed))
            cells[arm].append(known or json.loads(_place(folder or Path(), arm, seed).read_text(encoding="utf-8")))
    return result_of(cells, size, len(seeds))


# -- options and data --------------------------------------------------------------------------------------------------
def _plan(options: Options) -> tuple[Size, list[int], tuple[str, ...], Path | None]:
    known = ("arms", "seeds", "cells")
    for key in options.extra:
        if key not in known:
            raise InputError("--set", f"must name one of {', '.join(known)}, got {key!r}")
    size = QUICK if options.quick else Size()
    asked = tuple(a.strip() for a in options.extra.get("arms", ",".join(ARMS)).split(","))
    for arm in asked:
        if arm not in ARMS:
            raise InputError("--set arms", f"must be some of {', '.join(ARMS)}, got {arm!r}")
    count = options.extra.get("seeds", str(2 if options.quick else SEEDS))
    if not count.isdigit() or int(count) < 1:
        raise InputError("--set seeds", f"must be a positive integer, got {count!r}")
    folder = Path(options.extra["cells"]) if "cells" in options.extra else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        mine = {"credibly": __version__, "quick": options.quick, "device": options.device, **dataclasses.asdict(size)}
        mine["methods"] = {name: to_spec(method_of(name, size)) for name in METHODS}
        place = folder / "settings.json"
        if place.is_file() and json.loads(place.read_text(encoding="utf-8")) != mine:
            raise InputError("--set", f"cells={folder} contains runs of other settings", "Choose another folder")
        write_json(place, mine)
    arms = tuple(arm for arm in ARMS if arm in asked)
    return size, [options.seed + i for i in range(int(count))], arms, folder


def _read(options: Options, size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    with np.load(options.file(FILE), allow_pickle=False) as archive:
        missing = [key for key in keys if key not in archive.files]
        if missing:
            raise InputError("--root", f"{FILE} has no {', '.join(missing)}", f"It contains {', '.join(archive.files)}")
        x, y, x_test, y_test = (torch.from_numpy(archive[key]) for key in keys)
    order = torch.randperm(len(x), generator=stream(0, "active images"))[: max(ROWS, size.pool)]
    return x[order], y[order].long(), x_test, y_test.long()


def _place(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm}-{seed}.json"


# -- the result --------------------------------------------------------------------------------------------------------
def result_of(cells: Cells, size: Size, seeds: int) -> Result:
    """Return the conclusions, the table and the picture of the given cells."""
    saved = {
        (method, rule): [a - b for a, b in zip(needs(cells, "random", method, size), needs(cells, rule, method, size))]
        for method in METHODS
        for rule in ("bald", "batch")
        if f"random-{method}" in cells and f"{rule}-{method}" in cells
    }
    sentences, reproduced = judge(saved, cells, size)
    numbers = {
        "needed": {arm: [cell["needed"] for cell in found] for arm, found in cells.items()},
        "saved_against_random": {f"{rule}-{method}": values for (method, rule), values in saved.items()},
        "curves": {
            arm: [{k: c[k] for k in ("seed", "labels", "accuracy")} for c in found] for arm, found in cells.items()
        },
    }
    return Result(
        sentences, reproduced, _table(cells, saved, size), (_curves(cells, size),), numbers, _notes(size, seeds)
    )


def needs(cells: Cells, rule: str, method: str, size: Size) -> list[float]:
    """Return the labels needed per seed; a run that never reached the target counts with its maximum."""
    return [float(c["needed"] if c["needed"] is not None else size.most) for c in cells[f"{rule}-{method}"]]


def judge(saved: dict[tuple[str, str], list[float]], cells: Cells, size: Size) -> tuple[tuple[str, ...], bool | None]:
    """Return whether BALD needs fewer labels than random acquisition, by differences paired over seeds."""
    plain = {method: values for (method, rule), values in saved.items() if rule == "bald"}
    fewer = [m for m, values in plain.items() if side.above(values, 0.0)]
    more = [m for m, values in plain.items() if side.above([-v for v in values], 0.0)]
    reproduced = None if not plain else True if len(fewer) == len(plain) else False if len(more) == len(plain) else None
    text = []
    for method, values in plain.items():
        word = (
            "fewer labels than"
            if method in fewer
            else "more labels than"
            if method in more
            else "about as many labels as"
        )
        mean = mean_error(values)[0]
        own = mean_error(needs(cells, "bald", method, size))[0]
        text.append(
            f"{side.label(method)}: BALD needs {word} random acquisition for {size.target:.0%} accuracy ({own:.0f} "
            f"against {own + mean:.0f}; {side.mean_text(values, 0)} saved, paired over seeds)."
        )
    for (method, rule), values in saved.items():
        if rule == "batch":
            text.append(
                f"{side.label(method)}: BatchBALD saves {side.mean_text(values, 0)} labels compared with random "
                "acquisition."
            )
    short = [arm for arm, found in cells.items() if any(c["needed"] is None for c in found)]
    if short:
        text.append(
            f"Not every run of {side.listed(short)} reached the target within {size.most} labels; such a run counts as "
            f"{size.most}, which understates the labels it needs."
        )
    tested = side.listed([side.label(m) for m in plain]) or "no method"
    first = f"{side.verdict(reproduced)}: BALD against random acquisition, with {tested}."
    return (first, *text), reproduced


def _table(cells: Cells, saved: dict[tuple[str, str], list[float]], size: Size) -> Table:
    columns = (
        Column("Method"),
        Column("Acquisition"),
        Column(f"Labels for {size.target:.0%}", digits=0, best="low"),
        Column("Standard error", digits=1),
        Column("Saved against random"),
        Column("Runs that reached it"),
    )
    rows: list[tuple[Value, ...]] = []
    for arm, found in cells.items():
        rule, method = arm.split("-")
        mean, error = mean_error(needs(cells, rule, method, size))
        gain = side.mean_text(saved[method, rule], 0) if (method, rule) in saved else "–"
        there = sum(c["needed"] is not None for c in found)
        rows.append((side.label(method), RULES[rule], mean, error, gain, f"{there} of {len(found)}"))
    return Table(columns, tuple(rows))


def _curves(cells: Cells, size: Size) -> Picture:
    methods = [m for m in METHODS if any(arm.endswith(f"-{m}") for arm in cells)]

    def paint(axes: list[Axes]) -> None:
        for axis, method in zip(axes, methods):
            for place, (rule, name) in enumerate(RULES.items()):
                look: dict[str, Any] = {"color": plot.PALETTE[place], "linestyle": plot.DASHES[place], "linewidth": 1.0}
                for number, cell in enumerate(cells.get(f"{rule}-{method}", [])):
                    axis.plot(cell["labels"], cell["accuracy"], label=name if number == 0 else None, **look)
            axis.axhline(size.target, linewidth=0.8, linestyle=":", color="black")
            axis.set(title=side.label(method), xlabel="labels", ylabel="accuracy on test images")
        lowest = [min(c["accuracy"]) for found in cells.values() for c in found]
        axes[0].set_ylim(max(0.0, min(lowest) - 0.02), 1.0)

    return side.panels(
        "active-mnist",
        paint,
        columns=len(methods),
        size=(3.1 * len(methods) + 0.4, 3.8),
        legend=len(RULES),
        alt="Test accuracy against the number of labels, for labels acquired by BALD, by BatchBALD and at random",
        caption=f"Each line is one seed, from {10 * size.each} labels to {size.target:.0%} accuracy (dotted) or "
        f"{size.most} labels.",
    )


def _notes(size: Size, seeds: int) -> tuple[str, ...]:
    return (
        f"{seeds} seeds, each with a pool of {size.pool:,} MNIST training images. All arms of a seed start from the "
        f"same {size.each} labelled images per class and acquire {size.batch} more per round; after every round the "
        f"network is refitted and evaluated on all test images. A run ends at {size.target:.0%} accuracy or at "
        f"{size.most} labels.",
        "The features are fixed: edges in eight directions on a 7 x 7 grid (392 values). A 392-64-10 network is "
        f"trained on them, with prior N(0, {PRIOR:g}²) divided by the fan-in. MC-Dropout: rate 0.5 before both "
        f"layers, {2 * size.steps} Adam steps, {DRAWS} passes. Ensemble: {size.members} randomly initialised members, "
        f"{size.steps} steps at a constant learning rate of 0.02 (with a decaying rate the members were almost "
        f"identical and hardly disagreed). Bayes by Backprop: mean field, {8 * size.steps // 3} steps, {DRAWS} draws.",
        "Most settings were chosen with random acquisition: the features by ridge regression, evaluated on 4,000 of "
        "the test images; rates, steps and the prior in a few trials on training images. Three choices were made "
        "after single runs of BALD: dropout before both layers, as in published networks, since with dropout before "
        "the last layer only BALD saved nothing (250 labels against 230, seed 0, batches of 10), although this "
        "change costs random acquisition labels as well (400, seed 0); a constant learning rate for the ensemble, "
        "since members trained on resampled rows needed more labels with BALD than with random acquisition (500 "
        "against 380, seed 100, batches of 10); and batches of 20 instead of 10, to save time.",
        "The published experiments (Gal, Islam & Ghahramani 2017; Kirsch et al. 2019) train a convolutional network "
        "on pixels with MC-Dropout; their label counts are for that network and are not comparable with these.",
    )


STUDIES = {
    "active-mnist": Study(
        "active-mnist",
        "Active learning: BALD against random acquisition",
        "Acquiring the labels that are most informative about the weights (BALD) reaches 95 % accuracy on MNIST with "
        "fewer labels than random acquisition (Gal, Islam & Ghahramani 2017; Kirsch, van Amersfoort & Gal 2019 for "
        "batches).",
        run,
        (FILE,),
    )
}
