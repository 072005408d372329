"""The study behind `credibly demo`: every method on two real data sets and two toys, with the figures that tell them apart.

For each task all methods get the same network, likelihood, prior and data, so that only the method differs. HMC draws from
that posterior itself, so it is the reference: what a method predicts otherwise than HMC is its own approximation.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from credibly import __version__, data
from credibly import methods as registry
from credibly.core.rng import check_seed, global_stream
from credibly.core.specs import to_spec
from credibly.core.threads import one_thread
from credibly.diagnostics.summary import Diagnostics
from credibly.errors import InputError
from credibly.likelihoods import Bernoulli, Gaussian, Likelihood
from credibly.metrics import evaluation
from credibly.posterior.base import DrawsPosterior, Posterior, SampledPosterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem

REFERENCE = "hmc"
TASKS = ("diabetes", "breast_cancer", "gap_regression", "star_classification")
HIDDEN = 50
POINTS = 300  # of a toy's grid at which predictions are compared, at most

# Deviation of the weights before division by the root of the fan-in. 1 keeps standardised signals at their size; the toys
# have two inputs at most and a wave to follow, which smaller weights would rule out.
PRIOR_SCALE = {"diabetes": 1.0, "breast_cancer": 1.0, "gap_regression": 3.0, "star_classification": 2.0}


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demo found. Figures, posteriors and seconds are by task and then by method.

    The regression figures of diabetes are in the units of the data set (a disease score), not standardised.

    Attributes:
        against: how far the predictions of each method are from HMC's, as `evaluation.compare` has it; empty where HMC was not
            run. In HMC's own place stands one half of its chains against the other half: nothing closer can be told apart.
        diagnostics: of the methods that run chains, in the space of predictions.
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

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values; one that is not finite is None."""
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
            "seconds": self.seconds,
        }


def _finite(figures: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float | None]]]:
    return {
        task: {
            method: {key: value if math.isfinite(value) else None for key, value in row.items()}
            for method, row in rows.items()
        }
        for task, rows in figures.items()
    }


def demo_settings(method: str, *, quick: bool = False) -> dict[str, Any]:
    """Settings of a method in the demo; a method without an entry runs with its own defaults."""
    training: dict[str, Any] = {"steps": 150 if quick else 1500}
    # Randomised members spread over the posterior. Started alike and drawn to one prior centre, they would mostly agree.
    spread = {"members": 10, "anchored": True, "init": "prior"}
    # The demo networks have no dropout of their own. It is put before the last layer: the toys have one or two inputs, and
    # dropping one of those would drop the whole question.
    drop = training | {"insert": "2", "rate": 0.1}
    # Short trajectories that keep most of their momentum: on these tasks about twice the effective draws a gradient of long
    # ones that begin anew.
    hmc: dict[str, Any] = {"trajectory_length": 0.5, "refresh": 0.3, "jitter": 0.2, "init": "fresh"}
    many = {"chains": 16, "warmup": 80, "draws": 80, "thin": 2}
    few = {"chains": 4, "warmup": 20, "draws": 20, "max_steps": 40}
    # Steps by their own rule, which are small: on the wave these chains hardly leave the fits they begin at.
    minibatch: dict[str, Any] = {"chains": 4, "warmup": 2000, "draws": 150, "thin": 20}
    if quick:
        minibatch |= {"warmup": 100, "draws": 20, "thin": 5}
    known = {
        "mle": training,
        "map": training,
        "ensemble": training | spread,
        "dropout": drop,
        "bbb": training,
        "laplace": training,
        "swag": training,
        "hmc": (few if quick else many) | hmc,
        "sgld": minibatch,
        "sghmc": minibatch,
    }
    return known.get(method, {})


def summary(method: str) -> str:
    """A method in one line: the first line of its class's docstring."""
    return (inspect.getdoc(registry.METHODS[method]) or "").partition("\n")[0].rstrip(".")


def check_methods(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of methods to run, each once; None means all. An unknown one is refused."""
    known = registry.METHODS
    if names is None:
        return tuple(known)
    for name in names:
        if name not in known:
            raise InputError("methods", f"found {name!r}", f"Known methods are {', '.join(known)}")
    if not names:
        raise InputError("methods", "found none", f"Name one or more of {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def run_demo(
    methods: Sequence[str] | None = None, *, seed: int = 0, quick: bool = False, progress: Progress | None = None
) -> DemoResult:
    """Fits every method to every task and measures it.

    Args:
        methods: names in METHODS; None runs them all.
        seed: of the data splits, the networks' starts and the methods.
        quick: a tenth of the training steps: figures are worse, the page is complete. For trying things out.
        progress: called as progress(what comes next, fits done, fits in all).
    """
    names = check_methods(methods)
    check_seed(seed)
    settings = {name: demo_settings(name, quick=quick) for name in names}
    fitters = {  # made here, so that bad settings are refused before any work
        (task, name): registry.METHODS[name](**settings[name]) for task in TASKS for name in names
    }
    sets = {task: _load(task, seed) for task in TASKS}
    result = DemoResult(
        seed, quick, names, settings, sets, posteriors=_by_task(), figures=_by_task(), seconds=_by_task(),
        against=_by_task(), diagnostics=_by_task(),
    )  # fmt: skip
    total = len(TASKS) * len(names)
    with one_thread():
        for done, (task, name) in enumerate((task, name) for task in TASKS for name in names):
            if progress is not None:
                progress(f"{task}: {name}", done, total)
            started = time.perf_counter()
            posterior = fitters[task, name].fit(_problem(task, sets[task], seed), seed=seed, progress=False)
            result.seconds[task][name] = round(time.perf_counter() - started, 3)
            result.posteriors[task][name] = posterior
            result.figures[task][name] = _measure(sets[task], posterior, seed)
            if isinstance(posterior, SampledPosterior) and posterior.statistics:
                result.diagnostics[task][name] = posterior.diagnostics(held_out(sets[task]))
        for task in TASKS if REFERENCE in names else ():
            result.against[task].update(_against(held_out(sets[task]), result.posteriors[task]))
    if progress is not None:
        progress("done", total, total)
    return result


def _by_task() -> dict[str, dict[str, Any]]:
    return {task: {} for task in TASKS}


def _load(task: str, seed: int) -> data.DataSet | data.Toy:
    if task in data.EMBEDDED:
        return data.embedded(task, seed=seed)
    toy: data.Toy = getattr(data, task)(seed=seed)
    return toy


def _problem(task: str, known: data.DataSet | data.Toy, seed: int) -> Problem:
    """The task as every method gets it: one hidden layer, fan-in prior; noise learned on real data, known on the toy."""
    x, y = (known.x_train, known.y_train) if isinstance(known, data.DataSet) else (known.x, known.y)
    with global_stream(seed, "demo network"):
        net = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))
    likelihood: Likelihood = Bernoulli()
    if known.task == "regression":
        likelihood = Gaussian(getattr(known, "noise", None) or "learned")
    return Problem(net, data=(x, y), likelihood=likelihood, prior=Normal(PRIOR_SCALE[task], fan_in=True))


def _measure(known: data.DataSet | data.Toy, posterior: Posterior, seed: int) -> dict[str, float]:
    if isinstance(known, data.Toy):
        return _in_gap(known, posterior) if known.gap else _at_star(known, posterior)
    figures = evaluation.evaluate(posterior.predict(known.x_test), known.y_test, seed=seed)
    if known.task == "regression":  # back to the units of the data set
        figures = {
            key: value * known.y_std if key in ("rmse", "crps", "width") else value for key, value in figures.items()
        }
        figures["log_density"] -= math.log(known.y_std)
    return figures


def held_out(known: data.DataSet | data.Toy) -> Tensor:
    """Where predictions are compared and chains are judged: the test rows, or points spread over the picture of a toy."""
    if isinstance(known, data.DataSet):
        return known.x_test
    return known.grid[:: -(-len(known.grid) // POINTS)]


def _against(x: Tensor, posteriors: dict[str, Posterior]) -> dict[str, dict[str, float]]:
    """Every method's predictions at x against those of HMC, and one half of HMC's chains against the other."""
    reference = posteriors[REFERENCE]
    assert isinstance(reference, DrawsPosterior)
    drawn = reference.draws
    first, second = (
        DrawsPosterior(reference.model, half, reference.record).predict(x) for half in drawn.tensor_split(2)
    )
    known = reference.predict(x)
    return {
        name: evaluation.compare(first, second) if name == REFERENCE else evaluation.compare(p.predict(x), known)
        for name, p in posteriors.items()
    }


def _in_gap(toy: data.Toy, posterior: Posterior) -> dict[str, float]:
    """How doubt (epistemic deviation) and error compare between the data and the gap in them."""
    assert toy.gap is not None
    grid = posterior.predict(toy.grid)
    inside = ((toy.grid > toy.gap[0]) & (toy.grid < toy.gap[1])).flatten()
    doubt, spread = grid.epistemic.sqrt().flatten(), grid.std.flatten()
    return {
        "epistemic_on_data": float(posterior.predict(toy.x).epistemic.sqrt().mean()),
        "epistemic_in_gap": float(doubt[inside].mean()),
        "total_in_gap": float(spread[inside].mean()),
        "error_in_gap": float((grid.mean - toy.truth).abs().flatten()[inside].mean()),
    }


def _at_star(toy: data.Toy, posterior: Posterior) -> dict[str, float]:
    """The probability of class 1 at the far-away star, and the nats of uncertainty there."""
    assert toy.star is not None
    star = posterior.predict(toy.star)
    return {
        "probability_at_star": float(star.probabilities[..., 1]),
        "total_at_star": float(star.total),
        "epistemic_at_star": float(star.epistemic),
        "log_density_on_data": float(posterior.predict(toy.x).log_prob(toy.y).double().mean()),
    }
