"""`hmc-reference --budget`: many chains of SGHMC for a given time, with predictions averaged while they run.

Chains start at the members of a deep ensemble. A fifth of the time goes to the ensemble, a fifth to warm-up, the rest
to draws. Predictions at the test rows are summed round by round, so that no draw outlives its round: a run consists of
the positions of its chains and one table of probabilities per chain. Both are in a file beside the results, from which
a later run continues. Test labels are never read: the step size is the published one, or the sampler's own choice.
"""

from __future__ import annotations

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
from credibly.methods import SGHMC, DeepEnsemble
from credibly.metrics import scores as metrics
from credibly.posterior.base import Posterior
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors

Array = npt.NDArray[Any]

# Parts of the budget: training of the ensemble, and warm-up of the chains.
TRAINING, WARMUP = 0.2, 0.2
# Steps of two fits that measure how long a training step takes.
TRAINING_TRIALS = (10, 50)
# Rounds of draws that a budget is divided into, each followed by a line of results.
ROUNDS = 12
# Steps of the trial that measures how long a step takes, and between two draws.
TRIAL, THIN = 200, 100
# Memory of the draws of one round.
ROUND_BYTES = 2**32
# Rows whose predictions are computed at a time.
BLOCK = 2500


@dataclass
class State:
    """The state that a run continues from.

    Attributes:
        theta: the chains, (C, D).
        sums: probabilities at the test rows, summed over the draws of each chain, (C, rows, classes), in float64.
        draws, steps: draws in those sums, and steps per chain, warm-up included.
        seconds: time spent, that of earlier runs included.
        first: probabilities of the first member and of the ensemble, (2, rows, classes).
    """

    theta: Tensor
    sums: Tensor
    draws: int = 0
    steps: int = 0
    seconds: float = 0.0
    first: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def probabilities(self) -> Array:
        """The average over all draws of all chains, (rows, classes)."""
        return (self.sums.mean(0) / max(1, self.draws)).float().numpy()

    def save(self, path: Path) -> None:
        """Write the state under a temporary name and rename it into place."""
        from safetensors.torch import save_file

        counts = torch.tensor([self.draws, self.steps, self.seconds], dtype=torch.float64)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        tensors = {"theta": self.theta.cpu(), "sums": self.sums, "counts": counts, "first": self.first}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path, problem: Problem, shape: tuple[int, ...]) -> State:
        """Read the state of an earlier run. Raise if it belongs to another network or other rows."""
        tensors = load_tensors(path)
        draws, steps, seconds = tensors["counts"].tolist()
        if tensors["theta"].shape[1] != problem.dim or tensors["sums"].shape[1:] != shape:
            raise InputError("--out", f"{path} belongs to another network or other test rows", "Choose another folder")
        theta = tensors["theta"].to(problem.device, problem.layout.dtype)
        return cls(theta, tensors["sums"], int(draws), int(steps), seconds, tensors["first"])


def at_points(problem: Problem, theta: Tensor, x: Inputs) -> Tensor:
    """Return the class probabilities of every parameter vector (C, D), (C, rows, classes), in float64."""
    assert isinstance(x, Tensor)
    found = []
    with torch.no_grad():
        for i in range(0, len(x), BLOCK):
            output = torch.cat([problem.forward(one, x[i : i + BLOCK]) for one in theta.split(1)])
            found.append(torch.softmax(output.double(), -1).cpu())
    return torch.cat(found, 1)


def run_to_budget(
    problem: Problem,
    x_test: Tensor,
    reference: Array,
    *,
    budget: float,
    chains: int,
    settings: dict[str, Any],
    training: dict[str, Any],
    seed: int,
    file: Path | None,
    report: Callable[[str], None],
) -> State:
    """Run chains until the budget, in seconds, is used up; continue from `file` if it exists.

    Args:
        problem: the posterior.
        x_test, reference: test rows, and the probabilities to compare with.
        budget: seconds of this run.
        chains: number of chains, and of members of the ensemble.
        settings, training: of SGHMC, and of the ensemble.
        seed: of all randomness.
        file: where the state is kept; None for nowhere.
        report: called with a line of results after every round.
    """
    began = time.monotonic()

    def left() -> float:
        return budget - (time.monotonic() - began)

    if file is not None and file.exists():
        state = State.load(file, problem, reference.shape)
        report(f"continuing after {state.seconds:,.0f} s and {state.draws} draws of {len(state.theta)} chains")
    else:
        state = _trained(problem, x_test, reference, chains, training, TRAINING * budget, seed, report)
    before, chains = state.seconds, len(state.theta)
    each = _seconds_per_step(problem, state, settings, seed)
    if not state.draws:
        steps = max(THIN, int(min(WARMUP * budget, left() / 3) / each))
        _advance(problem, state, settings, steps, seed, None)
        report(f"warm-up: {steps:,} steps of {chains} chains, {1e3 * each:.1f} ms per step")
    while left() > THIN * each or not state.draws:
        wanted = int(min(budget / ROUNDS, left() - THIN * each) / each)
        held = ROUND_BYTES // (state.theta.numel() * state.theta.element_size())
        steps = THIN * max(1, min(wanted // THIN, held))
        timed = time.monotonic()
        kinetic = _advance(problem, state, settings, steps, seed, x_test)
        each = 0.5 * each + 0.5 * (time.monotonic() - timed) / steps
        state.seconds = before + time.monotonic() - began
        if file is not None:
            state.save(file)
        draws = f"{state.draws} draws of {chains} chains"
        heat = f", kinetic temperature {kinetic:.2f}" if kinetic is not None else ""
        report(f"{draws}: {in_words(state.probabilities, reference)}{heat}")
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

    # Two short fits separate the time per step from the fixed cost per fit; the very first fit takes longest.
    fit(1)
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
    sums = torch.zeros(chains, *reference.shape, dtype=torch.float64)
    return State(theta, sums, seconds=time.monotonic() - began, first=first)


def _seconds_per_step(problem: Problem, state: State, settings: dict[str, Any], seed: int) -> float:
    """Return the time of a step of all chains, by a trial that is part of the warm-up."""
    _advance(problem, state, settings, 1, seed, None)
    began = time.monotonic()
    _advance(problem, state, settings, TRIAL, seed, None)
    return (time.monotonic() - began) / TRIAL


def _advance(
    problem: Problem, state: State, settings: dict[str, Any], steps: int, seed: int, x_test: Tensor | None
) -> float | None:
    """Take steps of all chains; with test rows, add predictions every `THIN` steps. Return the mean temperature.

    The kinetic temperature is 1 for chains that sample the posterior; gradient noise heats them. Every call draws new
    momenta, which are independent of positions, from streams named by the steps so far.
    """
    thin = steps if x_test is None else THIN
    draws = steps // thin
    method = SGHMC(chains=len(state.theta), draws=draws, warmup=0, thin=thin, init=state.theta, **settings)
    posterior = method.fit(problem, seed=seed + state.steps, progress=False)
    assert isinstance(posterior.draws, Tensor)
    if x_test is not None:
        for k in range(draws):
            state.sums += at_points(problem, posterior.draws[:, k], x_test)
        state.draws += draws
    state.theta = posterior.draws[:, -1].clone()
    state.steps += steps
    kinetic = (posterior.record.history.get("temperature") or {}).get("kinetic")
    return sum(kinetic) / len(kinetic) if kinetic else None
