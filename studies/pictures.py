"""`gap-regression` and `star-classification`: two classic pictures of point estimates against Bayesian model averages.

Six methods get the same network, prior, likelihood and data. Everything is repeated over data sets; each repeat
resamples the data, the initialisation of the network and the seed of the method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from credibly import data, plot
from credibly.core.rng import global_stream, stream
from credibly.likelihoods import Bernoulli, Gaussian
from credibly.networks.zoo import mlp
from credibly.posterior.base import Posterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.study import Options, Result, Study, mean_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIDDEN = 50
WAVE_PRIOR, STAR_PRIOR = 3.0, 2.0  # prior standard deviations before division by the square root of the fan-in
EVERY = 3  # plot every third grid point
CERTAIN, DOUBTFUL = 0.9, 0.75  # confidence at the star: least of a certain method, most of an uncertain one

GAP_KEYS = ("on_data", "in_gap", "ratio", "log_density", "coverage", "log_density_beyond")

Values = dict[str, dict[str, list[float]]]  # by method and quantity: one value per data set


# -- a gap in the data


def gap(options: Options) -> Result:
    """Fit all methods to waves with a gap in the data."""
    sets = 2 if options.quick else 4
    values: Values = {m: {k: [] for k in GAP_KEYS} for m in side.SIX}
    shown: dict[str, Posterior] = {}
    first = data.gap_regression(seed=options.seed)
    with side.one_thread():
        for repeat in range(sets):
            toy = data.gap_regression(seed=options.seed + repeat)
            for place, method in enumerate(side.SIX):
                options.report(f"data set {repeat + 1}: {method}", repeat * len(side.SIX) + place, sets * len(side.SIX))
                problem = wave_problem(toy, options.seed + repeat)
                posterior = side.fit(
                    method, problem, seed=options.seed + repeat, quick=options.quick, **hmc_settings(method, options)
                )
                if repeat == 0:
                    shown[method] = posterior
                for key, value in in_gap(toy, posterior, options.seed + repeat).items():
                    values[method][key].append(value)
    sentences, reproduced = judge_gap(values)
    return Result(
        sentences,
        reproduced,
        gap_table(values),
        (gap_picture(first, shown),),
        {"data_sets": sets, "methods": values},
        (
            f"Data: {sets} data sets of 80 points on both sides of the gap (-0.7, 0.7), y = sin(2x) + 0.3x with noise "
            f"of standard deviation {first.noise}, known to the likelihood. Network: one hidden layer of {HIDDEN} "
            f"SiLU units, prior N(0, {WAVE_PRIOR:g}²) divided by the fan-in. Errors are standard errors over the data "
            "sets.",
            side.SETTINGS,
            "Log density and coverage are for new noisy observations, in the gap and (2 < |x| <= 3.5) beyond the "
            "data. The articles show one picture of one data set, without numbers; the width of a band in the gap "
            "depends on the prior, which is the same for all methods here.",
        ),
    )


def wave_problem(toy: data.Toy, seed: int) -> Problem:
    """Return the regression problem: one input, one hidden layer, known noise."""
    with global_stream(seed, "study network"):
        net = mlp(1, (HIDDEN,), 1)
    assert toy.noise is not None
    prior = Normal(WAVE_PRIOR, fan_in=True)
    return Problem(net, data=(toy.x, toy.y), likelihood=Gaussian(toy.noise), prior=prior)


def hmc_settings(method: str, options: Options) -> dict[str, Any]:
    """Return HMC settings for a wave with little noise, which needs small steps: at most 150 per trajectory."""
    if method != "hmc" or options.quick:
        return {}
    return {"chains": 8, "warmup": 80, "draws": 60, "thin": 2, "max_steps": 150}


def in_gap(toy: data.Toy, posterior: Posterior, seed: int) -> dict[str, float]:
    """Return the epistemic std on the data and in the gap, and metrics of new observations there and beyond."""
    assert toy.gap is not None
    assert toy.noise is not None
    inside = ((toy.grid > toy.gap[0]) & (toy.grid < toy.gap[1])).flatten()
    there = posterior.predict(toy.grid[inside])
    noise = torch.randn(toy.grid.shape, generator=stream(seed, "new observations where there are no data"))
    new = toy.truth + toy.noise * noise
    y, beyond = new[inside], (toy.grid.abs() > 2).flatten()
    lower, upper = there.interval(0.9)
    on_data = float(posterior.predict(toy.x).epistemic.sqrt().mean())
    doubt = float(there.epistemic.sqrt().mean())
    return {
        "on_data": on_data,
        "in_gap": doubt,
        "ratio": doubt / on_data if on_data > 0 else 1.0,  # a point estimate has no epistemic part
        "log_density": float(there.log_prob(y).double().mean()),
        "coverage": float(((lower <= y) & (y <= upper)).double().mean()),
        "log_density_beyond": float(posterior.predict(toy.grid[beyond]).log_prob(new[beyond]).double().mean()),
    }


def judge_gap(values: Values) -> tuple[tuple[str, ...], bool]:
    """Return the conclusions, by a rule fixed before the runs.

    The finding is reproduced if HMC's epistemic standard deviation is larger in the gap than on the data, and new
    observations in the gap have a higher log density under HMC than under MAP, both by more than two standard errors
    over the data sets.
    """
    hmc = values["hmc"]
    gain = [a - b for a, b in zip(hmc["log_density"], values["map"]["log_density"], strict=True)]
    wider, better = side.above(hmc["ratio"], 1.0), side.above(gain, 0.0)
    reproduced = wider and better
    start = side.verdict(reproduced, partly=wider != better)
    far = [a - b for a, b in zip(hmc["log_density_beyond"], values["map"]["log_density_beyond"], strict=True)]
    means = {m: mean_error(values[m]["ratio"])[0] for m in side.AVERAGES}
    density = {m: mean_error(f["log_density"])[0] for m, f in values.items()}
    flat = [side.label(m) for m in side.AVERAGES if not side.above(values[m]["ratio"], 1.0)]
    widest, best = max(means, key=means.__getitem__), max(density, key=density.__getitem__)
    ratios = [f"{side.label(m)} {side.mean_text(values[m]['ratio'])}" for m in side.AVERAGES]
    count = len(hmc["ratio"])
    return (
        f"{start}: in the gap HMC's epistemic standard deviation is {side.mean_text(hmc['ratio'])} times that on the "
        f"data, so its band {'widens' if wider else 'does not widen'}; the log density of new observations there "
        f"under HMC minus that under MAP is {side.mean_text(gain)} nats, so MAP's band, which is the noise alone, "
        f"{'is overconfident' if better else 'is not shown to be overconfident'} ({count} data sets).",
        f"Ratio of gap to data by method: {side.listed(ratios)}; the largest is that of {side.label(widest)}.",
        "The band of every model average is wider in the gap by more than two standard errors."
        if not flat
        else f"The band of {side.listed(flat)} is not wider in the gap by more than two standard errors.",
        f"The best predictions in the gap are those of {side.label(best)} (log density "
        f"{side.mean_text(values[best]['log_density'])}; HMC {side.mean_text(hmc['log_density'])}).",
        f"Beyond the data (|x| > 2), which the rule does not cover, HMC's log density is {side.mean_text(far, 0)} nats "
        "above MAP's."
        if mean_error(far)[0] > 0
        else "Beyond the data (|x| > 2), which the rule does not cover, HMC's log density is not above MAP's "
        f"({side.mean_text(far, 0)}).",
    ), reproduced


def gap_table(values: Values) -> Table:
    """Return a table with one row per method."""
    titles = (
        "method",
        "epistemic sd on data",
        "in the gap",
        "gap / data",
        "log density in gap",
        "90 % coverage in gap",
        "log density beyond",
    )
    rows = [
        (
            side.label(m),
            *("none" if key == "ratio" and not any(f["on_data"]) else side.mean_text(f[key]) for key in GAP_KEYS),
        )
        for m, f in values.items()
    ]
    return Table(tuple(Column(title) for title in titles), tuple(rows))


def gap_picture(toy: data.Toy, shown: dict[str, Posterior]) -> Picture:
    """Draw the predictive bands of six methods."""

    def paint(axes: list[Axes]) -> None:
        grid = toy.grid[::EVERY]
        for axis, (method, posterior) in zip(axes, shown.items()):
            seen = (toy.x, toy.y)
            predictive = posterior.predict(grid)
            plot.bands(predictive, grid, data=seen, truth=toy.truth[::EVERY], levels=(0.9,), legend=False, ax=axis)
            axis.axvspan(*(toy.gap or (0, 0)), color=plot.INK, alpha=0.15, linewidth=0, zorder=0, label="the gap")
            axis.set(title=side.label(method), ylim=(-3.5, 3.5))

    return side.panels(
        "gap",
        paint,
        rows=2,
        columns=3,
        legend=6,
        alt="Six panels: the bands of MLE and MAP have the same width everywhere, those of model averages may widen "
        "in the gap",
        caption="The first data set. Light: 90 % interval of y. Dark: epistemic standard deviation. Grey: the gap in "
        "the data.",
    )


# -- a star far away


def star(options: Options) -> Result:
    """Fit all methods to two clusters, and predict at a star far away."""
    sets = 2 if options.quick else 8
    values: Values = {m: {"probability": [], "confidence": [], "epistemic": []} for m in side.SIX}
    shown: dict[str, Posterior] = {}
    first = data.star_classification(seed=options.seed)
    assert first.star is not None
    with side.one_thread():
        for repeat in range(sets):
            toy = data.star_classification(seed=options.seed + repeat)
            for place, method in enumerate(side.SIX):
                options.report(f"data set {repeat + 1}: {method}", repeat * len(side.SIX) + place, sets * len(side.SIX))
                with global_stream(options.seed + repeat, "study network"):
                    net = mlp(2, (HIDDEN,), 1)
                prior = Normal(STAR_PRIOR, fan_in=True)
                problem = Problem(net, data=(toy.x, toy.y), likelihood=Bernoulli(), prior=prior)
                posterior = side.fit(method, problem, seed=options.seed + repeat, quick=options.quick)
                if repeat == 0:
                    shown[method] = posterior
                there = posterior.predict(first.star)
                p = float(there.probabilities[..., 1])
                values[method]["probability"].append(p)
                values[method]["confidence"].append(max(p, 1 - p))
                values[method]["epistemic"].append(float(there.epistemic))
    sentences, reproduced = judge_star(values)
    columns = tuple(
        Column(t) for t in ("method", "P(1) at the star", "confidence at the star", "epistemic there, nats")
    )
    rows = tuple((side.label(m), *(side.mean_text(f[k]) for k in f)) for m, f in values.items())
    return Result(
        sentences,
        reproduced,
        Table(columns, rows),
        (star_picture(first, shown),),
        {"data_sets": sets, "methods": values},
        (
            f"Data: {sets} data sets of 20 points in two clusters, and a star ten cluster widths above them. Network: "
            f"one hidden layer of {HIDDEN} SiLU units, prior N(0, {STAR_PRIOR:g}²) divided by the fan-in. Confidence "
            "is the probability of the more probable class. Errors are standard errors over the data sets.",
            side.SETTINGS,
            "The article shows one data set, with 0.6 to 0.4 for the model average.",
        ),
    )


def judge_star(values: Values) -> tuple[tuple[str, ...], bool]:
    """Return the conclusions, by a rule fixed before the runs.

    The finding is reproduced if, on average over the data sets, MAP is certain at the star (confidence of at least
    0.9), HMC's model average is uncertain there (at most 0.75), and the difference is above zero by more than two
    standard errors.
    """
    of_map, of_hmc = values["map"]["confidence"], values["hmc"]["confidence"]
    gap_ = [a - b for a, b in zip(of_map, of_hmc, strict=True)]
    certain_, doubtful = mean_error(of_map)[0] >= CERTAIN, mean_error(of_hmc)[0] <= DOUBTFUL
    reproduced = certain_ and doubtful and side.above(gap_, 0.0)
    start = side.verdict(reproduced, partly=certain_ != doubtful)
    other = [
        f"{side.label(m)} {side.mean_text(values[m]['confidence'])}" for m in ("mle", "dropout", "bbb", "ensemble")
    ]
    certain = [side.label(m) for m in side.AVERAGES if mean_error(values[m]["confidence"])[0] >= CERTAIN]
    return (
        f"{start}: at the star MAP has a confidence of {side.mean_text(of_map)} (certain means {CERTAIN} or more) and "
        f"HMC's model average one of {side.mean_text(of_hmc)} (uncertain means {DOUBTFUL} or less); the difference is "
        f"{side.mean_text(gap_)} ({len(of_map)} data sets).",
        f"Confidence of the other methods there: {side.listed(other)}.",
        f"Of the model averages, {side.listed(certain)} {'is' if len(certain) == 1 else 'are'} practically certain at "
        "the star."
        if certain
        else f"No model average is certain (confidence of {CERTAIN} or more) at the star.",
    ), reproduced


def star_picture(toy: data.Toy, shown: dict[str, Posterior]) -> Picture:
    """Draw the probability of class 1 by six methods."""

    def paint(axes: list[Axes]) -> None:
        for axis, (method, posterior) in zip(axes, shown.items()):
            seen = (toy.x, toy.y)
            plot.decision(posterior.predict, toy.grid, data=seen, marks=toy.star, colorbar=False, ax=axis)
            axis.images[0].set_interpolation("none")  # a tenth of the file size
            axis.set_title(side.label(method))

    return side.panels(
        "star",
        paint,
        rows=2,
        columns=3,
        size=(9.0, 6.4),
        legend=2,
        alt="Six panels: the probability of class 1 over the plane; far above the data point estimates stay certain",
        caption="The first data set. Orange to blue: probability of class 1; the line is at 0.5. The star is not in "
        "the training data.",
    )


STUDIES = {
    "gap-regression": Study(
        "gap-regression",
        "A gap in the data: which methods notice?",
        "Where there are no data a point estimate (MLE, MAP) predicts one line with the noise around it and is "
        "overconfident; the band of the Bayesian model average widens there.",
        gap,
    ),
    "star-classification": Study(
        "star-classification",
        "A star far from the data: which methods are certain?",
        "Far from the data a point estimate is certain of the class it extrapolates to, while the Bayesian model "
        "average gives about 0.6 to 0.4.",
        star,
    ),
}
