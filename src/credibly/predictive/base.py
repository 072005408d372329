"""Predictive: the Bayesian model average at given inputs, with its aleatoric and epistemic uncertainty.

    p(y | x, D) ~ (1/S) sum_s p(y | x, w_s)

Everything is computed block by block from the outputs (S, rows, ...) of a block of rows under all draws, so memory does
not grow with the number of rows. Metrics, reports and decisions use only this class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from credibly.backends.cpp.moments import mean_of_draws, moments_of_draws
from credibly.core.checks import check_choice, check_integer, check_probability
from credibly.core.inputs import Inputs, map_inputs, row_count, to_values
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.predictive.blocks import Blocks
from credibly.predictive.display import predictive_table
from credibly.predictive.quantiles import mixture_quantiles
from credibly.predictive.source import DrawSource

T = TypeVar("T")


class _Summary(NamedTuple):
    mean: Tensor
    variance: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class Predictive(Blocks):
    """Predictions with their uncertainty, in the shape of the problem's y: (N,), (N, K), (N, H, W), ...

    Everything is computed on first access, block by block in bounded memory.
    """

    def __init__(self, source: DrawSource, x: Inputs) -> None:
        self._source = source
        self._x = x
        self.likelihood = source.likelihood
        self.rows = row_count(x)
        self.draws = source.count
        self._cached: Tensor | None = None

    # -- moments and the decomposition -------------------------------------------------------------------------------
    @property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the averaged probabilities (N, ..., K).

        For noise without a mean (`StudentT` with df <= 1) its location, which is the median, is used instead.
        """
        # The mean alone is half the work of the summary. Without cached outputs, one pass computes everything instead.
        return self._mean if self._fits() and "_summary" not in vars(self) else self._summary.mean

    @property
    def variance(self) -> Tensor:
        """Var[y | x, D], in the shape of the mean; for regression and counts it is aleatoric + epistemic.

        It is infinite for noise of infinite variance (`StudentT` with df <= 2), as is the aleatoric part. Intervals and
        the epistemic part are still finite.
        """
        return self._summary.variance

    @property
    def std(self) -> Tensor:
        """Standard deviation of y, the root of the variance."""
        return self._summary.variance.sqrt()

    @property
    def total(self) -> Tensor:
        """Total uncertainty: the variance, or for labels the entropy of the averaged probabilities in nats."""
        return self._summary.total

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not remove: E_s Var(y | x, w_s), or for labels E_s H[p_s]."""
        return self._summary.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty about the model: Var_s E(y | x, w_s), or for labels the mutual information of y and w."""
        return self._summary.epistemic

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (N, ..., K); a Bernoulli's single probability p becomes (1 - p, p)."""
        if self.likelihood.support == "class":
            return self.likelihood.arrange(self.mean)
        if self.likelihood.support == "binary":
            return torch.stack([1 - self.mean, self.mean], -1)
        kind = type(self.likelihood).__name__
        raise InputError("probabilities", f"the likelihood is {kind}, not one of labels", "Use mean and interval")

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of `_summary`, bit-for-bit."""
        likelihood, location, scale = self.likelihood.standardised() or (self.likelihood, None, None)

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            mean = likelihood.moments(output, extra)[0].mean(0, dtype=torch.float64)
            if location is not None and scale is not None:
                mean = mean * scale.to(mean) + location.to(mean)
            return mean.to(self._result_dtype(output))

        return self.likelihood.restore(torch.cat(list(self.map_blocks(block))))

    @cached_property
    def _summary(self) -> _Summary:
        # Moments are computed in the units and dtype of the network, then converted.
        likelihood, location, scale = self.likelihood.standardised() or (self.likelihood, None, None)

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, ...]:
            means, variances = likelihood.moments(output, extra)
            plain = type(likelihood).spread is Likelihood.spread
            aleatoric = mean_of_draws(variances if plain else likelihood.spread(output, extra))
            mean, variance_of_means = moments_of_draws(means, use_cpp=self._cpp_width is not None)
            total = likelihood.total(mean, variance_of_means, aleatoric)
            # Rounding can leave the difference slightly below zero; a single draw must give exactly zero.
            epistemic = (total - aleatoric).clamp_min(0) if self.draws > 1 else torch.zeros_like(total)
            if likelihood.support in ("real", "time"):
                # With noise of infinite variance the difference is undefined, but the variance of the means is not.
                epistemic = torch.where(aleatoric.isfinite(), epistemic, variance_of_means)
            variance = likelihood.variance(mean, variance_of_means, aleatoric)
            dtype = self._result_dtype(output)
            parts: tuple[Tensor, ...] = (mean, variance, total, aleatoric, epistemic)
            if location is not None and scale is not None:
                centre, stretch = location.to(mean), scale.to(mean)
                parts = (mean * stretch + centre, *(part * stretch**2 for part in parts[1:]))
            return tuple(part.to(dtype) for part in parts)

        mean, variance, *rest = (torch.cat(c) for c in zip(*self.map_blocks(block)))
        # Entropies have no class axis; everything else has the target axis of the mean.
        rest = [r if r.ndim < mean.ndim else self.likelihood.restore(r) for r in rest]
        return _Summary(self.likelihood.restore(mean), self.likelihood.restore(variance), *rest)

    # -- densities, quantiles, samples -------------------------------------------------------------------------------
    def log_prob(self, y: object) -> Tensor:
        """Return the log predictive density of each row, log (1/S) sum_s p(y | x, w_s), shape (N, ...)."""
        target = self.prepared(y)

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            part = self.likelihood.predictive_log_prob(output, target[start : start + output.shape[1]], extra).double()
            return (torch.logsumexp(part, 0) - math.log(self.draws)).to(self._result_dtype(output))

        return torch.cat(list(self.map_blocks(block)))

    def log_likelihoods(self, y: object) -> Iterator[Tensor]:
        """Yield log p(y_i | x_i, w_s) per draw and row, (S, rows) per block of rows, summed over targets and pixels."""
        target = self.prepared(y)

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            part = self.likelihood.log_prob(output, target[start : start + output.shape[1]], extra)
            return part.reshape(*part.shape[:2], -1).sum(2, dtype=torch.float64)

        return self.map_blocks(block)

    def cdf(self, y: object) -> Tensor:
        """Return P(Y <= y | x, D), elementwise in the shape of y."""
        target = self.prepared(y)

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            return self.likelihood.cdf(output, target[start : start + output.shape[1]], extra).mean(0)

        return self.likelihood.restore(torch.cat(list(self.map_blocks(block))))

    def quantile(self, level: float | Sequence[float]) -> Tensor:
        """Return quantiles of the mixture, in the shape of the mean; (levels, N, ...) for several levels."""
        levels = (level,) if isinstance(level, (int, float)) else tuple(level)
        if not levels or any(not 0 < q < 1 for q in levels):
            raise InputError("level", f"must be strictly between 0 and 1, got {level!r}")
        if not self.likelihood.ordered:
            found = f"{type(self.likelihood).__name__} outcomes have no quantiles"
            raise InputError("level", found, "Use prediction_set(level) or probabilities")

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            return mixture_quantiles(self.likelihood, output, extra, levels)

        result = torch.cat(list(self.map_blocks(block)), 1)
        restored = torch.stack([self.likelihood.restore(r) for r in result])
        return restored[0] if isinstance(level, (int, float)) else restored

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central credible interval (lower, upper) with probability `level` under the predictive."""
        check_probability("level", level)
        lower, upper = self.quantile(((1 - level) / 2, (1 + level) / 2))
        return lower, upper

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return the smallest set of classes with probability at least `level`, as booleans (N, ..., K)."""
        check_probability("level", level)
        p, order = self.probabilities.sort(-1, descending=True)
        needed = p.cumsum(-1) - p < level  # a class is included while the likelier ones do not yet reach the level
        return torch.zeros_like(needed).scatter(-1, order, needed)

    def sample(self, count: int = 1, *, seed: int = 0) -> Tensor:
        """Draw samples of y, (count, N, ...). Each uses one draw of the weights for all rows, so they are dependent."""
        check_integer("count", count)
        picks = torch.randint(self.draws, (count,), generator=stream(check_seed(seed), "predictive draws"))

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            generator = stream(seed, "predictive noise", start, device=output.device)
            chosen = picks.to(output.device)
            return self.likelihood.sample(output[chosen], {k: v[chosen] for k, v in extra.items()}, generator)

        result = torch.cat(list(self.map_blocks(block)), 1)
        return result if self.likelihood.support == "class" else self.likelihood.restore(result, 1)

    def functions(self, count: int | None = None) -> Tensor:
        """Return E(y | x, w_s) of all draws, or of `count` evenly spaced ones, (S, N, ...): the curves of a plot."""
        picks = torch.arange(self.draws)
        if count is not None:
            check_integer("count", count)
            picks = torch.linspace(0, self.draws - 1, min(count, self.draws)).round().long()

        def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
            return self.likelihood.moments(output, extra)[0][picks.to(output.device)]

        return self.likelihood.restore(torch.cat(list(self.map_blocks(block)), 1), 1)

    def ood_score(self, kind: str = "total") -> Tensor:
        """Return an out-of-distribution score per row, (N,), higher for inputs unlike the training data.

        Args:
            kind: "total" (entropy or variance), "epistemic" (mutual information or epistemic variance), or
                "max_probability" (one minus the highest class probability). Averaged over targets and pixels.
        """
        check_choice("kind", kind, ("total", "epistemic", "max_probability"))
        score = 1 - self.probabilities.max(-1).values if kind == "max_probability" else getattr(self, kind)
        return score.reshape(self.rows, -1).mean(-1)

    def __len__(self) -> int:
        return self.rows

    # -- for building on ---------------------------------------------------------------------------------------------
    @property
    def source(self) -> DrawSource:
        """The draws and the network, which compute the outputs at any inputs."""
        return self._source

    @property
    def x(self) -> Inputs:
        """The inputs, on the network's device."""
        return self._x

    def subset(self, rows: Tensor) -> Predictive:
        """Return the predictions of the same draws at the given rows (indices or a boolean mask)."""
        return Predictive(self._source, map_inputs(lambda t: t[rows.to(t.device)], self._x))

    def prepared(self, y: object) -> Tensor:
        """Return observed y in the layout and dtype of the likelihood. Raise if its shape does not match."""
        sample = self._source.outputs(map_inputs(lambda t: t[:1], self._x), 0, 1)
        value = to_values(y, "y")
        target = self.likelihood.prepare(value.to(sample.device), self._result_dtype(sample))
        mean = self.likelihood.moments(sample, self._source.extra(0, 1))[0]
        expected = mean.shape[2:] if self.likelihood.support != "class" else mean.shape[2:-1]
        if target.shape != (self.rows, *expected):
            blank = torch.empty(self.rows, *expected, device="meta")
            own = blank if self.likelihood.support == "class" else self.likelihood.restore(blank)
            raise InputError("y", f"must have shape {tuple(own.shape)}, got {tuple(value.shape)}")
        return target

    def _repr_html_(self) -> str:
        return predictive_table(self)

    def __repr__(self) -> str:
        return f"Predictive({self.rows} rows, {self.draws} draws, {type(self.likelihood).__name__})"

    def _result_dtype(self, output: Tensor) -> torch.dtype:
        """Return the dtype of results: the network's, or float64 if the likelihood needs it."""
        return torch.float64 if self.likelihood.wide else output.dtype
