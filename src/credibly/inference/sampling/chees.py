"""The ChEES sampler: HMC whose warm-up finds one trajectory length for all chains. See `kernels.chees`.

The criterion is measured in weight space, in units of the mass. Its centre is the mean of all chains for a plain
density. A network's chains lie in permuted copies of the same modes, whose mean is meaningless, so each chain has its
own centre. (Centres in function space do not help: predictions have a fast component, which the shortest trajectories
change most per gradient. On UCI concrete, 8-50-1, they drive T to 0.06, with a third of the effective predictions per
gradient that T = 1 has.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.inference.kernels.chees import chees, van_der_corput, weighted_mean
from credibly.inference.kernels.hmc import Info, State
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.warmup import Warmup
from credibly.inference.target import DensityTarget, Target

# Steps of the first trajectories.
FIRST_STEPS = 3


class LengthAscent:
    """Adam (Kingma & Ba 2015) on log T, maximising C(T) / T, the criterion per gradient.

        g = (dC / d log T - C) / c,    s <- b s + (1 - b) g^2,    log T <- log T + RATE / sqrt(k) g / sqrt(s)

    c is a running geometric mean of C, and g is clipped: the criterion spans many orders of magnitude before chains
    have reached the bulk of the density, and a single outlier would otherwise stop Adam for the rest of the warm-up.
    `length` is the trajectory length to use next, `final` an average that forgets the first ones.
    """

    RATE, DECAY, KAPPA = 0.3, 0.95, 0.75
    # Decay of the geometric mean, and the largest g.
    MEMORY, CLIP = 0.8, 10.0

    def __init__(self) -> None:
        self.log_length = self.log_mean = self.squares = self.log_scale = 0.0
        self.count = 0

    def begin(self, length: float) -> None:
        """Start at a length, with large steps."""
        self.log_length = self.log_mean = math.log(length)
        self.squares, self.log_scale, self.count = 0.0, 0.0, 0

    def update(self, criterion: float, slope: float, least: float, most: float) -> None:
        """Take a step, except down from `least` (a single step) or up from `most`, where trajectories are cut."""
        if criterion <= 0:
            return
        self.count += 1
        kept = self.MEMORY if self.count > 1 else 0.0
        self.log_scale = kept * self.log_scale + (1 - kept) * math.log(criterion)
        gradient = min(self.CLIP, max(-self.CLIP, (slope - criterion) / math.exp(self.log_scale)))
        self.squares = self.DECAY * self.squares + (1 - self.DECAY) * gradient**2
        size = math.sqrt(self.squares / (1 - self.DECAY**self.count)) or 1.0
        moved = self.log_length + self.RATE / math.sqrt(self.count) * gradient / size
        low, high = min(self.log_length, math.log(least)), max(self.log_length, math.log(most))
        self.log_length = min(high, max(low, moved))
        self.log_mean += self.count**-self.KAPPA * (self.log_length - self.log_mean)

    def rescale(self, factor: float) -> None:
        """Multiply all lengths, as after a change of their unit."""
        self.log_length += math.log(factor)
        self.log_mean += math.log(factor)

    @property
    def length(self) -> float:
        """The trajectory length of the next iteration, before its jitter."""
        return math.exp(self.log_length)

    @property
    def final(self) -> float:
        """The averaged length."""
        return math.exp(self.log_mean)

    def tensor(self) -> Tensor:
        """Return the state as a tensor."""
        return torch.tensor(
            [self.log_length, self.log_mean, self.squares, self.log_scale, float(self.count)], dtype=torch.float64
        )

    def restore(self, tensor: Tensor) -> None:
        """Restore the state that `tensor` returned."""
        self.log_length, self.log_mean, self.squares, self.log_scale, count = tensor.tolist()
        self.count = int(count)


class ChEESWarmup(Warmup):
    """The warm-up of HMC, which also finds the trajectory length.

    The first estimate of the mass changes how many steps a trajectory needs, so the search for its length starts again.
    Later estimates only change its unit.

    Attributes:
        centres: running means of the positions of every chain, (C, D), that forget the first ones.
    """

    def __init__(
        self, target: Target, plan: HMCPlan, seed: int, mesh: Mesh, one_step: Callable[[Tensor, int], Tensor]
    ) -> None:
        super().__init__(target, plan, seed, mesh, one_step)
        self.ascent = LengthAscent()
        self.centres: Tensor | None = None
        self.pooled_centre = isinstance(target, DensityTarget)

    def begin(self) -> None:
        """Search for a rough step size, and start with trajectories of a few steps."""
        super().begin()
        self._begin_length()

    def observe(self, t: int, current: State, proposal: State, info: Info, steps: list[int]) -> None:
        """Move the trajectory length up the slope of the criterion."""
        unit: Tensor | float = 1.0
        velocity = proposal.momentum.double()
        if self.inverse_mass is not None:
            # The method offers no other mass.
            assert isinstance(self.inverse_mass, Tensor)
            unit = self.inverse_mass.double().rsqrt()
            velocity = velocity * self.inverse_mass
        taken = (self.size * torch.tensor(steps, dtype=torch.float64)).to(velocity.device)
        self._move_centres(t, current.theta.double())
        assert self.centres is not None
        centre = self._of_all(self.centres).mean(0) if self.pooled_centre else self.centres
        values = chees(
            (current.theta.double() - centre) * unit,
            (proposal.theta.double() - centre) * unit,
            taken.unsqueeze(1) * velocity * unit,
        )
        means = weighted_mean(self._of_all(torch.stack(values), 1), self._of_all(info.acceptance))
        criterion, slope = means.tolist()
        size = self._mean_size()
        self.ascent.update(criterion, slope, least=size, most=size * self.most_steps(t))
        self.length = self.ascent.length

    def update(self, t: int, before: Tensor, state: State, info: Info) -> State:
        """Adapt what HMC adapts, and in the last iteration of warm-up take the average length."""
        mass, size, restarts = self.inverse_mass, self._mean_size(), len(self.restarts)
        state = super().update(t, before, state, info)
        if self.inverse_mass is not mass:
            first = next(end for name, _, end in self.phases if name == "mass")
            if t + 1 == first:
                self._begin_length()
            else:
                self.ascent.rescale(self._mean_size() / size)
                self.length = self.ascent.length
        for restart in self.restarts[restarts:]:
            if self.centres is not None and restart.chain in self.own:
                own = restart.chain - self.own.start
                self.centres[own] = state.theta[own].double()
        if t + 1 == self.end:
            self.length, self.centres = self.ascent.final, None
        return state

    def _begin_length(self) -> None:
        self.length = min(FIRST_STEPS, self.plan.max_steps) * self._mean_size()
        self.ascent.begin(self.length)

    def _move_centres(self, t: int, theta: Tensor) -> None:
        if self.centres is None:
            self.centres = theta.clone()
        else:
            self.centres = self.centres + (t + 1) ** -LengthAscent.KAPPA * (theta - self.centres)

    def _mean_size(self) -> float:
        """Return the geometric mean of all chains' step sizes."""
        return float(self._of_all(self.size).log().mean().exp())

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the rest of the run depends on."""
        found = {**super().tensors(), "length": torch.tensor(self.length, dtype=torch.float64)}
        found["ascent"] = self.ascent.tensor()
        return found if self.centres is None else {**found, "centres": self.centres}

    def restore(self, tensors: dict[str, Tensor], done: int) -> None:
        """Restore the state that `tensors` returned after `done` iterations."""
        super().restore(tensors, done)
        self.ascent.restore(tensors["ascent"])
        self.centres = tensors["centres"].to(self.target.device) if "centres" in tensors else None

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        return 0 if name == "centres" else super().chain_axis(name)


class ChEESSampler(HMCSampler):
    """C chains of HMC with one trajectory length T for all of them; iteration t has a fraction of it, h_t T."""

    warmup_kind = ChEESWarmup

    @property
    def truncates(self) -> bool:
        """Always true: the length is learned, whatever the step size, so trajectories may become too long."""
        return True

    def _length(self, t: int) -> float:
        return self.adaptation.length * van_der_corput(t)
