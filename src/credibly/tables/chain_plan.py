"""Length of the chains of a table: long enough to pass their own diagnostics within the time of a default fit.

A short trial on some of the rows measures the effective draws per gradient. The chains are then made long enough for
the effective sample size and R-hat that the report asks for. If that would take longer than about a minute, the plan is
refused, and the table gets another method: chains that have not mixed would not be draws from the posterior.
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
from credibly.methods import HMC
from credibly.tables.prepared import Prepared
from credibly.tables.threads import threads_for

# Rows times parameters times gradients of the chains: about 80 processor seconds.
WORK = 1.8e12
# Settings that a user gives to determine the length of the chains.
LENGTHS = ("chains", "draws", "thin", "warmup", "max_steps", "step_size", "trajectory_length")
TRIAL: dict[str, Any] = {"chains": 4, "draws": 100}
# Iterations per draw of the trial, at least and at most, and the fraction of the work that it may take.
TRIAL_THIN, TRIAL_WORK = (2, 10), 0.1
# Effective draws to plan for, and to plan for at least, in units of what the verdict asks for: a trial measures them
# roughly.
WANTED, LEAST = 1.6, 1.2
# Draws whose momentum persists have similar energies, which E-BFMI would report as slow mixing: keep fewer of them.
LEAST_THIN = 4
# Fraction of divergent trajectories from which steps are made smaller, by the higher acceptance, and how much smaller.
DIVERGENT, CAREFUL, SMALLER = 0.002, 0.95, 1.4
# Rows at which the trial is diagnosed.
ROWS = 200


@dataclass(frozen=True)
class ChainPlan:
    """What a trial has found.

    Attributes:
        thin: iterations per draw.
        target_accept: acceptance that the step size is adapted to.
        effective: effective draws of the worst quantity in the trial.
        times: work that enough draws would take, in units of what there is time for.
    """

    thin: int
    target_accept: float
    effective: float
    times: float

    @property
    def attainable(self) -> bool:
        """Whether there is time for enough draws."""
        return self.times <= 1


def plan_chains(prepared: Prepared) -> ChainPlan:
    """Run short chains on the rows of the first fold and plan the chains of the final fit."""
    method = prepared.method
    assert isinstance(method, HMC)
    rows = prepared.splits[0][0] if prepared.splits else np.arange(len(prepared.train))
    problem = prepared.problem_of(rows)
    trial = dataclasses.replace(method, **TRIAL)
    longest = TRIAL_WORK * WORK / (trial.chains * trial.max_steps * problem.n * problem.layout.dim) - trial.warmup
    thin = max(TRIAL_THIN[0], min(TRIAL_THIN[1], int(longest / trial.draws)))
    trial = dataclasses.replace(trial, thin=thin)
    with torch_threads(threads_for(problem, trial)):
        posterior = trial.fit(problem, seed=prepared.config.seed, progress=False)
        found = posterior.diagnostics(*_observed(prepared, rows))
    effective = min(space.ess_most for space in found.judged.values())
    effective = max(1.0, effective) if math.isfinite(effective) else 1.0
    history = posterior.record.history
    iterations = trial.draws * trial.thin
    gradients = history["gradients"] / (trial.chains * (trial.warmup + iterations))
    target_accept = method.target_accept
    if sum(history["divergences"]) > DIVERGENT * trial.chains * iterations and target_accept < CAREFUL:
        target_accept, gradients = CAREFUL, min(float(method.max_steps), SMALLER * gradients)
    work = gradients * method.chains * prepared.problem.n * prepared.problem.layout.dim
    affordable = WORK / work - method.warmup
    needed = iterations * trial.chains / method.chains * ESS_TOTAL / effective
    length = min(affordable, WANTED * needed)
    thin = max(LEAST_THIN, math.ceil(length / method.draws))
    return ChainPlan(thin, target_accept, effective, (LEAST * needed + method.warmup) * work / WORK)


def _observed(prepared: Prepared, rows: npt.NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, as the posterior has them, of some of the rows."""
    some = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().astype(int)]
    part, known = prepared.data.at(some), prepared.preparation
    inputs = np.ascontiguousarray(known.scaling(part.x), np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(np.ascontiguousarray(known.standardise(part.y)))
