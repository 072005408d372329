"""Run until done: a sampler continues until its chains agree on predictions, or until its budget is spent.

Draws are taken in rounds. After each round R-hat and the effective sample size (the smaller of bulk and tails) are
computed for predictions at 64 training rows, or for coordinates of a plain density. While the worst misses the goal,

    R-hat > 1.1    the chains disagree: everything so far counts as warm-up, and the next round takes twice as long, by
                   longer trajectories if they were truncated, else by more iterations per draw;
    otherwise      the next round adds draws, up to four times the requested number (or 1,600 of all chains); beyond,
                   draws are taken further apart, unless half of the budget is spent.

The goal for training rows, R-hat 1.03 and 500 effective draws, is stricter than the usual 1.05 and 400, because other
rows and quantities may mix more slowly. The budget ends a run between two iterations, and the record keeps the verdict.
A run without a budget, or with one in iterations, is bit-for-bit reproducible; where time ends it, that depends on the
machine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.core.durations import to_text
from credibly.diagnostics.convergence import MIN_DRAWS, measure
from credibly.distributed.world import Mesh
from credibly.errors import InputError, SamplingError
from credibly.inference.sampling.budget import Budget
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.target import Target

log = logging.getLogger("credibly")

# The goal for the worst prediction.
RHAT, ESS = 1.03, 500.0
# R-hat above which the draws so far count as warm-up.
APART = 1.1
# Maximum number of draws that are kept, as a multiple of those requested, or this many of all chains if that is more.
MOST, MOST_TOTAL = 4, 1600
# Maximum number of rounds without a budget, each about twice as long as the one before.
ROUNDS = 8
# Seconds between two convergence checks for the progress bar.
EVERY_SECONDS = 2.0


def check_until(until: str | None, budget: float | str | None, least: int = 1) -> None:
    """Raise unless the two settings make sense together, and a budget in iterations holds the `least` for one draw."""
    if until is not None:
        check_choice("until", until, ("mixed",), "Or pass None for a fixed number of draws")
    if budget is not None:
        limit = Budget.parse("budget", budget)
        if until is None:
            raise InputError("budget", f'must be None without until="mixed", got {budget!r}', "Pass both or neither")
        if not limit.timed and limit.amount < least:
            found = f"must be at least {least:,} iterations, the warm-up and one draw, got {budget!r}"
            raise InputError("budget", found, "Pass more iterations, or a shorter warm-up")


@dataclass(frozen=True)
class Judgement:
    """The worst R-hat and effective sample size of the predictions, and when they were found.

    Attributes:
        draws: per chain.
        discarded: whether the draws were then counted as warm-up.
    """

    rhat: float
    ess: float
    draws: int
    seconds: float
    discarded: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.rhat <= RHAT and self.ess >= ESS

    @property
    def factor(self) -> float:
        """The factor by which the draws must grow to reach the goal: R-hat - 1 falls and ESS grows in proportion."""
        if not (math.isfinite(self.rhat) and self.ess > 0):
            return math.inf
        return max((self.rhat - 1) / (RHAT - 1), ESS / self.ess)


class Until:
    """The rounds of one run: predictions at every draw, the clock, and the decision to continue.

    Args:
        target, mesh: of the run.
        draws: per chain and round.
        budget: the limit; None for none.
    """

    def __init__(self, target: Target, mesh: Mesh, chains: int, draws: int, budget: Budget | None) -> None:
        self.target, self.mesh, self.chains, self.draws, self.budget = target.plain, mesh, chains, draws, budget
        self.values: list[Tensor] = []
        self.rounds: list[Judgement] = []
        self.began, self.before = time.monotonic(), 0.0
        self.last: Judgement | None = None
        self.judged = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, including those before a resume."""
        return self.before + time.monotonic() - self.began

    def table(self) -> Tensor:
        """Return the rounds so far, one row each."""
        return torch.tensor([astuple(one) for one in self.rounds], dtype=torch.float64)

    def restore(self, draws: Tensor, seconds: float, rounds: Tensor) -> None:
        """Continue after `seconds` and some rounds with the draws (own chains, draw, D) so far."""
        self.before = seconds
        self.rounds = [Judgement(r, e, int(n), s, bool(d)) for r, e, n, s, d in rounds.tolist()]
        self.values = [self._features(theta) for theta in draws.unbind(1)]

    def add(self, theta: Tensor) -> None:
        """Add a draw (C, D)."""
        self.values.append(self._features(theta))

    def _features(self, theta: Tensor) -> Tensor:
        with torch.no_grad():
            return self.target.features(theta.to(self.target.dtype))

    @property
    def timed(self) -> bool:
        """Whether a clock may end the run."""
        return self.budget is not None and self.budget.timed

    def expired(self, done: int) -> bool:
        """Return whether the budget is spent after `done` iterations."""
        return self.budget is not None and self.budget.spent(self.seconds, done) >= self.budget.amount

    def judge(self) -> Judgement:
        """Return the state of all chains. A collective call of all processes."""
        count = len(self.values)
        if count < MIN_DRAWS:
            return Judgement(math.inf, 0.0, count, self.seconds)
        values = self.mesh.all_chains(torch.stack(self.values, 1), self.chains)
        found = measure(values)
        # A prediction that never changes has no R-hat, and nothing to mix.
        moving = ~found.constant
        rhat = torch.nan_to_num(found.rhat, nan=math.inf, posinf=math.inf)[moving]
        ess = torch.nan_to_num(torch.minimum(found.bulk, found.tail), nan=0.0)[moving]
        if not len(rhat):
            return Judgement(math.inf, 0.0, count, self.seconds)
        return Judgement(float(rhat.max()), float(ess.min()), count, self.seconds)

    def extend(self, sampler: Sampler, discard: Callable[[], None]) -> int:
        """Check the last round and extend the sampler by another one. Return its draws per chain, 0 for none.

        `discard()` forgets the recorded draws. A collective call of all processes: the clock of the first decides.
        """
        now = self.judge()
        if not len(self.values):
            raise SamplingError(
                f"budget: {self.budget} ended in iteration {sampler.done}, before the first draw. "
                f"Pass a longer budget, fewer warm-up iterations or fewer chains"
            )
        expired, left = self._budget_left(sampler.done)
        last = self.budget is None and len(self.rounds) + 1 >= ROUNDS
        if now.met or expired or last:
            self.rounds.append(now)
            return 0
        # Without the budget for a longer round, starting one would only lose draws.
        apart = now.rhat > APART and left > 0.5
        most = max(MOST * self.draws, MOST_TOTAL // self.chains) if left > 0.5 else math.inf
        crowded = len(self.values) >= most
        self.rounds.append(Judgement(now.rhat, now.ess, now.draws, now.seconds, discarded=apart or crowded))
        more = self.draws
        if apart or crowded:
            self.values = []
            discard()
        else:
            wanted = math.ceil(len(self.values) * (min(now.factor, 2.0) - 1))
            more = max(1, int(min(wanted, most - len(self.values))))
        sampler.prolong(more, discard=apart or crowded)
        return more

    def _budget_left(self, done: int) -> tuple[bool, float]:
        """Return whether the budget is spent, and the fraction that is left. A collective call of all processes."""
        if self.budget is None:
            return False, 1.0
        spent: float = self.mesh.world.gather(self.budget.spent(self.seconds, done))[0]
        return spent >= self.budget.amount, 1 - spent / self.budget.amount

    def live_values(self) -> dict[str, float | str]:
        """Return the worst R-hat and ESS, and the expected time to the goal; of this process's chains."""
        if self.mesh.world.size > 1 or len(self.values) < 2 * MIN_DRAWS:
            return {}
        if self.last is None or time.monotonic() - self.judged > EVERY_SECONDS:
            self.last, self.judged = self.judge(), time.monotonic()
        now = self.last
        shown: dict[str, float | str] = {"R-hat": round(now.rhat, 3), "ESS": round(now.ess)}
        shown["ESS/s"] = now.ess / max(1e-9, now.seconds)
        if math.isfinite(now.factor) and not now.met:
            shown["to goal"] = to_text(now.seconds * (now.factor - 1))
        return shown

    def history(self) -> dict[str, Any]:
        """Return the goal, the rounds, and whether it was met."""
        met = bool(self.rounds) and self.rounds[-1].met
        if self.rounds and not met:
            now = self.rounds[-1]
            log.warning(
                "not mixed after %s: R-hat %.3f (goal %.2f), ESS %.0f (goal %.0f) of the worst prediction",
                to_text(now.seconds), now.rhat, RHAT, now.ess, ESS,
            )  # fmt: skip
        return {
            "goal": {"rhat": RHAT, "ess": ESS} | self._limit(),
            "met": met,
            "rounds": [asdict(one) for one in self.rounds],
        }

    def _limit(self) -> dict[str, float | None]:
        if self.budget is None or self.budget.timed:
            return {"seconds": None if self.budget is None else self.budget.amount}
        return {"seconds": None, "iterations": self.budget.amount}
