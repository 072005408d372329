"""Sections on convergence: the chains of a sampler, the loss of a trained method."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from credibly import plot
from credibly.diagnostics.summary import Diagnostics, rhat
from credibly.report.metric_columns import format_number
from credibly.report.page import Column, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Rows searched for the one with the worst R-hat.
TRACED_ROWS = 200


def chains_section(facts: FitSummary) -> Section | None:
    """Show R-hat, effective sample size and divergences, with traces of the row on which chains agree least."""
    found = facts.diagnostics
    if found is None:
        return None
    columns = (
        Column("Quantity"),
        Column(
            "R-hat, worst",
            None,
            3,
            "disagreement of chains: up to 1.01 is good, up to 1.05 usable, above 1.1 not mixed",
        ),
        Column("R-hat, median", None, 3),
        Column("ESS, lowest", None, 0, "effective sample size: how many independent draws the draws are worth"),
        Column("MCSE, worst", None, 3, "Monte Carlo standard error of the mean, in posterior standard deviations"),
    )
    spaces = {**found.judged, "weights": found.weights}
    rows: list[tuple[Value, ...]] = [
        (name, s.rhat_worst, s.rhat_median, min(s.ess_bulk_min, s.ess_tail_min), s.mcse_worst)
        for name, s in spaces.items()
    ]
    notes = []
    if found.acceptance is not None:
        notes.append(f"Acceptance rate: {sum(found.acceptance) / len(found.acceptance):.0%}.")
    if found.divergences is not None:
        notes.append(f"Divergent trajectories: {found.divergences:,} (ideally none).")
    text = (
        f"{found.chains} chains of {found.draws:,} draws each explored the posterior from "
        f"{'one start' if found.one_start else 'different starts'}. If they have mixed, they agree, and R-hat, which "
        "compares the variance between chains with that within chains, is near 1. Weights may disagree, since "
        "permuting hidden units leaves the function unchanged; the predictions and their noise are what counts.",
        *([" ".join(notes)] if notes else []),
    )
    histogram = picture(
        "rhat",
        lambda ax: plot.rhat_histogram(found, ax=ax),
        title="R-hat",
        size=(4.8, 3.6),
        alt=f"Histogram of R-hat, worst of {rows[0][0]} {rows[0][1]:.3f}.",
        caption="Left of the first line is good.",
    )
    pictures = (*_traces(facts, found), histogram)
    return Section("Did the chains mix?", text, Table(columns, tuple(rows)), pictures, (found.verdict,))


def _traces(facts: FitSummary, found: Diagnostics) -> list[Picture]:
    # The predictions of folds are those of other chains.
    if facts.on == "cross-validated" or facts.predictive.draws != found.chains * found.draws or found.draws < 4:
        return []
    curves = facts.predictive.functions().cpu().double().reshape(found.chains, found.draws, len(facts.y), -1)
    indices = torch.linspace(0, len(facts.y) - 1, min(TRACED_ROWS, len(facts.y))).round().long()
    # Of several classes the last one: probabilities sum to one.
    values = curves[:, :, indices, -1]
    rhats = torch.as_tensor(rhat(values)).nan_to_num(nan=0.0, posinf=math.inf)
    if not float(rhats.max()) > 0:
        return []
    worst = int(rhats.argmax())
    trace = values[:, :, worst].numpy()
    what = f"probability of {facts.classes[-1]}" if facts.classes else facts.target
    row = f"{facts.on} row {int(indices[worst]) + 1:,}, where chains agree least (R-hat {float(rhats[worst]):.3f})"

    def paint_ranks(ax: Axes) -> None:
        plot.ranks(trace, names=[what], bins=min(20, found.draws), axes=[ax])

    pictures = [
        picture(
            "trace",
            lambda ax: plot.trace(trace, names=[what], axes=[ax]),
            title="Trace",
            size=(5.4, 3.6),
            alt=f"Trace of the {what} for {row}.",
            caption=f"Prediction for {row}. Chains that have mixed overlap.",
        )
    ]
    if found.chains > 1:
        pictures.append(
            picture(
                "ranks",
                paint_ranks,
                title="Rank histogram",
                size=(5.4, 3.6),
                alt=f"Rank histogram of the {what} for {row}.",
                caption="The same prediction. Near 1 throughout, every chain visits low and high values equally often.",
            )
        )
    return pictures


def training_section(facts: FitSummary) -> Section | None:
    """Show the training loss over the steps, for methods that train."""
    history = facts.posterior.record.history
    if not history.get("step") or not history.get("loss"):
        return None
    loss = np.asarray(history["loss"], dtype=float).reshape(len(history["loss"]), -1).mean(1)
    parts = list(history.get("parts") or {})
    text = ["Training minimises a loss. A flat curve has converged; one that still falls needs more steps."]
    if "elbo" in history:
        text.append(
            "The loss is the variational free energy: misfit to the data plus the complexity of the weights, their KL "
            "divergence from the prior. Its negative, over all rows, is a lower bound on the log evidence."
        )
    start = f"From {format_number(float(loss[0]))} to {format_number(float(loss[-1]))} in {_steps(history)} steps."
    caption = [start]
    tenth = max(1, len(loss) // 10)
    if len(loss) >= 20:
        last, before = float(loss[-tenth:].mean()), float(loss[-2 * tenth : -tenth].mean())
        whole = float(loss[:tenth].mean()) - last
        flat = whole > 0 and abs(before - last) < 0.02 * whole
        caption.append(
            "It hardly changed over the last tenth of the steps." if flat else "It was still changing at the end."
        )
    if "elbo" in history and history.get("elbo_standard_error") is not None:
        error = format_number(2 * history["elbo_standard_error"])
        caption.append(f"Evidence lower bound: {format_number(history['elbo'])} ± {error} nats.")
    drawn = picture(
        "training",
        lambda ax: plot.free_energy(history, ax=ax),
        title="Free energy" if "elbo" in history else "Loss",
        size=(5.0, 3.7),
        alt=f"Loss{' and its parts ' + ', '.join(parts) if len(parts) > 1 else ''} over the steps. {start}",
        caption=" ".join(caption),
    )
    return Section("Did training converge?", tuple(text), pictures=(drawn,))


def _steps(history: dict[str, Any]) -> str:
    return f"{int(history.get('steps') or np.max(history['step'])):,}"
