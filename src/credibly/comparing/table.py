"""The result of a comparison: a table, differences with standard errors, and a verdict.

| criterion | two models are indistinguishable if their difference is |
|---|---|
| LOO, WAIC | within two standard errors, paired over rows, or below 4 nats |
| evidence | within two standard errors of its estimate, or below log 3 (a Bayes factor of 3) |
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from credibly.comparing.scores import Scores
from credibly.diagnostics.pareto import WORST
from credibly.plot.style import axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL = {"loo": 4.0, "waic": 4.0, "evidence": math.log(3), "elbo": math.log(3), "log_evidence": math.log(3)}
TITLES = {"loo": "LOO", "waic": "WAIC", "elbo": "ELBO", "log_evidence": "log evidence", "evidence": "evidence"}


class Difference(NamedTuple):
    """How far a model is behind the best, in nats over all rows, and the standard error of the difference."""

    value: float
    error: float

    def told_apart(self, small: float) -> bool:
        """Return whether the difference exceeds two standard errors and `small` nats."""
        return self.value < -small and self.value < -2 * self.error


@dataclass(frozen=True, eq=False)
class Comparison:
    """Models from best to worst.

    Attributes:
        by: the criterion they are ranked by.
        models: their scores, the best first.
        differences: the difference of each from the best, by name.
        remarks: caveats about the scores.
    """

    by: str
    models: tuple[Scores, ...]
    differences: dict[str, Difference]
    remarks: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The name of the model with the highest score."""
        return self.models[0].name

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of the models that are indistinguishable from the best, which comes first."""
        small = SMALL[self.by]
        return tuple(
            m.name for i, m in enumerate(self.models) if not i or not self.differences[m.name].told_apart(small)
        )

    @property
    def verdict(self) -> str:
        """The ranking and its caveats, as text."""
        return " ".join([*self._ranking(), *self._warnings(), *self.remarks])

    def _ranking(self) -> list[str]:
        title, tied, rest = TITLES[self.by], self.tied[1:], [m.name for m in self.models if m.name not in self.tied]
        if len(self.models) == 1:
            return ["There is only one model: nothing to compare it with."]
        sentences = [f"By {title} {self.best!r} is best."]
        if tied:
            each = "; ".join(f"{name!r} {_minus(self.differences[name])}" for name in tied)
            rule = f"within two standard errors or below {SMALL[self.by]:.2g} nats"
            sentences.append(f"It is statistically indistinguishable from {_listed(tied)}: {each}, which is {rule}.")
        if rest:
            each = "; ".join(f"{name!r} {_minus(self.differences[name])}" for name in rest)
            sentences.append(f"It is distinguishable from {_listed(rest)}: {each}.")
        return sentences

    def _warnings(self) -> Iterator[str]:
        for m in self.models:
            if m.pareto_k is not None and m.bad_k:
                beyond = int((m.pareto_k > WORST).sum())
                tail = f", {beyond:,} of them above 1, where the estimate has no finite error" if beyond else ""
                yield (
                    f"LOO of {m.name!r}: {m.bad_k:,} of {m.rows:,} rows have a Pareto k above {m.k_limit:.2f}{tail}"
                    f" (worst {float(m.pareto_k.max()):.2f}): it is too optimistic there. Use more draws, or held-out"
                    " rows."
                )
            for kind in ("loo", "waic"):
                if kind in m.missing and (kind == "loo" or m.missing.get("loo") != m.missing[kind]):
                    yield f"{m.name!r} has no {TITLES[kind]}: {m.missing[kind]}."
        kinds = {m.evidence for m in self.models}
        if self.by == "evidence" and len(kinds) > 1:
            yield "An ELBO lies below the log evidence by an unknown amount: rank models of both kinds with care."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with None for NaN and infinity."""
        models = {}
        for rank, m in enumerate(self.models, 1):
            scores = {
                kind: {"value": _plain(f.value), "error": _plain(f.error), "parameters": _plain(f.parameters)}
                for kind, f in m.figures.items()
            }
            k = None if m.pareto_k is None else _plain(float(m.pareto_k.max()))
            models[m.name] = {
                "rank": rank,
                "method": m.method,
                "draws": m.draws,
                "rows": m.rows,
                **scores,
                "missing": dict(m.missing),
                "pareto_k": {"worst": k, "limit": m.k_limit, "over": m.bad_k} if m.pareto_k is not None else None,
                "difference": _plain(self.differences[m.name].value),
                "difference_error": _plain(self.differences[m.name].error),
            }
        return {"by": self.by, "best": self.best, "tied": list(self.tied), "models": models, "verdict": self.verdict}

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[Scores]:
        return iter(self.models)

    def __getitem__(self, name: str) -> Scores:
        return {m.name: m for m in self.models}[name]

    def __str__(self) -> str:
        kinds = [k for k in ("loo", "waic", "elbo", "log_evidence") if any(k in m.figures for m in self.models)]
        loo = any(m.pareto_k is not None for m in self.models)
        head = [
            "",
            "method",
            *(TITLES[k] for k in kinds),
            *(["p_loo", f"k > {self._k_limit()}"] if loo else []),
            "behind",
        ]
        rows = [head]
        for m in self.models:
            scores = [m.figures.get(k) for k in kinds]
            cells = [_show(score.value, score.error) if score else "–" for score in scores]
            if loo:
                known = m.figures.get("loo")
                cells += [f"{known.parameters:.1f}" if known and known.parameters is not None else "–"]
                cells += [f"{m.bad_k:,}" if m.pareto_k is not None else "–"]
            behind = (
                "" if m.name == self.best else _show(-self.differences[m.name].value, self.differences[m.name].error)
            )
            rows.append([m.name, m.method, *cells, behind])
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            f"{len(self.models)} models of {self.models[0].rows:,} rows, by {TITLES[self.by]}, in nats over all rows"
        ]
        for row in rows:
            cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *textwrap.wrap(self.verdict, 100)])

    def _k_limit(self) -> str:
        limits = {f"{m.k_limit:.2f}" for m in self.models if m.pareto_k is not None}
        return limits.pop() if len(limits) == 1 else "limit"

    def __repr__(self) -> str:
        return f"Comparison(by {self.by}: {', '.join(m.name for m in self.models)})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot how far each model is behind the best, with two standard errors of the difference."""
        axes = axes_of(ax)
        positions = list(range(len(self.models)))
        behind = [self.differences[m.name] for m in self.models]
        errors = [2 * d.error if math.isfinite(d.error) else 0.0 for d in behind]
        axes.errorbar([d.value for d in behind], positions, xerr=errors, fmt="o", linestyle="none", capsize=3)
        axes.axvline(0, linewidth=0.8, linestyle=":")
        axes.set_yticks(positions, [m.name for m in self.models])
        axes.invert_yaxis()
        axes.set_xlabel(f"{TITLES[self.by]} minus that of the best, in nats")
        return axes


def _minus(difference: Difference) -> str:
    return f"is {_show(-difference.value, difference.error)} behind"


def _show(value: float, error: float) -> str:
    return f"{value:,.1f} ± {error:.1f}" if math.isfinite(error) and error > 0 else f"{value:,.1f}"


def _listed(names: Any) -> str:
    shown = [repr(name) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
