"""Which of some models fits better: leave-one-out predictions, WAIC and evidence, with errors and a plain ranking.

Evidence log p(D) asks how well the prior foretold the data, and so has a view on the prior; leave-one-out asks how well the
posterior foretells one more row. Both use the training rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from credibly.comparing.entries import Entry, entries_of, same_inputs
from credibly.comparing.pareto import LeaveOneOut, WidelyApplicable, loo, psis, waic
from credibly.comparing.scores import HAVE_EVIDENCE, Figure, Scores, has_evidence, scores_of
from credibly.comparing.table import TITLES, Comparison, Difference
from credibly.core.rng import check_seed
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.problem import Problem

__all__ = [
    "Comparison",
    "Difference",
    "Figure",
    "LeaveOneOut",
    "Scores",
    "WidelyApplicable",
    "compare_models",
    "loo",
    "psis",
    "waic",
]

CRITERIA = ("loo", "waic", "evidence")


def compare_models(
    models: Mapping[str, Posterior | tuple[Posterior, Problem]], data: Any = None, *, by: str | None = None,
    criteria: Sequence[str] = CRITERIA, draws: int = 1000, samples: int = 200, seed: int = 0,
) -> Comparison:  # fmt: skip
    """Models of the same targets side by side, the best first.

    Args:
        models: posteriors by name, or (posterior, problem) each.
        data: what they were fitted to, as (x, y), a Dataset or a Problem; not needed where every model comes with its problem.
        by: what they are ranked by: "loo", "waic", "elbo", "log_evidence", or "evidence" (the log evidence, or the ELBO where there
            is none). None takes the first of LOO, evidence and WAIC that all of them have.
        criteria: which figures are computed: some of "loo", "waic", "evidence".
        draws: of the weights, of a posterior that any number can be drawn from; a sampler's are all used.
        samples: draws for an ELBO.
        seed: of those draws.
    """
    check_seed(seed)
    wanted = _criteria(criteria, by)
    for name, value, least in (("draws", draws, 2), ("samples", samples, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(name, f"found {value!r}", f"Pass a whole number from {least} up")
    entries = entries_of(models, data)
    if by in ("evidence", "elbo", "log_evidence"):
        _refuse_without_evidence(entries, by)
    remarks: tuple[str, ...] = (
        () if same_inputs(entries) else ("The models were given different inputs for the same targets.",)
    )
    scores = [scores_of(entry, wanted, draws=draws, samples=samples, seed=seed) for entry in entries]
    chosen = _ranked_by(scores, by)
    remarks += tuple(f"{remark}." for s in scores for remark in s.remarks)
    return ranked(scores, chosen, remarks)


def ranked(scores: Sequence[Scores], by: str, remarks: tuple[str, ...] = ()) -> Comparison:
    """Models by one criterion that all of them have, with their differences from the best."""
    order = sorted(scores, key=lambda s: -_of(s, by).value)
    best = _of(order[0], by)
    return Comparison(by, tuple(order), {s.name: difference(_of(s, by), best) for s in order}, remarks)


def difference(one: Figure, other: Figure) -> Difference:
    """One less other. Over rows the two are paired: sqrt(N Var(a_i - b_i)) is the standard error."""
    if one is other:
        return Difference(0.0, 0.0)
    if one.pointwise is None or other.pointwise is None:
        return Difference(one.value - other.value, math.hypot(one.error, other.error))
    gaps = one.pointwise - other.pointwise
    return Difference(float(gaps.sum()), math.sqrt(len(gaps) * float(gaps.var())) if len(gaps) > 1 else math.nan)


def _of(scores: Scores, by: str) -> Figure:
    found = scores.figure(by)
    assert found is not None
    return found


def _criteria(criteria: Sequence[str], by: str | None) -> tuple[str, ...]:
    if by is not None and by not in TITLES:
        raise InputError("by", f"found {by!r}", f"Pass one of {', '.join(TITLES)}, or None")
    chosen = (criteria,) if isinstance(criteria, str) else tuple(criteria)
    if not chosen or any(c not in CRITERIA for c in chosen):
        raise InputError("criteria", f"found {criteria!r}", f"Pass some of {', '.join(CRITERIA)}")
    needed = None if by is None else by if by in CRITERIA else "evidence"
    return chosen if needed is None or needed in chosen else (*chosen, needed)


def _refuse_without_evidence(entries: Sequence[Entry], by: str) -> None:
    """Before any work: a method that can have no evidence is known by its posterior."""
    for entry in entries:
        if not has_evidence(entry):
            found = f"{entry.name!r} is of {entry.posterior.record.method or 'draws'}, which has no evidence"
            raise InputError("by", f"found {by!r}, but {found}", f"Those that have are {HAVE_EVIDENCE}")


def _ranked_by(scores: Sequence[Scores], by: str | None) -> str:
    for kind in ("loo", "evidence", "waic") if by is None else (by,):
        without = [s for s in scores if s.figure(kind) is None]
        if not without:
            return kind
        if by is not None:
            said = "; ".join(f"{s.name!r}: {s.reason(by)}" for s in without)
            raise InputError(
                "by", f"found {by!r}, which not all models have ({said})", "Rank by another, or leave them out"
            )
    said = "; ".join(f"{s.name!r} has {_has(s)}" for s in scores)
    raise InputError(
        "models", f"have no figure in common ({said})", f"LOO needs draws of a posterior; evidence have {HAVE_EVIDENCE}"
    )


def _has(scores: Scores) -> str:
    known = ", ".join(TITLES[k] for k in scores.figures)
    why = "; ".join(
        dict.fromkeys(f"no {TITLES[k]} since {v}" for k, v in scores.missing.items() if k in ("loo", "elbo"))
    )
    return f"{known or 'none'}{f' ({why})' if why else ''}"
