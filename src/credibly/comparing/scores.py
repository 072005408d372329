"""The scores of one model: LOO, WAIC, ELBO and log evidence, each with its standard error, or why it is missing.

LOO and WAIC need the log likelihood of each row under each draw. It is computed for a block of rows under all draws and
reduced before the next block, so memory does not grow with the rows. A row of x is one observation: the likelihoods of
its targets or pixels are multiplied. Where rows have weights, sums over rows are weighted by them (see
`credibly.diagnostics.pareto`).
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from credibly.comparing.entries import Entry
from credibly.core.inputs import map_inputs
from credibly.diagnostics.convergence import MIN_DRAWS as MIN_CHAIN
from credibly.diagnostics.convergence import ess
from credibly.diagnostics.pareto import MIN_DRAWS, limit, loo, waic
from credibly.errors import InputError
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.predictive.base import Predictive

# Rows from which the relative efficiency of a sampler's draws is estimated.
PROBES = 64
# Variance of a row's log likelihood above which WAIC is unreliable.
UNRELIABLE = 0.4
WITH_EVIDENCE = "BayesByBackprop (its ELBO) and Laplace (its log evidence)"


@dataclass(frozen=True, eq=False)
class Score:
    """One criterion's value for a model, summed over all rows, in nats.

    Attributes:
        value: higher is better.
        error: standard error; over rows for LOO and WAIC, of the Monte Carlo estimate for evidence.
        parameters: the effective number of parameters, for LOO and WAIC.
        pointwise: the value per row, (N,); None for evidence.
    """

    value: float
    error: float
    parameters: float | None = None
    pointwise: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one model.

    Attributes:
        name: the caller's name for it.
        method: the method that produced the posterior.
        draws: number of draws that LOO and WAIC are computed from.
        rows: number of rows in the data.
        figures: scores by criterion: "loo", "waic", "elbo", "log_evidence".
        missing: why a criterion has no score.
        pareto_k: Pareto k per row, (N,).
        k_limit: Pareto k above which a row's LOO is unreliable.
        remarks: caveats about the scores.
    """

    name: str
    method: str
    draws: int
    rows: int
    figures: dict[str, Score] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    pareto_k: Tensor | None = None
    k_limit: float = 0.7
    remarks: tuple[str, ...] = ()

    @property
    def bad_k(self) -> int:
        """Number of rows with a Pareto k above the limit."""
        return 0 if self.pareto_k is None else int((self.pareto_k > self.k_limit).sum())

    @property
    def evidence(self) -> str | None:
        """The criterion that stands for the model's evidence: the estimate if there is one, else the bound."""
        return next((kind for kind in ("log_evidence", "elbo") if kind in self.figures), None)

    def figure(self, by: str) -> Score | None:
        """Return the score of a criterion. "evidence" is the log evidence, or the ELBO if there is none."""
        return self.figures.get((self.evidence or "") if by == "evidence" else by)

    def reason(self, by: str) -> str:
        """Return why a criterion has no score."""
        return self.missing.get("elbo" if by == "evidence" else by, "it was not requested")


def scores_of(entry: Entry, criteria: tuple[str, ...], *, draws: int, samples: int, seed: int) -> Scores:
    """Compute the requested scores that a model has."""
    scores: dict[str, Score] = {}
    missing: dict[str, str] = {}
    remarks: list[str] = []
    pareto_k, used = None, 0
    wanted = [c for c in criteria if c in ("loo", "waic")]
    if wanted:
        used, pareto_k = _by_rows(entry, wanted, draws, seed, scores, missing, remarks)
    if "evidence" in criteria:
        _evidence(entry, samples, seed, scores, missing, remarks)
    return Scores(
        entry.name,
        entry.posterior.record.method,
        used,
        entry.problem.n,
        scores,
        missing,
        pareto_k,
        limit(used) if used > 1 else 0.7,
        tuple(remarks),
    )


# -- LOO and WAIC
def _by_rows(
    entry: Entry,
    wanted: list[str],
    draws: int,
    seed: int,
    scores: dict[str, Score],
    missing: dict[str, str],
    remarks: list[str],
) -> tuple[int, Tensor | None]:
    """Add LOO and WAIC to the scores. Return the number of draws and Pareto k per row."""
    predictive = predict(entry, entry.problem.x, draws, seed)
    count = predictive.draws
    if entry.tempered:
        why = f"the posterior is tempered ({entry.tempered}), and LOO and WAIC are defined at T = 1"
        missing.update(dict.fromkeys(wanted, why))
        return count, None
    least = {"loo": MIN_DRAWS, "waic": 2}
    for kind in wanted:
        if count < least[kind]:
            what = "a point estimate has one draw" if count == 1 else f"it has {count} draws"
            missing[kind] = f"{what}, and {kind.upper()} needs {least[kind]} or more of the posterior"
    kinds = [kind for kind in wanted if kind not in missing]
    if not kinds:
        return count, None
    if not _is_sampler(entry):
        method = entry.posterior.record.method or "them"
        remarks.append(
            f"{entry.name!r}: its {count:,} draws are not a sampler's, so LOO and WAIC treat {method} as the posterior"
        )
    relative_efficiency = efficiency(entry) if "loo" in kinds else 1.0
    parts: dict[str, list[tuple[Tensor, ...]]] = {kind: [] for kind in kinds}
    weights, start = entry.problem.sample_weight, 0
    for block in predictive.log_likelihoods(entry.targets):
        if not bool(block.isfinite().all()):
            found = f"{entry.name!r} has draws under which a row is impossible"
            raise InputError("models", found, "Its log likelihood is not finite; use another likelihood")
        own = None if weights is None else weights[start : start + block.shape[1]]
        start += block.shape[1]
        for kind in kinds:
            got: tuple[Tensor, ...] = (
                loo(block, efficiency=relative_efficiency, weight=own) if kind == "loo" else waic(block, weight=own)
            )
            parts[kind].append(tuple(part.cpu() for part in got))
    pareto_k = None
    for kind in kinds:
        elpd, second, *rest = (torch.cat(column) for column in zip(*parts[kind]))
        scores[kind] = summed(elpd, float((second - elpd).sum()) if kind == "loo" else float(second.sum()))
        if kind == "loo":
            pareto_k = rest[0]
        elif unreliable := int((second > UNRELIABLE).sum()):
            remarks.append(
                f"{entry.name!r}: at {unreliable:,} of {len(second):,} rows the log likelihood has a variance above"
                f" {UNRELIABLE}, where WAIC is unreliable; use LOO"
            )
    return count, pareto_k


def predict(entry: Entry, x: Any, draws: int, seed: int) -> Predictive:
    """Return the predictive over all stored draws, or over `draws` of a posterior that can be sampled at will."""
    posterior = entry.posterior
    if isinstance(posterior, SampledPosterior):
        return posterior.predict(x)
    known = inspect.signature(posterior.predict).parameters
    chosen: dict[str, Any] = {"draws": draws, "passes": draws, "seed": seed}
    return posterior.predict(x, **{key: value for key, value in chosen.items() if key in known})


def efficiency(entry: Entry) -> float:
    """Return the ESS per draw of a sampler, from the likelihoods of some rows; 1 for independent draws."""
    posterior = entry.posterior
    if not isinstance(posterior, SampledPosterior) or not _is_sampler(entry):
        return 1.0
    chains, draws = posterior.shape[:2]
    if draws < MIN_CHAIN:
        return 1.0
    rows = torch.linspace(0, entry.problem.n - 1, min(PROBES, entry.problem.n)).round().long()
    some = map_inputs(lambda t: t[rows.to(t.device)], entry.problem.x)
    values = torch.cat(list(posterior.predict(some).log_likelihoods(entry.targets[rows])), 1)
    found = ess((values - values.amax(0)).exp().reshape(chains, draws, -1), "mean") / (chains * draws)
    known = found[found.isfinite()]
    return min(1.0, max(float(known.mean()), 1 / (chains * draws))) if len(known) else 1.0


def summed(pointwise: Tensor, parameters: float | None = None) -> Score:
    """Return the sum over rows, with sqrt(N Var) as its standard error."""
    n = len(pointwise)
    error = math.sqrt(n * float(pointwise.var())) if n > 1 else math.nan
    return Score(float(pointwise.sum()), error, parameters, pointwise)


def _is_sampler(entry: Entry) -> bool:
    posterior = entry.posterior
    return isinstance(posterior, SampledPosterior) and (bool(posterior.statistics) or not posterior.record.method)


# -- evidence
@runtime_checkable
class HasLogEvidence(Protocol):
    """A posterior with an estimate of log p(D), as a number or a function without arguments."""

    log_evidence: Any


def has_evidence(entry: Entry) -> bool:
    """Return whether the model's posterior has a log evidence or an ELBO."""
    return isinstance(entry.posterior, (GaussianPosterior, HasLogEvidence))


def _evidence(
    entry: Entry, samples: int, seed: int, scores: dict[str, Score], missing: dict[str, str], remarks: list[str]
) -> None:
    """Add the log evidence and the ELBO to the scores."""
    posterior, why = entry.posterior, ""
    if not has_evidence(entry):
        method = posterior.record.method or type(posterior).__name__
        why = f"{method} has no evidence; it is available for {WITH_EVIDENCE}"
    elif entry.tempered:
        why = f"the posterior is tempered ({entry.tempered}), and evidence is defined at T = 1"
    elif not entry.prior_known:
        why = f"its record does not describe its prior: pass models[{entry.name!r}] as (posterior, problem)"
    if why:
        missing.update({"elbo": why, "log_evidence": why})
        return
    if isinstance(posterior, HasLogEvidence):
        found = posterior.log_evidence
        scores["log_evidence"] = Score(float(found() if callable(found) else found), 0.0)
        if isinstance(posterior, LaplacePosterior) and posterior.count < posterior.layout.dim:
            remarks.append(
                f"{entry.name!r}: its evidence is over {posterior.count:,} of {posterior.layout.dim:,} parameters,"
                " with the others treated as given"
            )
    else:
        missing["log_evidence"] = "variational inference bounds it from below: use the ELBO"
    if isinstance(posterior, GaussianPosterior):
        factor = posterior.record.history.get("prior_scale_factor")
        scale = None if factor is None else torch.tensor(factor, dtype=posterior.phi.dtype, device=posterior.phi.device)
        bound = posterior.elbo(entry.problem, samples=samples, seed=seed, prior_scale=scale)
        scores["elbo"] = Score(float(bound.value), float(bound.standard_error))
    else:
        missing["elbo"] = "it is not variational"
