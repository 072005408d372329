"""The mass of HMC and NUTS: what a setting means for a target, and its adaptation in the windows of warm-up.

    identity, prior   fixed
    diagonal          variances of draws and gradients
    low-rank          correlations of all coordinates, up to `mass_rank` eigenvectors
    block             correlations within each layer: all of them, or up to `mass_rank` eigenvectors of a large layer
    posterior         the covariance of a Gaussian posterior of the same problem, fixed

Each window replaces the estimate of the one before. Chains that are far from the others are left out, and the record
counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.gaussians.mass import (
    CorrelatedMass,
    Factor,
    InverseMass,
    covariance_mass,
    mass_of_tensors,
    mass_tensors,
)
from credibly.inference.adaptation import Welford, variance_with_gradients
from credibly.inference.kernels.hmc import State
from credibly.inference.mass_estimates import far_chains, spectral_estimate
from credibly.inference.sampling.hmc_plan import HMCPlan, MassBlock
from credibly.inference.target import ProblemTarget, Target
from credibly.networks.layout import Layout
from credibly.posterior.base import Posterior
from credibly.priors.gaussian import signature

KINDS = ("auto", "identity", "prior", "diagonal", "low-rank", "block")
DIAGONAL = ("auto", "identity", "prior", "diagonal")
ADAPTED = ("diagonal", "low-rank", "block")
# Parameters of a layer up to which "block" keeps every eigenvector that matters.
DENSE_BLOCK = 512
# Draws of all chains that a window keeps, and values beyond which it keeps fewer.
MOST_ROWS, MOST_VALUES = 2_000, 10**6
# At least these of every chain, and of all.
LEAST_DRAWS, LEAST_ROWS = 4, 100

# A (D,) tensor is a diagonal M^-1.
GivenMass = Posterior | Tensor | CorrelatedMass


# -- settings ----------------------------------------------------------------------------------------------------------
def check_mass(mass: object, start: object, rank: object) -> None:
    """Raise unless the three settings of the mass make sense together."""
    given = (Posterior, Tensor, CorrelatedMass)
    check_integer("mass_rank", rank)
    if not isinstance(mass, given):
        check_choice("mass", mass, KINDS, "Or pass a posterior of the same problem")
    if start is None:
        return
    if not isinstance(start, given):
        raise InputError("mass_start", f"must be a posterior of the same problem or None, got {start!r}")
    if mass not in ADAPTED:
        known = ", ".join(repr(kind) for kind in ADAPTED)
        raise InputError("mass_start", f"must be None unless mass is one of {known}, got mass={mass!r}")


def given_mass(name: str, given: GivenMass, target: Target) -> Tensor | CorrelatedMass:
    """Return M^-1 in the target's dtype: the covariance of a posterior, or the one that is given.

    Raise if it belongs to another network, or is not the covariance of one Gaussian.
    """
    if isinstance(given, CorrelatedMass):
        return given.to(target.device, target.dtype)
    if isinstance(given, Tensor):
        if given.shape != (target.dim,) or not bool((torch.isfinite(given) & (given > 0)).all()):
            shape = tuple(given.shape)
            raise InputError(name, f"must be {target.dim} positive variances, got a tensor of shape {shape}")
        return given.to(target.device, target.dtype)
    if not isinstance(target, ProblemTarget):
        found = f"must not be a posterior for a density, which has no network, got {given!r}"
        raise InputError(name, found, 'Use "low-rank" or "diagonal"')
    try:
        gaussian = given.as_prior()
    except InputError as error:
        raise InputError(name, f"must have the covariance of one Gaussian, got {given!r} ({error})") from error
    mine, theirs = signature(target.problem.layout), gaussian.names
    if mine != theirs:
        other = next((pair for pair in zip(theirs, mine) if pair[0] != pair[1]), (f"{len(theirs)} tensors", len(mine)))
        raise InputError(
            name,
            f"must be a posterior of this network, got one with {other[0]} where the problem has {other[1]}",
            "Network, random parameters and likelihood must be those of this problem",
        )
    return covariance_mass(gaussian.precision).to(target.device, target.dtype)


def mass_blocks(kind: str, target: Target, rank: int) -> tuple[MassBlock, ...]:
    """Return the coordinates whose correlations a kind of mass estimates together, with the maximum rank of each."""
    if kind == "low-rank":
        return (MassBlock(0, target.dim, min(rank, target.dim)),)
    if kind != "block":
        return ()
    if not isinstance(target, ProblemTarget):
        raise InputError("mass", 'must not be "block" for a density, which has no layers', 'Use "low-rank"')
    return layer_blocks(target.problem.layout, rank)


def layer_blocks(layout: Layout, rank: int) -> tuple[MassBlock, ...]:
    """Return a block per module that owns random parameters: the weight and the bias of a layer together."""
    ends: dict[str, tuple[int, int]] = {}
    last = ""
    for entry in layout.entries:
        owner = entry.name.rpartition(".")[0]
        # Tensors of one module that do not follow each other, and those without a module, are blocks by themselves.
        if not owner or (owner in ends and owner != last):
            owner = entry.name
        start = ends[owner][0] if owner in ends else entry.start
        ends[owner], last = (start, entry.stop), owner
    sizes = ((start, stop - start) for start, stop in ends.values())
    return tuple(MassBlock(start, size, size if size <= DENSE_BLOCK else min(rank, size)) for start, size in sizes)


# -- adaptation --------------------------------------------------------------------------------------------------------
class Window(NamedTuple):
    """The draws and gradients of this process's chains in a window, (C, n, D) each."""

    draws: Tensor
    gradients: Tensor


class MassAdaptation:
    """M^-1 and what the current window has collected for the next one.

    Args:
        target, plan, mesh: target, plan and mesh of the run.

    Attributes:
        inverse: M^-1.
        excluded: chains that were left out of a window, summed over the windows.
    """

    def __init__(self, target: Target, plan: HMCPlan, mesh: Mesh) -> None:
        self.target, self.plan, self.mesh = target, plan, mesh
        self.inverse: InverseMass = plan.inverse_mass
        self.chains = len(mesh.chains(plan.chains))
        self.excluded = self.count = 0
        self.levels: Tensor
        self.draws: Welford
        self.gradients: Welford
        self.window: list[Window]
        self._empty()

    @property
    def adapts(self) -> bool:
        """Whether warm-up has windows for the mass."""
        return self.plan.mass in ADAPTED

    def update(self, state: State, first: int, t: int, end: int) -> None:
        """Take the states after iteration t of the window from `first` to `end`; the last one sets the mass."""
        lik, prior = self.target.weights
        self.levels = self.levels + lik * state.log_likelihood + prior * state.log_prior
        self.count += 1
        if not self.plan.mass_blocks:
            self.draws.update(state.theta)
            self.gradients.update(state.gradient)
        elif (t - first) % self._stride(end - first) == 0:
            self.window.append(Window(state.theta.clone(), state.gradient.clone()))
        if t + 1 == end:
            self._set()
            self._empty()

    def history(self) -> dict[str, Any]:
        """Return the kind, the number of eigenvectors, and the condition number of what they correct."""
        found: dict[str, Any] = {"kind": self.plan.mass, "rank": 0, "condition": 1.0}
        if isinstance(self.inverse, CorrelatedMass):
            values = torch.cat([factor.values for factor in self.inverse.factors])
            high, low = float(values.max().clamp(min=1)), float(values.min().clamp(max=1))
            found |= {"rank": self.inverse.rank, "condition": high / low}
        return {**found, "excluded_chains": self.excluded}

    def range(self) -> list[float] | None:
        """Return the smallest and the largest variance, None for the identity."""
        if self.inverse is None:
            return None
        variance = self.inverse if isinstance(self.inverse, Tensor) else self.inverse.diagonal()
        return [float(variance.min()), float(variance.max())]

    def _set(self) -> None:
        far = far_chains(self._of_all(self.levels) / self.count, self.target.dim)
        self.excluded += int(far.sum())
        if self.plan.mass_blocks:
            self.inverse = self._correlated(far)
            return
        draws, gradients = self._of_all(self.draws.squares), self._of_all(self.gradients.squares)
        if bool(far.any()):
            draws, gradients = draws[~far], gradients[~far]
        variance = variance_with_gradients(
            self.draws.unshrunk(draws),
            self.gradients.unshrunk(gradients),
            self.draws.variance(self.target.scale**2, draws),
        )
        self.inverse = variance.to(self.target.dtype)

    def _correlated(self, far: Tensor) -> Tensor | CorrelatedMass:
        draws, gradients = (self._of_all(torch.stack(part, 1))[~far] for part in zip(*self.window))
        usual = self.target.scale.double()
        scale, factors = usual.clone(), []
        for start, size, rank in self.plan.mass_blocks:
            own = slice(start, start + size)
            scale[own], found = spectral_estimate(draws[..., own], gradients[..., own], usual[own], rank)
            factors += [Factor(start, vectors, values) for _, vectors, values in found]
        if not factors:
            return torch.square(scale).to(self.target.dtype)
        return CorrelatedMass(scale, tuple(factors)).to(self.target.device, self.target.dtype)

    def _stride(self, length: int) -> int:
        """Return how many iterations of a window there are per draw that is kept."""
        rows = min(MOST_ROWS, max(LEAST_ROWS, MOST_VALUES // self.target.dim))
        return -(-length // max(LEAST_DRAWS, rows // self.plan.chains))

    def _empty(self) -> None:
        device, dim = self.target.device, self.target.dim
        self.levels = torch.zeros(self.chains, dtype=torch.float64, device=device)
        self.count = 0
        self.draws, self.gradients = (Welford(self.chains, dim, device) for _ in range(2))
        self.window = []

    # -- state ---------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the rest of the run depends on."""
        found = mass_tensors(self.inverse)
        if not self.adapts:
            return found
        found["window.counts"] = torch.tensor([self.count, self.excluded], dtype=torch.float64)
        if self.count:
            found["window.levels"] = self.levels
        if self.draws.count:
            found |= {f"draws.{k}": v for k, v in self.draws.tensors().items()}
            found |= {f"gradients.{k}": v for k, v in self.gradients.tensors().items()}
        if self.window:
            draws, gradients = zip(*self.window)
            found |= {"window.draws": torch.stack(draws, 1), "window.gradients": torch.stack(gradients, 1)}
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        device = self.target.device
        self.inverse = mass_of_tensors(tensors, device)
        if not self.adapts:
            return
        self._empty()
        self.count, self.excluded = (int(n) for n in tensors["window.counts"].tolist())
        if self.count:
            self.levels = tensors["window.levels"].to(device)
        if draws := below("draws."):
            self.draws.restore(draws)
            self.gradients.restore(below("gradients."))
        if "window.draws" in tensors:
            both = (tensors[f"window.{part}"].to(device).unbind(1) for part in ("draws", "gradients"))
            self.window = [Window(*pair) for pair in zip(*both)]

    @staticmethod
    def chain_axis(name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        per_chain = name in ("window.levels", "window.draws", "window.gradients")
        return 0 if per_chain or name.endswith((".mean", ".squares")) else None

    def _of_all(self, own: Tensor) -> Tensor:
        return self.mesh.all_chains(own, self.plan.chains)
