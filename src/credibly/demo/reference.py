"""HMC as the reference: distance of the other methods' predictions from HMC's, and diagnostics of its chains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from credibly import plot
from credibly.demo.fits import REFERENCE, TASKS, DemoResult
from credibly.plot.chains import rhat_histogram
from credibly.report.page import Column, Section, Table, Value, joined
from credibly.report.pictures import Picture, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from credibly.diagnostics.summary import Diagnostics

SHORT = {
    "diabetes": "diabetes",
    "breast_cancer": "breast cancer",
    "gap_regression": "gap",
    "star_classification": "star",
}
MARKERS = ("o", "s", "^", "D")
# By task, method and metric.
Rows = dict[str, dict[str, dict[str, float]]]


def closeness(result: DemoResult) -> Section:
    """Compare every method's predictions with HMC's."""
    rows = result.against
    second = {task: _second_metric(rows[task]) for task in TASKS}
    titles = {"agreement": "agreement", "mean_shift": "shift"}
    columns = [Column("Method")]
    for task in TASKS:
        columns += [Column(f"{SHORT[task].capitalize()}: TV"), Column(titles[second[task]])]
    body: list[tuple[Value, ...]] = []
    for name in _reference_last(result.methods):
        label = f"{name}, half against half" if name == REFERENCE else name
        values = [rows[task][name][key] for task in TASKS for key in ("total_variation", second[task])]
        body.append((label, *values))
    text = (
        "HMC samples the exact posterior: with enough draws it makes no approximation. All methods target the same "
        "posterior, so a difference from HMC is the method's approximation error, not the fault of the model or the "
        "data. Close to HMC means close to the posterior; how well the posterior predicts is in the sections above.",
        "Total variation (TV) is the largest difference in probability that the two predictions give to any event: 0 "
        "if they are equal, 1 if they do not overlap. It is averaged over the test rows or, for the toys, over grid "
        "points, most of which are far from the data. Agreement is the fraction of these with the same most probable "
        "class; shift is the distance between the two means, in standard deviations of HMC's prediction.",
        f"The last row compares one half of the chains of {REFERENCE} with the other. That is its Monte Carlo error: a "
        "method as close as that is statistically indistinguishable from HMC.",
    )
    unconverged = [task for task in TASKS if not result.diagnostics[task][REFERENCE].ok]
    findings = (*closeness_sentences(rows), *_caution(unconverged))
    return Section("How close to HMC?", text, Table(tuple(columns), tuple(body)), (_distances(result),), findings)


def _second_metric(rows: dict[str, dict[str, float]]) -> str:
    """Return the metric shown next to total variation: agreement for classes, mean shift for real targets."""
    return next(key for key in next(iter(rows.values())) if key != "total_variation")


def _reference_last(methods: tuple[str, ...]) -> list[str]:
    return [name for name in methods if name != REFERENCE] + [REFERENCE]


def _distances(result: DemoResult) -> Picture:
    """Plot one line per method with a point per task."""
    names = _reference_last(result.methods)
    found = {task: [result.against[task][name]["total_variation"] for name in names] for task in TASKS}

    def paint(ax: Axes) -> None:
        lines = range(len(names))
        ax.hlines(lines, 0, 1, color=plot.INK, alpha=0.25, linewidth=0.8)
        points: dict[str, Any] = {"linestyle": "none", "markersize": 6, "alpha": 0.9}
        for task, marker, colour in zip(TASKS, MARKERS, plot.PALETTE):
            ax.plot(found[task], lines, color=colour, marker=marker, label=SHORT[task], **points)
        ax.set_yticks(lines, [f"{name} (halves)" if name == REFERENCE else name for name in names])
        ax.invert_yaxis()
        ax.set(xlabel="total variation from HMC", xlim=(0, 1.08 * max(max(values) for values in found.values())))
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.legend()

    values = {name: ", ".join(f"{found[task][i]:.3f}" for task in TASKS) for i, name in enumerate(names)}
    shown = "; ".join(f"{name} {text}" for name, text in values.items())
    return picture(
        "against",
        paint,
        title="Distance from HMC",
        size=(4.8, 1.6 + 0.3 * len(names)),
        alt=f"Total variation from HMC on {', '.join(SHORT[task] for task in TASKS)}: {shown}.",
        caption="Further left is closer to the posterior. The last line is HMC against itself: its Monte Carlo error.",
    )


def closeness_sentences(rows: Rows) -> tuple[str, ...]:
    """Return the closest, farthest and indistinguishable methods per task, after the mean over all tasks."""
    others = [name for name in rows[TASKS[0]] if name != REFERENCE]
    if not others:
        return ()
    distance = {task: {name: rows[task][name]["total_variation"] for name in others} for task in TASKS}
    sentences = [_task_sentence(task, distance[task], rows[task][REFERENCE]["total_variation"]) for task in TASKS]
    if len(others) > 1:
        mean = {name: sum(distance[task][name] for task in TASKS) / len(TASKS) for name in others}
        first, *_, last = sorted(mean, key=lambda name: mean[name])
        closest = f"{first} is closest to HMC (mean total variation {mean[first]:.3f})"
        sentences.insert(0, f"Over the {len(TASKS)} tasks, {closest}; {last} is farthest ({mean[last]:.3f}).")
    return tuple(sentences)


def _task_sentence(task: str, distance: dict[str, float], error: float) -> str:
    first, *others = sorted(distance, key=lambda name: distance[name])
    found = f"{first} is at {distance[first]:.3f}"
    if others:
        found = f"{first} is closest ({distance[first]:.3f}), {others[-1]} farthest ({distance[others[-1]]:.3f})"
    sentence = f"{SHORT[task].capitalize()}: {found}. HMC's Monte Carlo error is {error:.3f}"
    same = [name for name in distance if distance[name] <= error]
    if not same:
        return f"{sentence}."
    return f"{sentence}, so {joined(same)} {'is' if len(same) == 1 else 'are'} indistinguishable from HMC here."


def _caution(unconverged: list[str]) -> tuple[str, ...]:
    """Warn about the tasks on which HMC's own chains fail the diagnostics."""
    if not unconverged:
        return ()
    where = joined([SHORT[task] for task in unconverged])
    return (
        f"Caution: HMC's chains fail the diagnostics on {where}, so distances there are rough. See the next section.",
    )


# -- chains


def chains(result: DemoResult) -> Section:
    """Show the diagnostics of every method that runs chains, with R-hat histograms of the reference."""
    found = result.diagnostics
    names = [name for name in result.methods if name in found[TASKS[0]]]
    shown = REFERENCE if REFERENCE in names else names[0]
    columns = (
        Column("Chains"),
        Column("R-hat, predictions", None, 3, "worst prediction; up to 1.01 is good, up to 1.05 usable"),
        Column("R-hat, weights", None, 3, "worst weight; permuting hidden units leaves predictions unchanged"),
        Column("ESS, predictions", None, 0, "effective sample size of the worst prediction"),
        Column("Acceptance", None, 2, "fraction of proposals accepted, for methods with an accept step"),
        Column("Divergences", None, 0, "trajectories with a large energy error; ideally none"),
        Column("Verdict", None, 0, "based on the predictions; results.json has the details"),
    )
    rows = [_chain_row(f"{name}, {SHORT[task]}", found[task][name]) for name in names for task in TASKS]
    first = found[TASKS[0]][shown]
    text = (
        f"A reference is only as good as its chains. {shown} ran {first.chains} chains of {first.draws} draws each, "
        "from different starts. If they have mixed, they agree, and R-hat, which compares the variance between chains "
        "with that within chains, is near 1.",
        "Look at the orange histograms, the predictions. The blue ones, the weights, may lie further right: many "
        "weight settings give the same function, and no chain needs to visit them all.",
    )
    pictures = tuple(_rhat(task, shown, found[task][shown]) for task in TASKS)
    verdicts = tuple(f"{shown}, {SHORT[task]}: {found[task][shown].verdict}" for task in TASKS)
    return Section("Did the chains mix?", text, Table(columns, tuple(rows)), pictures, verdicts)


def _chain_row(label: str, found: Diagnostics) -> tuple[Value, ...]:
    assert found.functions is not None
    accepted = "–" if found.acceptance is None else sum(found.acceptance) / len(found.acceptance)
    diverged = "–" if found.divergences is None else found.divergences
    ess = found.functions.ess_bulk_min
    rhat = (found.functions.rhat_worst, found.weights.rhat_worst)
    return (label, *rhat, ess, accepted, diverged, found.verdict.partition(":")[0])


def _rhat(task: str, name: str, found: Diagnostics) -> Picture:
    assert found.functions is not None
    functions, weights = found.functions, found.weights
    caption = (
        f"Predictions: median {functions.rhat_median:.3f}, worst {functions.rhat_worst:.3f}. "
        f"Weights: median {weights.rhat_median:.3f}, worst {weights.rhat_worst:.3f}."
    )
    return picture(
        f"rhat-{name}-{SHORT[task].replace(' ', '-')}",
        lambda ax: rhat_histogram(found, ax=ax),
        title=f"{name}, {SHORT[task]}",
        alt=f"Histograms of R-hat of {name} on {SHORT[task]}. {caption}",
        caption=caption,
    )
