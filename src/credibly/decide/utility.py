"""Expected utility: the action whose utility, averaged over what may happen, is highest.

    a*(x) = argmax_a E[u(a, y) | x, D]

For labels the average is a sum over classes. For real targets and counts it is taken over draws of y. Two losses need neither:
under squared loss the best action is the mean, under a pinball loss a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.predictive.base import Predictive

Utility = Callable[[Any, Any], Any]
TOGETHER = 2**20  # values of y that are drawn at a time, where the outputs are fewer


class Choice(NamedTuple):
    """What each action is worth in each row, and which is best.

    Attributes:
        utilities: (N, ..., actions).
        best: the number of the best action, (N, ...); the first of those that are equal.
        error: Monte-Carlo standard error of `utilities`, of their shape; None where they are exact.
    """

    utilities: Tensor
    best: Tensor
    error: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The expected utility of the best action, (N, ...)."""
        return self.utilities.amax(-1)


def expected_utility(
    predictive: Predictive,
    utility: Tensor | Sequence[Sequence[float]] | Utility,
    *,
    actions: Sequence[Any] | Tensor | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> Choice:
    """The expected utility of every action in every row.

    Args:
        predictive: predictions. What it leaves out is left out here: for labels the value is exact given its draws.
        utility: for labels a table (actions, classes), or a function of an action and a class number that gives a number.
            For real targets and counts a function of an action and draws of y: y is (n, rows, ...), with several targets on
            its last axis, and the value has one number for each row, (n, rows, ...).
        actions: what the function is given as its action; for labels the classes themselves by default.
        samples: draws of y in each row, for real targets and counts. They are shared out evenly over the draws of the
            weights, at least two to each, and are the same for every action, so that actions differ by less than by `error`.
        seed: of those draws.
    """
    if predictive.likelihood.support in ("class", "binary"):
        probabilities = predictive.probabilities
        table = _table(utility, actions, probabilities.shape[-1]).to(probabilities)
        utilities = probabilities @ table.T
        return Choice(utilities, utilities.argmax(-1))
    if not callable(utility):
        raise InputError(
            "utility",
            f"found {type(utility).__name__} for {predictive.likelihood.support} targets",
            "A table is for labels; pass a function of an action and draws of y, and actions=",
        )
    if actions is None or len(actions) == 0:
        raise InputError("actions", f"found {actions!r}", "Pass the actions to choose from, such as a grid of numbers")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise InputError("samples", f"found {samples!r}", "Pass a whole number from 1 up")
    return _sampled(predictive, utility, list(actions), samples, check_seed(seed))


def newsvendor(predictive: Predictive, *, under: float, over: float) -> Tensor:
    """The best amount where a unit too little costs `under` and one too much `over`: the quantile under / (under + over).

    In the shape of the mean; for counts a whole number. Nothing is sampled.
    """
    _positive("under", under)
    _positive("over", over)
    return predictive.quantile(under / (under + over))


def pinball(*, under: float, over: float) -> Utility:
    """The utility of which `newsvendor` is the optimum: -(under (y - a)+ + over (a - y)+)."""
    _positive("under", under)
    _positive("over", over)

    def utility(action: Any, y: Any) -> Any:
        short = torch.as_tensor(y) - action
        return -(under * short.clamp_min(0) + over * (-short).clamp_min(0))

    return utility


def class_costs(
    classes: int, costs: Mapping[tuple[int, int], float] | None = None, *, wrong: float = 1.0, right: float = 0.0
) -> Tensor:
    """A table of utilities (classes, classes) from costs: minus what it costs to say i where j is true.

    Args:
        classes: how many.
        costs: of some pairs (said, true); the others cost `wrong`, or `right` where they agree.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise InputError("classes", f"found {classes!r}", "Pass their number, at least 2")
    table = torch.full((classes, classes), float(wrong), dtype=torch.float64).fill_diagonal_(float(right))
    for pair, cost in (costs or {}).items():
        if len(pair) != 2 or not all(0 <= place < classes for place in pair):
            raise InputError("costs", f"found the pair {pair!r}", f"Pass (said, true), each from 0 to {classes - 1}")
        table[pair] = float(cost)
    return -_finite("costs", table)


def _table(utility: Any, actions: Any, classes: int) -> Tensor:
    """A checked table (actions, classes)."""
    if callable(utility):
        options = range(classes) if actions is None else list(actions)
        rows = [[_number(utility(action, label)) for label in range(classes)] for action in options]
        table = torch.tensor(rows, dtype=torch.float64)
    else:
        try:
            table = torch.as_tensor(utility, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise InputError("utility", f"found {type(utility).__name__}", _expected(classes)) from error
        if actions is not None and table.ndim == 2 and len(actions) != len(table):
            raise InputError("actions", f"has {len(actions)} for {len(table)} rows of utility", "Pass one for each row")
    if table.ndim != 2 or table.shape[1] != classes or len(table) == 0:
        raise InputError("utility", f"has shape {tuple(table.shape)}", _expected(classes))
    return _finite("utility", table)


def _sampled(predictive: Predictive, utility: Utility, actions: list[Any], samples: int, seed: int) -> Choice:
    """Averages over draws of y, in pairs of rounds: each round takes one y from every draw of the weights.

    Within a pair the two values of a draw differ by noise alone, so half their squared difference is its variance without
    bias, and nothing has to be kept for each draw.
    """
    likelihood, pairs = predictive.likelihood, max(1, math.ceil(samples / predictive.draws / 2))

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        shape = output.shape[1:-1]
        mean, spread = torch.zeros(2, *shape, len(actions), dtype=torch.float64, device=output.device)
        at_once = max(1, min(pairs, TOGETHER // output.numel()))
        for first_pair in range(0, pairs, at_once):
            generator = stream(seed, "utility noise", start, first_pair, device=output.device)
            some = min(at_once, pairs - first_pair)
            many = output.repeat(some, *(1,) * (output.ndim - 1))
            own = {name: value.repeat(some, *(1,) * (value.ndim - 1)) for name, value in extra.items()}
            drawn = [likelihood.sample(many, own, generator) for _ in range(2)]
            single = drawn[0].shape[-1] == 1
            drawn = [y.squeeze(-1) for y in drawn] if single else drawn
            for place, action in enumerate(actions):
                first, second = (_value(utility, action, y, single) for y in drawn)
                mean[..., place] += (first + second).sum(0)
                spread[..., place] += torch.square(first - second).sum(0)
        used = 2 * pairs * predictive.draws
        return mean / used, (spread / used / used).sqrt()

    utilities, error = (torch.cat(part) for part in zip(*predictive.map_blocks(block)))
    return Choice(utilities, utilities.argmax(-1), error)


def _value(utility: Utility, action: Any, y: Tensor, single: bool) -> Tensor:
    shape = y.shape if single else y.shape[:-1]
    value = utility(action, y)
    if not isinstance(value, Tensor) or value.shape != shape:
        found = f"gives shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"gives {type(value).__name__}"
        raise InputError(
            "utility", f"{found} for y of shape {tuple(y.shape)}", f"It has to give a tensor {tuple(shape)}"
        )
    return _finite("utility", value.double())


def _expected(classes: int) -> str:
    return f"Pass a table (actions, {classes}): a row for each action, a column for each of the {classes} classes"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            "utility", f"gives {type(value).__name__}", "For labels it has to give one number for an action and a class"
        ) from error


def _finite(name: str, value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise InputError(
            name, "has values that are not finite", "Pass finite numbers, large ones for what is ruled out"
        )
    return value


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputError(name, f"found {value!r}", "Pass a positive number")
