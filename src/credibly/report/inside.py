"""Parts of the page of a fit that look inside it: the whole fit where it can be drawn, its doubt, its chains, its training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from credibly import plot
from credibly.diagnostics.summary import rhat
from credibly.report.page import Column, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import POINTS, halves, loss_of_rows, some_rows, told_apart
from credibly.report.tables import number
from credibly.tables.fit_summary import Facts, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 61  # points of a map along either input
LINE = 240  # points of a curve
LOOKED_AT = 200  # rows among which the one with the worst R-hat is looked for


# -- the whole fit, with one or two inputs


def view(facts: Facts) -> Section | None:
    """The fit over its one or two inputs, a little beyond the data on every side."""
    seen = facts.view
    if seen is None or len(seen.x) == 0:
        return None
    draw = _curve if seen.x.shape[1] == 1 else _maps
    pictures, text = draw(facts, _few(seen))
    edge = "The picture goes a little beyond the data on every side, where a model that knows its limits becomes less sure."
    return Section("The fit", (text, edge), pictures=pictures)


def _few(seen: View) -> View:
    places = np.linspace(0, len(seen.x) - 1, min(len(seen.x), POINTS)).round().astype(int)
    return View(seen.names, np.asarray(seen.x, float)[places], np.asarray(seen.y)[places], seen.predict)


def _ends(values: Any, margin: float = 0.15) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    reach = margin * (high - low if high > low else 1.0)
    return low - reach, high + reach


def _curve(facts: Facts, seen: View) -> tuple[tuple[Picture, ...], str]:
    grid = np.linspace(*_ends(seen.x[:, 0]), LINE)[:, None]
    predictive = seen.predict(grid)

    def paint(ax: Axes) -> None:
        if facts.task == "regression":
            plot.bands(predictive, grid, data=(seen.x, seen.y), ax=ax)
        else:
            plot.class_curves(predictive, grid, data=(seen.x, seen.y), classes=facts.classes, ax=ax)
        ax.set(xlabel=seen.names[0], xlim=(grid[0, 0], grid[-1, 0]))
        ax.set_ylabel(facts.target if facts.task == "regression" else "probability")

    what = "Mean and intervals" if facts.task == "regression" else "Probability of each class"
    drawn = picture(
        "fit", paint, title=f"{facts.target} against {seen.names[0]}", size=(6.2, 4.2),
        alt=f"{what} of {facts.target} over {seen.names[0]} with the training data.", caption=f"{what}, with training rows.",
    )  # fmt: skip
    if facts.task == "regression":
        text = (
            "Light bands are intervals for a new value, noise included; the strong band around the mean is the model's own doubt, "
            "which more rows would narrow."
        )
    else:
        text = "The probability of each class along the input; strokes below are training rows of each class."
    return (drawn,), text


def _maps(facts: Facts, seen: View) -> tuple[tuple[Picture, ...], str]:
    axes = [np.linspace(*_ends(column), SIDE) for column in seen.x.T]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], 1)
    predictive = seen.predict(grid)
    data = (seen.x, seen.y)
    two = facts.classes is not None and len(facts.classes) == 2

    def named(ax: Axes) -> None:
        ax.set(xlabel=seen.names[0], ylabel=seen.names[1])

    def first(ax: Axes) -> None:
        if facts.task == "regression":
            plot.surface(predictive, grid, data=data, label=facts.target, ax=ax)
        elif two:
            assert facts.classes is not None
            plot.decision(predictive, grid, data=data, classes=facts.classes, ax=ax)
            ax.legend()
        else:
            plot.surface(predictive, grid, part="total", data=data, ax=ax)
        named(ax)

    def second(ax: Axes) -> None:
        plot.surface(predictive, grid, part="epistemic", data=data, ax=ax)
        named(ax)

    title = (
        facts.target
        if facts.task == "regression"
        else f"Probability of {facts.classes[1]}"
        if two and facts.classes
        else "Doubt in all"
    )
    over = f"over {seen.names[0]} and {seen.names[1]}"
    pictures = [
        picture(
            "fit",
            first,
            title=title,
            size=(5.0, 3.9),
            alt=f"{title} {over}, with training rows.",
            caption="Points are training rows.",
        )
    ]
    text = "What is predicted for each pair of inputs"
    if float(predictive.epistemic.max()) > 0:
        caption = "Darker is less known: more rows there would help most."
        alt = f"Epistemic uncertainty {over}, with training rows."
        pictures.append(
            picture("fit-doubt", second, title="What is not known", size=(5.0, 3.9), alt=alt, caption=caption)
        )
        text += ", and beside it how little the model knows there"
    return tuple(pictures), f"{text}."


# -- doubt


def doubt(facts: Facts) -> Section:
    """Aleatoric against epistemic uncertainty, and whether strange rows are told from familiar ones."""
    noise, unknown, kind = facts.predictive.aleatoric.double(), facts.predictive.epistemic.double(), "entropy"
    if facts.task == "regression":
        kind = "variance"
    whole = float((noise + unknown).mean())
    share = float(unknown.mean()) / whole if whole > 0 else 0.0
    text = [
        "Two things make a prediction uncertain. Noise (aleatoric) is in the target itself and stays however many rows there are. "
        "Ignorance (epistemic) is what the rows have not settled; it shrinks with more rows, and is large where there are none.",
    ]
    said = []
    if share > 0:
        advice = "more rows would help" if share > 0.3 else "more rows alone would narrow little; better columns might"
        said.append(f"{_share(share)} of the mean predictive {kind} is ignorance: {advice}.")
    else:
        said.append(f"This fit has no epistemic part: what {facts.method} does not know, it does not show.")
    pictures = []
    if share > 0:
        predictive, _ = some_rows(facts)
        pictures.append(
            picture(
                "parts",
                lambda ax: plot.uncertainty_parts(predictive, ax=ax).set_xlim(left=0),
                title="Noise against ignorance",
                size=(4.8, 3.9),
                alt=f"Aleatoric against epistemic uncertainty of each row; {share:.0%} of the whole is epistemic.",
                caption="A point for each row. High up: the model has seen few rows like it.",
            )
        )
    if facts.ood is not None:
        pictures.append(_ood(facts))
    area = told_apart(facts)
    if area is not None:
        text.append(
            "The ood score of a row says which share of familiar rows the model is surer of: near 1 is strange. To test it, every "
            "column was shuffled by itself, which leaves each column as it was and breaks the ties between them."
        )
        said.append(_area_sentence(*area))
    return Section("What does it not know?", tuple(text), pictures=tuple(pictures), findings=tuple(said))


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "Less than 1%"


def _ood(facts: Facts) -> Picture:
    area = told_apart(facts)
    told = "" if area is None else f" AUROC {area[0]:.2f}."
    against = ", and of rows with shuffled columns" if facts.ood_far is not None else ""
    return picture(
        "ood", lambda ax: plot.ood_histogram(facts.ood, facts.ood_far, ax=ax), title="Familiar and strange rows", size=(4.8, 3.9),
        alt=f"Histogram of the ood score of {facts.on} rows{against}.{told}",
        caption=f"Scores of the {facts.on} rows{against}.{told}",
    )  # fmt: skip


def _area_sentence(area: float, error: float) -> str:
    start = f"Of a {'shuffled row'} and one of the table, the shuffled one has the higher score {area:.0%} of the time (AUROC {area:.2f})"
    if area - 2 * error <= 0.5:
        return f"{start}: that cannot be told from a coin."
    how = "nearly always noticed" if area > 0.9 else "noticed more often than not" if area > 0.65 else "hardly noticed"
    return f"{start}: strange rows are {how}."


def unsure_and_wrong(facts: Facts) -> Section:
    """The error of those rows that are kept when the least certain ones are handed on."""
    if not bool(loss_of_rows(facts).any()):
        words = f"None of the {len(facts.y):,} rows is predicted wrongly, so there is nothing to see here."
        return Section("Does being unsure mean being wrong?", (words,))
    text = (
        "Suppose the rows it is least sure of were handed to somebody who knows. Read from right to left: where the curve falls, being "
        "unsure means being wrong, and the rows worth a second look are found.",
    )
    found = halves(facts)
    said: tuple[str, ...] = ()
    if found is not None:
        sure, rest, error = found
        if facts.task == "regression":
            shown = f"The surer half of the rows has a typical error of {number(math.sqrt(sure))}, the other {number(math.sqrt(rest))}"
        else:
            shown = f"In the surer half of the rows {sure:.1%} are wrong, in the other {rest:.1%}"
        said = (f"{shown}: {'more than chance' if abs(rest - sure) > 2 * error else 'within chance'}.",)
    y = torch.as_tensor(facts.y)
    drawn = picture(
        "risk", lambda ax: plot.risk_coverage(facts.predictive, y, ax=ax), title="Error of the rows that are kept", size=(4.8, 3.6),
        alt=f"Risk against the share of rows kept. {' '.join(said)}", caption=" ".join(said),
    )  # fmt: skip
    return Section("Does being unsure mean being wrong?", text, pictures=(drawn,))


# -- chains


def chains(facts: Facts) -> Section | None:
    """R-hat, effective draws and divergences, with the traces of the row about which chains agree least."""
    found = facts.diagnostics
    if found is None:
        return None
    columns = [
        Column("Of"), Column("R-hat, worst", None, 3, "how far chains disagree: up to 1.01 is good, up to 1.05 usable, above 1.1 not mixed"),
        Column("R-hat, median", None, 3), Column("ESS, lowest", None, 0, "how many independent draws the draws are worth, where least"),
        Column("MCSE, worst", None, 3, "error of the mean from having so many draws only, in deviations"),
    ]  # fmt: skip
    spaces = ([("predictions", found.functions)] if found.functions is not None else []) + [("weights", found.weights)]
    rows: list[tuple[Value, ...]] = [
        (name, s.rhat_worst, s.rhat_median, min(s.ess_bulk_min, s.ess_tail_min), s.mcse_worst) for name, s in spaces
    ]
    notes = []
    if found.acceptance is not None:
        notes.append(f"Proposals accepted: {sum(found.acceptance) / len(found.acceptance):.0%}.")
    if found.divergences is not None:
        notes.append(f"Trajectories that diverged: {found.divergences:,}, where none is right.")
    text = (
        f"{found.chains} chains of {found.draws:,} draws each explored the posterior from different starts. If each has seen all of "
        "it they agree, and R-hat, which compares the spread between chains with that within, is near 1. Weights may disagree, since "
        "hidden units can swap places; what counts is the predictions.",
        *([" ".join(notes)] if notes else []),
    )
    pictures = [
        *_traces(facts),
        picture(
            "rhat", lambda ax: plot.rhat_histogram(found, ax=ax), title="R-hat of all that was looked at", size=(4.8, 3.6),
            alt=f"Histogram of R-hat, worst of {rows[0][0]} {rows[0][1]:.3f}.", caption="Left of the first line is good.",
        ),
    ]  # fmt: skip
    return Section("Did the chains mix?", text, Table(tuple(columns), tuple(rows)), tuple(pictures), (found.verdict,))


def _traces(facts: Facts) -> list[Picture]:
    found = facts.diagnostics
    assert found is not None
    if facts.predictive.draws != found.chains * found.draws or found.draws < 4:
        return []
    curves = facts.predictive.functions().cpu().double().reshape(found.chains, found.draws, len(facts.y), -1)
    places = torch.linspace(0, len(facts.y) - 1, min(LOOKED_AT, len(facts.y))).round().long()
    some = curves[:, :, places, -1]  # of several classes the last: probabilities add up to one
    values = torch.as_tensor(rhat(some)).nan_to_num(nan=0.0, posinf=math.inf)
    if not float(values.max()) > 0:
        return []
    worst = int(values.argmax())
    line, at = some[:, :, worst].numpy(), float(values[worst])
    what = f"probability of {facts.classes[-1]}" if facts.classes else facts.target
    row = f"row {int(places[worst]) + 1:,} of the {facts.on} ones, where chains agree least (R-hat {at:.3f})"

    def ranked(ax: Axes) -> None:
        plot.ranks(line, names=[what], bins=min(20, found.draws), axes=[ax])

    drawn = [
        picture(
            "trace", lambda ax: plot.trace(line, names=[what], axes=[ax]), title="The chains, draw by draw", size=(5.4, 3.6),
            alt=f"Trace of the {what} for {row}.", caption=f"Prediction for {row}. Chains that mix lie over one another.",
        )
    ]  # fmt: skip
    if found.chains > 1:
        drawn.append(
            picture(
                "ranks",
                ranked,
                title="How the chains rank",
                size=(5.4, 3.6),
                alt=f"Rank histogram of the {what} for {row}.",
                caption="The same prediction: near 1 throughout, each chain has its equal part of low and of high draws.",
            )
        )
    return drawn


# -- training


def training(facts: Facts) -> Section | None:
    """The loss over the steps, for methods that train."""
    history = facts.posterior.record.history
    if not history.get("step") or not history.get("loss"):
        return None
    loss = np.asarray(history["loss"], dtype=float).reshape(len(history["loss"]), -1).mean(1)
    parts = list(history.get("parts") or {})
    text = [
        "The method minimises a loss, step by step. A curve that has become flat is done; one that still falls wants more steps."
    ]
    if "elbo" in history:
        text.append(
            "The loss is the free energy: misfit to the rows plus the complexity of the weights, which is what it costs to move away "
            "from the prior. Its negative, over all rows, bounds the log evidence of the model from below."
        )
    said = [f"From {number(float(loss[0]))} to {number(float(loss[-1]))} in {_steps(history)}."]
    tenth = max(1, len(loss) // 10)
    if len(loss) >= 20:
        last, before = float(loss[-tenth:].mean()), float(loss[-2 * tenth : -tenth].mean())
        whole = float(loss[:tenth].mean()) - last
        flat = whole > 0 and abs(before - last) < 0.02 * whole
        said.append(
            "Over the last tenth of the steps it hardly changed." if flat else "It was still changing at the end."
        )
    if "elbo" in history and history.get("elbo_standard_error") is not None:
        said.append(
            f"Evidence lower bound: {number(history['elbo'])} ± {number(2 * history['elbo_standard_error'])} nats."
        )
    drawn = picture(
        "training", lambda ax: plot.free_energy(history, ax=ax), title="Free energy" if "elbo" in history else "Loss", size=(5.0, 3.7),
        alt=f"Loss{' and its parts ' + ', '.join(parts) if len(parts) > 1 else ''} over the steps. {said[0]}", caption=" ".join(said),
    )  # fmt: skip
    return Section("Did the training settle?", tuple(text), pictures=(drawn,))


def _steps(history: dict[str, Any]) -> str:
    steps = int(history.get("steps") or np.max(history["step"]))
    return f"{steps:,} steps"
