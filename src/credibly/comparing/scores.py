"""The figures of one model: LOO, WAIC, ELBO and log evidence, each with its error, or the reason why it has none.

LOO and WAIC need the log likelihood of each row under each draw. Those are computed for a block of rows under all draws and
reduced before the next, so that memory does not grow with the rows. A row of x is an observation: the likelihoods of its targets
or pixels are multiplied.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from credibly.comparing.entries import Entry
from credibly.comparing.pareto import MIN_DRAWS, limit, loo, waic
from credibly.core.inputs import map_inputs
from credibly.diagnostics.convergence import MIN_DRAWS as MIN_CHAIN
from credibly.diagnostics.convergence import ess
from credibly.errors import InputError
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.predictive.base import Predictive

PROBES = 64  # rows by which the efficiency of a sampler's draws is judged
UNSTEADY = 0.4  # variance of a row's log likelihood above which WAIC is not to be relied on
HAVE_EVIDENCE = "BayesByBackprop (its ELBO) and Laplace (its log evidence)"


@dataclass(frozen=True, eq=False)
class Figure:
    """A sum over all rows, in nats.

    Attributes:
        value: higher is better. error: standard error; over rows for LOO and WAIC, of the Monte Carlo estimate for evidence.
        parameters: the effective number of them, where the figure gives one.
        pointwise: the value of each row, (N,); None for evidence.
    """

    value: float
    error: float
    parameters: float | None = None
    pointwise: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of one model.

    Attributes:
        name: as the caller has it. method: that made the posterior.
        draws: of the weights that LOO and WAIC are from. rows: of the data.
        figures: by criterion: "loo", "waic", "elbo", "log_evidence".
        missing: why a criterion has no figure.
        pareto_k: of each row, (N,). k_limit: above which a row's LOO is not to be relied on.
        remarks: what to know about the figures.
    """

    name: str
    method: str
    draws: int
    rows: int
    figures: dict[str, Figure] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    pareto_k: Tensor | None = None
    k_limit: float = 0.7
    remarks: tuple[str, ...] = ()

    @property
    def bad_k(self) -> int:
        """How many rows have a Pareto k above the limit."""
        return 0 if self.pareto_k is None else int((self.pareto_k > self.k_limit).sum())

    @property
    def evidence(self) -> str | None:
        """Which of the two the model's evidence is; the estimate comes before the bound."""
        return next((kind for kind in ("log_evidence", "elbo") if kind in self.figures), None)

    def figure(self, by: str) -> Figure | None:
        """The figure of a criterion; "evidence" is the log evidence, or the ELBO where there is none."""
        return self.figures.get((self.evidence or "") if by == "evidence" else by)

    def reason(self, by: str) -> str:
        """Why there is none."""
        return self.missing.get("elbo" if by == "evidence" else by, "it was not asked for")


def scores_of(entry: Entry, criteria: tuple[str, ...], *, draws: int, samples: int, seed: int) -> Scores:
    """All figures of a model that were asked for and that it has."""
    figures: dict[str, Figure] = {}
    missing: dict[str, str] = {}
    remarks: list[str] = []
    pareto_k, used = None, 0
    wanted = [c for c in criteria if c in ("loo", "waic")]
    if wanted:
        used, pareto_k = _by_rows(entry, wanted, draws, seed, figures, missing, remarks)
    if "evidence" in criteria:
        _evidence(entry, samples, seed, figures, missing, remarks)
    return Scores(
        entry.name, entry.posterior.record.method, used, entry.problem.n, figures, missing, pareto_k,
        limit(used) if used > 1 else 0.7, tuple(remarks),
    )  # fmt: skip


# -- LOO and WAIC --------------------------------------------------------------------------------------------------------
def _by_rows(
    entry: Entry, wanted: list[str], draws: int, seed: int, figures: dict[str, Figure], missing: dict[str, str], remarks: list[str]
) -> tuple[int, Tensor | None]:  # fmt: skip
    predictive = predict(entry, entry.problem.x, draws, seed)
    count = predictive.draws
    if entry.tempered:
        why = f"the posterior is tempered ({entry.tempered}), and the weights of LOO and WAIC are those of T = 1"
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
        remarks.append(
            f"{entry.name!r}: its {count:,} draws are not a sampler's, so LOO and WAIC take {entry.posterior.record.method or 'them'} "
            "for the posterior itself"
        )  # fmt: skip
    shares = efficiency(entry) if "loo" in kinds else 1.0
    parts: dict[str, list[tuple[Tensor, ...]]] = {kind: [] for kind in kinds}
    for block in predictive.log_likelihoods(entry.targets):
        if not bool(block.isfinite().all()):
            found = f"{entry.name!r} has draws under which a row is impossible"
            raise InputError("models", found, "Its log likelihood is not finite; take another likelihood")
        for kind in kinds:
            got: tuple[Tensor, ...] = loo(block, efficiency=shares) if kind == "loo" else waic(block)
            parts[kind].append(tuple(part.cpu() for part in got))
    pareto_k = None
    for kind in kinds:
        elpd, second, *rest = (torch.cat(column) for column in zip(*parts[kind]))
        figures[kind] = summed(elpd, float((second - elpd).sum()) if kind == "loo" else float(second.sum()))
        if kind == "loo":
            pareto_k = rest[0]
        elif int((second > UNSTEADY).sum()):
            remarks.append(
                f"{entry.name!r}: at {int((second > UNSTEADY).sum()):,} of {len(second):,} rows the log likelihood varies by more than "
                f"{UNSTEADY}, where WAIC is not to be relied on; use LOO"
            )  # fmt: skip
    return count, pareto_k


def predict(entry: Entry, x: Any, draws: int, seed: int) -> Predictive:
    """The predictive over all draws that there are, or so many of a posterior that any number can be drawn from."""
    posterior = entry.posterior
    if isinstance(posterior, SampledPosterior):
        return posterior.predict(x)
    known = inspect.signature(posterior.predict).parameters
    chosen = {"draws": draws, "passes": draws, "seed": seed}
    return posterior.predict(x, **{key: value for key, value in chosen.items() if key in known})


def efficiency(entry: Entry) -> float:
    """Effective draws a draw of a sampler, by the likelihoods of some rows; 1 for draws that are independent."""
    posterior = entry.posterior
    if not isinstance(posterior, SampledPosterior) or not _is_sampler(entry):
        return 1.0
    chains, draws = posterior._draws.shape[:2]
    if draws < MIN_CHAIN:
        return 1.0
    rows = torch.linspace(0, entry.problem.n - 1, min(PROBES, entry.problem.n)).round().long()
    some = map_inputs(lambda t: t[rows.to(t.device)], entry.problem.x)
    values = torch.cat(list(posterior.predict(some).log_likelihoods(entry.targets[rows])), 1)
    found = ess((values - values.amax(0)).exp().reshape(chains, draws, -1), "mean") / (chains * draws)
    known = found[found.isfinite()]
    return min(1.0, max(float(known.mean()), 1 / (chains * draws))) if len(known) else 1.0


def summed(pointwise: Tensor, parameters: float | None = None) -> Figure:
    """The sum over rows, with sqrt(N Var) as its standard error."""
    n = len(pointwise)
    error = math.sqrt(n * float(pointwise.var())) if n > 1 else math.nan
    return Figure(float(pointwise.sum()), error, parameters, pointwise)


def _is_sampler(entry: Entry) -> bool:
    posterior = entry.posterior
    return isinstance(posterior, SampledPosterior) and (bool(posterior.statistics) or not posterior.record.method)


# -- evidence ------------------------------------------------------------------------------------------------------------
@runtime_checkable
class Evident(Protocol):
    """A posterior that has an estimate of log p(D), as a number or a function without arguments."""

    log_evidence: Any


def has_evidence(entry: Entry) -> bool:
    """Whether the model's method gives any."""
    return isinstance(entry.posterior, (GaussianPosterior, Evident))


def _evidence(
    entry: Entry, samples: int, seed: int, figures: dict[str, Figure], missing: dict[str, str], remarks: list[str]
) -> None:
    posterior, why = entry.posterior, ""
    if not has_evidence(entry):
        why = f"{posterior.record.method or type(posterior).__name__} has no evidence; those that have are {HAVE_EVIDENCE}"
    elif entry.tempered:
        why = f"the posterior is tempered ({entry.tempered}), and evidence is that of T = 1"
    elif not entry.prior_known:
        why = f"its record does not tell its prior: pass models[{entry.name!r}] as (posterior, problem)"
    if why:
        missing.update({"elbo": why, "log_evidence": why})
        return
    if isinstance(posterior, Evident):
        found = posterior.log_evidence
        figures["log_evidence"] = Figure(float(found() if callable(found) else found), 0.0)
        if isinstance(posterior, LaplacePosterior) and posterior.count < posterior.layout.dim:
            remarks.append(
                f"{entry.name!r}: its evidence is over {posterior.count:,} of {posterior.layout.dim:,} parameters, the others count as given"
            )
    else:
        missing["log_evidence"] = "variational inference bounds it from below: its figure is the ELBO"
    if isinstance(posterior, GaussianPosterior):
        factor = posterior.record.history.get("prior_scale_factor")
        scale = None if factor is None else torch.tensor(factor, dtype=posterior.phi.dtype, device=posterior.phi.device)
        bound = posterior.elbo(entry.problem, samples=samples, seed=seed, prior_scale=scale)
        figures["elbo"] = Figure(float(bound.value), float(bound.standard_error))
    else:
        missing["elbo"] = "it is not variational"
