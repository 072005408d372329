"""Expected utility: the action with the highest utility, averaged over the predictive distribution.

    a*(x) = argmax_a E[u(a, y) | x, D]

For labels the expectation is a sum over classes. For real targets and counts it is a Monte Carlo average over draws of
y. Two losses need neither: under squared loss the best action is the mean, under a pinball loss a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_integer, check_positive
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.predictive.base import Predictive

Utility = Callable[[Any, Any], Any]
CHUNK_VALUES = 2**20  # values of y drawn at a time, unless one draw of the outputs is larger


class Choice(NamedTuple):
    """The expected utility of each action in each row, and the best action.

    Attributes:
        utilities: (N, ..., actions).
        best: index of the best action, (N, ...); ties go to the first.
        error: Monte Carlo standard error of `utilities`, in their shape; None where they are exact.
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
    """Return the expected utility of every action in every row.

    Args:
        predictive: predictions; for labels the result is exact given its draws.
        utility: for labels a table (actions, classes), or a function from an action and a class number to a number. For
            real targets and counts a function of an action and draws of y, which have shape (n, rows, ...), with
            several targets on the last axis; it returns one number per draw and row, (n, rows, ...).
        actions: the values passed to the function as its action; for labels the class numbers by default.
        samples: draws of y per row, for real targets and counts. They are split evenly over the draws of the weights,
            at least two each, and shared by all actions, so differences between actions have a smaller error than
            `error`.
        seed: random seed of those draws.
    """
    if predictive.likelihood.support in ("class", "binary"):
        probabilities = predictive.probabilities
        table = _table(utility, actions, probabilities.shape[-1]).to(probabilities)
        utilities = probabilities @ table.T
        return Choice(utilities, utilities.argmax(-1))
    if not callable(utility):
        raise InputError(
            "utility",
            f"must be a function for {predictive.likelihood.support} targets, got {type(utility).__name__}",
            "A table is for labels; pass a function of an action and draws of y, and actions=",
        )
    if actions is None or len(actions) == 0:
        raise InputError("actions", f"must be the actions to choose from, such as a grid of numbers, got {actions!r}")
    check_integer("samples", samples)
    return _monte_carlo(predictive, utility, list(actions), samples, check_seed(seed))


def newsvendor(predictive: Predictive, *, under: float, over: float) -> Tensor:
    """Return the best amount if a unit too little costs `under` and one too much `over`.

    This is the quantile at under / (under + over), in the shape of the mean; an integer for counts. Nothing is sampled.
    """
    check_positive("under", under)
    check_positive("over", over)
    return predictive.quantile(under / (under + over))


def pinball(*, under: float, over: float) -> Utility:
    """Return the utility that `newsvendor` maximises: -(under (y - a)+ + over (a - y)+)."""
    check_positive("under", under)
    check_positive("over", over)

    def utility(action: Any, y: Any) -> Any:
        shortfall = torch.as_tensor(y) - action
        return -(under * shortfall.clamp_min(0) + over * (-shortfall).clamp_min(0))

    return utility


def class_costs(
    classes: int, costs: Mapping[tuple[int, int], float] | None = None, *, wrong: float = 1.0, right: float = 0.0
) -> Tensor:
    """Return a utility table (classes, classes): minus the cost of predicting i where j is true.

    Args:
        classes: number of classes.
        costs: costs by (predicted, true) pair; all others cost `wrong`, or `right` on the diagonal.
        wrong: cost of a mistake without an entry in `costs`.
        right: cost of a correct prediction without an entry in `costs`.
    """
    check_integer("classes", classes, least=2)
    table = torch.full((classes, classes), float(wrong), dtype=torch.float64).fill_diagonal_(float(right))
    for pair, cost in (costs or {}).items():
        if len(pair) != 2 or not all(0 <= label < classes for label in pair):
            found = f"must have (predicted, true) pairs from 0 to {classes - 1} as keys, got {pair!r}"
            raise InputError("costs", found)
        table[pair] = float(cost)
    return -_finite("costs", table)


def _table(utility: Any, actions: Any, classes: int) -> Tensor:
    """Return the utilities as a validated table (actions, classes)."""
    if callable(utility):
        options = range(classes) if actions is None else list(actions)
        rows = [[_number(utility(action, label)) for label in range(classes)] for action in options]
        table = torch.tensor(rows, dtype=torch.float64)
    else:
        try:
            table = torch.as_tensor(utility, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise InputError("utility", f"{_expected(classes)}, got {type(utility).__name__}") from error
        if actions is not None and table.ndim == 2 and len(actions) != len(table):
            raise InputError("actions", f"has {len(actions)} entries, utility has {len(table)} rows")
    if table.ndim != 2 or table.shape[1] != classes or len(table) == 0:
        raise InputError("utility", f"{_expected(classes)}, got shape {tuple(table.shape)}")
    return _finite("utility", table)


def _monte_carlo(predictive: Predictive, utility: Utility, actions: list[Any], samples: int, seed: int) -> Choice:
    """Average over draws of y in pairs of rounds, each with one y from every draw of the weights.

    Within a pair the two values of a draw differ by noise alone, so half their squared difference is an unbiased
    estimate of the noise variance, and nothing has to be stored per draw.
    """
    likelihood, pairs = predictive.likelihood, max(1, math.ceil(samples / predictive.draws / 2))

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        shape = output.shape[1:-1]
        total, squared = torch.zeros(2, *shape, len(actions), dtype=torch.float64, device=output.device)
        chunk = max(1, min(pairs, CHUNK_VALUES // output.numel()))
        for first_pair in range(0, pairs, chunk):
            generator = stream(seed, "utility noise", start, first_pair, device=output.device)
            repeats = min(chunk, pairs - first_pair)
            outputs = output.repeat(repeats, *(1,) * (output.ndim - 1))
            extras = {name: value.repeat(repeats, *(1,) * (value.ndim - 1)) for name, value in extra.items()}
            drawn = [likelihood.sample(outputs, extras, generator) for _ in range(2)]
            single = drawn[0].shape[-1] == 1
            drawn = [y.squeeze(-1) for y in drawn] if single else drawn
            for i, action in enumerate(actions):
                first, second = (_value(utility, action, y, single) for y in drawn)
                total[..., i] += (first + second).sum(0)
                squared[..., i] += torch.square(first - second).sum(0)
        n = 2 * pairs * predictive.draws
        return total / n, (squared / n / n).sqrt()

    utilities, error = (torch.cat(part) for part in zip(*predictive.map_blocks(block)))
    return Choice(utilities, utilities.argmax(-1), error)


def _value(utility: Utility, action: Any, y: Tensor, single: bool) -> Tensor:
    shape = y.shape if single else y.shape[:-1]
    value = utility(action, y)
    if not isinstance(value, Tensor) or value.shape != shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        needed = f"must return a tensor of shape {tuple(shape)} for y of shape {tuple(y.shape)}"
        raise InputError("utility", f"{needed}, got {found}")
    return _finite("utility", value.double())


def _expected(classes: int) -> str:
    return f"must be a table (actions, {classes}), one row per action and one column per class"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        found = f"must return one number for an action and a class, got {type(value).__name__}"
        raise InputError("utility", found) from error


def _finite(name: str, value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        advice = "To rule an action out, pass a large finite number"
        raise InputError(name, "has values that are not finite", advice)
    return value
