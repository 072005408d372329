"""The models of a comparison: each a posterior with the problem it was fitted to, checked before any computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from credibly.core.inputs import tensors_of
from credibly.core.specs import from_spec, kinds_of
from credibly.errors import InputError, StoreError
from credibly.posterior.base import Posterior
from credibly.priors.elementwise import PRIORS, Normal
from credibly.problem import Problem, Tempering


@dataclass(frozen=True, eq=False)
class Entry:
    """A model in a comparison.

    Attributes:
        name: the caller's name for it.
        posterior: the posterior of its weights.
        problem: the density it was fitted to.
        prior_known: whether the problem has the model's prior; if not, only its data and likelihood are valid.
    """

    name: str
    posterior: Posterior
    problem: Problem
    prior_known: bool

    @property
    def targets(self) -> Any:
        """The caller's y."""
        likelihood = self.problem.likelihood
        return self.problem.y if likelihood.support == "class" else likelihood.restore(self.problem.y)

    @property
    def tempered(self) -> str:
        """The temperatures as text; empty if all are 1."""
        tempering: dict[str, float] = self.posterior.record.tempering or vars(self.problem.tempering)
        if all(t == 1 for t in tempering.values()):
            return ""
        return ", ".join(f"{k} at T = {t:g}" for k, t in tempering.items())


def entries_of(models: Mapping[str, Any], data: Any) -> list[Entry]:
    """Return the models of a comparison. Raise if they cannot be compared."""
    if not isinstance(models, Mapping) or not models:
        got = "an empty one" if isinstance(models, Mapping) else f"a {type(models).__name__}"
        advice = 'Pass for example {"narrow": a, "wide": b}'
        raise InputError("models", f"must be a dict of posteriors by name, got {got}", advice)
    entries = [_entry(str(name), value, data) for name, value in models.items()]
    for other in entries[1:]:
        _check_comparable(entries[0], other)
    return entries


def _entry(name: str, value: Any, data: Any) -> Entry:
    posterior, own = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(posterior, Posterior) or (own is not None and not isinstance(own, Problem)):
        found = f"must be a posterior or (posterior, problem), got a {type(value).__name__}"
        raise InputError(f"models[{name!r}]", found)
    if own is not None:
        entry = Entry(name, posterior, own, prior_known=True)
        if own.layout.dim != posterior.layout.dim:
            found = f"the problem has {own.layout.dim:,} parameters, the posterior {posterior.layout.dim:,}"
            raise InputError(f"models[{name!r}]", found, "Pass the problem that the posterior was fitted to")
    elif data is None:
        advice = f"Pass the training data, or models[{name!r}] as (posterior, problem)"
        raise InputError("data", "none was given", advice)
    else:
        entry = _rebuilt(name, posterior, data)
    known = posterior.record.fingerprint
    if known and known != entry.problem.fingerprint():
        found = f"was fitted to other data ({posterior.record.n:,} rows) than those given ({entry.problem.n:,} rows)"
        advice = "Pass the training rows in their order and dtype: all criteria are of training rows. "
        advice += f"If they had weights, pass models[{name!r}] as (posterior, problem)"
        raise InputError(f"models[{name!r}]", found, advice)
    return entry


def _rebuilt(name: str, posterior: Posterior, data: Any) -> Entry:
    """Rebuild a posterior's problem from the data and the prior and temperatures in its record."""
    weights = None
    if isinstance(data, Problem):
        likelihood, weights = data.likelihood, data.sample_weight
        data = (data.x, data.y if likelihood.support == "class" else likelihood.restore(data.y))
    record, model = posterior.record, posterior.model
    prior: Any = None
    if record.prior is not None:
        try:
            prior = from_spec(record.prior, kinds_of(*PRIORS.values()))
        except StoreError:
            # A custom class, which a record cannot describe.
            prior = None
    problem = Problem(
        model.layout.module,
        data,
        model.likelihood,
        Normal() if prior is None else prior,
        sample_weight=weights,
        temperature=Tempering(**record.tempering),
        random=model.layout.random,
    )
    return Entry(name, posterior, problem, prior_known=prior is not None)


def _check_comparable(first: Entry, other: Entry) -> None:
    """Raise unless two models predict the same targets."""
    names = f"{first.name!r} and {other.name!r}"
    one, two = first.problem.likelihood, other.problem.likelihood
    if one.support != two.support:
        found = f"{names} have outcomes of different kinds ({one.support} and {two.support})"
        raise InputError("models", found, "Densities and probabilities cannot be compared")
    a, b = first.problem.y.cpu(), other.problem.y.cpu()
    if a.shape != b.shape or not torch.equal(a.double(), b.double()):
        found = f"{names} were fitted to different data (targets of shape {tuple(a.shape)} and {tuple(b.shape)})"
        raise InputError("models", found, "Compare models fitted to the same targets, row for row")
    v, w = (torch.ones(len(a)) if e.problem.sample_weight is None else e.problem.sample_weight for e in (first, other))
    if not torch.equal(v.cpu().double(), w.cpu().double()):
        raise InputError("models", f"{names} were fitted with different sample_weight", "Give their rows equal weights")


def same_inputs(entries: list[Entry]) -> bool:
    """Return whether all models have the same inputs; they may use other columns of the same rows."""
    first = dict(tensors_of(entries[0].problem.x))
    for other in entries[1:]:
        mine = dict(tensors_of(other.problem.x))
        if first.keys() != mine.keys() or any(
            first[k].shape != mine[k].shape or not torch.equal(first[k].cpu().double(), mine[k].cpu().double())
            for k in first
        ):
            return False
    return True
