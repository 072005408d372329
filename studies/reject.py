"""`reject-option`: on digits mixed with other images, which method answers most at a guaranteed risk?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from credibly import plot
from credibly.core.rng import stream
from credibly.decide import mistakes, selective_threshold
from credibly.metrics import scores as metrics
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture
from studies import ood
from studies import side_by_side as side
from studies.study import Options, Result, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from credibly.decide import Selection
    from credibly.posterior.base import Posterior

METHODS = ood.METHODS
SCORES = ood.SCORES
FAR = {name: ood.FAR[name] for name in ("Fashion-MNIST", "KMNIST")}
ROWS, DIGITS, FAR_IMAGES = (
    5000,
    10000,
    1000,
)  # training images; test digits, and out-of-distribution images per data set
RISK, CONFIDENCE = 0.05, 0.95
HALVES, RESAMPLES = 20, 200

Pair = tuple[str, str]  # method and score


class Answers(NamedTuple):
    """The answers of one method on the test images: whether each is wrong, and its uncertainty by score, (N,) each."""

    wrong: Tensor
    uncertainty: dict[str, Tensor]


def run(options: Options) -> Result:
    """Train on digits, predict a mixture, and reject the most uncertain answers."""
    x, y, x_test, y_test = ood.arrays(options, ood.HOME, "x_train", "y_train", "x_test", "y_test")
    rows, digits, far_images = (200, 60, 20) if options.quick else (ROWS, DIGITS, FAR_IMAGES)
    few, answered = (torch.randperm(len(x), generator=stream(options.seed, "ood rows"))[:rows]), slice(0, digits)
    far = {name: _some(ood.arrays(options, file, "x_test")[0], far_images, name, options) for name, file in FAR.items()}
    options.report("prior", 0, len(METHODS) + 1)
    held_out = ood.held_out_densities(x[few], y[few], options)
    scale = max(held_out, key=held_out.__getitem__)
    found: dict[str, Answers] = {}
    accuracy: dict[str, float] = {}
    for place, method in enumerate(METHODS):
        options.report(method, place + 1, len(METHODS) + 1)
        problem = ood.problem_of(x[few], y[few], scale, options)
        posterior = side.fit(method, problem, seed=options.seed, quick=options.quick, **ood.settings(method, options))
        found[method] = answers(posterior, x_test[answered], y_test[answered], far)
        accuracy[method] = 1 - float(found[method].wrong[: len(x_test[answered])].double().mean())
    return result_of(found, accuracy, scale, options)


def answers(posterior: Posterior, x: Tensor, y: Tensor, far: Mapping[str, Tensor]) -> Answers:
    """Return the answers on digits, then on out-of-distribution images, for which any answer is a mistake."""
    here = posterior.predict(x)
    parts = [(mistakes(here, y).cpu(), ood.scores_of(here))]
    for images in far.values():
        there = posterior.predict(images)
        parts.append((torch.ones(len(images), dtype=torch.bool), ood.scores_of(there)))
    return Answers(
        torch.cat([wrong for wrong, _ in parts]), {kind: torch.cat([u[kind] for _, u in parts]) for kind in SCORES}
    )


def result_of(found: dict[str, Answers], accuracy: dict[str, float], scale: float, options: Options) -> Result:
    """Return the result, by a rule fixed before the runs.

    The finding is reproduced if the area under the risk-coverage curve of the deep ensemble's total entropy is below
    that of MAP's max. probability by more than two standard errors of the difference (bootstrap over the same test
    images).
    """
    pairs = [(m, k) for m in found for k in SCORES if (m, k) != ("map", "epistemic")]
    curves = {pair: curve_of(found, pair) for pair in pairs}
    areas = {pair: float(curve.area) for pair, curve in curves.items()}
    gains = bootstrap(found, pairs, options.seed, 20 if options.quick else RESAMPLES)
    bounds = {pair: promise(found, pair, options) for pair in pairs}
    gain, error = gains["ensemble", "total"]
    reproduced = gain - 2 * error > 0
    best = min(areas, key=areas.__getitem__)
    others = [f"{side.label(m)} {_signed(gains[m, 'total'])}" for m in found if m not in ("map", "ensemble")]
    sentences = (
        f"{side.verdict(reproduced)}: the area under the risk-coverage curve is {areas['ensemble', 'total']:.3f} for "
        f"the deep ensemble's total entropy and {areas['map', 'max_probability']:.3f} for MAP's max. probability; the "
        f"gain is {_signed((gain, error))}.",
        f"The same gain for the total entropy of the other methods: {side.listed(others)}.",
        f"The smallest area is that of {side.label(best[0])}, {SCORES[best[1]]} ({areas[best]:.3f}).",
        _most(bounds),
        f"On the images not used for the threshold, the error rate exceeded the limit in {_sum(bounds, 'above')} of "
        f"{_sum(bounds, 'splits')} splits, by more than two standard errors in {_sum(bounds, 'broken')}; the "
        f"guarantee allows the true risk to exceed it in {1 - CONFIDENCE:.0%} of them.",
    )
    numbers = {
        "aurc": _nested(areas),
        "gain_over_map": _nested(gains),
        "promise": _nested(bounds),
        "accuracy_on_digits": accuracy,
    }
    table = _table(areas, gains, bounds, accuracy)
    return Result(sentences, reproduced, table, (_pictures(curves),), numbers, notes(found, scale, options))


def curve_of(found: dict[str, Answers], pair: Pair, rows: Tensor | None = None) -> metrics.RiskCoverage:
    """Return the risk-coverage curve of a method and score, on all images or the given rows."""
    mine = found[pair[0]]
    wrong, uncertainty = mine.wrong.double(), mine.uncertainty[pair[1]]
    return metrics.risk_coverage(*((uncertainty, wrong) if rows is None else (uncertainty[rows], wrong[rows])))


def bootstrap(
    found: dict[str, Answers], pairs: list[Pair], seed: int, resamples: int
) -> dict[Pair, tuple[float, float]]:
    """Return how much smaller the area is than that of MAP's max. probability, and its bootstrap standard error."""
    base, n = ("map", "max_probability"), len(found["map"].wrong)
    start = float(curve_of(found, base).area)
    values: dict[Pair, list[float]] = {pair: [] for pair in pairs}
    for b in range(resamples):
        rows = torch.randint(n, (n,), generator=stream(seed, "bootstrap of answers", b))
        areas = {pair: float(curve_of(found, pair, rows).area) for pair in pairs}
        for pair in pairs:
            values[pair].append(areas[base] - areas[pair])
    return {pair: (start - float(curve_of(found, pair).area), float(np.std(values[pair]))) for pair in pairs}


def promise(found: dict[str, Answers], pair: Pair, options: Options) -> dict[str, float]:
    """Calibrate thresholds on random halves of the images, and evaluate them on the other halves.

    `above` counts the splits whose error rate on the other half exceeds the guaranteed risk, `broken` those that exceed
    it by two binomial standard errors: a threshold whose true risk is at the limit exceeds it half of the time, and
    rarely by that much.
    """
    mine = found[pair[0]]
    uncertainty, wrong = mine.uncertainty[pair[1]], mine.wrong
    risk, coverage, above, broken, splits = [], [], 0, 0, 3 if options.quick else HALVES
    for split in range(splits):
        order = torch.randperm(len(wrong), generator=stream(options.seed, "half of the answers", split))
        cal, rest = order[: len(order) // 2], order[len(order) // 2 :]
        chosen: Selection = selective_threshold(uncertainty[cal], wrong[cal], risk=RISK, confidence=CONFIDENCE)
        accepted = chosen.below(uncertainty[rest])
        coverage.append(float(accepted.double().mean()))
        if bool(accepted.any()):
            seen = float(wrong[rest][accepted].double().mean())
            risk.append(seen)
            above += seen > RISK
            broken += seen > RISK + 2 * (RISK * (1 - RISK) / int(accepted.sum())) ** 0.5
    mean_risk = sum(risk) / len(risk) if risk else float("nan")
    return {"coverage": sum(coverage) / splits, "risk": mean_risk, "above": above, "broken": broken, "splits": splits}


def notes(found: dict[str, Answers], scale: float, options: Options) -> tuple[str, ...]:
    """Return the setup, and where it falls short of the published one."""
    images = len(found["map"].wrong)
    rows, far_images = (200, 20) if options.quick else (ROWS, FAR_IMAGES)
    return (
        f"Networks, settings and the choice of the prior scale (here {scale:g}) are those of the study `ood`: "
        f"{rows:,} MNIST training images, 784-{ood.HIDDEN}-10. Test set: {images - 2 * far_images:,} MNIST test "
        f"images and {far_images:,} each of Fashion-MNIST and KMNIST, {images:,} in total; any answer on an "
        "out-of-distribution image is a mistake, so without rejection the risk is at least "
        f"{2 * far_images / images:.0%}. No out-of-distribution image is used in training.",
        "The area is the mean risk over all coverages; the gain is over MAP's max. probability, with standard errors "
        f"from {20 if options.quick else RESAMPLES} bootstrap resamples of the images, the same for all methods; they "
        "do not include the variation over training runs.",
        f"The guarantee: thresholds from `decide.selective_threshold` on a random half of the mixture (risk {RISK:g}, "
        f"confidence {CONFIDENCE:g}), checked on the other half, for {3 if options.quick else HALVES} random halves, "
        "which overlap and are not independent trials. It needs calibration images from the same mixture: it does "
        "not cover kinds of images missing from them.",
    )


def _most(bounds: dict[Pair, dict[str, float]]) -> str:
    method, score = max(bounds, key=lambda pair: bounds[pair]["coverage"])
    kept = bounds[method, score]
    if not kept["coverage"]:
        return f"No method can guarantee an error rate of at most {RISK:.0%} among its answers."
    return (
        f"With a guaranteed error rate of at most {RISK:.0%} among its answers, {side.label(method)}, {SCORES[score]}, "
        f"answers most: {kept['coverage']:.0%} of the images, with {_percent(kept['risk'])} mistakes."
    )


def _sum(bounds: dict[Pair, dict[str, float]], what: str) -> int:
    return int(sum(kept[what] for kept in bounds.values()))


def _some(images: Tensor, count: int, name: str, options: Options) -> Tensor:
    return images[torch.randperm(len(images), generator=stream(options.seed, f"strange rows of {name}"))[:count]]


def _signed(pair: tuple[float, float]) -> str:
    return f"{pair[0]:+.3f} ± {pair[1]:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _nested(values: Mapping[Pair, Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for (method, score), value in values.items():
        result.setdefault(method, {})[score] = value
    return result


def _table(
    areas: dict[Pair, float],
    gains: dict[Pair, tuple[float, float]],
    bounds: dict[Pair, dict[str, float]],
    accuracy: dict[str, float],
) -> Table:
    rows = []
    for (method, score), area in areas.items():
        kept = bounds[method, score]
        risk = _percent(kept["risk"]) if kept["coverage"] else "none answered"
        gain = "-" if (method, score) == ("map", "max_probability") else _signed(gains[method, score])
        rows.append(
            (
                side.label(method),
                SCORES[score],
                f"{area:.3f}",
                gain,
                _percent(kept["coverage"]),
                risk,
                f"{accuracy[method]:.3f}",
            )
        )
    columns = (
        "method",
        "score",
        "area",
        "gain over MAP",
        f"answered at {RISK:.0%}",
        "error rate there",
        "accuracy on digits",
    )
    return Table(tuple(Column(c) for c in columns), tuple(rows))


def _pictures(curves: dict[Pair, metrics.RiskCoverage]) -> Picture:
    def paint(axes: list[Axes]) -> None:
        # Reversed: the legend shows the lines of the last panel, and MAP has no epistemic part.
        for axis, (kind, title) in zip(axes, reversed(SCORES.items())):
            for place, method in enumerate(METHODS):
                if (method, kind) in curves:
                    curve = curves[method, kind]
                    at = np.unique(np.linspace(0.02 * len(curve.risk), len(curve.risk) - 1, 150).round().astype(int))
                    axis.plot(
                        curve.coverage.numpy()[at],
                        curve.risk.numpy()[at],
                        color=plot.PALETTE[place],
                        linestyle=plot.DASHES[place % len(plot.DASHES)],
                        linewidth=1.5,
                        label=side.label(method),
                    )
            axis.axhline(RISK, color="0.5", linewidth=0.8, linestyle=":")
            axis.set(title=title, xlabel="coverage", ylabel="risk (error rate among the answers)", xlim=(0, 1))
            axis.set_ylim(bottom=0)

    return side.panels(
        "reject-option",
        paint,
        columns=3,
        size=(9.4, 3.9),
        legend=5,
        alt="Error rate among the answers against the fraction answered, for each method and score",
        caption=f"Lower is better. The dotted line is the guaranteed risk of {RISK:.0%}.",
    )


STUDIES = {
    "reject-option": Study(
        "reject-option",
        "Reject option: which methods know when not to answer?",
        "A model average ranks its own mistakes better than a single network: rejecting the least certain inputs "
        "leaves fewer mistakes among the answers (Lakshminarayanan et al. 2017, accuracy against confidence on MNIST "
        "mixed with out-of-distribution images).",
        run,
        (ood.HOME, *FAR.values()),
    )
}
