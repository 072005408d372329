"""A likelihood made from a function that returns a `torch.distributions` object.

Log densities are always those of the distribution. Moments, entropies, CDFs and quantiles are too if it has them;
otherwise they come from a fixed number of samples with a fixed seed, so that a result is the same on every call.
`FromDistribution.sampled` lists the sampled quantities, `monte_carlo_error` returns their standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from credibly.core.checks import check_choice, check_integer
from credibly.core.inputs import check_finite
from credibly.core.placement import exact_dtype
from credibly.core.rng import check_seed, global_stream
from credibly.core.specs import kind_name, to_spec
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, Likelihood, Parameter, row_shape
from credibly.likelihoods.discrete import class_labels, entropy_of
from credibly.likelihoods.distribution_parts import (
    CLOSED_FORMS,
    missing_parts,
    name_of,
    sampled_cdf,
    sampled_entropy,
    sampled_moments,
    sampled_quantiles,
    start_value,
    support_kind,
    target_form,
    unvalidated,
    within_support,
)
from credibly.likelihoods.sampled_fisher import sampled_root

SUPPORTS = ("auto", "real", "count", "binary", "class")
STORED = ("support", "samples", "seed", "axis", "squeeze", "sampled", "form", "classes")


def from_distribution(
    make: Callable[..., Distribution],
    *,
    parameters: Mapping[str, Parameter] | None = None,
    support: str = "auto",
    samples: int = 1024,
    seed: int = 0,
    axis: int = -1,
) -> FromDistribution:
    """Return the likelihood of the distributions that `make` returns for the network's outputs.

    `make(out)` gets outputs (rows, ..., W), with W outputs per row on the last axis, and returns a distribution of one
    y per row, of K independent targets on a last axis, or of a vector of K targets (an event).

        cr.likelihoods.from_distribution(lambda out: Gamma(out[..., 0].exp(), out[..., 1].exp()))

    Args:
        make: the function. The distribution must not depend on anything random, nor on other rows.
        parameters: random parameters of the model besides the network's, such as a dispersion; `make` gets each as a
            keyword argument, in its own shape.
        support: "real", "count", "binary" or "class"; "auto" infers it from the distribution.
        samples: samples per row and draw for quantities without a closed form.
        seed: seed of those samples.
        axis: the axis of the network's output that holds the W outputs, where 0 is the rows.
    """
    if not callable(make):
        raise InputError("make", f"must be a function of the outputs, got {make!r}")
    check_choice("support", support, SUPPORTS)
    check_integer("samples", samples, least=2)
    own = tuple((parameters or {}).items())
    for name, parameter in own:
        if not isinstance(parameter, Parameter) or not str(name).isidentifier():
            found = f"must map names to credibly.likelihoods.Parameter, got {name!r}: {parameter!r}"
            raise InputError("parameters", found)
    return FromDistribution(
        make=make, own=own, support=support, samples=samples, seed=check_seed(seed), axis=axis, name=name_of(make)
    )


@dataclass(frozen=True, kw_only=True)
class FromDistribution(Likelihood):
    """y with the distribution make(f(x, w)); see `from_distribution`, which makes it.

    Attributes:
        sampled: which of "mean", "variance", "entropy" and "cdf" come from samples; set by `bind`. "summed cdf" is
            the exact sum of the probabilities of counts.
        form: how targets lie in the distribution: "plain" without an axis of their own, "axis" on the last axis of the
            batch, "event" as a vector; set by `bind`.
        classes: number of classes; set by `bind`.
    """

    make: Callable[..., Distribution] = field(repr=False)
    own: tuple[tuple[str, Parameter], ...] = ()
    support: str = "auto"  # type: ignore[misc]
    samples: int = 1024
    seed: int = 0
    name: str = ""
    sampled: tuple[str, ...] = ()
    form: str = "plain"
    classes: int = 0

    noise_sign: ClassVar[int] = 0

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """Whether outcomes have quantiles."""
        return self.support in ("real", "count")

    # -- binding -----------------------------------------------------------------------------------------------------
    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Make the distribution of a trial output, and match its shape to y."""
        arranged = self.arrange(output).detach()
        starts = {name: start_value(parameter, arranged) for name, parameter in self.own}
        with unvalidated(), self._stream("trial", arranged):
            try:
                trial = self.make(arranged, **starts)
            except Exception as error:
                raise InputError(
                    "make",
                    f"{self.name} failed on outputs of shape {row_shape(arranged)} ({type(error).__name__}: {error})",
                    "It gets rows first and the network's outputs on the last axis",
                ) from error
            if not isinstance(trial, Distribution):
                raise InputError("make", f"must return a torch.distributions.Distribution, got {type(trial).__name__}")
            support = support_kind(trial) if self.support == "auto" else self.support
            classes = int(trial.enumerate_support(expand=False).numel()) if support == "class" else 0
            own = y.movedim(self.axis, -1) if self.axis != -1 and y.ndim == output.ndim else y
            form, squeeze = target_form(trial, arranged, own, support, self.name)
            within_support(trial, y)
            sampled = () if support in ("class", "binary") else missing_parts(trial, support)
        return replace(self, support=support, form=form, squeeze=squeeze, classes=classes, sampled=sampled)

    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Check targets and return them as (N, ..., K), or labels as int64, (N, ...)."""
        if self.support == "class":
            return class_labels(y, self.classes)
        y = y.unsqueeze(-1) if self.squeeze else self.arrange(y)
        y = y.to(exact_dtype(dtype) if self.support == "count" else dtype)
        check_finite("y", y)
        if self.support == "binary" and not bool(((y == 0) | (y == 1)).all()):
            raise InputError("y", "has values other than 0 and 1", "Encode two classes as 0 and 1")
        return y

    def parameters(self) -> dict[str, Parameter]:
        """Return the likelihood's own random parameters, by name."""
        return dict(self.own)

    # -- the density and what follows from it -----------------------------------------------------------------------
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log density per row (and pixel), summed over independent targets."""
        return self._each(output, extra, lambda d, v: d.log_prob(v), y, per_target=False)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return mean and variance; for a distribution without a mean, the median replaces it."""
        if self.support in ("class", "binary"):
            p = self._probabilities(output, extra).exp()
            p = p if self.support == "class" else p[..., 1]
            return p, p * (1 - p)
        by_samples = tuple(part for part in self.sampled if part in ("mean", "variance"))

        def both(d: Distribution) -> Tensor:
            if by_samples:
                with self._stream("moments", output):
                    mean, variance = sampled_moments(d, self.samples)
            if "mean" not in by_samples:
                mean = CLOSED_FORMS["mean"](d)
            if "variance" not in by_samples:
                variance = CLOSED_FORMS["variance"](d)
            return torch.stack([mean, variance], -1)

        mean, variance = self._each(output, extra, both, stacked=True).unbind(-1)
        return mean, variance

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy in nats: per target, and one value for classes and for vectors."""
        if self.support in ("class", "binary"):
            return entropy_of(self._probabilities(output, extra).exp())

        def one(d: Distribution) -> Tensor:
            if "entropy" not in self.sampled:
                return d.entropy()
            with self._stream("entropy", output):
                return sampled_entropy(d, self.samples)[0]

        return self._each(output, extra, one, per_target=self.form != "event")

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value), elementwise."""
        if not self.ordered:
            return super().cdf(output, value, extra)

        def one(d: Distribution, v: Tensor) -> Tensor:
            if "cdf" not in self.sampled and "summed cdf" not in self.sampled:
                return CLOSED_FORMS["cdf"](d, v)
            with self._stream("cdf", output):
                return sampled_cdf(d, v, self.samples, counts="summed cdf" in self.sampled)

        return self._each(output, extra, one, value)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw one y per element, in the layout of prepared targets."""
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with global_stream(seed, "distribution samples", device=output.device):
            drawn = self._each(output, extra, lambda d: d.sample(), per_target=self.support != "class")
        return drawn if self.support == "class" else drawn.to(output.dtype)

    def mixture_quantiles(self, output: Tensor, extra: Extra, levels: Sequence[float]) -> Tensor | None:
        """Return quantiles of samples pooled over draws if the distribution has no CDF."""
        if "cdf" not in self.sampled:
            return None
        each = max(16, -(-16 * self.samples // len(output)))

        def draw(rows: Tensor) -> Tensor:
            return self._each(rows, extra, lambda d: d.sample((each,)).movedim(0, 1)).movedim(2, 0)

        with self._stream("quantiles", output):
            return sampled_quantiles(draw, each, output, levels)

    def fisher_root(self, output: Tensor, extra: Extra) -> Tensor | None:
        """Return a root of E_y[s s']: summed over the outcomes of labels, from sampled labels otherwise."""
        if self.support not in ("class", "binary"):
            return sampled_root(self, output, extra, seed=self.seed)
        leaf = output.detach().unsqueeze(0).requires_grad_()
        columns = []
        with torch.enable_grad():
            log_p = self._probabilities(leaf, extra)
            log_p = log_p.unsqueeze(-2) if self.support == "class" else log_p
            for one in log_p.flatten(-2).unbind(-1):
                (score,) = torch.autograd.grad(one.sum(), leaf, retain_graph=True)
                columns.append(score * (0.5 * one.detach()).exp().unsqueeze(-1))
        return torch.stack(columns, -1).squeeze(0)

    # -- uncertainty of labels -----------------------------------------------------------------------------------------
    def spread(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the variance, or the entropy of labels."""
        return self.moments(output, extra)[1] if self.ordered else self.entropy(output, extra)

    def total(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return the variance, or the entropy of the averaged probabilities of labels."""
        if self.ordered:
            return aleatoric + variance_of_means
        return entropy_of(mean if self.support == "class" else torch.stack([1 - mean, mean], -1))

    def variance(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return the variance of y under the model average."""
        return aleatoric + variance_of_means if self.ordered else mean * (1 - mean)

    # -- what is sampled ---------------------------------------------------------------------------------------------
    def monte_carlo_error(self, predictive: Any) -> dict[str, Tensor | float]:
        """Return the standard errors of a predictive's results that come from samples.

        "mean" is per row, in the shape of the mean, and so is "entropy". "cdf" is the largest possible one, for any
        row: quantiles have that error divided by the density there. Empty if everything has a closed form.
        """
        found: dict[str, Tensor | float] = {}
        count = self.samples * predictive.draws

        def variance(output: Tensor, extra: Extra, start: int) -> Tensor:
            return self.moments(output, extra)[1].mean(0)

        def surprise(output: Tensor, extra: Extra, start: int) -> Tensor:
            with self._stream("entropy", output):
                return self._each(output, extra, lambda d: sampled_entropy(d, self.samples)[1]).mean(0)

        if "mean" in self.sampled:
            found["mean"] = self.restore((torch.cat(list(predictive.map_blocks(variance))) / count).sqrt())
        if "entropy" in self.sampled:
            found["entropy"] = self.restore((torch.cat(list(predictive.map_blocks(surprise))) / count).sqrt())
        if "cdf" in self.sampled:
            found["cdf"] = 0.5 / math.sqrt(count)
        return found

    # -- storage -------------------------------------------------------------------------------------------------------
    def spec(self) -> dict[str, Any]:
        """Return the description for a run folder: everything except the function."""
        stored = {name: to_spec(getattr(self, name)) for name in STORED}
        return {"kind": kind_name(type(self)), "make": self.name, "own": to_spec(dict(self.own)), **stored}

    def restored(self, spec: Mapping[str, Any]) -> Self:
        """Return the likelihood as it was bound in a stored run."""
        mine, theirs = [name for name, _ in self.own], list(spec.get("own") or ())
        if spec.get("kind") != kind_name(type(self)) or mine != theirs:
            found = f"is {self.name} with parameters {mine}, that of the run {spec.get('make', spec.get('kind'))}"
            raise InputError("likelihood", f"{found} with parameters {theirs}", "Pass the likelihood of the fit")
        fields = {name: spec[name] for name in STORED}
        return replace(self, **{**fields, "sampled": tuple(fields["sampled"])})

    # -- the distribution ----------------------------------------------------------------------------------------------
    def _each(
        self,
        output: Tensor,
        extra: Extra,
        function: Callable[..., Tensor],
        *values: Tensor,
        per_target: bool = True,
        stacked: bool = False,
    ) -> Tensor:
        """Return function(distribution, *values) for outputs (C, N, ..., W), with leading axes (C, N).

        `values` are prepared targets. The function returns rows first and the elements last. With `per_target` the
        result has a target axis last, otherwise log densities of targets are summed; `stacked` keeps one further axis
        at the end.
        """
        lead = output.shape[:2]
        ready = [self._for_distribution(v, output) for v in values]
        with unvalidated():
            if self.own:
                parts = []
                for c in range(lead[0]):
                    d = self.make(output[c], **{name: extra[name][c] for name, _ in self.own})
                    parts.append(function(d, *(v[c] for v in ready)))
                found = torch.stack(parts)
            else:
                d = self.make(output.flatten(0, 1))
                found = function(d, *(v.flatten(0, 1) for v in ready)).unflatten(0, lead)
        if self.form == "axis" and not per_target:
            return found.sum(-1)
        if self.form == "plain" and per_target and self.support != "class":
            return found.unsqueeze(-2 if stacked else -1)
        return found

    def _for_distribution(self, value: Tensor, output: Tensor) -> Tensor:
        """Return prepared targets, shared by all draws or not, as (C, N, ...) in the layout of the distribution."""
        wanted = output.ndim - (self.support == "class")
        while value.ndim < wanted:
            value = value.unsqueeze(0)
        value = value.expand(*output.shape[:2], *value.shape[2:])
        return value.squeeze(-1) if self.form == "plain" and self.support != "class" else value

    def _probabilities(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the log probabilities of all outcomes of labels, on a last axis."""

        def one(d: Distribution) -> Tensor:
            if isinstance(d, Categorical):
                return d.logits
            return d.log_prob(d.enumerate_support()).movedim(0, -1)

        several = self.form == "axis"
        found = self._each(output, extra, one, per_target=several, stacked=several)
        return found.unsqueeze(-2) if self.support == "binary" and self.form == "plain" else found

    def _stream(self, purpose: str, output: Tensor) -> Any:
        return global_stream(self.seed, f"distribution {purpose}", device=output.device)
