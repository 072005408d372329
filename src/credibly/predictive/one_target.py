"""The predictive of one of several targets, for reports and files that show them one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from credibly.core.inputs import Inputs, map_inputs
from credibly.errors import InputError
from credibly.likelihoods.base import IndependentTargets
from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.predictive.rescaling import WithLikelihood
from credibly.predictive.source import DrawSource


class _OneTarget(WithLikelihood):
    """A source with the outputs and noise parameters of one target."""

    def __init__(
        self, inner: DrawSource, likelihood: IndependentTargets, target: int, targets: int, per_target: bool
    ) -> None:
        super().__init__(inner, likelihood)
        self.target, self.targets, self.per_target = target, targets, per_target

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        found = self.inner.outputs(x, start, stop, first_row)
        # K means, then K log-variances: every K-th output belongs to the target.
        return found[..., self.target :: self.targets]

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        given = self.inner.extra(start, stop)
        return {name: value[:, self.target] if self.per_target else value for name, value in given.items()}


def one_target(predictive: Predictive, target: int) -> Predictive:
    """Return the predictions of target number `target` of (N, K) targets as those of a single target, (N,)."""
    if isinstance(predictive, JoinedPredictive):
        return JoinedPredictive([one_target(part, target) for part in predictive.parts], predictive.places)
    likelihood = predictive.likelihood
    if not isinstance(likelihood, IndependentTargets) or likelihood.squeeze or likelihood.axis != -1:
        raise InputError("predictive", f"must be of several independent targets, got {type(likelihood).__name__}")
    trial = predictive.source.outputs(map_inputs(lambda t: t[:1], predictive.x), 0, 1)
    targets = likelihood.moments(trial, predictive.source.extra(0, 1))[0].shape[-1]
    if not 0 <= target < targets:
        raise InputError("target", f"must be from 0 to {targets - 1}, got {target}")
    single = _single(likelihood, target)
    per_target = bool(getattr(getattr(likelihood, "inner", likelihood), "per_target", False))
    return Predictive(_OneTarget(predictive.source, single, target, targets, per_target), predictive.x)


def _single(likelihood: Any, target: int) -> Any:
    """Return a likelihood of K targets as that of one of them."""
    fields: dict[str, Any] = {"squeeze": True}
    for name in ("transforms", "location", "scale"):
        value = getattr(likelihood, name, None)
        if isinstance(value, tuple):
            # A fixed scale of the noise is a number if there is one target, everything else a tuple.
            own = value[target]
            fields[name] = own if name == "scale" and not hasattr(likelihood, "inner") else (own,)
    if hasattr(likelihood, "inner"):
        fields["inner"] = _single(likelihood.inner, target)
    known = {field.name for field in dataclasses.fields(likelihood)}
    fields |= {name: value for name, value in (("per_target", False), ("targets", 1)) if name in known}
    prior = getattr(likelihood, "scale_prior", None)
    return dataclasses.replace(
        likelihood, **fields, **({"scale_prior": prior[target]} if isinstance(prior, tuple) else {})
    )
