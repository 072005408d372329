"""Gradient estimators of Bayes by Backprop: batched or looped draws, gradient variance, time per step.

python -m benchmarks.estimators                       # about four minutes
python -m benchmarks.estimators --only small          # one of the networks
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks import vi_peers
from benchmarks.bbb import SCALE, free_energy
from benchmarks.ensemble import Task
from benchmarks.timing import (
    Goal,
    Row,
    Times,
    cold_compiler,
    duration,
    interleaved,
    options,
    report,
    scaled,
    show,
    table,
)
from benchmarks.vi_steps import Ours, check_gradient, plain_map, small, wide
from credibly.methods.bbb import FreeEnergy

DRAWS = 8  # per step, batched
ESTIMATORS = [("weights", 1), ("weights", DRAWS), ("local", 1), ("flipout", 1)]


class Gradient:
    """The gradient of the free energy from K draws on one minibatch, sampling included; batched or in a loop."""

    def __init__(self, task: Task, objective: FreeEnergy, phi: Tensor, *, loop: bool = False) -> None:
        problem = task.problem()
        self.objective, self.phi, self.loop = objective, phi, loop
        self.data = (problem.x, problem.y, torch.arange(task.batch))
        self.statistics = torch.ones(1)
        self.done = 0

    def __call__(self) -> Tensor:
        with torch.no_grad():
            noise = self.objective.noise(self.done)
            self.done += 1
            if not self.loop:
                return self.objective.evaluate(self.phi, (), *self.data, noise, self.statistics)[1]
            samples = noise[0].shape[1]
            total = torch.zeros_like(self.phi)
            for k in range(samples):
                one = tuple(t[:, k : k + 1] for t in noise)
                total += self.objective.evaluate(self.phi, (), *self.data, one, self.statistics)[1]
            return total / samples


def variance(gradient: Gradient, pairs: int) -> tuple[float, float]:
    """Return the total variance of a gradient over its coordinates and its standard error, from pairs of draws."""
    values = [float((gradient() - gradient()).double().square().sum()) / 2 for _ in range(pairs)]
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(pairs)


def check_draws(task: Task, objective: FreeEnergy, phi: Tensor) -> None:
    """Exit unless the gradient of K batched draws is the mean of K gradients of one draw."""
    batched, looped = Gradient(task, objective, phi), Gradient(task, objective, phi, loop=True)
    check_gradient(looped(), batched(), f"{DRAWS} draws in a loop")


def name_of(estimator: str, samples: int) -> str:
    return estimator if samples == 1 else f"{estimator}, {samples} draws"


def steps(task: Task, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Time every estimator, compiled and eager, against plain MAP and bayesian-torch's flipout; then the variances."""
    is_small = task.x.shape[1] == 13
    implementations: dict[str, Callable[[], object]] = {
        "plain": plain_map(task, "loss"),
        "lean": plain_map(task, "optimiser"),
    }
    flipout = vi_peers.bayesian_torch(task, SCALE, "Flipout")
    if flipout is not None:
        implementations["peer"] = flipout.loop
    for estimator, samples in ESTIMATORS:
        step = Ours(task, *free_energy(task, estimator, samples), compiled=True)
        seconds = step.compile()
        record.setdefault("compile", []).append(
            {"network": task.name, "what": name_of(estimator, samples), "first_call_s": seconds}
        )
        implementations[name_of(estimator, samples)] = step
    for estimator, samples in ESTIMATORS:
        name = f"eager {name_of(estimator, samples)}"
        implementations[name] = Ours(task, *free_energy(task, estimator, samples), compiled=False)
    if is_small:
        objective, phi = free_energy(task, "weights", DRAWS)
        check_draws(task, objective, phi)
        implementations["batched"] = Gradient(task, objective, phi)
        implementations["looped"] = Gradient(task, objective, phi, loop=True)
    times = interleaved(implementations, repeats=args.repeats, seconds=args.seconds, multiple=task.per_epoch)
    print(f"## {task.name}, {len(task.x)} rows, minibatch {task.batch}: one step\n")
    rows = []
    for key, name in (("plain", "plain MAP"), ("lean", "plain MAP (weight_decay)")):
        goal = Goal("<", 1.0) if is_small else Goal("<=", 2.2)
        rows.append(Row(f"weights / {name}", times["weights"], times[key], goal))
        rows += [Row(f"{kind} / {name}", times[kind], times[key]) for kind in ("local", "flipout", "eager weights")]
    if flipout is not None:
        rows.append(Row("bayesian-torch flipout / flipout", times["flipout"], times["peer"], inverse=True))
    if is_small:
        third, many, one = Goal("<=", 0.333), name_of("weights", DRAWS), f"{DRAWS} steps of one draw"
        rows += [
            Row(f"{DRAWS} draws per step, compiled / {one}", times[many], scaled(times["weights"], DRAWS), third),
            Row(f"the same, eager / {one}", times[f"eager {many}"], scaled(times["eager weights"], DRAWS), third),
            Row(f"gradient, eager / {DRAWS} gradients of one draw", times["batched"], times["looped"], third),
        ]
    show(rows, record, f"steps {task.name}")
    variances(task, times, args, record)


def variances(task: Task, times: dict[str, Times], args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Report the gradient variance after a short fit beside the time per step."""
    fit = cr.BayesByBackprop(estimator="local", batch_size=task.batch, init_scale=SCALE, steps=args.fit, compile=False)
    phi = fit.fit(task.problem(), progress=False).phi
    lines, found = [], []
    for estimator, samples in ESTIMATORS:
        name = name_of(estimator, samples)
        value, error = variance(Gradient(task, free_energy(task, estimator, samples)[0], phi), args.pairs)
        found.append((name, value, error, statistics.median(times[name]), statistics.median(times[f"eager {name}"])))
    _, first, _, step, eager = found[0]
    for name, value, error, own, slow in found:
        relative, costs = value / first, (own / step, slow / eager)
        line = [name, f"{value:.3g} +- {error:.1g}", f"{relative:.3g}"]
        for seconds, cost in zip((own, slow), costs):
            line += [f"{duration(seconds)} ({cost:.2f})", f"{relative * cost:.3g}"]
        lines.append(line)
    print(
        f"## {task.name}: gradient variance from the sampled weights, on one minibatch of {task.batch}, "
        f"after {args.fit} steps of a fit, {2 * args.pairs} draws\n\n"
        "Relative to one draw of the weights; variance x time is the time to equal accuracy, lower is better.\n"
    )
    header = ["estimator", "variance", "relative", "compiled step", "variance x time", "eager step", "variance x time"]
    print(table(header, lines) + "\n", flush=True)
    record.setdefault("estimators", []).extend(_records(task, found))


def _records(task: Task, found: Sequence[tuple[str, float, float, float, float]]) -> list[dict[str, Any]]:
    first, step = found[0][1], found[0][3]
    return [
        {
            "network": task.name,
            "estimator": name,
            "variance": value,
            "standard_error": error,
            "step_s": own,
            "eager_step_s": slow,
            "relative_variance": value / first,
            "efficiency": value / first * own / step,
        }
        for name, value, error, own, slow in found
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("small", "wide"), default=None, help="one of the networks")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of gradients per variance (default 100)")
    parser.add_argument("--fit", type=int, default=300, help="steps before the variance is measured (default 300)")
    args = parser.parse_args()
    with report("estimators", args) as record, cold_compiler() as loading:
        for size, make in (("small", small), ("wide", wide)):
            if args.only in (None, size):
                steps(make(), args, record)
        print(f"Time to compile, paid once, cold cache; loading the compiler took {duration(loading)} more:\n")
        lines = [[c["network"], c["what"], duration(c["first_call_s"])] for c in record["compile"]]
        print(table(["network", "step", "first call"], lines))
        record["compiler_loading_s"] = loading


if __name__ == "__main__":
    main()
