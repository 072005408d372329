"""Model comparison by leave-one-out cross-validation, WAIC and evidence, with standard errors and a ranking.

The evidence log p(D) measures how well the prior predicted the data, and so depends on the prior. Leave-one-out
measures how well the posterior predicts one more row. Both use only the training rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from credibly.comparing.entries import Entry, entries_of, same_inputs
from credibly.comparing.scores import WITH_EVIDENCE, Score, Scores, has_evidence, scores_of
from credibly.comparing.table import TITLES, Comparison, Difference
from credibly.core.checks import check_choice, check_integer
from credibly.core.rng import check_seed
from credibly.diagnostics.pareto import LeaveOneOut, WidelyApplicable, loo, psis, waic
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.problem import Problem

__all__ = [
    "Comparison",
    "Difference",
    "Figure",
    "LeaveOneOut",
    "Score",
    "Scores",
    "WidelyApplicable",
    "compare_models",
    "loo",
    "psis",
    "waic",
]

CRITERIA = ("loo", "waic", "evidence")
# The former name of Score.
Figure = Score


def compare_models(
    models: Mapping[str, Posterior | tuple[Posterior, Problem]],
    data: Any = None,
    *,
    by: str | None = None,
    criteria: Sequence[str] = CRITERIA,
    draws: int = 1000,
    samples: int = 200,
    seed: int = 0,
) -> Comparison:
    """Compare models of the same targets and rank them, best first.

    Args:
        models: posteriors by name, or (posterior, problem) each.
        data: the training data, as (x, y), a Dataset or a Problem; not needed if every model comes with its problem.
        by: the criterion to rank by: "loo", "waic", "elbo", "log_evidence", or "evidence" (the log evidence, or the
            ELBO if there is none). None uses the first of LOO, evidence and WAIC that all models have.
        criteria: the criteria to compute, any of "loo", "waic", "evidence".
        draws: draws of the weights from a posterior that can be sampled at will; all of a sampler's draws are used.
        samples: draws for an ELBO.
        seed: seed of those draws.
    """
    check_seed(seed)
    wanted = _criteria(criteria, by)
    check_integer("draws", draws, least=2)
    check_integer("samples", samples, least=2)
    entries = entries_of(models, data)
    if by in ("evidence", "elbo", "log_evidence"):
        _check_evidence(entries, by)
    remarks: tuple[str, ...] = (
        () if same_inputs(entries) else ("The models have different inputs for the same targets.",)
    )
    scores = [scores_of(entry, wanted, draws=draws, samples=samples, seed=seed) for entry in entries]
    criterion = _ranking_criterion(scores, by)
    remarks += tuple(f"{remark}." for s in scores for remark in s.remarks)
    return ranked(scores, criterion, remarks)


def ranked(scores: Sequence[Scores], by: str, remarks: tuple[str, ...] = ()) -> Comparison:
    """Rank models by a criterion that all of them have, with their differences from the best."""
    order = sorted(scores, key=lambda s: -_score(s, by).value)
    best = _score(order[0], by)
    return Comparison(by, tuple(order), {s.name: difference(_score(s, by), best) for s in order}, remarks)


def difference(one: Score, other: Score) -> Difference:
    """Return one minus other. Scores over rows are paired: sqrt(N Var(a_i - b_i)) is the standard error."""
    if one is other:
        return Difference(0.0, 0.0)
    if one.pointwise is None or other.pointwise is None:
        return Difference(one.value - other.value, math.hypot(one.error, other.error))
    gaps = one.pointwise - other.pointwise
    return Difference(float(gaps.sum()), math.sqrt(len(gaps) * float(gaps.var())) if len(gaps) > 1 else math.nan)


def _score(scores: Scores, by: str) -> Score:
    score = scores.figure(by)
    assert score is not None
    return score


def _criteria(criteria: Sequence[str], by: str | None) -> tuple[str, ...]:
    """Return the criteria to compute, including the one to rank by."""
    if by is not None:
        check_choice("by", by, TITLES)
    chosen = (criteria,) if isinstance(criteria, str) else tuple(criteria)
    if not chosen or any(c not in CRITERIA for c in chosen):
        raise InputError("criteria", f"must be some of {', '.join(CRITERIA)}, got {criteria!r}")
    needed = None if by is None else by if by in CRITERIA else "evidence"
    return chosen if needed is None or needed in chosen else (*chosen, needed)


def _check_evidence(entries: Sequence[Entry], by: str) -> None:
    """Raise, before any work, if a posterior cannot have an evidence."""
    for entry in entries:
        if not has_evidence(entry):
            found = f"{entry.name!r} is of {entry.posterior.record.method or 'draws'}, which has no evidence"
            raise InputError("by", f"is {by!r}, but {found}", f"Available for {WITH_EVIDENCE}")


def _ranking_criterion(scores: Sequence[Scores], by: str | None) -> str:
    """Return `by` or, if it is None, the first criterion that all models have."""
    for kind in ("loo", "evidence", "waic") if by is None else (by,):
        without = [s for s in scores if s.figure(kind) is None]
        if not without:
            return kind
        if by is not None:
            reasons = "; ".join(f"{s.name!r}: {s.reason(by)}" for s in without)
            found = f"is {by!r}, which not all models have ({reasons})"
            raise InputError("by", found, "Rank by another criterion, or leave those models out")
    available = "; ".join(f"{s.name!r} has {_available(s)}" for s in scores)
    advice = f"LOO needs draws of a posterior; evidence is available for {WITH_EVIDENCE}"
    raise InputError("models", f"have no criterion in common ({available})", advice)


def _available(scores: Scores) -> str:
    known = ", ".join(TITLES[k] for k in scores.figures)
    why = "; ".join(
        dict.fromkeys(f"no {TITLES[k]} since {v}" for k, v in scores.missing.items() if k in ("loo", "elbo"))
    )
    return f"{known or 'none'}{f' ({why})' if why else ''}"
