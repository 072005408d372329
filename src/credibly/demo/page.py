"""The page of `credibly demo`: pictures and sentences generated from the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from credibly import plot
from credibly.demo import reference
from credibly.demo.fits import REFERENCE, DemoResult
from credibly.methods import METHODS
from credibly.metrics import scores as metrics
from credibly.report.page import Column, Page, Section, Table, Value
from credibly.report.pictures import Picture, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from credibly.data import DataSet, Toy
    from credibly.predictive.base import Predictive

LEVEL = 0.9


def demo_page(result: DemoResult) -> Page:
    """Return the report on a demo run."""
    lead = (
        "The same network, prior and data, fitted by different methods. A point estimate keeps one set of weights; a "
        "Bayesian method averages over many, so it can show where it is uncertain. Each section explains what to look "
        "for, then what this run shows."
    )
    length = "a short run (--quick) with worse metrics than a full one" if result.quick else "a full run"
    footer = f"credibly demo, seed {result.seed}, {length}. results.json in the same folder has all metrics."
    sections = [_methods(result), _diabetes(result), _cancer(result), _gap(result), _star(result)]
    if REFERENCE in result.methods:
        lead += " HMC samples the exact posterior; the last sections show how close the others come to it."
        sections.append(reference.closeness(result))
    if any(result.diagnostics.values()):
        sections.append(reference.chains(result))
    return Page("Bayesian deep learning methods compared", lead, tuple(sections), footer)


def _methods(result: DemoResult) -> Section:
    rows = []
    for name in result.methods:
        settings = ", ".join(f"{key}={value}" for key, value in result.settings[name].items()) or "defaults"
        draws = result.posteriors["gap_regression"][name].predict(result.data["gap_regression"].x[:1]).draws
        seconds = sum(times[name] for times in result.seconds.values())
        rows.append((name, METHODS[name].title(), draws, settings, seconds))
    columns = (
        Column("Method"),
        Column("Description"),
        Column("Draws"),
        Column("Settings"),
        Column("Seconds", digits=1),
    )
    text = (
        "Draws are the sets of weights that a prediction averages over. With a single draw, epistemic uncertainty is "
        "exactly zero. Seconds are the total of the four fits."
    )
    return Section("The methods", (text,), Table(columns, tuple(rows)))


def _table(result: DemoResult, task: str, columns: tuple[Column, ...], keys: tuple[str, ...]) -> Table:
    """Return one row per method: its name, the metrics of the given keys, its gradients and its distance from HMC."""
    spent: dict[str, Value] = {name: "–" if count is None else count for name, count in result.gradients[task].items()}
    rows: list[tuple[Value, ...]] = [
        (name, *[row[key] for key in keys], spent[name]) for name, row in result.figures[task].items()
    ]
    note = "gradients of all rows that the fit took, over all chains or members; a minibatch counts by its rows"
    columns = (*columns, Column("Gradients", None, 0, note))
    distance = result.against[task]
    if distance:
        note = "total variation between its predictions and HMC's, from 0 to 1; see the last sections"
        columns = (*columns, Column("From HMC", None, 3, note))
        rows = [
            (*row, "reference" if row[0] == REFERENCE else distance[str(row[0])]["total_variation"]) for row in rows
        ]
    return Table(columns, tuple(rows))


def _grouped(names: tuple[str, ...], group: Callable[[str], str], shown: Callable[[str], str]) -> tuple[str, ...]:
    """Return one sentence per group of methods, in order of first appearance."""
    groups = dict.fromkeys(group(name) for name in names)
    return tuple(f"{g}: {', '.join(shown(n) for n in names if group(n) == g)}." for g in groups)


# -- real data


def _diabetes(result: DemoResult) -> Section:
    known: DataSet = result.data["diabetes"]
    predictions = {name: p.predict(known.x_test) for name, p in result.posteriors["diabetes"].items()}
    n = len(known.y_test)
    error = metrics.coverage_standard_error(LEVEL, n)
    columns = (
        Column("Method"),
        Column("RMSE", "low", 2, "root mean squared error of the mean, in points of the disease score"),
        Column("CRPS", "low", 2, "error of the whole predictive distribution, in the same points"),
        Column(
            "Log density",
            "high",
            3,
            "log predictive density in nats per row; scores the mean and the interval width together",
        ),
        Column("Coverage", LEVEL, 3, f"fraction of test values inside their 90% interval; ideally {LEVEL}"),
        Column("Width", None, 1, "mean width of the 90% interval; narrow is good only if coverage is right"),
        Column("Calibration error", "low", 3, "mean gap between nominal and observed coverage, over all levels"),
    )
    keys = ("rmse", "crps", "log_density", "coverage", "width", "calibration_error")
    table = _table(result, "diabetes", columns, keys)

    def paint(ax: Axes) -> None:
        for name, predictive in predictions.items():
            plot.coverage_curve(predictive, known.y_test, label=name, ax=ax)

    coverage = {name: result.figures["diabetes"][name]["coverage"] for name in result.methods}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in coverage.items())
    curve = picture(
        "coverage",
        paint,
        title="Observed against nominal coverage",
        size=(4.8, 3.9),
        alt=f"Observed against nominal coverage of intervals. At level {LEVEL}: {shown}.",
        caption=f"Below the line, intervals are too narrow. At the 90% level: {shown}.",
    )
    text = (
        f"{known.description}: disease progression after one year from {known.n_features} measurements; "
        f"{len(known.y_train)} patients for training, {n} for testing.",
        f"Look at coverage first: 90% intervals that cover less are overconfident. With {n} test rows, "
        f"{LEVEL - 2 * error:.2f} to {LEVEL + 2 * error:.2f} is within chance of {LEVEL}. Then look at log density, "
        "which penalises both a wrong mean and a wrong width.",
    )
    groups = _grouped(result.methods, lambda n: _coverage_group(coverage[n], error), lambda n: f"{n} {coverage[n]:.1%}")
    findings = (*_ranking(predictions, known), *groups)
    return Section("Real data: diabetes (regression)", text, table, (curve,), findings)


def _cancer(result: DemoResult) -> Section:
    known: DataSet = result.data["breast_cancer"]
    predictions = {name: p.predict(known.x_test) for name, p in result.posteriors["breast_cancer"].items()}
    columns = (
        Column("Method"),
        Column("Accuracy", "high", 3, "fraction of tumours classified correctly"),
        Column("Log density", "high", 3, "log probability of the observed class in nats per row"),
        Column("Brier", "low", 3, "squared error of the probabilities, from 0 to 2"),
        Column("ECE", "low", 3, "expected calibration error, the mean gap between confidence and accuracy"),
        Column("Coverage", None, 3, "fraction of test rows whose class is in the smallest set holding 90%"),
        Column("Set size", None, 2, "mean number of classes in that set; 1 is a clear decision"),
    )
    keys = ("accuracy", "log_density", "brier", "ece", "coverage", "set_size")
    table = _table(result, "breast_cancer", columns, keys)
    confidence = {name: float(p.probabilities.max(-1).values.double().mean()) for name, p in predictions.items()}
    accuracy = {name: result.figures["breast_cancer"][name]["accuracy"] for name in result.methods}

    def panel(name: str) -> Picture:
        found = metrics.calibration(predictions[name].probabilities, known.y_test)
        scores = (
            f"mean confidence {confidence[name]:.3f}, accuracy {accuracy[name]:.3f}, "
            f"calibration error {float(found.ece):.3f}"
        )
        alt, caption = f"Reliability diagram of {name}: {scores}.", f"{scores.capitalize()}."
        return picture(
            f"reliability-{name}", lambda ax: plot.reliability(found, ax=ax), title=name, alt=alt, caption=caption
        )

    text = (
        f"{known.description}: benign or malignant from {known.n_features} measurements of cell nuclei; "
        f"{len(known.y_train)} tumours for training, {len(known.y_test)} for testing.",
        "Look at the reliability diagrams. On the dashed line, a confidence of 0.8 is right 8 times in 10; points "
        "below it are overconfident, points above it underconfident. The bars show how many rows each point has: "
        "points with few rows are noisy.",
    )
    n = len(known.y_test)
    groups = _grouped(
        result.methods,
        lambda name: _confidence_group(confidence[name], accuracy[name], n),
        lambda name: f"{name} (confidence {confidence[name]:.1%}, accuracy {accuracy[name]:.1%})",
    )
    pictures = tuple(panel(name) for name in result.methods)
    findings = (*_ranking(predictions, known), *groups)
    return Section("Real data: breast cancer (two classes)", text, table, pictures, findings)


def _ranking(predictions: dict[str, Predictive], known: DataSet) -> tuple[str, ...]:
    """Return which method has the highest log density, and whether its lead over the next exceeds chance."""
    rows = {name: p.log_prob(known.y_test).double() for name, p in predictions.items()}
    first, *others = sorted(rows, key=lambda name: -float(rows[name].mean()))
    if not others:
        return ()
    gain = rows[first] - rows[others[0]]
    mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
    chance = "more than chance explains" if mean > 2 * error else f"within chance on {len(gain)} rows"
    lead = f"Highest log density: {first}, ahead of {others[0]} by {mean:.3f} ± {2 * error:.3f} nats per row, {chance}"
    if len(others) == 1:
        return (f"{lead}.",)
    return (f"{lead}; {others[-1]} is last, {float((rows[first] - rows[others[-1]]).mean()):.3f} behind.",)


def _coverage_group(observed: float, error: float) -> str:
    if observed < LEVEL - 2 * error:
        return "Overconfident (90% intervals cover less than chance explains)"
    if observed > LEVEL + 2 * error:
        return "Underconfident (90% intervals cover more than chance explains)"
    return "Calibrated (coverage of the 90% intervals is within chance)"


def _confidence_group(confidence: float, accuracy: float, n: int) -> str:
    error = max(accuracy * (1 - accuracy) / n, 1 / n**2) ** 0.5
    if confidence > accuracy + 2 * error:
        return "Overconfident on average"
    if confidence < accuracy - 2 * error:
        return "Underconfident on average"
    return "Calibrated on average, within chance"


# -- toys


def _gap(result: DemoResult) -> Section:
    toy: Toy = result.data["gap_regression"]
    predictions = {name: p.predict(toy.grid) for name, p in result.posteriors["gap_regression"].items()}
    limits = _shared_limits(toy, predictions)

    def panel(name: str) -> Picture:
        def paint(ax: Axes) -> None:
            plot.bands(predictions[name], toy.grid, data=(toy.x, toy.y), truth=toy.truth, ax=ax)
            ax.set(ylim=limits, xlim=(float(toy.grid.min()), float(toy.grid.max())))

        sentence = _gap_sentence(result.figures["gap_regression"][name])
        alt = f"Mean and credible bands of {name}. {sentence}"
        return picture(f"gap-{name}", paint, title=name, alt=alt, caption=sentence)

    low, high = toy.gap or (0.0, 0.0)
    text = (
        f"{len(toy.y)} points of a wave with noise of standard deviation {toy.noise:g}, and none between {low:g} and "
        f"{high:g}, where the data do not determine the function.",
        "Look at the dark orange band: epistemic uncertainty, which should be narrow on the data and wide in the gap "
        "and beyond. The light bands are prediction intervals, noise included.",
    )
    columns = (
        Column("Method"),
        Column("Epistemic on data", None, 3, "mean epistemic standard deviation on the data"),
        Column("Epistemic in gap", None, 3, "the same in the gap"),
        Column("Error in gap", None, 3, "mean absolute error of the mean in the gap; epistemic std should be as large"),
    )
    table = _table(result, "gap_regression", columns, ("epistemic_on_data", "epistemic_in_gap", "error_in_gap"))
    pictures = tuple(panel(name) for name in result.methods)
    return Section("Toy: a gap in the data", text, table, pictures)


def _gap_sentence(values: dict[str, float]) -> str:
    on, gap, error = (values[key] for key in ("epistemic_on_data", "epistemic_in_gap", "error_in_gap"))
    if gap == 0:
        return f"No epistemic uncertainty (std 0), while its mean is off by {error:.2f} in the gap."
    change = "no wider than" if gap <= on else f"{gap / on:.1f} times" if on > 0 else "up from"
    return (
        f"Epistemic std in the gap {gap:.3f}, {change} the {on:.3f} on the data; its mean is off by {error:.2f} there."
    )


def _shared_limits(toy: Toy, predictions: dict[str, Predictive]) -> tuple[float, float]:
    """Return y limits for all panels: every interval, but at most twice the range of the data."""
    low, high = float(toy.y.min()), float(toy.y.max())
    height = high - low
    edges = [p.interval(LEVEL) for p in predictions.values()]
    bottom, top = min(float(e[0].min()) for e in edges), max(float(e[1].max()) for e in edges)
    return max(bottom, low - height / 2) - 0.05 * height, min(top, high + height / 2) + 0.05 * height


def _star(result: DemoResult) -> Section:
    toy: Toy = result.data["star_classification"]
    posteriors = result.posteriors["star_classification"]

    def panel(name: str) -> Picture:
        def paint(ax: Axes) -> None:
            plot.decision(posteriors[name].predict, toy.grid, data=(toy.x, toy.y), marks=toy.star, ax=ax)

        sentence = _star_sentence(result.figures["star_classification"][name])
        alt = f"Probability of class 1 by {name}, two clusters and a star far above. {sentence}"
        return picture(f"star-{name}", paint, title=name, alt=alt, caption=sentence)

    text = (
        f"{len(toy.y)} points in two clusters, and a star far from all of them. Near the data the decision boundary is "
        "well determined; at the star, small changes of the boundary that the data allow flip the prediction.",
        "Look at the number at the star: near 0 or 1 is confident, near 0.5 is uncertain. If the colour fades far from "
        "the data, the method knows its limits.",
    )
    columns = (
        Column("Method"),
        Column("P(class 1) at star", None, 3, "predicted probability at the star"),
        Column("Uncertainty", None, 3, "entropy at the star in nats, from 0 to 0.693"),
        Column("Epistemic part", None, 3, "the part that is disagreement between draws"),
    )
    keys = ("probability_at_star", "total_at_star", "epistemic_at_star")
    table = _table(result, "star_classification", columns, keys)
    return Section("Toy: a far-away star", text, table, tuple(panel(name) for name in result.methods))


def _star_sentence(values: dict[str, float]) -> str:
    p, total, epistemic = (values[key] for key in ("probability_at_star", "total_at_star", "epistemic_at_star"))
    claim = "almost certain" if max(p, 1 - p) >= 0.95 else "undecided" if max(p, 1 - p) <= 0.7 else "leaning"
    part = f"{epistemic / total:.0%} of its uncertainty is" if epistemic > 0 else "none of its uncertainty is"
    return f"Class 1 has probability {p:.3f} at the star: {claim}; {part} epistemic."
