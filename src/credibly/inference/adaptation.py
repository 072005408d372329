"""Adaptation during warm-up, frozen afterwards.

The step size follows dual averaging, a diagonal mass the running variances of draws and gradients, and the trajectory
length a trial of a few candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from credibly.errors import SamplingError

# Limits of the search for a step size.
SMALLEST, LARGEST = 1e-12, 1e12


class DualAveraging:
    """Dual averaging of step sizes (K,) towards a target acceptance (Hoffman & Gelman 2014, section 3.2), in float64.

        h  <- (1 - 1/(t + t0)) h + (target - acceptance) / (t + t0)
        log eps = mu - sqrt(t)/gamma h,        log eps_bar <- t^-kappa log eps + (1 - t^-kappa) log eps_bar

    `size` is the step size to try next, `final` the average to freeze.
    """

    GAMMA, DELAY, KAPPA = 0.05, 10.0, 0.75

    def __init__(self, size: Tensor, target: float) -> None:
        self.target = target
        self.count = 0
        self.restart(size)

    def restart(self, size: Tensor, optimism: float = 10.0) -> None:
        """Restart near a step size, as after a change of the mass.

        Sizes are shrunk towards `optimism` times the given one: large steps are cheap to try.
        """
        self.centre = torch.log(optimism * size.double())
        self.log_size = torch.log(size.double())
        self.log_mean = torch.log(size.double())
        self.bias = torch.zeros_like(self.log_size)
        self.count = 0

    def update(self, acceptance: Tensor) -> None:
        """Update with the acceptance (K,) of one iteration."""
        self.count += 1
        rate = 1 / (self.count + self.DELAY)
        self.bias = (1 - rate) * self.bias + rate * (self.target - acceptance.double().cpu())
        self.log_size = self.centre - math.sqrt(self.count) / self.GAMMA * self.bias
        weight = self.count**-self.KAPPA
        self.log_mean = weight * self.log_size + (1 - weight) * self.log_mean

    @property
    def size(self) -> Tensor:
        """The step size of the next iteration, (K,)."""
        return self.log_size.exp()

    @property
    def final(self) -> Tensor:
        """The averaged step size, (K,)."""
        return self.log_mean.exp()

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state."""
        count = torch.tensor(float(self.count), dtype=torch.float64)
        return {
            "centre": self.centre,
            "log_size": self.log_size,
            "log_mean": self.log_mean,
            "bias": self.bias,
            "count": count,
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        self.centre, self.log_size, self.log_mean = tensors["centre"], tensors["log_size"], tensors["log_mean"]
        self.bias, self.count = tensors["bias"], int(tensors["count"])


class PooledAcceptance:
    """A pooled acceptance of all chains, for a common step size, that does not average away a chain that is stuck.

    It is the mean over the chains as long as each of them has recently reached half of the target, and falls towards 0
    with the worst of them below that. Fifteen chains at 0.9 would otherwise outvote one at 0, whatever the step size.

    If the worst chain limits the step size, dual averaging ends at the edge of what this chain can take, and beyond
    that edge it would not move at all: `margin` is the safety factor for the final size.

    Args:
        chains: C.
        target: acceptance rate that the step size is adapted to.
    """

    # Iterations over which a chain's acceptance is averaged.
    MEMORY = 10
    # The fraction of recent iterations in which the worst chain was the limit, from which there is a margin.
    OFTEN, MARGIN = 0.1, 0.75

    def __init__(self, chains: int, target: float) -> None:
        self.least = target / 2
        self.recent = torch.full((chains,), target, dtype=torch.float64)
        self.limited = torch.zeros((), dtype=torch.float64)

    @property
    def margin(self) -> float:
        """Factor of the final step size: 1 unless one chain limits it."""
        return self.MARGIN if float(self.limited) > self.OFTEN else 1.0

    def update(self, acceptance: Tensor) -> Tensor:
        """Update with the acceptance (C,) of one iteration, and return the pooled one (1,)."""
        acceptance = acceptance.double().cpu()
        self.recent = self.recent + (acceptance - self.recent) / self.MEMORY
        worst = self.recent.min()
        self.limited = self.limited + ((worst < self.least).double() - self.limited) / self.MEMORY
        return acceptance.mean(0, keepdim=True) * (worst / self.least).clamp(max=1)


def harmonic_mean(values: Tensor) -> Tensor:
    """Return the harmonic mean (1,) of non-negative values (C,): 0 if any of them is."""
    return 1 / (1 / values.clamp(min=1e-300)).mean(0, keepdim=True)


class Welford:
    """Running variance of C chains, each about its own mean: chains in different modes do not inflate it."""

    def __init__(self, chains: int, dim: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(chains, dim, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def update(self, theta: Tensor) -> None:
        """Update with a draw (C, D)."""
        self.count += 1
        gap = theta.double() - self.mean
        self.mean = self.mean + gap / self.count
        self.squares = self.squares + gap * (theta.double() - self.mean)

    def variance(self, prior: Tensor, squares: Tensor | None = None) -> Tensor:
        """Return the variance (D,), pooled over chains and shrunk slightly towards a guess (D,).

        The guess counts as five draws with a thousandth of its variance, so it only keeps the estimate away from zero;
        without draws it is returned as it is. `squares` are those of all chains, if this process has only some.
        """
        squares = self.squares if squares is None else squares
        weight = len(squares) * self.count / (len(squares) * self.count + 5.0)
        return weight * self.unshrunk(squares) + (1 - weight) * 1e-3 * prior if self.count > 1 else prior

    def unshrunk(self, squares: Tensor) -> Tensor:
        """Return the variance (D,), pooled over the chains whose `squares` are given."""
        return squares.sum(0) / max(1, len(squares) * (self.count - 1))

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state."""
        return {
            "mean": self.mean,
            "squares": self.squares,
            "count": torch.tensor(float(self.count), dtype=torch.float64),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        device = self.mean.device
        self.mean, self.squares = tensors["mean"].to(device), tensors["squares"].to(device)
        self.count = int(tensors["count"])


def variance_with_gradients(draws: Tensor, gradients: Tensor, otherwise: Tensor) -> Tensor:
    """Return a variance estimate (D,) that is accurate even before the chains have crossed the density.

    In a Gaussian with independent coordinates sqrt(Var x / Var g), with g the gradient, is the variance wherever the
    draws x lie, so a direction is scaled correctly long before chains have travelled along it. With correlations it is
    smaller than the variance, and the larger of the two is taken. It needs no guess of the scale.

    Args:
        draws, gradients: the variances of x and g.
        otherwise: the variance of coordinates that did not move, or whose gradient did not change.
    """
    known = (draws > 0) & (gradients > 0)
    return torch.where(known, torch.maximum(draws, torch.sqrt(draws / gradients)), otherwise)


class LengthTrial:
    """A trial of trajectory lengths: which one decorrelates the features of the state most per gradient.

    The full length competes with two trajectories of half of it, four of a quarter and eight of an eighth: the same
    number of gradients each. f are features of the state, such as predictions at some rows, and f' those after such a
    block, rejections included. The remaining correlation is 1 - E (f' - f)^2 / (2 Var f). (A single iteration of each
    would not be enough: a short trajectory moves the fast part of f, and the slow part is what matters.) The longest
    length within `SLACK` of the smallest correlation wins: the estimates are no more precise than that, and too short
    mixes worse than too long.
    """

    SLACK = 0.05
    PARTS = (1.0, 0.5, 0.25, 0.125)
    # The length of every iteration, as an index into PARTS.
    BLOCKS = tuple(k for k, part in enumerate(PARTS) for _ in range(round(1 / part)))

    def __init__(self, chains: int, features: int, device: torch.device) -> None:
        self.jumps = torch.zeros(len(self.PARTS), chains, features, dtype=torch.float64, device=device)
        self.blocks = torch.zeros(len(self.PARTS), dtype=torch.float64)
        # Features at the start of the block.
        self.begun = torch.zeros(chains, features, dtype=torch.float64, device=device)
        self.values = Welford(chains, features, device)

    @property
    def part(self) -> float:
        """The length to try next, as a fraction of the full one."""
        return self.PARTS[self.BLOCKS[self.values.count % len(self.BLOCKS)]]

    def update(self, before: Tensor, after: Tensor) -> None:
        """Update with the features (C, F) before and after an iteration."""
        at, size = self.values.count % len(self.BLOCKS), len(self.BLOCKS)
        kind = self.BLOCKS[at]
        if at == 0 or self.BLOCKS[at - 1] != kind:
            self.begun = before.clone()
        if at + 1 == size or self.BLOCKS[at + 1] != kind:
            self.jumps[kind] += torch.square(after - self.begun)
            self.blocks[kind] += 1
        self.values.update(after)

    def remaining(self, jumps: Tensor, means: Tensor, squares: Tensor) -> Tensor:
        """Return the remaining correlation of each length, averaged over the features; 1 for a length not tried.

        The arguments are `jumps`, `values.mean` and `values.squares` of all chains.
        """
        variance = squares.mean(0) / max(1, self.values.count) + means.var(0, correction=0)
        jump = jumps.mean(1).cpu() / self.blocks.clamp(min=1).unsqueeze(1) / variance.cpu().clamp(min=1e-300)
        return 1 - jump.mean(1) / 2

    def choice(self, left: Tensor) -> float:
        """Return the chosen fraction of the full length."""
        # Mirrored features are no better than unchanged ones.
        size = left.abs()
        good = size <= size.min() + self.SLACK
        return self.PARTS[int(good.int().argmax())]

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state."""
        values = {f"values.{k}": v for k, v in self.values.tensors().items()}
        return {"jumps": self.jumps, "blocks": self.blocks, "begun": self.begun, **values}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        device = self.jumps.device
        self.jumps, self.begun = tensors["jumps"].to(device), tensors["begun"].to(device)
        self.blocks = tensors["blocks"]
        self.values.restore({k.removeprefix("values."): v for k, v in tensors.items() if k.startswith("values.")})


def search_step_size(acceptance_of: Callable[[Tensor, int], Tensor], size: Tensor, target: float) -> Tensor:
    """Double or halve step sizes (K,) until a single step is accepted about as often as the target acceptance.

    `acceptance_of(sizes, trial)` returns the acceptance (K,) of one step of the given sizes. The result is infinite if
    every step is accepted, and 0 if none is.
    """
    size, direction, found = size.clone(), torch.zeros_like(size), torch.zeros_like(size, dtype=torch.bool)
    for trial in range(200):
        acceptance = acceptance_of(size, trial)
        wanted = torch.where(acceptance > target, 1.0, -1.0).to(size)
        turned = ~found & (direction != 0) & (wanted != direction)
        going = ~found & ~turned
        size = torch.where(turned & (wanted < 0), size / 2, torch.where(going, size * 2.0**wanted, size))
        direction = torch.where(going, wanted, direction)
        found = found | turned | (size < SMALLEST) | (size > LARGEST)
        if bool(found.all()):
            break
    return torch.where(size < SMALLEST, 0.0, torch.where(size > LARGEST, math.inf, size))


def usable_step_sizes(found: Tensor, all_found: Tensor) -> Tensor:
    """Return the sizes (K,) that a search found; a chain without one gets the smallest (or largest) of `all_found`.

    Raise if no chain has one.
    """
    good = all_found[(all_found > 0) & torch.isfinite(all_found)]
    if not len(good):
        flat = bool((all_found > 0).any())
        size, outcome = (LARGEST, "accepted") if flat else (SMALLEST, "rejected")
        reason = "The density may be flat"
        if not flat:
            reason = "The gradient does not match the density, or data are not standardised"
        raise SamplingError(f"no step size was found: even at {size:.1e} a single step is {outcome}. {reason}")
    return torch.where(found == 0, good.min(), torch.where(torch.isfinite(found), found, good.max()))


def largest_curvature(
    gradient: Callable[[Tensor], Tensor], theta: Tensor, root: Tensor, direction: Tensor, iterations: int = 30
) -> tuple[Tensor, Tensor]:
    """Return the eigenvalue (C,) of P^1/2 Hessian P^1/2 of largest magnitude, and its eigenvector (C, D).

    By power iteration on differences of gradients. The magnitude is returned: a step is limited by either sign.

    Args:
        gradient: of the log density at (C, D) points.
        theta: the points (C, D).
        root: P^1/2, (C, D).
        direction: random starting directions (C, D).
        iterations: of the power method.
    """
    value, reach = theta.new_zeros(len(theta)), 0.01
    for _ in range(iterations):
        direction = direction / direction.norm(dim=-1, keepdim=True)
        offset = reach * root * direction
        ahead, behind = gradient(theta + offset), gradient(theta - offset)
        image = root * (behind - ahead) / (2 * reach)
        value, direction = image.norm(dim=-1), image
    return value, direction


# Warm-up iterations below which there are no windows for the mass, and needed to find a step size.
LEAST_WARMUP = 20


def windows(warmup: int, mass: bool) -> list[tuple[str, int, int]]:
    """Return the phases of a warm-up as (name, first, end): for the step size, with windows for the mass in between.

    With mass: 15 % for the step size, then windows that double in length and restart the variance, then 10 % for the
    step size with the final mass.
    """
    if not mass or warmup < LEAST_WARMUP:
        return [("step size", 0, warmup)] if warmup else []
    first, last = round(0.15 * warmup), warmup - round(0.10 * warmup)
    phases = [("step size", 0, first)]
    start, length = first, max(10, round(0.05 * warmup))
    while start < last:
        stop = start + length if start + 3 * length <= last else last
        phases.append(("mass", start, stop))
        start, length = stop, 2 * length
    return [*phases, ("step size", last, warmup)]
