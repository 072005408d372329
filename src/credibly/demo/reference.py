"""HMC as the reference: how far the other methods' predictions are from its own, and whether its chains can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from credibly import plot
from credibly.demo.fits import REFERENCE, TASKS, DemoResult
from credibly.plot.chains import rhat_histogram
from credibly.report.page import Column, Section, Table, Value
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
Rows = dict[str, dict[str, dict[str, float]]]  # by task, method and figure


def closeness(result: DemoResult) -> Section:
    """Every method's predictions against those of HMC."""
    rows = result.against
    second = {task: _second(rows[task]) for task in TASKS}
    titles = {"agreement": "agreement", "mean_shift": "shift"}
    columns = [Column("Method")]
    for task in TASKS:
        columns += [Column(f"{SHORT[task].capitalize()}: TV"), Column(titles[second[task]])]
    body: list[tuple[Value, ...]] = []
    for name in _reference_last(result.methods):
        label = f"{name}, half against half" if name == REFERENCE else name
        figures = [rows[task][name][key] for task in TASKS for key in ("total_variation", second[task])]
        body.append((label, *figures))
    text = (
        "HMC draws from the posterior itself: with enough draws it makes no approximation. Every method here was asked for the "
        "same posterior, so what it predicts otherwise than HMC is its own approximation, and neither the model's fault nor that "
        "of the data. Close to HMC means that a method found the posterior; how well the posterior predicts is in the parts "
        "above.",
        "Total variation (TV) is the largest difference between the probabilities that the two give to any event: 0 for the same "
        "prediction, 1 where they have nothing in common. Here it is the mean over the test rows or, for the toys, over the "
        "points of the picture, most of which are far from data. Agreement is the share of these with the same most probable "
        "class; shift the distance between the two means, in standard deviations of HMC's prediction.",
        f"The last row sets one half of the chains of {REFERENCE} against the other half. That is chance, and a method that "
        "comes as close as that cannot be told from HMC.",
    )
    unsure = [task for task in TASKS if not result.diagnostics[task][REFERENCE].ok]
    said = (*closeness_sentences(rows), *_caution(unsure))
    return Section("How close to HMC?", text, Table(tuple(columns), tuple(body)), (_distances(result),), said)


def _second(rows: dict[str, dict[str, float]]) -> str:
    """What is told beside the total variation: agreement for labels, the shift of the mean for real targets."""
    return next(key for key in next(iter(rows.values())) if key != "total_variation")


def _reference_last(methods: tuple[str, ...]) -> list[str]:
    return [name for name in methods if name != REFERENCE] + [REFERENCE]


def _distances(result: DemoResult) -> Picture:
    """A line for each method with a point for each task."""
    names = _reference_last(result.methods)
    found = {task: [result.against[task][name]["total_variation"] for name in names] for task in TASKS}

    def paint(ax: Axes) -> None:
        places = range(len(names))
        ax.hlines(places, 0, 1, color=plot.INK, alpha=0.25, linewidth=0.8)
        for task, marker, colour in zip(TASKS, MARKERS, plot.PALETTE):
            ax.plot(
                found[task], places, color=colour, linestyle="none", marker=marker, markersize=6, alpha=0.9, label=SHORT[task]
            )  # fmt: skip
        ax.set_yticks(places, [f"{name} (halves)" if name == REFERENCE else name for name in names])
        ax.invert_yaxis()
        ax.set(xlabel="total variation from HMC", xlim=(0, 1.08 * max(max(values) for values in found.values())))
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.legend()

    values = {name: ", ".join(f"{found[task][i]:.3f}" for task in TASKS) for i, name in enumerate(names)}
    said = "; ".join(f"{name} {text}" for name, text in values.items())
    return picture(
        "against", paint, title="Distance from HMC", size=(4.8, 1.6 + 0.3 * len(names)),
        alt=f"Total variation from HMC on {', '.join(SHORT[task] for task in TASKS)}: {said}.",
        caption="Further left is closer to the posterior. In the last line, HMC against itself: what chance alone gives.",
    )  # fmt: skip


def closeness_sentences(rows: Rows) -> tuple[str, ...]:
    """For each task who is closest and who is farthest, who cannot be told from HMC; and who is closest on the whole."""
    others = [name for name in rows[TASKS[0]] if name != REFERENCE]
    if not others:
        return ()
    far = {task: {name: rows[task][name]["total_variation"] for name in others} for task in TASKS}
    said = [_task_sentence(task, far[task], rows[task][REFERENCE]["total_variation"]) for task in TASKS]
    if len(others) > 1:
        mean = {name: sum(far[task][name] for task in TASKS) / len(TASKS) for name in others}
        first, *_, last = sorted(mean, key=lambda name: mean[name])
        said.insert(
            0, f"Over the {len(TASKS)} tasks {first} is closest to HMC, with a mean total variation of {mean[first]:.3f}; "
            f"{last} is farthest, with {mean[last]:.3f}."
        )  # fmt: skip
    return tuple(said)


def _task_sentence(task: str, far: dict[str, float], chance: float) -> str:
    first, *others = sorted(far, key=lambda name: far[name])
    start = f"{SHORT[task].capitalize()}: {first} is {'closest' if others else 'at a distance'} ({far[first]:.3f})"
    if others:
        start += f", {others[-1]} farthest ({far[others[-1]]:.3f})"
    same = [name for name in far if far[name] <= chance]
    if not same:
        return f"{start}. Chance alone gives {chance:.3f}."
    return f"{start}. Chance alone gives {chance:.3f}, so {', '.join(same)} cannot be told from HMC here."


def _caution(unsure: list[str]) -> tuple[str, ...]:
    """What to say of the tasks on which the reference's own chains are not good enough."""
    if not unsure:
        return ()
    where = " and ".join(SHORT[task] for task in unsure)
    return (
        f"With care: HMC's own chains do not pass on {where}, so distances there are rough. The next part says why.",
    )


# -- chains


def chains(result: DemoResult) -> Section:
    """Whether the chains agree, for every method that runs chains, with pictures of the reference's."""
    found = result.diagnostics
    names = [name for name in result.methods if name in found[TASKS[0]]]
    shown = REFERENCE if REFERENCE in names else names[0]
    columns = (
        Column("Chains"),
        Column("R-hat, predictions", None, 3, "of the worst prediction: up to 1.01 is good, up to 1.05 usable"),
        Column(
            "R-hat, weights", None, 3, "of the worst weight: hidden units can swap places without changing a prediction"
        ),
        Column("ESS, predictions", None, 0, "how many independent draws the worst prediction is worth"),
        Column("Acceptance", None, 2, "share of proposals accepted; methods without such a test have none"),
        Column("Divergences", None, 0, "trajectories that left the region they should have followed: none is right"),
        Column("Verdict", None, 0, "by the predictions; results.json has the rest of it"),
    )
    rows = [_chain_row(f"{name}, {SHORT[task]}", found[task][name]) for name in names for task in TASKS]
    first = found[TASKS[0]][shown]
    text = (
        f"A reference is as good as its chains. {shown} ran {first.chains} chains of {first.draws} draws each, from different "
        "starts. If every chain has explored the same posterior they agree, and R-hat, which compares the spread between chains "
        "with the spread within them, is near 1.",
        "Look at the orange histograms, the predictions. The blue ones, the weights, may lie further right: many settings of the "
        "weights make the same function, and no chain need visit them all.",
    )
    pictures = tuple(_rhat(task, shown, found[task][shown]) for task in TASKS)
    said = tuple(f"{shown}, {SHORT[task]}: {found[task][shown].verdict}" for task in TASKS)
    return Section("Did the chains mix?", text, Table(columns, tuple(rows)), pictures, said)


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
        f"rhat-{name}-{SHORT[task].replace(' ', '-')}", lambda ax: rhat_histogram(found, ax=ax), title=f"{name}, {SHORT[task]}",
        alt=f"Histograms of R-hat of {name} on {SHORT[task]}. {caption}", caption=caption,
    )  # fmt: skip
