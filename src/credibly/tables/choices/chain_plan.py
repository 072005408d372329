"""Chains of a table: long enough to pass their own diagnostics within the time of a default fit.

A short trial on some of the rows measures the effective draws per gradient of whole trajectories with a diagonal mass.
The chains are planned from it for the effective sample size and R-hat that the report asks for, and continue until
their predictions have them, within a budget of iterations. If that would take longer than about a minute, another trial
is without the output layer, which is integrated out: its gradients cost several times as much, but on some tables far
fewer of them are needed. If neither has time, the plan is not attainable: the table gets another method if that
predicts as well, and otherwise short trajectories that keep most of their momentum.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import torch_threads
from credibly.diagnostics.verdict import ESS_TOTAL
from credibly.inference.collapsed import output_weights, refusal
from credibly.methods import HMC
from credibly.problem import Problem
from credibly.tables.folds import fold_method
from credibly.tables.prepared import Prepared
from credibly.tables.threads import threads_for

# Rows times multiplications times gradients of the chains: about 100 processor seconds.
WORK = 2.0e12
# Fixed cost of a gradient, however small the table, in rows times multiplications: in compiled code, and by autograd.
OVERHEAD, AUTOGRAD = 100_000, 1_500_000
# Settings by which a user determines the length of the chains.
LENGTHS = ("chains", "draws", "thin", "warmup", "max_steps", "step_size", "trajectory_length")
# Whole trajectories. Truncated ones are random walks where the posterior is narrow.
WHOLE: dict[str, Any] = {
    "chains": 4, "draws": 250, "warmup": 200, "target_accept": 0.8, "trajectory_length": None, "refresh": 1.0,
    "mass": "diagonal", "collapse": False,
}  # fmt: skip
TRIAL: dict[str, Any] = {**WHOLE, "warmup": 150, "draws": 100, "thin": 1, "until": None, "budget": None}
# Fraction of the work that the trial may take, which limits the steps per trajectory, at least and at most.
TRIAL_WORK, TRIAL_STEPS = 0.18, (50, 5_000)
# Effective draws to plan for and the minimum to accept, as multiples of what the verdict asks for: a trial measures
# them only roughly, and the verdict is about more quantities than those that tell the chains when to stop.
WANTED, LEAST = 2.0, 1.5
# Fraction of divergent trajectories from which steps are made smaller, by the higher acceptance, and how much smaller.
DIVERGENT, CAREFUL, SMALLER = 0.002, 0.95, 1.6
# Rows at which the trial is diagnosed.
ROWS = 200


@dataclass(frozen=True)
class ChainPlan:
    """The outcome of a trial.

    Attributes:
        settings: of the chains.
        effective: effective draws of the worst quantity in the trial.
        times: work that enough draws would take, in units of what there is time for.
    """

    settings: dict[str, Any]
    effective: float
    times: float

    @property
    def attainable(self) -> bool:
        """Whether there is time for enough draws."""
        return self.times <= 1


def plan_chains(prepared: Prepared) -> ChainPlan:
    """Run short chains on the rows of the first fold and plan the chains of the final fit."""
    given = prepared.config.settings.get("collapse")
    possible = not refusal(prepared.problem)
    trial = _Trial(prepared, collapse=bool(given) and possible)
    if trial.plan.attainable or given is not None or not possible:
        return trial.plan
    other = _Trial(prepared, collapse=True)
    return other.plan if other.plan.attainable else trial.plan


class _Trial:
    """Short chains on the rows of the first fold, and the plan that they give.

    Args:
        prepared: the table, with the recipe of its chains.
        collapse: whether the output layer is integrated out.
    """

    def __init__(self, prepared: Prepared, collapse: bool) -> None:
        method = prepared.method
        assert isinstance(method, HMC)
        self.prepared, self.method, self.collapse = prepared, method, collapse
        rows = prepared.splits[0][0] if prepared.splits else np.arange(len(prepared.train))
        problem = prepared.problem_of(rows)
        trial = dataclasses.replace(method, **TRIAL | {"collapse": collapse})
        iterations, size = trial.chains * (trial.warmup + trial.draws), self.cost(problem)
        most = int(TRIAL_WORK * WORK / (iterations * size))
        self.trial = dataclasses.replace(trial, max_steps=max(TRIAL_STEPS[0], min(TRIAL_STEPS[1], most)))
        with torch_threads(threads_for(problem, self.trial)):
            posterior = self.trial.fit(problem, seed=prepared.config.seed, progress=False)
            found = posterior.diagnostics(*_observed(prepared, rows))
        effective = min(space.ess_most for space in found.judged.values())
        self.effective = max(1.0, effective) if math.isfinite(effective) else 1.0
        self.history = posterior.record.history
        self.spent = iterations * float(self.history["steps"]) * size

    def cost(self, problem: Problem) -> float:
        """Return the multiplications of a gradient, with its fixed cost."""
        of_row = problem.layout.dim
        if self.collapse:
            of_row += output_weights(problem) ** 2
        return problem.n * of_row + _overhead(self.prepared)

    @property
    def plan(self) -> ChainPlan:
        """Chains as long as they have to be, or as there is time for."""
        trial, history = self.trial, self.history
        steps = float(history["steps"])
        settings = {**WHOLE, "max_steps": 2 * trial.max_steps, "collapse": self.collapse}
        if sum(history["divergences"]) > DIVERGENT * trial.chains * trial.draws:
            steps, settings["target_accept"] = SMALLER * steps, CAREFUL
        size = self.cost(self.prepared.problem)
        needed = trial.draws * trial.chains / settings["chains"] * ESS_TOTAL / self.effective
        work = steps * settings["chains"] * size
        times = (LEAST * needed + settings["warmup"]) * work / WORK
        affordable = int(WORK / work - settings["warmup"])
        if history["trajectory_shortened"] or affordable < trial.draws:
            return ChainPlan({"thin": self._thin_of_short_ones()}, self.effective, max(times, 1.0 + 1e-6))
        settings["thin"] = max(1, min(affordable, math.ceil(WANTED * needed)) // settings["draws"])
        settings["draws"] = min(affordable, settings["draws"])
        settings |= {"until": "mixed", "budget": f"{settings['warmup'] + affordable} iterations"}
        return ChainPlan(settings, self.effective, times)

    def _thin_of_short_ones(self) -> int:
        """Return the iterations per draw of as many short trajectories as there is time for, beside trial and folds."""
        method, problem = self.method, self.prepared.problem
        size = problem.n * problem.layout.dim + _overhead(self.prepared)
        left = WORK - self.spent - _work_of_folds(self.prepared, method)
        affordable = int(left / (method.max_steps * method.chains * size) - method.warmup)
        return max(method.thin, affordable // method.draws)


def _work_of_folds(prepared: Prepared, method: HMC) -> float:
    """Return rows times parameters times gradients of the fits to all folds, with short trajectories."""
    one = fold_method(dataclasses.replace(method, thin=max(2, method.thin)), len(prepared.splits))
    assert isinstance(one, HMC)
    gradients = one.chains * (one.warmup + one.draws * one.thin) * one.max_steps
    dim, fixed = prepared.problem.layout.dim, _overhead(prepared)
    return float(gradients * sum(len(rows) * dim + fixed for rows, _ in prepared.splits))


def _overhead(prepared: Prepared) -> int:
    return OVERHEAD if prepared.recipe.compiled else AUTOGRAD


def _observed(prepared: Prepared, rows: npt.NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, as the posterior has them, of some of the rows."""
    some = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().astype(int)]
    part, known = prepared.data.at(some), prepared.preparation
    inputs = np.ascontiguousarray(known.scaling(part.x), np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(np.ascontiguousarray(known.standardise(part.y)))
