"""Damped Gauss-Newton steps on all rows (Levenberg 1944, Marquardt 1963), for small networks.

    w <- w - (G + P + lambda I)^-1 grad,    G = sum_i v_i J_i' F_i J_i / T

grad is that of the negative log density, G its Gauss-Newton matrix and P the prior's precision. A step that does not
lower the loss is repeated with four times the damping lambda; after one that does, lambda is divided by three. For a
linear model with Gaussian noise and lambda = 0, one step ends in the mode. A step costs as much as many gradients, but
follows narrow curved valleys, in which gradient steps are short: a network can fit a smooth target to a thousandth of
its standard deviation in a few dozen steps. Parameters of the likelihood, such as a log scale, are moved to their mode
given the weights after every step. With `mean_first`, steps of least squares come before those of a density with
predicted noise (`credibly.inference.training.mean_first`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from credibly.core.inputs import blank_row, describe
from credibly.core.progress import Progress
from credibly.curvature import choose_names, find_parts, prior_precision
from credibly.curvature.evidence import fit_own_parameters
from credibly.curvature.gauss_newton import gauss_newton_matrix
from credibly.curvature.prior_precision import prior_off_diagonal
from credibly.distributed.heartbeat import Heartbeat
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError, TrainingError
from credibly.inference.training.callbacks import Callback, TrainingState
from credibly.inference.training.data import Data
from credibly.inference.training.in_turn import joined_history, member_data, member_objective
from credibly.inference.training.mean_first import MeanFirst
from credibly.inference.training.objectives import NegativeLogDensity, Objective, effective_rows
from credibly.inference.training.settings import GAUSS_NEWTON, Training
from credibly.inference.training.trained import Trained
from credibly.problem import Problem

# Default number of steps.
STEPS = 100
# Maximum number of parameters: a step decomposes a matrix of that size.
LARGEST = 5_000
# Initial damping, in units of the mean diagonal of G, and its minimum; factors after a step that lowers the loss and
# after one that does not; and how often such a step is repeated.
DAMPING, LEAST, DOWN, UP, TRIES = 1e-3, 1e-10, 1 / 3, 4.0, 8
# Minimum number of rows in the sum of the matrix, in total and per parameter. Loss and gradient always use all rows.
FEWEST, PER_PARAMETER = 2_000, 4
# Number of rows whose outputs are in memory at a time.
ROWS = 8_192


def matrix_rows(rows: int, parameters: int) -> int:
    """Return the number of rows in the sum of the matrix of one step."""
    return -(-rows // _stride(rows, parameters))


def _stride(rows: int, parameters: int) -> int:
    return max(1, rows // max(FEWEST, PER_PARAMETER * parameters))


def train_gauss_newton(
    problem: Problem,
    objective: Objective,
    theta: Tensor,
    options: Training,
    data: Data,
    *,
    title: str,
    progress: bool | None = None,
    first: int = 0,
    mesh: Mesh | None = None,
    peers: World | None = None,
) -> Trained:
    """Minimise a negative log density from theta (M, D), one member after another; the counterpart of `train`."""
    density = _check(problem, objective, mesh)
    steps = options.steps or options.epochs or STEPS
    heartbeat, histories, found = Heartbeat(peers or World()), [], []
    mean_first = MeanFirst.of(density, theta, data) if options.mean_first else None
    fits = 1 if mean_first is None else 2
    with Progress(title, fits * steps * len(theta), progress) as bar:

        def advance(member: _Member, before: int, callback: Callback | None) -> int:
            """Take steps until the member is done. Return their number."""
            for done in range(1, steps + 1):
                ended = member.advance(title)
                heartbeat.tick()
                bar.update(before + done, loss=member.loss)
                ended = member.record(done, options.patience) or ended
                state = TrainingState(done, steps, (member.loss,), member.index, title, problem, member.theta)
                if ended or (callback is not None and callback(state) is True):
                    break
            return done

        for m in range(len(theta)):
            start, before = theta[m : m + 1], fits * m * steps
            history: dict[str, Any] = {"steps_planned": steps, "gradients": 0.0}
            if mean_first is not None:
                least = member_objective(mean_first.objective, m)
                mean = _Member(mean_first.problem, least, start, member_data(mean_first.data, m), first + m)
                history |= {"mean_steps": advance(mean, before, None), "gradients": float(mean.gradients)}
                start, before = mean_first.start(mean.judge(problem), mean.best), before + steps
            one = _Member(problem, member_objective(density, m), start, member_data(data, m), first + m)
            history["steps"] = advance(one, before, options.callback)
            history["gradients"] += one.gradients
            histories.append(one.history | history)
            found.append(one.best)
        bar.update(fits * steps * len(theta), final=True)
    heartbeat.wait()
    return Trained(torch.cat(found), joined_history(histories))


def _check(problem: Problem, objective: Objective, mesh: Mesh | None) -> NegativeLogDensity:
    """Return the objective. Raise if Gauss-Newton steps cannot minimise it."""
    advice = 'Use optimiser="adam"'
    if not isinstance(objective, NegativeLogDensity):
        raise InputError("optimiser", f'must be "adam" or "sgd" for this method, got {GAUSS_NEWTON!r}')
    if problem.stream is not None:
        raise InputError(
            "optimiser", f"{GAUSS_NEWTON!r} needs all rows in memory, and these come from a loader", advice
        )
    if mesh is not None and mesh.shape[1] > 1:
        raise InputError("optimiser", f"{GAUSS_NEWTON!r} is not available to processes that share rows", advice)
    if problem.dim > LARGEST:
        found = f"{GAUSS_NEWTON!r} is for at most {LARGEST:,} parameters, and this network has {problem.dim:,}"
        raise InputError("optimiser", found, advice)
    return objective


class _Member:
    """One member, theta (1, D), with its rows, its damping, and the best parameters on its held-out rows."""

    def __init__(self, problem: Problem, objective: Objective, theta: Tensor, data: Data, index: int) -> None:
        assert isinstance(objective, NegativeLogDensity)
        self.problem, self.objective, self.data, self.index = problem, objective, data, index
        rows = data.rows if data.resampled is None else data.resampled[0]
        self.rows = torch.arange(rows, device=problem.device) if isinstance(rows, int) else rows
        self.own = objective.problem.subset(self.rows)
        row = blank_row(describe(problem.sample.x), problem.device)
        self.parts = find_parts(problem.layout, choose_names(problem.layout, None, row), row)
        self.theta, self.best, self.best_score, self.waited = theta, theta, -math.inf, 0
        self.damping, self.gradients = DAMPING, 0
        self.history: dict[str, list[object] | dict[str, list[object]]] = {
            "step": [], "loss": [], "parts": {name: [] for name in objective.part_names},
            "validation_step": [], "validation": [],
        }  # fmt: skip
        self.terms, self.slope = self._evaluate(theta)
        self._fit_noise()

    @property
    def loss(self) -> float:
        """The loss per row at the current parameters."""
        return float(self.terms.sum())

    def advance(self, title: str) -> bool:
        """Take one step. Return True if no step was found that lowers the loss."""
        if not math.isfinite(self.loss):
            raise TrainingError(
                f"{title}: the loss of member {self.index} is not finite. Try standardised inputs and targets, or"
                ' optimiser="adam"',
                step=len(self.history["loss"]),
                member=self.index,
                posterior=self.best,
            )
        matrix, slope = self._curvature(), self.slope[0, self.parts.indices].double()
        scale, eye = float(matrix.diagonal().mean()), torch.eye(len(slope), dtype=torch.float64, device=slope.device)
        for _ in range(TRIES):
            factor, failed = torch.linalg.cholesky_ex(matrix + self.damping * scale * eye)
            if not failed:
                move = torch.cholesky_solve(slope.unsqueeze(1), factor).squeeze(1)
                tried = self.theta.clone()
                tried[0, self.parts.indices] -= move.to(tried)
                terms, gradient = self._evaluate(tried)
                if float(terms.sum()) < self.loss:
                    self.theta, self.terms, self.slope = tried, terms, gradient
                    self.damping = max(LEAST, self.damping * DOWN)
                    self._fit_noise()
                    return False
            self.damping *= UP
        return True

    def record(self, done: int, patience: int) -> bool:
        """Record the loss and the score on held-out rows. Return True if the score has not risen for too long."""
        parts = self.history["parts"]
        assert isinstance(parts, dict)
        for name, value in zip(self.objective.part_names, self.terms[0].double()):
            parts[name].append([float(value)])
        self._append(step=done, loss=[self.loss])
        if not self.data.stops:
            self.best = self.theta
            return False
        score = self._score()
        self._append(validation_step=done, validation=[score])
        if score > self.best_score:
            self.best, self.best_score, self.waited = self.theta, score, 0
        else:
            self.waited += 1
        return self.waited >= patience

    def judge(self, problem: Problem) -> Problem:
        """Return the rows of a problem that decide about this member: those held out from it, or else its own."""
        if not self.data.stops:
            return problem.subset(self.rows)
        ((held_out, _),) = self.data.unseen(1)
        judging = copy.copy(held_out)
        judging.likelihood = problem.likelihood
        return judging

    def _score(self) -> float:
        """Return the score of the weights on held-out rows, with the noise scale that fits those rows best."""
        ((held_out, _),) = self.data.unseen(1)
        with torch.no_grad():
            judged = fit_own_parameters(held_out, self.theta[0]).unsqueeze(0)
            return float(self.objective.score(judged, held_out))

    def _append(self, **values: object) -> None:
        for name, value in values.items():
            column = self.history[name]
            assert isinstance(column, list)
            column.append(value)

    def _evaluate(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms of the loss (1, 2) and its gradient (1, D), by blocks of rows."""
        self.gradients += 1
        x, y, controls = self.problem.x, self.problem.y, theta.new_zeros(0)
        terms, slope = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for rows in self._blocks():
            weight = len(rows) / len(self.rows)
            some, gradient = self.objective.evaluate(theta, self.objective.own, x, y, rows, (), controls)
            terms, slope = terms + weight * some.double(), slope + weight * gradient.double()
        return terms, slope.to(theta)

    def _blocks(self) -> Iterator[Tensor]:
        return iter(self.rows.split(ROWS))

    def _curvature(self) -> Tensor:
        """Return G + P per row, (P, P) in float64."""
        objective, indices, theta = self.objective, self.parts.indices, self.theta[0]
        some = self._some_rows()
        matrix = gauss_newton_matrix(some, theta, self.parts) / effective_rows(self.problem, some.n)
        if objective.prior_weight:
            prior = objective.problem.prior
            precision = torch.diag(prior_precision(prior, theta)[indices])
            correlated = prior_off_diagonal(prior, indices)
            matrix += objective.prior_weight * (precision if correlated is None else precision + correlated)
        return matrix

    def _some_rows(self) -> Problem:
        """Return the rows of the next matrix, which differ from step to step."""
        stride = _stride(len(self.rows), self.problem.dim)
        if stride == 1:
            return self.own
        start = len(self.history["loss"]) % stride
        return self.own.subset(torch.arange(start, len(self.rows), stride, device=self.rows.device))

    def _fit_noise(self) -> None:
        """Move the likelihood's own parameters to their mode, if that lowers the loss."""
        if self.problem.dim == self.problem.layout.network_dim:
            return
        tried = fit_own_parameters(self.own, self.theta[0]).unsqueeze(0)
        terms, slope = self._evaluate(tried)
        if float(terms.sum()) < self.loss:
            self.theta, self.terms, self.slope = tried, terms, slope
