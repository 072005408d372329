"""Bayesian optimisation over a finite set of candidates: improvement-based acquisitions and an ask-tell loop.

The argument `of` selects the quantity to optimise:

    "function"      f(x, w) = E(y | x, w), over the draws of the weights: epistemic uncertainty alone (default)
    "gaussian"      the same with the draws replaced by N(mean, epistemic variance): smooth where draws are few
    "observation"   y itself, noise included: for the best single observation, which is rarely the goal

Most searches look for the maximum of f, where observation noise is not a reason to try a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_probability
from credibly.core.rng import check_seed, stream, stream_seed
from credibly.decide.bandits import Goal, scalar_values, sign_of, thompson
from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.likelihoods.continuous import LocationScale
from credibly.posterior.base import Posterior
from credibly.predictive.base import Predictive

KINDS = ("function", "gaussian", "observation")
Acquisition = Callable[[Predictive, float], Tensor]


def expected_improvement(
    predictive: Predictive, best: float, *, of: str = "function", goal: Goal = "max", margin: float = 0.0
) -> Tensor:
    """Return E[(value - best - margin)+ | D] per candidate, (N,); with goal="min" that of (best - margin - value)+.

    "function" averages the improvement over the draws. The others use the closed form s [z Phi(z) + phi(z)] with
    z = (m - best)/s: "gaussian" for one Gaussian with the epistemic variance, "observation" averaged over the draws'
    N(f(x, w_s), noise_s^2), which is exact for the mixture and needs a Gaussian likelihood.

    Args:
        best: the value to improve on, in the units of the predictive.
        of: the quantity to optimise; see the module docstring.
        margin: the smallest improvement that counts.
    """
    sign, limit = _sign_and_limit(of, goal, best, margin)
    if of == "gaussian":
        mean, sd = _gaussian(predictive)
        return _closed_form(sign * (mean - limit), sd)
    if of == "observation":
        return _each(predictive, lambda output, extra: _observed(predictive.likelihood, output, extra, sign, limit))
    return _functions(predictive, lambda f: (sign * (f - limit)).clamp_min(0).mean(0))


def probability_of_improvement(
    predictive: Predictive, best: float, *, of: str = "function", goal: Goal = "max", margin: float = 0.0
) -> Tensor:
    """Return P(value > best + margin | D) per candidate, (N,); with goal="min" P(value < best - margin).

    The arguments are those of `expected_improvement`. "observation" supports any ordered likelihood.
    """
    sign, limit = _sign_and_limit(of, goal, best, margin)
    if of == "gaussian":
        mean, sd = _gaussian(predictive)
        gap = sign * (mean - limit)
        inside: Tensor = torch.special.ndtr(gap / sd)
        return torch.where(sd > 0, inside, (gap > 0).to(gap))
    if of == "observation":
        below = predictive.cdf(_single(predictive, predictive.mean).new_full(predictive.mean.shape, limit))
        return _single(predictive, 1 - below if sign > 0 else below)
    return _functions(predictive, lambda f: (sign * (f - limit) > 0).to(f).mean(0))


def upper_bound(predictive: Predictive, level: float = 0.95, *, of: str = "function") -> Tensor:
    """Return the upper confidence bound, (N,): the quantile at `level`. A level below 0.5 gives a lower bound.

    "function" is the quantile over the draws (linear between them), "gaussian" mean + Phi^-1(level) x epistemic
    standard deviation, "observation" the quantile of y.
    """
    check_probability("level", level)
    _sign_and_limit(of, "max", 0.0, 0.0)
    if of == "gaussian":
        mean, sd = _gaussian(predictive)
        return mean + float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64))) * sd
    if of == "observation":
        return _single(predictive, predictive.quantile(level))
    return _functions(predictive, lambda f: torch.quantile(f.double(), level, dim=0).to(f))


class BayesianOptimiser:
    """Bayesian optimisation over a finite set of candidates, with an ask-tell interface.

    Args:
        candidates: inputs, (N, ...).
        fit: function from the rows tried (n, ...), their values (n,) and a seed to a posterior, such as `lambda x, y,
            seed: cr.DeepEnsemble().fit(cr.Problem(net, (x, y), ...), seed=seed)`. Values are passed as given to `tell`;
            standardise them here if the network needs it.
        acquisition: "thompson", or a function from a predictive and the best value so far to scores, higher is better,
            such as `decide.expected_improvement` or `decide.probability_of_improvement` with goal="max".
        goal: "max" or "min". With "min" a custom acquisition must account for it.
        initial: number of candidates tried at random before the first fit, at least 2.
        seed: random seed of the whole search.
    """

    def __init__(
        self,
        candidates: Tensor,
        fit: Callable[[Tensor, Tensor, int], Posterior],
        *,
        acquisition: str | Acquisition = "thompson",
        goal: Goal = "max",
        initial: int = 5,
        seed: int = 0,
    ) -> None:
        self.sign, self.goal, self.seed = sign_of(goal), goal, check_seed(seed)
        if not callable(acquisition) and acquisition != "thompson":
            raise InputError("acquisition", f'must be "thompson" or a function, got {acquisition!r}')
        if not isinstance(candidates, Tensor) or candidates.ndim == 0 or len(candidates) < 2:
            found = f"shape {tuple(candidates.shape)}" if isinstance(candidates, Tensor) else type(candidates).__name__
            raise InputError("candidates", f"must be a tensor with at least 2 rows, got {found}")
        check_integer("initial", initial, least=2, most=len(candidates))
        self.candidates, self.fit, self.acquisition = candidates, fit, acquisition
        self.tried: list[int] = []
        self.values: list[float] = []
        self._asked = 0
        self._first = torch.randperm(len(candidates), generator=stream(seed, "first candidates"))[:initial].tolist()
        self.posterior: Posterior | None = None

    def ask(self, count: int = 1) -> Tensor:
        """Return row numbers of candidates to try next, (count,): the random start first, then by the acquisition.

        Candidates already tried are excluded. With a function as acquisition the batch is its highest scores, whatever
        their similarity; with Thompson sampling each candidate comes from its own draw.
        """
        done = set(self.tried)
        untried = [i for i in range(len(self.candidates)) if i not in done]
        check_integer("count", count, most=len(untried), advice=f"{len(untried)} candidates are untried")
        waiting = [i for i in self._first if i not in done]
        if waiting or len(self.values) < 2:
            return torch.tensor((waiting + [i for i in untried if i not in waiting])[:count])
        self._asked += 1
        if self.posterior is None:
            rows = torch.tensor(self.tried, device=self.candidates.device)
            y = torch.tensor(self.values, dtype=torch.float64).to(self.candidates)
            self.posterior = self.fit(self.candidates[rows], y, stream_seed(self.seed, "fit", len(self.values)))
        untried_rows = torch.tensor(untried)
        x = self.candidates[untried_rows.to(self.candidates.device)]
        if callable(self.acquisition):
            scores = self.acquisition(self.posterior.predict(x), self.best[1])
            return untried_rows[scores.cpu().topk(count).indices]
        return untried_rows[self._thompson(self.posterior, x, count)]

    def tell(self, rows: Any, values: Any) -> None:
        """Record one finite value for each of the given row numbers."""
        numbers = torch.as_tensor(rows).reshape(-1).tolist()
        found = torch.as_tensor(values, dtype=torch.float64).reshape(-1).tolist()
        if len(numbers) != len(found) or not all(math.isfinite(v) for v in found):
            raise InputError("values", f"must be one finite number per row, got {found} for rows {numbers}")
        if not all(isinstance(i, int) and 0 <= i < len(self.candidates) for i in numbers):
            raise InputError("rows", f"must be row numbers from 0 to {len(self.candidates) - 1}, got {numbers}")
        self.tried += numbers
        self.values += found
        self.posterior = None

    @property
    def best(self) -> tuple[int, float]:
        """The row number of the best candidate so far, and its value."""
        if not self.values:
            raise InputError("best", "no values recorded yet", "Evaluate the rows from ask() and pass them to tell()")
        index = max(range(len(self.values)), key=lambda i: self.sign * self.values[i])
        return self.tried[index], self.values[index]

    def _thompson(self, posterior: Posterior, x: Tensor, count: int) -> Tensor:
        """Return distinct candidates by Thompson sampling, filled up in row order if the draws yield too few."""
        seed = stream_seed(self.seed, "ask", self._asked)
        picks = thompson(posterior, x, 8 * count, seed=seed, goal=self.goal).tolist()
        return torch.tensor(list(dict.fromkeys([*picks, *range(len(x))]))[:count])


def _sign_and_limit(of: str, goal: Goal, best: float, margin: float) -> tuple[int, float]:
    """Check the arguments; return the sign of the goal and the value to exceed in its direction."""
    check_choice("of", of, KINDS)
    sign = sign_of(goal)
    for name, value in (("best", best), ("margin", margin)):
        try:
            usable = math.isfinite(float(value))
        except (TypeError, ValueError):
            usable = False
        if not usable:
            raise InputError(name, f"must be a finite number, got {value!r}")
    return sign, float(best) + sign * float(margin)


def _closed_form(gap: Tensor, sd: Tensor) -> Tensor:
    """Return E[(gap + sd e)+] for standard normal e: sd [z Phi(z) + phi(z)], or max(gap, 0) where sd is 0."""
    z = gap / sd
    value = sd * (z * torch.special.ndtr(z) + torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
    return torch.where(sd > 0, value.clamp_min(0), gap.clamp_min(0))


def _observed(likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], sign: int, limit: float) -> Tensor:
    """Return the expected improvement of an observation over a block: the closed form averaged over draws."""
    inner, location, scale = likelihood.standardised() or (likelihood, None, None)
    if not isinstance(inner, LocationScale) or type(inner).standard_log_prob is not LocationScale.standard_log_prob:
        found = f'"observation" needs Gaussian noise, the likelihood is {type(inner).__name__}'
        raise InputError("of", found, 'Pass of="function"')
    loc, sd = inner.location_scale(output, extra)
    loc, sd = loc.double(), sd.double()
    if location is not None and scale is not None:
        loc, sd = loc * scale.to(loc) + location.to(loc), sd * scale.to(sd)
    return _closed_form(sign * (loc - limit), sd.expand_as(loc)).mean(0).to(output.dtype)


def _each(predictive: Predictive, reduce: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
    return _single(
        predictive, torch.cat(list(predictive.map_blocks(lambda output, extra, start: reduce(output, extra))))
    )


def _functions(predictive: Predictive, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce the function values (S, rows) over draws, block by block."""

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        return reduce(scalar_values(predictive, predictive.likelihood.moments(output, extra)[0]))

    return torch.cat(list(predictive.map_blocks(block)))


def _gaussian(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return the mean and epistemic standard deviation of the function, (N,) each."""
    if predictive.likelihood.support not in ("real", "count"):
        raise InputError("of", '"gaussian" needs an epistemic variance, which labels lack', 'Pass of="function"')
    return _single(predictive, predictive.mean), _single(predictive, predictive.epistemic).sqrt()


def _single(predictive: Predictive, values: Tensor) -> Tensor:
    if values.numel() != len(predictive):
        found = f"has {values.numel() // len(predictive)} values per row ({type(predictive.likelihood).__name__})"
        raise InputError("predictive", found, "Candidates are compared by one number each")
    return values.reshape(len(predictive))
