"""What is compared: each model as its posterior and the problem it was fitted to, checked before anything is computed."""

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
        name: as the caller has it.
        posterior: of its weights.
        problem: the density it was fitted to.
        prior_known: whether the problem's prior is the model's; where it is not, only its data and likelihood are.
    """

    name: str
    posterior: Posterior
    problem: Problem
    prior_known: bool

    @property
    def targets(self) -> Any:
        """y as the caller gave it."""
        likelihood = self.problem.likelihood
        return self.problem.y if likelihood.support == "class" else likelihood.restore(self.problem.y)

    @property
    def tempered(self) -> str:
        """The temperatures in words where one of them is not 1, else ""."""
        said: dict[str, float] = self.posterior.record.tempering or vars(self.problem.tempering)
        return "" if all(t == 1 for t in said.values()) else ", ".join(f"{k} at T = {t:g}" for k, t in said.items())


def entries_of(models: Mapping[str, Any], data: Any) -> list[Entry]:
    """The models of a comparison; those that cannot be compared are refused."""
    if not isinstance(models, Mapping) or not models:
        found = "is empty" if isinstance(models, Mapping) else f"found {type(models).__name__}"
        raise InputError("models", found, 'Pass a dict of posteriors by name, such as {"narrow": a, "wide": b}')
    found_ones = [_entry(str(name), value, data) for name, value in models.items()]
    for other in found_ones[1:]:
        _check_together(found_ones[0], other)
    return found_ones


def _entry(name: str, value: Any, data: Any) -> Entry:
    posterior, own = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(posterior, Posterior) or (own is not None and not isinstance(own, Problem)):
        raise InputError(
            f"models[{name!r}]", f"found {type(value).__name__}", "Pass a posterior, or (posterior, problem)"
        )
    if own is not None:
        entry = Entry(name, posterior, own, prior_known=True)
        if own.layout.dim != posterior.layout.dim:
            found = f"the problem has {own.layout.dim:,} parameters, the posterior {posterior.layout.dim:,}"
            raise InputError(f"models[{name!r}]", found, "Pass the problem that the posterior was fitted to")
    elif data is None:
        raise InputError(
            "data", "none was given", f"Pass the training data, or models[{name!r}] as (posterior, problem)"
        )
    else:
        entry = _rebuilt(name, posterior, data)
    known = posterior.record.fingerprint
    if known and known != entry.problem.fingerprint():
        found = f"it was fitted to other data ({posterior.record.n:,} rows) than those given ({entry.problem.n:,} rows)"
        raise InputError(
            f"models[{name!r}]", found, "Pass the rows it was fitted to, in their order and dtype: all figures are of training rows"
        )  # fmt: skip
    return entry


def _rebuilt(name: str, posterior: Posterior, data: Any) -> Entry:
    """The problem of a posterior from the data and what its record says of prior and temperature."""
    if isinstance(data, Problem):
        likelihood = data.likelihood
        data = (data.x, data.y if likelihood.support == "class" else likelihood.restore(data.y))
    record, model = posterior.record, posterior.model
    prior: Any = None
    if record.prior is not None:
        try:
            prior = from_spec(record.prior, kinds_of(*PRIORS.values()))
        except StoreError:
            prior = None  # of a class that a record cannot describe
    problem = Problem(
        model.layout.module, data, model.likelihood, Normal() if prior is None else prior,
        temperature=Tempering(**record.tempering), random=model.layout.random,
    )  # fmt: skip
    return Entry(name, posterior, problem, prior_known=prior is not None)


def _check_together(first: Entry, other: Entry) -> None:
    """Refuses two models whose figures are of different things."""
    names = f"{first.name!r} and {other.name!r}"
    one, two = first.problem.likelihood, other.problem.likelihood
    if one.support != two.support:
        found = f"{names} have outcomes of different kinds ({one.support} and {two.support})"
        raise InputError("models", found, "Densities and probabilities cannot be compared")
    a, b = first.problem.y.cpu(), other.problem.y.cpu()
    if a.shape != b.shape or not torch.equal(a.double(), b.double()):
        found = f"{names} were fitted to different data (targets of shape {tuple(a.shape)} and {tuple(b.shape)})"
        raise InputError("models", found, "Compare models that were fitted to the same targets, row for row")


def same_inputs(entries: list[Entry]) -> bool:
    """Whether all models were given the same inputs; they may be other columns of the same rows."""
    first = dict(tensors_of(entries[0].problem.x))
    for other in entries[1:]:
        mine = dict(tensors_of(other.problem.x))
        if first.keys() != mine.keys() or any(
            first[k].shape != mine[k].shape or not torch.equal(first[k].cpu().double(), mine[k].cpu().double())
            for k in first
        ):
            return False
    return True
