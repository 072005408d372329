"""The page of `credibly demo`: its pictures, and its sentences, each written from the numbers of the run."""

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
    """The report on a demo run."""
    lead = (
        "The same network, prior and data, fitted by different methods. A point estimate keeps one set of weights; a Bayesian "
        "method averages over many, and so can say where it does not know. Each part tells what to look at, then what this "
        "run shows."
    )
    steps = "a short run (--quick), so that figures are worse than need be" if result.quick else "a full run"
    footer = f"credibly demo, seed {result.seed}, {steps}. The same figures are in results.json beside this page."
    parts = [_methods(result), _diabetes(result), _cancer(result), _gap(result), _star(result)]
    if REFERENCE in result.methods:
        lead += " HMC draws from the posterior itself; the last parts tell how close to it the others come."
        parts.append(reference.closeness(result))
    if any(result.diagnostics.values()):
        parts.append(reference.chains(result))
    return Page("What the methods know, and what they know they do not", lead, tuple(parts), footer)


def _methods(result: DemoResult) -> Section:
    rows = []
    for name in result.methods:
        settings = ", ".join(f"{key}={value}" for key, value in result.settings[name].items()) or "its defaults"
        draws = result.posteriors["gap_regression"][name].predict(result.data["gap_regression"].x[:1]).draws
        seconds = sum(times[name] for times in result.seconds.values())
        rows.append((name, METHODS[name].title(), draws, settings, seconds))
    columns = (Column("Method"), Column("What it is"), Column("Draws"), Column("Settings"), Column("Seconds", digits=1))
    text = (
        "Draws are the sets of weights a prediction averages over; with one there is nothing to disagree, so its epistemic "
        "uncertainty is exactly zero. Seconds are for all four fits together."
    )
    return Section("The methods", (text,), Table(columns, tuple(rows)))


def _table(result: DemoResult, task: str, columns: tuple[Column, ...], keys: tuple[str, ...]) -> Table:
    """A row for each method: its name, its figures of those keys and, where HMC was run, how far it is from HMC."""
    rows: list[tuple[Value, ...]] = [(name, *[row[key] for key in keys]) for name, row in result.figures[task].items()]
    far = result.against[task]
    if far:
        note = "total variation between its predictions and HMC's, from 0 to 1: see the last parts"
        columns = (*columns, Column("From HMC", None, 3, note))
        rows = [(*row, "reference" if row[0] == REFERENCE else far[str(row[0])]["total_variation"]) for row in rows]
    return Table(columns, tuple(rows))


def _grouped(names: tuple[str, ...], kind: Callable[[str], str], shown: Callable[[str], str]) -> tuple[str, ...]:
    """One sentence for each kind, with the methods of it and what is shown of each, in the order of the first of a kind."""
    kinds = dict.fromkeys(kind(name) for name in names)
    return tuple(f"{k}: {', '.join(shown(n) for n in names if kind(n) == k)}." for k in kinds)


# -- real data


def _diabetes(result: DemoResult) -> Section:
    known: DataSet = result.data["diabetes"]
    figures = result.figures["diabetes"]
    predictions = {name: p.predict(known.x_test) for name, p in result.posteriors["diabetes"].items()}
    n = len(known.y_test)
    error = metrics.coverage_standard_error(LEVEL, n)
    columns = (
        Column("Method"),
        Column("RMSE", "low", 2, "typical error of the mean, in points of the disease score"),
        Column("CRPS", "low", 2, "error of the whole predicted distribution, in the same points"),
        Column(
            "Log density",
            "high",
            3,
            "how probable the observed values were, in nats a row: one figure for mean and width together",
        ),
        Column("Coverage", LEVEL, 3, f"share of test values inside their 90% interval: right is near {LEVEL}"),
        Column("Width", None, 1, "mean width of that interval: narrow is good only where the coverage is right"),
        Column("Calibration error", "low", 3, "mean gap between promised and observed shares, over all levels"),
    )
    keys = ("rmse", "crps", "log_density", "coverage", "width", "calibration_error")
    table = _table(result, "diabetes", columns, keys)

    def paint(ax: Axes) -> None:
        for name, predictive in predictions.items():
            plot.coverage_curve(predictive, known.y_test, label=name, ax=ax)

    observed = ", ".join(f"{name} {figures[name]['coverage']:.2f}" for name in result.methods)
    curve = picture(
        "coverage", paint, title="Do intervals hold what they promise?", size=(4.8, 3.9),
        alt=f"Observed against promised coverage of intervals. At level {LEVEL}: {observed}.",
        caption=f"A curve below the line belongs to intervals that are too narrow. At the 90% level: {observed}.",
    )  # fmt: skip
    text = (
        f"{known.description}: one year's progression of the disease from {known.n_features} measurements; "
        f"{len(known.y_train)} patients to learn from, {n} to test on, none of them seen in training.",
        f"Look at coverage first: an interval that promises 90% and holds less is overconfident. With {n} test rows, "
        f"{LEVEL - 2 * error:.2f} to {LEVEL + 2 * error:.2f} cannot be told from {LEVEL}. Then at log density, which "
        "punishes both a wrong mean and a wrong width.",
    )
    held = {name: figures[name]["coverage"] for name in result.methods}
    said = _grouped(result.methods, lambda n: _coverage_kind(held[n], error), lambda n: f"{n} {held[n]:.1%}")
    findings = (*_ranking(predictions, known), *said)
    return Section("Real data: diabetes (regression)", text, table, (curve,), findings)


def _cancer(result: DemoResult) -> Section:
    known: DataSet = result.data["breast_cancer"]
    figures = result.figures["breast_cancer"]
    predictions = {name: p.predict(known.x_test) for name, p in result.posteriors["breast_cancer"].items()}
    columns = (
        Column("Method"),
        Column("Accuracy", "high", 3, "share of tumours put into the right class"),
        Column("Log density", "high", 3, "how probable the observed classes were, in nats a row"),
        Column("Brier", "low", 3, "squared error of the probabilities, from 0 to 2"),
        Column("ECE", "low", 3, "mean distance between confidence and accuracy"),
        Column("Coverage", None, 3, "share of test rows whose class is in the smallest set of classes that holds 90%"),
        Column("Set size", None, 2, "mean number of classes in that set: 1 is a decision, 2 an honest shrug"),
    )
    keys = ("accuracy", "log_density", "brier", "ece", "coverage", "set_size")
    table = _table(result, "breast_cancer", columns, keys)
    sure = {name: float(p.probabilities.max(-1).values.double().mean()) for name, p in predictions.items()}
    right = {name: figures[name]["accuracy"] for name in result.methods}

    def panel(name: str) -> Picture:
        found = metrics.calibration(predictions[name].probabilities, known.y_test)
        said = f"mean confidence {sure[name]:.3f}, accuracy {right[name]:.3f}, calibration error {float(found.ece):.3f}"
        alt, caption = f"Reliability diagram of {name}: {said}.", f"{said.capitalize()}."
        return picture(
            f"reliability-{name}", lambda ax: plot.reliability(found, ax=ax), title=name, alt=alt, caption=caption
        )

    text = (
        f"{known.description}: benign or malignant from {known.n_features} measurements of cell nuclei; "
        f"{len(known.y_train)} tumours to learn from, {len(known.y_test)} to test on.",
        "Look at the diagrams: points on the dashed line mean that a confidence of 0.8 is right 8 times in 10; points below "
        "it that the model is too sure, above it too cautious. The bars show how many rows each point rests on: few rows, "
        "little evidence.",
    )
    n = len(known.y_test)
    said = _grouped(
        result.methods,
        lambda name: _confidence_kind(sure[name], right[name], n),
        lambda name: f"{name} ({sure[name]:.1%} sure, {right[name]:.1%} right)",
    )
    pictures = tuple(panel(name) for name in result.methods)
    findings = (*_ranking(predictions, known), *said)
    return Section("Real data: breast cancer (two classes)", text, table, pictures, findings)


def _ranking(predictions: dict[str, Predictive], known: DataSet) -> tuple[str, ...]:
    """Which method gave the test rows the highest density, and whether the lead over the next is more than noise."""
    rows = {name: p.log_prob(known.y_test).double() for name, p in predictions.items()}
    first, *others = sorted(rows, key=lambda name: -float(rows[name].mean()))
    if not others:
        return ()
    gain = rows[first] - rows[others[0]]
    mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
    verdict = "more than chance would give" if mean > 2 * error else f"too little to call on {len(gain)} rows"
    lead = f"Highest log density: {first}, ahead of {others[0]} by {mean:.3f} ± {2 * error:.3f} nats a row, {verdict}"
    if len(others) == 1:
        return (f"{lead}.",)
    return (f"{lead}; {others[-1]} comes last, {float((rows[first] - rows[others[-1]]).mean()):.3f} behind.",)


def _coverage_kind(observed: float, error: float) -> str:
    if observed < LEVEL - 2 * error:
        return "Overconfident (fewer test values within the 90% intervals than chance explains)"
    if observed > LEVEL + 2 * error:
        return "Too cautious (more test values within the 90% intervals than chance explains)"
    return "As promised (the share of test values within the 90% intervals is within chance of 90%)"


def _confidence_kind(sure: float, right: float, n: int) -> str:
    error = max(right * (1 - right) / n, 1 / n**2) ** 0.5
    if sure > right + 2 * error:
        return "Too sure on average"
    if sure < right - 2 * error:
        return "Too cautious on average"
    return "As sure on average as they are right, within chance"


# -- toys


def _gap(result: DemoResult) -> Section:
    toy: Toy = result.data["gap_regression"]
    figures = result.figures["gap_regression"]
    predictions = {name: p.predict(toy.grid) for name, p in result.posteriors["gap_regression"].items()}
    limits = _shared_limits(toy, predictions)

    def panel(name: str) -> Picture:
        def paint(ax: Axes) -> None:
            plot.bands(predictions[name], toy.grid, data=(toy.x, toy.y), truth=toy.truth, ax=ax)
            ax.set(ylim=limits, xlim=(float(toy.grid.min()), float(toy.grid.max())))

        sentence = _gap_sentence(figures[name])
        alt = f"Mean and credible bands of {name}. {sentence}"
        return picture(f"gap-{name}", paint, title=name, alt=alt, caption=sentence)

    low, high = toy.gap or (0.0, 0.0)
    text = (
        f"{len(toy.y)} points of a wave with noise of deviation {toy.noise:g}, and none between {low:g} and {high:g}. "
        "Nobody can know what happens there.",
        "Look at the strong orange band: the model's own doubt (epistemic uncertainty), which should be thin on the data and "
        "wide in the gap and beyond. The light bands are intervals for a new observation, noise included.",
    )
    columns = (
        Column("Method"),
        Column("Doubt on data", None, 3, "mean epistemic deviation at the data"),
        Column("Doubt in gap", None, 3, "the same in the gap"),
        Column(
            "Error in gap", None, 3, "mean distance of the mean from the truth in the gap, which doubt should allow for"
        ),
    )
    table = _table(result, "gap_regression", columns, ("epistemic_on_data", "epistemic_in_gap", "error_in_gap"))
    pictures = tuple(panel(name) for name in result.methods)
    return Section("Toy: a gap in the data", text, table, pictures)


def _gap_sentence(figures: dict[str, float]) -> str:
    on, gap, error = (figures[key] for key in ("epistemic_on_data", "epistemic_in_gap", "error_in_gap"))
    if gap == 0:
        return f"No doubt anywhere (epistemic deviation 0), while its mean is off by {error:.2f} in the gap."
    change = "no wider than" if gap <= on else f"{gap / on:.1f} times" if on > 0 else "up from"
    return f"Epistemic deviation in the gap {gap:.3f}, {change} the {on:.3f} on the data; its mean is off by {error:.2f} there."


def _shared_limits(toy: Toy, predictions: dict[str, Predictive]) -> tuple[float, float]:
    """One range of y for all panels: every interval, but at most twice the height of the data."""
    low, high = float(toy.y.min()), float(toy.y.max())
    reach = high - low
    edges = [p.interval(LEVEL) for p in predictions.values()]
    bottom, top = min(float(e[0].min()) for e in edges), max(float(e[1].max()) for e in edges)
    return max(bottom, low - reach / 2) - 0.05 * reach, min(top, high + reach / 2) + 0.05 * reach


def _star(result: DemoResult) -> Section:
    toy: Toy = result.data["star_classification"]
    figures = result.figures["star_classification"]
    posteriors = result.posteriors["star_classification"]

    def panel(name: str) -> Picture:
        def paint(ax: Axes) -> None:
            plot.decision(posteriors[name].predict, toy.grid, data=(toy.x, toy.y), marks=toy.star, ax=ax)

        sentence = _star_sentence(figures[name])
        alt = f"Probability of class 1 by {name}, two clusters and a star far above. {sentence}"
        return picture(f"star-{name}", paint, title=name, alt=alt, caption=sentence)

    text = (
        f"{len(toy.y)} points in two clusters, and a star far from all of them. Close to the data the boundary is settled; at "
        "the star, small changes of the boundary that the data allow turn one answer into the other.",
        "Look at the number at the star: near 0 or 1 is a claim to know, near 0.5 is an admission not to. Where the colour "
        "fades far from the data the method knows its limits.",
    )
    columns = (
        Column("Method"),
        Column("P(class 1) at star", None, 3, "the predicted probability there"),
        Column("Uncertainty", None, 3, "entropy at the star in nats, from 0 to 0.693"),
        Column("Epistemic part", None, 3, "how much of it is disagreement between the draws"),
    )
    keys = ("probability_at_star", "total_at_star", "epistemic_at_star")
    table = _table(result, "star_classification", columns, keys)
    return Section("Toy: a far-away star", text, table, tuple(panel(name) for name in result.methods))


def _star_sentence(figures: dict[str, float]) -> str:
    p, total, doubt = (figures[key] for key in ("probability_at_star", "total_at_star", "epistemic_at_star"))
    claim = "all but certain" if max(p, 1 - p) >= 0.95 else "undecided" if max(p, 1 - p) <= 0.7 else "leaning"
    share = f"{doubt / total:.0%} of its uncertainty is" if doubt > 0 else "none of its uncertainty is"
    return f"Class 1 has probability {p:.3f} at the star: {claim}; {share} epistemic."
