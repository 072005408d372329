"""`hmc-reference --budget`: chains of SGHMC, or members of an IVON mixture, for a given time.

Predictions at the test rows are summed round by round, so that no draw outlives its round. A run consists of a table of
probabilities per round of draws, or per member, and the positions of the chains. They are in a file beside the results,
from which a later run continues. Test labels are never read.

Chains start at the members of a deep ensemble, which an eighth of the time goes to. The first third of all steps so far
is warm-up: its rounds no longer count once a run has gone on for long enough. The step size is the published one.
Gradient noise heats a direction of curvature a by h a N / (2 B friction), so where larger batches cost little per row,
they are worth more than further steps.

Members of the mixture are trained eight at a time, each round from new starting points.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.errors import InputError
from credibly.methods import IVON, SGHMC, DeepEnsemble
from credibly.metrics import scores as metrics
from credibly.posterior.base import Posterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors

Array = npt.NDArray[Any]

# Fraction of the budget for the ensemble, and fraction of all steps that is warm-up.
TRAINING, WARMUP = 0.12, 1 / 3
# Steps of two fits that measure how long a training step takes.
TRAINING_TRIALS = (10, 50)
# Rounds of draws that a budget is divided into, each followed by a line of results, and draws per round.
ROUNDS, DRAWS = 15, 8
# Steps of two fits that measure how long a step takes.
TRIALS = (10, 110)
# Step size of SGHMC as published, and a momentum with which a direction constrained by the prior alone decorrelates in
# some 1,000 steps.
STEP, MOMENTUM = 3e-7**0.5, 0.98
# Epochs per member of a mixture, rounds of members that a budget allows at least, and draws per member.
EPOCHS, LEAST_ROUNDS, MEMBER_DRAWS = 300, 2, 16
# Memory of the draws of one round.
ROUND_BYTES = 2**32
# Rows whose predictions are computed at a time.
BLOCK = 2500


@dataclass
class State:
    """The state that a run continues from.

    Attributes:
        theta: the chains, (C, D).
        tables: probabilities at the test rows, (R, rows, classes), in float64: means over the draws of all chains of a
            round, or over those of a member.
        ends: steps per chain by the end of each round.
        draws: draws per chain and round.
        seconds: time spent, that of earlier runs included.
        first: probabilities of the first member and of the ensemble, (2, rows, classes).
    """

    theta: Tensor
    tables: Tensor
    ends: list[int] = field(default_factory=list)
    draws: int = 0
    seconds: float = 0.0
    first: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def steps(self) -> int:
        """Steps per chain, warm-up included."""
        return self.ends[-1] if self.ends else 0

    @property
    def kept(self) -> list[int]:
        """The rounds after warm-up: those that began in the last two thirds of the steps, and at least the last one."""
        starts = [0, *self.ends[:-1]]
        after = [k for k, start in enumerate(starts) if start >= WARMUP * self.steps]
        return after or [len(self.ends) - 1]

    def probabilities(self, rounds: list[int] | None = None) -> Array:
        """Return the average over rounds, by default those after warm-up, (rows, classes)."""
        return self.tables[self.kept if rounds is None else rounds].mean(0).float().numpy()

    def add(self, table: Tensor, steps: int) -> None:
        """Add a round."""
        self.tables = torch.cat([self.tables, table[None]])
        self.ends.append(steps)

    def save(self, path: Path) -> None:
        """Write the state under a temporary name and rename it into place."""
        from safetensors.torch import save_file

        counts = torch.tensor([self.draws, self.seconds, *self.ends], dtype=torch.float64)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        tensors = {"theta": self.theta.cpu(), "tables": self.tables, "counts": counts, "first": self.first}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path, problem: Problem, shape: tuple[int, ...], *, chains: bool) -> State:
        """Read the state of an earlier run of chains, or of members. Raise if it is of another kind, or other rows."""
        tensors = load_tensors(path)
        if "tables" not in tensors:
            raise InputError("--out", f"{path} was written by an earlier version", "Choose another folder")
        if tensors["theta"].shape[1] != problem.dim or tensors["tables"].shape[1:] != shape:
            raise InputError("--out", f"{path} belongs to another network or other test rows", "Choose another folder")
        if bool(len(tensors["theta"])) is not chains:
            raise InputError("--set method", f"must be that of the run in {path}", "Choose another folder with --out")
        draws, seconds, *ends = tensors["counts"].tolist()
        theta = tensors["theta"].to(problem.device, problem.layout.dtype)
        return cls(theta, tensors["tables"], [int(end) for end in ends], int(draws), seconds, tensors["first"])


@dataclass(frozen=True)
class Pace:
    """The duration of a fit: `fixed` seconds, and `each` per step of all chains or members."""

    fixed: float
    each: float

    def steps(self, seconds: float) -> int:
        """Return how many steps a fit can take in the given time."""
        return max(1, int((seconds - self.fixed) / self.each))


def at_points(problem: Problem, theta: Tensor, x: Inputs) -> Tensor:
    """Return the class probabilities of every parameter vector (C, D), (C, rows, classes), in float64."""
    assert isinstance(x, Tensor)
    found = []
    with torch.no_grad():
        for i in range(0, len(x), BLOCK):
            output = torch.cat([problem.forward(one, x[i : i + BLOCK]) for one in theta.split(1)])
            found.append(torch.softmax(output.double(), -1).cpu())
    return torch.cat(found, 1)


def chains_to_budget(
    problem: Problem,
    x_test: Tensor,
    reference: Array,
    *,
    budget: float,
    settings: dict[str, Any],
    training: dict[str, Any],
    seed: int,
    file: Path | None,
    report: Callable[[str], None],
) -> State:
    """Run chains of SGHMC until the budget, in seconds, is used up; continue from `file` if it exists.

    Args:
        problem: the posterior.
        x_test, reference: test rows, and the probabilities to compare with.
        budget: seconds of this run.
        settings, training: of SGHMC, and of the ensemble.
        seed: of all randomness.
        file: where the state is kept; None for nowhere.
        report: called with a line of results after every round.
    """
    began = time.monotonic()

    def left() -> float:
        return budget - (time.monotonic() - began)

    settings = {"step_size": STEP, "momentum": MOMENTUM} | settings
    if file is not None and file.exists():
        state = State.load(file, problem, reference.shape, chains=True)
        report(f"continuing after {state.seconds:,.0f} s and {state.draws} draws of {len(state.theta)} chains")
    else:
        chains = settings["chains"]
        state = _trained(problem, x_test, reference, chains, training, TRAINING * budget, seed, report)
    settings["chains"] = chains = len(state.theta)
    before = state.seconds
    pace = _pace(problem, state, settings, seed)
    report(f"{1e3 * pace.each:.1f} ms per step of {chains} chains")
    round_steps = pace.steps(budget / ROUNDS)
    state.draws = max(1, min(DRAWS, ROUND_BYTES // (state.theta.numel() * state.theta.element_size())))
    began_with = len(state.ends)
    while len(state.ends) == began_with or left() > pace.fixed + state.draws * pace.each:
        thin = max(1, min(round_steps, pace.steps(left())) // state.draws)
        timed = time.monotonic()
        table, kinetic = _advance(problem, state, settings, state.draws, thin, seed, x_test)
        state.add(table, state.steps + state.draws * thin)
        each = max(1e-6, time.monotonic() - timed - pace.fixed) / (state.draws * thin)
        pace = Pace(pace.fixed, 0.5 * (pace.each + each))
        state.seconds = before + time.monotonic() - began
        if file is not None:
            state.save(file)
        heat = f", kinetic temperature {kinetic:.2f}" if kinetic is not None else ""
        draws = f"{state.draws * len(state.kept)} draws of {chains} chains"
        report(f"{state.steps:,} steps, {draws}: {in_words(state.probabilities(), reference)}{heat}")
    return state


def mixture_to_budget(
    problem: Problem,
    x_test: Tensor,
    reference: Array,
    *,
    budget: float,
    settings: dict[str, Any],
    seed: int,
    file: Path | None,
    report: Callable[[str], None],
) -> State:
    """Train rounds of an IVON mixture until the budget is used up; continue from `file` if it exists.

    The arguments are those of `chains_to_budget`, with the settings of IVON.
    """
    began = time.monotonic()
    if file is not None and file.exists():
        state = State.load(file, problem, reference.shape, chains=False)
        report(f"continuing after {state.seconds:,.0f} s and {len(state.tables)} members")
    else:
        empty = torch.zeros(0, *reference.shape, dtype=torch.float64)
        state = State(torch.zeros(0, problem.dim), empty, draws=MEMBER_DRAWS)
    before = state.seconds
    epochs = int(settings.pop("epochs", EPOCHS))

    def fit(steps: int) -> GaussianPosterior:
        return IVON(**settings, steps=steps).fit(problem, seed=seed + len(state.tables), progress=False)

    taken = []
    for steps in (1, *TRAINING_TRIALS):
        timed = time.monotonic()
        fit(steps)
        taken.append(time.monotonic() - timed)
    each = max(1e-6, (taken[2] - taken[1]) / (TRAINING_TRIALS[1] - TRAINING_TRIALS[0]))
    pace = Pace(max(0.0, taken[1] - TRAINING_TRIALS[0] * each), each)
    longest = epochs * IVON(**settings).plan(problem.n)[2]
    left = budget - (time.monotonic() - began)
    rounds = max(LEAST_ROUNDS, math.ceil(left / (pace.fixed + longest * pace.each)))
    for done in range(rounds):
        share = (budget - (time.monotonic() - began)) / (rounds - done)
        steps = min(longest, pace.steps(share))
        posterior = fit(steps)
        members = posterior.components
        points = posterior.sample(MEMBER_DRAWS * members, seed=seed).split(members)
        found = torch.stack([at_points(problem, some, x_test) for some in points]).mean(0)
        for table in found:
            state.add(table, steps)
        if not len(state.first):
            state.first = torch.stack([at_points(problem, posterior.loc[:1], x_test)[0], found[0]])
        state.seconds = before + time.monotonic() - began
        if file is not None:
            state.save(file)
        every = list(range(len(state.ends)))
        report(f"{len(every)} members, {steps:,} steps each: {in_words(state.probabilities(every), reference)}")
    return state


def in_words(found: Array, reference: Array) -> str:
    """Return agreement and total variation as text."""
    agreement = float(metrics.agreement(torch.from_numpy(found), torch.from_numpy(reference)))
    return f"agreement {agreement:.2%}, total variation {0.5 * np.abs(found - reference).sum(-1).mean():.4f}"


def _trained(
    problem: Problem,
    x_test: Tensor,
    reference: Array,
    chains: int,
    training: dict[str, Any],
    seconds: float,
    seed: int,
    report: Callable[[str], None],
) -> State:
    """Return chains at the members of an ensemble, trained for about the given time, and at most the epochs given."""
    began = time.monotonic()
    own = {name: value for name, value in training.items() if name not in ("epochs", "steps")}

    def fit(steps: int) -> tuple[Posterior, float]:
        started = time.monotonic()
        posterior = DeepEnsemble(members=chains, **own, steps=steps).fit(problem, seed=seed, progress=False)
        return posterior, time.monotonic() - started

    # The very first fit takes longest; two short ones then separate the time per step from the fixed cost per fit.
    DeepEnsemble(members=1, **own, steps=1).fit(problem, seed=seed, progress=False)
    (_, short), (_, longer) = (fit(steps) for steps in TRAINING_TRIALS)
    each = max(1e-6, (longer - short) / (TRAINING_TRIALS[1] - TRAINING_TRIALS[0]))
    per_epoch = DeepEnsemble(**own).plan(problem.n)[2]
    left = seconds - (time.monotonic() - began) - (short - TRAINING_TRIALS[0] * each)
    steps = max(TRAINING_TRIALS[1], min(int(training.get("epochs", 20)) * per_epoch, int(left / each)))
    posterior, _ = fit(steps)
    theta = posterior.sample(chains, seed=seed)
    found = at_points(problem, theta, x_test)
    first = torch.stack([found[0], found.mean(0)])
    report(f"ensemble of {chains}, {steps / per_epoch:.1f} epochs: {in_words(first[1].float().numpy(), reference)}")
    tables = torch.zeros(0, *reference.shape, dtype=torch.float64)
    return State(theta, tables, seconds=time.monotonic() - began, first=first)


def _pace(problem: Problem, state: State, settings: dict[str, Any], seed: int) -> Pace:
    """Return how long steps take, by two short runs."""
    taken = []
    for steps in TRIALS:
        began = time.monotonic()
        _advance(problem, state, settings, 1, steps, seed)
        taken.append(time.monotonic() - began)
    each = max(1e-6, (taken[1] - taken[0]) / (TRIALS[1] - TRIALS[0]))
    return Pace(max(0.0, taken[0] - TRIALS[0] * each), each)


def _advance(
    problem: Problem,
    state: State,
    settings: dict[str, Any],
    draws: int,
    thin: int,
    seed: int,
    x_test: Tensor | None = None,
) -> tuple[Tensor, float | None]:
    """Move all chains. Return mean probabilities at the test rows over evenly spaced draws, and the mean temperature.

    The kinetic temperature is 1 for chains that sample the posterior; gradient noise heats them. Every call draws new
    momenta, which are independent of positions, from streams named by the steps so far.
    """
    method = SGHMC(**settings, draws=draws, warmup=0, thin=thin, init=state.theta)
    posterior = method.fit(problem, seed=seed + state.steps, progress=False)
    assert isinstance(posterior.draws, Tensor)
    table = torch.empty(0)
    if x_test is not None:
        table = torch.stack([at_points(problem, posterior.draws[:, k], x_test).mean(0) for k in range(draws)]).mean(0)
    state.theta = posterior.draws[:, -1].clone()
    kinetic = (posterior.record.history.get("temperature") or {}).get("kinetic")
    return table, sum(kinetic) / len(kinetic) if kinetic else None
