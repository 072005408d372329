"""What to try next: expected improvement and its kin over a set of candidates, and a loop that asks and is told.

Three readings of "the value at x", in the argument `of`:

    "function"      f(x, w) = E(y | x, w): what is not known about the function, as the draws of the weights have it
    "gaussian"      the same with its draws replaced by N(mean, epistemic variance): smooth where the draws are few
    "observation"   y itself, noise and all: for the best of single observations, seldom what is wanted

Where f is looked for, as in most searches, noise is no reason to try a candidate: that is the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.rng import check_seed, stream, stream_seed
from credibly.decide.bandits import Goal, one_value, sign_of, thompson
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
    """E[(value - best - margin)+ | D] for each candidate, (N,); with goal="min" that of (best - margin - value)+.

    "function" averages the improvement over the draws, exactly for them. The others average the closed form
    s [z Phi(z) + phi(z)] with z = (m - best)/s: of one Gaussian with the epistemic variance, or of the draws' own
    N(f(x, w_s), noise_s^2), which is the exact value for the mixture; that needs a Gaussian likelihood.

    Args:
        best: the value to improve on, in the units of the predictive.
        of: which value; see the top of this page.
        margin: by how much it has to be improved on to count.
    """
    sign, limit = _checked(of, goal, best, margin)
    if of == "gaussian":
        mean, sd = _gaussian(predictive)
        return _closed(sign * (mean - limit), sd)
    if of == "observation":
        return _each(predictive, lambda output, extra: _observed(predictive.likelihood, output, extra, sign, limit))
    return _functions(predictive, lambda f: (sign * (f - limit)).clamp_min(0).mean(0))


def probability_of_improvement(
    predictive: Predictive, best: float, *, of: str = "function", goal: Goal = "max", margin: float = 0.0
) -> Tensor:
    """P(value > best + margin | D) for each candidate, (N,); with goal="min" P(value < best - margin).

    The arguments are those of `expected_improvement`. "observation" takes any ordered likelihood.
    """
    sign, limit = _checked(of, goal, best, margin)
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
    """The value that is exceeded with probability 1 - level, (N,): optimism as a number; a level below 0.5 gives a lower bound.

    "function" is the quantile over the draws (linear between them), "gaussian" mean + Phi^-1(level) x the epistemic deviation,
    "observation" the quantile of y.
    """
    if isinstance(level, bool) or not isinstance(level, float) or not 0 < level < 1:
        raise InputError("level", f"found {level!r}", "Pass a number between 0 and 1, such as 0.95")
    _checked(of, "max", 0.0, 0.0)
    if of == "gaussian":
        mean, sd = _gaussian(predictive)
        return mean + float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64))) * sd
    if of == "observation":
        return _single(predictive, predictive.quantile(level))
    return _functions(predictive, lambda f: torch.quantile(f.double(), level, dim=0).to(f))


class BayesianOptimiser:
    """A search for the best of a set of candidates, by asking for candidates to try and being told what came of them.

    Args:
        candidates: inputs, (N, ...).
        fit: from the rows tried (n, ...), their values (n,) and a seed to a posterior, such as
            `lambda x, y, seed: cr.DeepEnsemble().fit(cr.Problem(net, (x, y), ...), seed=seed)`. Values come as they were told:
            standardising them, where the network wants that, is its business.
        acquisition: "thompson", or a function of a predictive and the best value so far that is higher for better candidates:
            `decide.expected_improvement` and `decide.probability_of_improvement` are such, with goal="max".
        goal: "max" or "min". With "min" a function of your own has to know it.
        initial: candidates that are tried at random before the first fit, at least 2.
        seed: of everything.
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
            raise InputError("acquisition", f"found {acquisition!r}", 'Pass "thompson" or a function')
        if not isinstance(candidates, Tensor) or candidates.ndim == 0 or len(candidates) < 2:
            raise InputError("candidates", f"found {type(candidates).__name__}", "Pass a tensor with at least 2 rows")
        if isinstance(initial, bool) or not isinstance(initial, int) or not 2 <= initial <= len(candidates):
            raise InputError(
                "initial", f"found {initial!r}", f"Pass a number from 2 to {len(candidates)}, the candidates"
            )
        self.candidates, self.fit, self.acquisition = candidates, fit, acquisition
        self.tried: list[int] = []
        self.values: list[float] = []
        self._asked = 0
        self._first = torch.randperm(len(candidates), generator=stream(seed, "first candidates"))[:initial].tolist()
        self.posterior: Posterior | None = None

    def ask(self, count: int = 1) -> Tensor:
        """Row numbers of candidates to try next, (count,): those of the random start, then what the acquisition picks.

        None that was tried already is asked for again. Several at once by a function are its highest, without regard to how
        alike they are; by Thompson sampling each has a draw of its own.
        """
        done = set(self.tried)
        left = [i for i in range(len(self.candidates)) if i not in done]
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(left):
            raise InputError("count", f"found {count!r}", f"Pass a number from 1 to {len(left)}, the candidates left")
        waiting = [i for i in self._first if i not in done]
        if waiting or len(self.values) < 2:
            return torch.tensor((waiting + [i for i in left if i not in waiting])[:count])
        self._asked += 1
        if self.posterior is None:
            rows = torch.tensor(self.tried, device=self.candidates.device)
            told = torch.tensor(self.values, dtype=torch.float64).to(self.candidates)
            self.posterior = self.fit(self.candidates[rows], told, stream_seed(self.seed, "fit", len(self.values)))
        open_rows = torch.tensor(left)
        x = self.candidates[open_rows.to(self.candidates.device)]
        if callable(self.acquisition):
            scores = self.acquisition(self.posterior.predict(x), self.best[1])
            return open_rows[scores.cpu().topk(count).indices]
        return open_rows[self._draws(self.posterior, x, count)]

    def tell(self, rows: Any, values: Any) -> None:
        """What came of some candidates: their row numbers and one finite value for each."""
        numbers = torch.as_tensor(rows).reshape(-1).tolist()
        found = torch.as_tensor(values, dtype=torch.float64).reshape(-1).tolist()
        if len(numbers) != len(found) or not all(math.isfinite(v) for v in found):
            raise InputError("values", f"found {found} for rows {numbers}", "Pass one finite number for each row")
        if not all(isinstance(i, int) and 0 <= i < len(self.candidates) for i in numbers):
            raise InputError("rows", f"found {numbers}", f"Pass row numbers from 0 to {len(self.candidates) - 1}")
        self.tried += numbers
        self.values += found
        self.posterior = None

    @property
    def best(self) -> tuple[int, float]:
        """The row number of the best candidate so far, and its value."""
        if not self.values:
            raise InputError("best", "nothing was told yet", "Call ask, try what it gives, and tell")
        place = max(range(len(self.values)), key=lambda i: self.sign * self.values[i])
        return self.tried[place], self.values[place]

    def _draws(self, posterior: Posterior, x: Tensor, count: int) -> Tensor:
        """Different candidates by Thompson sampling: draws until there are enough, the rest in their order."""
        several = thompson(
            posterior, x, 8 * count, seed=stream_seed(self.seed, "ask", self._asked), goal=self.goal
        ).tolist()
        return torch.tensor(list(dict.fromkeys([*several, *range(len(x))]))[:count])


def _checked(of: str, goal: Goal, best: float, margin: float) -> tuple[int, float]:
    if of not in KINDS:
        raise InputError("of", f"found {of!r}", f"Pass one of {', '.join(KINDS)}")
    sign = sign_of(goal)
    for name, value in (("best", best), ("margin", margin)):
        try:
            usable = math.isfinite(float(value))
        except (TypeError, ValueError):
            usable = False
        if not usable:
            raise InputError(name, f"found {value!r}", "Pass a finite number")
    return sign, float(best) + sign * float(margin)


def _closed(gap: Tensor, sd: Tensor) -> Tensor:
    """E[(gap + sd e)+] for standard normal e: sd [z Phi(z) + phi(z)]; the positive part of the gap where sd is 0."""
    z = gap / sd
    value = sd * (z * torch.special.ndtr(z) + torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
    return torch.where(sd > 0, value.clamp_min(0), gap.clamp_min(0))


def _observed(likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor], sign: int, limit: float) -> Tensor:
    """Expected improvement of an observation over a block: the mean over draws of each one's closed form."""
    inner, location, scale = likelihood.standardised() or (likelihood, None, None)
    if not isinstance(inner, LocationScale) or type(inner).standard_log_prob is not LocationScale.standard_log_prob:
        found = f"the likelihood is {type(inner).__name__}"
        raise InputError("of", found, 'The closed form is for Gaussian noise; pass of="function"')
    loc, sd = inner.location_scale(output, extra)
    loc, sd = loc.double(), sd.double()
    if location is not None and scale is not None:
        loc, sd = loc * scale.to(loc) + location.to(loc), sd * scale.to(sd)
    return _closed(sign * (loc - limit), sd.expand_as(loc)).mean(0).to(output.dtype)


def _each(predictive: Predictive, reduce: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
    return _single(
        predictive, torch.cat(list(predictive.map_blocks(lambda output, extra, start: reduce(output, extra))))
    )


def _functions(predictive: Predictive, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """A summary over draws of the function values (S, rows), block by block."""

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        return reduce(one_value(predictive, predictive.likelihood.moments(output, extra)[0]))

    return torch.cat(list(predictive.map_blocks(block)))


def _gaussian(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Mean and epistemic deviation of the function, (N,) each."""
    if predictive.likelihood.support not in ("real", "count"):
        raise InputError("of", "labels have no epistemic variance", 'Pass of="function"')
    return _single(predictive, predictive.mean), _single(predictive, predictive.epistemic).sqrt()


def _single(predictive: Predictive, values: Tensor) -> Tensor:
    if values.numel() != len(predictive):
        found = f"has {values.numel() // len(predictive)} values a row ({type(predictive.likelihood).__name__})"
        raise InputError("predictive", found, "One number for each candidate can be compared")
    return values.reshape(len(predictive))
