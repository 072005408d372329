"""The experiment behind `credibly demo`: metrics of every method on two real data sets and two toys.

On each task all methods get the same network, likelihood, prior and data. HMC samples the exact posterior, so it is the
reference: where a method's predictions differ from HMC's, that is its approximation error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from credibly import __version__, data
from credibly import methods as registry
from credibly.core.checks import check_choice
from credibly.core.rng import check_seed, global_stream
from credibly.core.specs import to_spec
from credibly.core.threads import one_thread
from credibly.diagnostics.summary import Diagnostics
from credibly.errors import InputError
from credibly.likelihoods import Bernoulli, Gaussian, Likelihood
from credibly.metrics import evaluation
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior, SampledPosterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem

REFERENCE = "hmc"
TASKS = ("diabetes", "breast_cancer", "gap_regression", "star_classification")
HIDDEN = 50
# The most grid points of a toy at which predictions are compared.
POINTS = 300

# Standard deviation of the weights before division by the square root of the fan-in. 1 preserves the scale of
# standardised signals; the toys have at most two inputs and a wave to follow, which smaller weights would rule out.
PRIOR_SCALE = {"diabetes": 1.0, "breast_cancer": 1.0, "gap_regression": 3.0, "star_classification": 2.0}


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Results of the demo. Posteriors, metrics, gradients and seconds are by task, then by method.

    The regression metrics of diabetes are in the units of the data set (a disease score), not standardised.

    Attributes:
        figures: metrics.
        against: distance of each method's predictions from HMC's, from `evaluation.compare`; empty if HMC was not run.
            The entry of HMC compares one half of its chains with the other: the resolution of the comparison.
        diagnostics: of the methods that run chains, in the space of predictions.
        gradients: of all chains or members together, in units of full gradients: a minibatch of B of N rows counts as
            B/N. MAP fits at which chains start are included. None for a method that does not record them.
    """

    seed: int
    quick: bool
    methods: tuple[str, ...]
    settings: dict[str, dict[str, Any]]
    data: dict[str, Any]
    posteriors: dict[str, dict[str, Posterior]]
    figures: dict[str, dict[str, dict[str, float]]]
    seconds: dict[str, dict[str, float]]
    against: dict[str, dict[str, dict[str, float]]]
    diagnostics: dict[str, dict[str, Diagnostics]]
    gradients: dict[str, dict[str, int | None]]

    def as_dict(self) -> dict[str, Any]:
        """Return all metrics as plain JSON values; non-finite ones become None."""
        return {
            "credibly": __version__,
            "seed": self.seed,
            "quick": self.quick,
            "methods": {name: to_spec(self.settings[name]) for name in self.methods},
            "figures": _finite(self.figures),
            f"against_{REFERENCE}": _finite(self.against),
            "diagnostics": {
                task: {name: found.to_dict() for name, found in rows.items()} for task, rows in self.diagnostics.items()
            },
            "gradients": self.gradients,
            "seconds": self.seconds,
        }


def _finite(metrics: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        task: {
            method: {key: value if math.isfinite(value) else None for key, value in row.items()}
            for method, row in rows.items()
        }
        for task, rows in metrics.items()
    }


def demo_settings(method: str, *, quick: bool = False) -> dict[str, Any]:
    """Return the settings of a method in the demo; none for a name that is not in METHODS."""
    return registry.METHODS[method].demo_settings(quick) if method in registry.METHODS else {}


def check_methods(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the method names without duplicates; None means all. Raise if one is unknown or there are none."""
    known = registry.METHODS
    if names is None:
        return tuple(known)
    for name in names:
        check_choice("methods", name, known)
    if not names:
        raise InputError("methods", f"must name at least one of {', '.join(known)}, got none")
    return tuple(dict.fromkeys(names))


def run_demo(
    methods: Sequence[str] | None = None, *, seed: int = 0, quick: bool = False, progress: Progress | None = None
) -> DemoResult:
    """Fit and evaluate every method on every task.

    Args:
        methods: names in METHODS; None runs all of them.
        seed: seed of the data splits, the initial weights and the methods.
        quick: use a tenth of the training steps. Metrics are worse, the page is complete.
        progress: called as progress(next fit, fits done, total fits).
    """
    names = check_methods(methods)
    check_seed(seed)
    settings = {name: demo_settings(name, quick=quick) for name in names}
    # Constructed up front, so that bad settings raise before any work.
    fitters = {(task, name): registry.METHODS[name](**settings[name]) for task in TASKS for name in names}
    sets = {task: _load(task, seed) for task in TASKS}
    result = DemoResult(
        seed,
        quick,
        names,
        settings,
        sets,
        posteriors=_by_task(),
        figures=_by_task(),
        seconds=_by_task(),
        against=_by_task(),
        diagnostics=_by_task(),
        gradients=_by_task(),
    )
    total = len(TASKS) * len(names)
    with one_thread():
        for done, (task, name) in enumerate((task, name) for task in TASKS for name in names):
            if progress is not None:
                progress(f"{task}: {name}", done, total)
            started = time.perf_counter()
            posterior = fitters[task, name].fit(_problem(task, sets[task], seed), seed=seed, progress=False)
            result.seconds[task][name] = round(time.perf_counter() - started, 3)
            result.posteriors[task][name] = posterior
            result.gradients[task][name] = _gradients(posterior)
            result.figures[task][name] = _evaluate(sets[task], posterior, seed)
            if isinstance(posterior, SampledPosterior) and posterior.statistics:
                result.diagnostics[task][name] = posterior.diagnostics(
                    held_out(sets[task]), getattr(sets[task], "y_test", None)
                )
        for task in TASKS if REFERENCE in names else ():
            result.against[task].update(_against(held_out(sets[task]), result.posteriors[task]))
    if progress is not None:
        progress("done", total, total)
    return result


def _gradients(posterior: Posterior) -> int | None:
    history = posterior.record.history
    if "gradients" not in history:
        return None
    return round(float(history["gradients"]) + float(history.get("start_gradients", 0.0)))


def _by_task() -> dict[str, dict[str, Any]]:
    return {task: {} for task in TASKS}


def _load(task: str, seed: int) -> data.DataSet | data.Toy:
    if task in data.EMBEDDED:
        return data.embedded(task, seed=seed)
    toy: data.Toy = getattr(data, task)(seed=seed)
    return toy


def _problem(task: str, known: data.DataSet | data.Toy, seed: int) -> Problem:
    """Return the problem: one hidden layer, fan-in prior; noise learned on real data, known on toys."""
    x, y = (known.x_train, known.y_train) if isinstance(known, data.DataSet) else (known.x, known.y)
    with global_stream(seed, "demo network"):
        net = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))
    likelihood: Likelihood = Bernoulli()
    if known.task == "regression":
        likelihood = Gaussian(getattr(known, "noise", None) or "learned")
    return Problem(net, data=(x, y), likelihood=likelihood, prior=Normal(PRIOR_SCALE[task], fan_in=True))


def _evaluate(known: data.DataSet | data.Toy, posterior: Posterior, seed: int) -> dict[str, float]:
    if isinstance(known, data.Toy):
        return _in_gap(known, posterior) if known.gap else _at_star(known, posterior)
    metrics = evaluation.evaluate(posterior.predict(known.x_test), known.y_test, seed=seed)
    if known.task == "regression":
        # Back to the units of the data set.
        metrics = {
            key: value * known.y_std if key in ("rmse", "crps", "width") else value for key, value in metrics.items()
        }
        metrics["log_density"] -= math.log(known.y_std)
    return metrics


def held_out(known: data.DataSet | data.Toy) -> Tensor:
    """Return the inputs for comparisons and diagnostics: the test rows, or an evenly spaced part of a toy's grid."""
    if isinstance(known, data.DataSet):
        return known.x_test
    return known.grid[:: -(-len(known.grid) // POINTS)]


def _against(x: Tensor, posteriors: dict[str, Posterior]) -> dict[str, dict[str, float]]:
    """Compare every method's predictions at x with HMC's, and one half of HMC's chains with the other."""
    reference = posteriors[REFERENCE]
    assert isinstance(reference, DrawsPosterior)
    halves = reference.draws.tensor_split(2)
    first, second = (DrawsPosterior(reference.model, half, reference.record).predict(x) for half in halves)
    known = reference.predict(x)
    return {
        name: evaluation.compare(first, second) if name == REFERENCE else evaluation.compare(p.predict(x), known)
        for name, p in posteriors.items()
    }


def _in_gap(toy: data.Toy, posterior: Posterior) -> dict[str, float]:
    """Return the epistemic std on the data and in the gap, and the total std and error in the gap."""
    assert toy.gap is not None
    grid = posterior.predict(toy.grid)
    inside = ((toy.grid > toy.gap[0]) & (toy.grid < toy.gap[1])).flatten()
    epistemic, total = grid.epistemic.sqrt().flatten(), grid.std.flatten()
    return {
        "epistemic_on_data": float(posterior.predict(toy.x).epistemic.sqrt().mean()),
        "epistemic_in_gap": float(epistemic[inside].mean()),
        "total_in_gap": float(total[inside].mean()),
        "error_in_gap": float((grid.mean - toy.truth).abs().flatten()[inside].mean()),
    }


def _at_star(toy: data.Toy, posterior: Posterior) -> dict[str, float]:
    """Return the probability of class 1 at the far-away star, and the uncertainty there in nats."""
    assert toy.star is not None
    star = posterior.predict(toy.star)
    return {
        "probability_at_star": float(star.probabilities[..., 1]),
        "total_at_star": float(star.total),
        "epistemic_at_star": float(star.epistemic),
        "log_density_on_data": float(posterior.predict(toy.x).log_prob(toy.y).double().mean()),
    }
