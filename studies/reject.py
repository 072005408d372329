"""`reject-option`: digits with clothes and Japanese characters among them. Who answers most at a risk that is promised?"""

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
ROWS, DIGITS, STRANGE = (
    5000,
    10000,
    1000,
)  # training images; digits to answer, and strange images of each kind among them
RISK, CONFIDENCE = 0.05, 0.95
HALVES, RESAMPLES = 20, 200

Pair = tuple[str, str]  # method and score


class Answers(NamedTuple):
    """The test images of one method: whether its answer is wrong, and its uncertainty by score, (N,) each."""

    wrong: Tensor
    uncertainty: dict[str, Tensor]


def run(options: Options) -> Result:
    """Trains on digits, answers a mixture, and cuts the answers off by uncertainty."""
    x, y, x_test, y_test = ood.arrays(options, ood.HOME, "x_train", "y_train", "x_test", "y_test")
    rows, digits, strange = (200, 60, 20) if options.quick else (ROWS, DIGITS, STRANGE)
    few, answered = (torch.randperm(len(x), generator=stream(options.seed, "ood rows"))[:rows]), slice(0, digits)
    far = {name: _some(ood.arrays(options, file, "x_test")[0], strange, name, options) for name, file in FAR.items()}
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
    """Digits first, then the strange images, which are mistakes whatever is said about them."""
    here = posterior.predict(x)
    parts = [(mistakes(here, y).cpu(), ood.scores_of(here))]
    for images in far.values():
        there = posterior.predict(images)
        parts.append((torch.ones(len(images), dtype=torch.bool), ood.scores_of(there)))
    return Answers(
        torch.cat([wrong for wrong, _ in parts]), {kind: torch.cat([u[kind] for _, u in parts]) for kind in SCORES}
    )


def result_of(found: dict[str, Answers], accuracy: dict[str, float], scale: float, options: Options) -> Result:
    """The answer, by a rule fixed before the runs.

    The finding holds when the area under the risk-coverage curve of the deep ensemble's total entropy is below that of MAP's max.
    probability by more than two standard errors of the difference (bootstrap over the same test images).
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
        f"{side.verdict(reproduced)}: the area under the risk-coverage curve is {areas['ensemble', 'total']:.3f} for the deep ensemble's total "
        f"entropy and {areas['map', 'max_probability']:.3f} for MAP's max. probability; the gain is {_signed((gain, error))}.",
        f"The same gain for the total entropy of the others: {side.listed(others)}.",
        f"Lowest is {side.label(best[0])} by {SCORES[best[1]]} ({areas[best]:.3f}).",
        _most(bounds),
        f"On the images that were not used to find the threshold, mistakes were above the limit in {_sum(bounds, 'above')} of "
        f"{_sum(bounds, 'splits')} splits, and by more than two standard errors in {_sum(bounds, 'broken')}; the true risk may be above it in "
        f"{1 - CONFIDENCE:.0%} of them.",
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
    """Risk against coverage of a method by a score, on all images or some of them."""
    mine = found[pair[0]]
    wrong, uncertainty = mine.wrong.double(), mine.uncertainty[pair[1]]
    return metrics.risk_coverage(*((uncertainty, wrong) if rows is None else (uncertainty[rows], wrong[rows])))


def bootstrap(
    found: dict[str, Answers], pairs: list[Pair], seed: int, resamples: int
) -> dict[Pair, tuple[float, float]]:
    """How much smaller the area is than that of MAP's max. probability, and its standard error over images drawn again."""
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
    """Thresholds found on random halves of the images, and what they do on the other halves.

    `above` counts the splits with more mistakes than promised on the other half, `broken` those with more by two standard errors of
    a share: a threshold whose true risk is at the limit is above it half of the time, and seldom by so much.
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
    """How it was run, and where it falls short."""
    images = len(found["map"].wrong)
    rows, strange = (200, 20) if options.quick else (ROWS, STRANGE)
    return (
        f"Networks, settings and the choice of the prior's scale (here {scale:g}) are those of the study `ood`: {rows:,} MNIST training images, "
        f"784-{ood.HIDDEN}-10. Answered: {images - 2 * strange:,} MNIST test images and {strange:,} each of Fashion-MNIST and KMNIST, {images:,} in "
        "all; whatever is said of a strange image is a mistake, so that without rejection the risk is at least "
        f"{2 * strange / images:.0%}. No strange image is seen in training.",
        "The area is the mean risk over all coverages; the gain is over MAP's max. probability, with standard errors by "
        f"{20 if options.quick else RESAMPLES} bootstrap resamples of the images, alike for all methods; they do not hold the spread over trainings.",
        f"The promise: thresholds by `decide.selective_threshold` on a random half of the mixture (risk {RISK:g}, confidence "
        f"{CONFIDENCE:g}), checked on the other half, for {3 if options.quick else HALVES} halvings, which overlap and so are no independent "
        "trials. It needs calibration images of the same mixture: it does not hold for kinds of images that they lack.",
    )


def _most(bounds: dict[Pair, dict[str, float]]) -> str:
    method, score = max(bounds, key=lambda pair: bounds[pair]["coverage"])
    kept = bounds[method, score]
    if not kept["coverage"]:
        return f"No method can promise at most {RISK:.0%} mistakes among its answers."
    return (
        f"With a promise of at most {RISK:.0%} mistakes among what is answered, {side.label(method)} by {SCORES[score]} answers most: "
        f"{kept['coverage']:.0%} of the images, with {_percent(kept['risk'])} mistakes."
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
        "mistakes there",
        "accuracy on digits",
    )
    return Table(tuple(Column(c) for c in columns), tuple(rows))


def _pictures(curves: dict[Pair, metrics.RiskCoverage]) -> Picture:
    def paint(axes: list[Axes]) -> None:
        for axis, (kind, title) in zip(
            axes, reversed(SCORES.items())
        ):  # MAP has no epistemic part; the key is the last panel's
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
            axis.set(title=title, xlabel="share answered", ylabel="mistakes among the answers", xlim=(0, 1))
            axis.set_ylim(bottom=0)

    return side.panels(
        "reject-option",
        paint,
        columns=3,
        size=(9.4, 3.9),
        legend=5,
        alt="Share of mistakes among the answers against the share answered, for each method and score",
        caption=f"Lower is better. The dotted line is the risk of {RISK:.0%} that is promised.",
    )


STUDIES = {
    "reject-option": Study(
        "reject-option",
        "The right to remain silent: who knows when not to answer?",
        "An average over models ranks its own mistakes better than a single network: handing over the least certain inputs leaves fewer "
        "mistakes among the answers (Lakshminarayanan et al. 2017, accuracy against confidence on MNIST with images of another kind mixed in).",
        run,
        (ood.HOME, *FAR.values()),
    )
}
