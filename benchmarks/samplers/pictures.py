"""Pictures of the results page, as SVG text: effective samples per second, traces, and R-hat before and after."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from benchmarks.samplers.compare import Entry, comparisons

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RHAT_GOAL = 1.05


def efficiency(found: list[Entry]) -> str:
    """Draw the effective samples of the worst row per second, a panel per posterior, a dot per repetition."""
    from credibly.plot.style import BLUE, DARK, ORANGE, style

    groups = sorted({(e.device, e.data, e.chains) for e in found})
    names = list(dict.fromkeys(e.sampler for mine in (True, False) for e in found if e.mine == mine and e.comparable))
    with style():
        figure = _figure(3.2 * len(groups) + 2, 1.2 + 0.27 * len(names))
        for ax, group in zip(figure.subplots(1, len(groups), sharey=True, squeeze=False)[0], groups):
            for e in found:
                if (e.device, e.data, e.chains) != group or not e.comparable:
                    continue
                values = [run["ess_worst_per_second"] for run in e.runs if run.get("ess_worst_per_second")]
                ax.plot(values, [-names.index(e.sampler)] * len(values), "o", ms=5, color=BLUE if e.mine else ORANGE)
            device, data, chains = group
            ax.set_title(f"{data}, {'CPU' if device == 'cpu' else 'GPU'}, {chains} chains")
            ax.set(xscale="log", xlabel="ESS of the worst row per second")
            ax.grid(axis="x", color=DARK, alpha=0.1)
            ax.set_yticks([-i for i in range(len(names))], names)
        return _svg(figure, "samplers-ess")


def traces(found: list[Entry]) -> str:
    """Draw the prediction with the highest R-hat over the draws: our best exact sampler and the best peer."""
    from credibly.plot.style import PALETTE, style

    shown = [one for one in comparisons(found) if one.row == "worst"]
    rows = [(one.data, one.device, side) for one in shown for side in (one.ours, one.peer)] or [
        (e.data, e.device, e) for e in found[:1]
    ]
    with style():
        figure = _figure(8, 1.6 * len(rows) + 0.6)
        for ax, (data, device, e) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows):
            run = e.runs[0]
            for chain, colour in zip(run.get("trace") or [], PALETTE):
                ax.plot([i * run["draws"] / len(chain) for i in range(len(chain))], chain, "-", lw=0.8, color=colour)
            rhat = run.get("rhat_worst")
            text = "infinite" if rhat is None else f"{rhat:.3f}"
            ax.set_title(f"{data}, {device.upper()}, {e.sampler}: R-hat {text}", loc="left")
            ax.set_ylabel("prediction")
        ax.set_xlabel("draw")
        return _svg(figure, "samplers-traces")


def mixing(splits: list[dict[str, Any]], before: dict[tuple[str, int], float]) -> str:
    """Draw the R-hat of the worst test row of every split: of the earlier study, and now."""
    from credibly.plot.style import BLUE, DARK, ORANGE, style

    sets = list(dict.fromkeys(one["data"] for one in splits))
    with style():
        figure = _figure(1.6 * len(sets) + 2, 3.6)
        ax = figure.subplots()
        for i, name in enumerate(sets):
            old = [rhat - 1 for (data, _), rhat in sorted(before.items()) if data == name and rhat > 1]
            new = [one["rhat_worst"] - 1 for one in splits if one["data"] == name and (one.get("rhat_worst") or 0) > 1]
            label = i == 0
            ax.plot(_spread(i - 0.18, len(old)), old, "o", ms=4, color=ORANGE, label="before" if label else None)
            ax.plot(_spread(i + 0.18, len(new)), new, "o", ms=4, color=BLUE, label="after" if label else None)
        ax.axhline(RHAT_GOAL - 1, color=DARK, lw=0.8, ls="--")
        ax.set_xticks(range(len(sets)), sets)
        ax.set(yscale="log", ylabel="R-hat of the worst test row, minus 1")
        ax.legend()
        return _svg(figure, "samplers-rhat")


def _spread(centre: float, count: int) -> list[float]:
    """Return positions side by side around a centre."""
    return [centre + 0.2 * ((i + 0.5) / count - 0.5) for i in range(count)]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, salt: str) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()
