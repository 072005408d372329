"""`posterior-sharpens`: how fast does the epistemic uncertainty of each method fall with more data?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from credibly import data, plot
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.pictures import EVERY, HIDDEN, WAVE_PRIOR, wave_problem
from studies.study import Options, Result, Study, mean_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from credibly.predictive.base import Predictive

SIZES = (10, 30, 100, 300)
SLOPE, ABOUT = -0.5, 0.15  # of log std against log N: the expected slope, and the tolerance

ByMethod = dict[str, dict[int, list[float]]]  # by method and number of points: one value per data set


def run(options: Options) -> Result:
    """Fit all methods to growing numbers of points of the same waves."""
    sets = 2 if options.quick else 3
    sizes = SIZES[:2] if options.quick else SIZES
    doubt: ByMethod = {m: {n: [] for n in sizes} for m in side.SIX}
    distance: ByMethod = {m: {n: [] for n in sizes} for m in ("mle", "map")}  # of the mean to HMC's
    shown: dict[int, Predictive] = {}
    total = sets * len(sizes) * len(side.SIX)
    with side.one_thread():
        for repeat in range(sets):
            for size in sizes:
                toy = data.sharpening_regression(size, seed=options.seed + repeat)
                inside = (toy.grid.abs() <= 2).flatten()
                lines = {}
                for method in side.SIX:
                    done = sum(len(v) for by_size in doubt.values() for v in by_size.values())
                    options.report(f"{size} points: {method}", done, total)
                    problem = wave_problem(toy, options.seed + repeat)
                    posterior = side.fit(
                        method, problem, seed=options.seed + repeat, quick=options.quick, **_hmc(method, options)
                    )
                    predictive = posterior.predict(toy.grid)
                    doubt[method][size].append(float(predictive.epistemic[inside].sqrt().mean()))
                    lines[method] = predictive.mean[inside]
                    if repeat == 0 and method == "hmc":
                        shown[size] = posterior.predict(toy.grid[::EVERY])
                for method in distance:
                    gap = (lines[method] - lines["hmc"]).double().square().mean().sqrt()
                    distance[method][size].append(float(gap))
    slopes = {m: slopes_of(doubt[m]) for m in side.AVERAGES}
    sentences, reproduced = judge(doubt, slopes, distance["map"])
    numbers: dict[str, Any] = {"epistemic_deviation": doubt, "slope": slopes, "distance_to_hmc": distance}
    return Result(
        sentences,
        reproduced,
        _table(doubt, slopes),
        (_curves(doubt, slopes), _bands(options.seed, shown)),
        numbers,
        (
            f"Data: {sets} sequences of points of the wave sin(2x) + 0.3x on [-2, 2] with known noise of standard "
            f"deviation 0.2; the first {', '.join(map(str, sizes))} points of each are used, so the data sets are "
            "nested. Standard deviations are averages over [-2, 2]; errors are standard errors over the sequences; a "
            "power is the slope of a line fitted to the logarithms.",
            f"Network: one hidden layer of {HIDDEN} SiLU units, prior N(0, {WAVE_PRIOR:g}²) divided by the fan-in. It "
            "can follow the wave closely, so the model is practically well specified, but it has many parameters, "
            "and at small N the prior still matters.",
            side.SETTINGS,
        ),
    )


def _hmc(method: str, options: Options) -> dict[str, Any]:
    if method != "hmc" or options.quick:
        return {}
    return {"chains": 8, "warmup": 80, "draws": 60, "thin": 1, "max_steps": 100}


def slopes_of(by_size: dict[int, list[float]]) -> list[float]:
    """Return the slope of log standard deviation against log N, one value per data set."""
    x = np.log(list(by_size))
    return [float(np.polyfit(x, np.log(row), 1)[0]) for row in zip(*by_size.values(), strict=True)]


def judge(
    doubt: ByMethod, slopes: dict[str, list[float]], to_map: dict[int, list[float]]
) -> tuple[tuple[str, ...], bool]:
    """Return the conclusions, by a rule fixed before the runs.

    The finding is reproduced if HMC's slope, on average over the data sets, is within 0.15 of -1/2 and below zero by
    more than two standard errors.
    """
    mean, _ = mean_error(slopes["hmc"])
    reproduced = abs(mean - SLOPE) <= ABOUT and side.above([-s for s in slopes["hmc"]], 0.0)
    small, large = min(doubt["hmc"]), max(doubt["hmc"])
    other = [f"{side.label(m)} {side.mean_text(slopes[m])}" for m in side.AVERAGES if m != "hmc"]
    near = [side.label(m) for m in side.AVERAGES if abs(mean_error(slopes[m])[0] - SLOPE) <= ABOUT]
    far = [side.label(m) for m in side.AVERAGES if side.label(m) not in near]
    text = f"Within {ABOUT} of -1/2: {side.listed(near) if near else 'none'}."
    first, last = mean_error(to_map[small])[0], mean_error(to_map[large])[0]
    return (
        f"{side.verdict(reproduced)}: HMC's epistemic standard deviation falls as N to the power "
        f"{side.mean_text(slopes['hmc'])}, from {side.mean_text(doubt['hmc'][small], 3)} at {small} points to "
        f"{side.mean_text(doubt['hmc'][large], 3)} at {large}; 1/sqrt(N) is the power -0.5 ({len(slopes['hmc'])} "
        "sequences).",
        f"Powers of the other methods: {side.listed(other)}. {text}"
        + (f" Outside: {side.listed(far)}." if far else ""),
        f"The posterior {'sharpens towards' if last < first else 'does not come closer to'} MAP: the RMS distance of "
        f"its mean from MAP's is {side.mean_text(to_map[small], 3)} at {small} points and "
        f"{side.mean_text(to_map[large], 3)} at {large}.",
        "MLE and MAP have no epistemic uncertainty at any N.",
    ), reproduced


def _table(doubt: ByMethod, slopes: dict[str, list[float]]) -> Table:
    sizes = list(doubt["hmc"])
    columns = ("method", *(f"epistemic sd, N = {n}" for n in sizes), "power of N")
    rows = [
        (
            side.label(m),
            *(side.mean_text(doubt[m][n], 3) for n in sizes),
            side.mean_text(slopes[m]) if m in slopes else "none",
        )
        for m in doubt
    ]
    return Table(tuple(Column(c) for c in columns), tuple(rows))


def _curves(doubt: ByMethod, slopes: dict[str, list[float]]) -> Picture:
    def paint(axes: list[Axes]) -> None:
        (axis,) = axes
        sizes = list(doubt["hmc"])
        for place, method in enumerate(side.AVERAGES):
            means = [mean_error(doubt[method][n]) for n in sizes]
            label = f"{side.label(method)}: power {mean_error(slopes[method])[0]:.2f}"
            look: dict[str, Any] = {
                "color": plot.PALETTE[place],
                "marker": "os^D"[place],
                "markersize": 5,
                "capsize": 2,
                "linestyle": "-",
            }
            axis.errorbar(sizes, [m for m, _ in means], yerr=[e for _, e in means], label=label, **look)
        start = mean_error(doubt["hmc"][sizes[0]])[0]
        guide = [start * math.sqrt(sizes[0] / n) for n in sizes]
        axis.plot(sizes, guide, color=plot.INK, linestyle=":", label="1/sqrt(N) from HMC's first point")
        axis.set(xscale="log", yscale="log", xlabel="number of points N", ylabel="epistemic std on [-2, 2]")
        axis.set_xticks(sizes, [str(n) for n in sizes])
        low, high = axis.get_ylim()
        ticks = [v for v in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= v <= high]
        axis.set_yticks(ticks, [f"{v:g}" for v in ticks])
        axis.minorticks_off()

    return side.panels(
        "sharpening",
        paint,
        size=(6.4, 4.4),
        legend=2,
        alt="Epistemic standard deviation against the number of points on logarithmic axes, one line per method",
        caption="Bars are standard errors over the sequences of points.",
    )


def _bands(seed: int, shown: dict[int, Predictive]) -> Picture:
    def paint(axes: list[Axes]) -> None:
        for axis, (size, predictive) in zip(axes, shown.items()):
            toy = data.sharpening_regression(size, seed=seed)
            grid, truth = toy.grid[::EVERY], toy.truth[::EVERY]
            plot.bands(predictive, grid, data=(toy.x, toy.y), truth=truth, levels=(0.9,), legend=False, ax=axis)
            axis.set(title=f"HMC, {size} points", ylim=(-3.5, 3.5))

    return side.panels(
        "sharpening-bands",
        paint,
        columns=len(shown),
        size=(2.6 * len(shown), 3.2),
        legend=5,
        alt="HMC's bands for growing numbers of points: they close in on the truth where there are data",
        caption="The first sequence. Light: 90 % interval of y. Dark: epistemic standard deviation.",
    )


STUDIES = {
    "posterior-sharpens": Study(
        "posterior-sharpens",
        "More data: how fast does each method's uncertainty fall?",
        "With more data the posterior concentrates on one function, that of MAP; for a well-specified model its "
        "standard deviation falls as 1/sqrt(N).",
        run,
    )
}
