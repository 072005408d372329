"""Adaptation in warm-up: step size by dual averaging, diagonal mass by Welford's running variance. Then both are frozen."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class DualAveraging:
    """Step sizes (K,) whose acceptance goes to a target (Hoffman & Gelman 2014, section 3.2). All in float64.

        h  <- (1 - 1/(t + t0)) h + (target - acceptance) / (t + t0)
        log eps = mu - sqrt(t)/gamma h,        log eps_bar <- t^-kappa log eps + (1 - t^-kappa) log eps_bar

    `size` is the one to try next, `final` the average to freeze.
    """

    GAMMA, DELAY, KAPPA = 0.05, 10.0, 0.75

    def __init__(self, size: Tensor, target: float) -> None:
        self.target = target
        self.count = 0
        self.restart(size)

    def restart(self, size: Tensor) -> None:
        """Begins again near a step size, as after a change of the mass."""
        self.centre = torch.log(10 * size.double())
        self.log_size = torch.log(size.double())
        self.log_mean = torch.log(size.double())
        self.bias = torch.zeros_like(self.log_size)
        self.count = 0

    def update(self, acceptance: Tensor) -> None:
        """Takes in the acceptance (K,) of one iteration."""
        self.count += 1
        share = 1 / (self.count + self.DELAY)
        self.bias = (1 - share) * self.bias + share * (self.target - acceptance.double().cpu())
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
        """All of the state."""
        count = torch.tensor(float(self.count), dtype=torch.float64)
        return {
            "centre": self.centre,
            "log_size": self.log_size,
            "log_mean": self.log_mean,
            "bias": self.bias,
            "count": count,
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.centre, self.log_size, self.log_mean = tensors["centre"], tensors["log_size"], tensors["log_mean"]
        self.bias, self.count = tensors["bias"], int(tensors["count"])


class Welford:
    """Running variance of C chains, each about its own mean: chains in different modes do not inflate it."""

    def __init__(self, chains: int, dim: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(chains, dim, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def update(self, theta: Tensor) -> None:
        """Takes in a draw (C, D)."""
        self.count += 1
        gap = theta.double() - self.mean
        self.mean = self.mean + gap / self.count
        self.squares = self.squares + gap * (theta.double() - self.mean)

    def variance(self, prior: Tensor, squares: Tensor | None = None) -> Tensor:
        """(D,), pooled over chains and shrunk a little towards a guess (D,), which is all there is without draws.

        The guess counts as five draws of a thousandth of its variance, so it only keeps the estimate away from zero. `squares`
        are those of all chains, where this holds some of them.
        """
        squares = self.squares if squares is None else squares
        chains = len(squares)
        seen = squares.sum(0) / max(1, chains * (self.count - 1))
        weight = chains * self.count / (chains * self.count + 5.0)
        return weight * seen + (1 - weight) * 1e-3 * prior if self.count > 1 else prior

    def tensors(self) -> dict[str, Tensor]:
        """All of the state."""
        return {
            "mean": self.mean,
            "squares": self.squares,
            "count": torch.tensor(float(self.count), dtype=torch.float64),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        device = self.mean.device
        self.mean, self.squares = tensors["mean"].to(device), tensors["squares"].to(device)
        self.count = int(tensors["count"])


def windows(warmup: int, mass: bool) -> list[tuple[str, int, int]]:
    """Phases of a warm-up as (name, first, last + 1): the step size alone, or with windows of the mass in the middle.

    With mass: 15 % for the step size, then windows that double in length, each of which starts the variance anew, then 10 %
    for the step size with the final mass.
    """
    if not mass or warmup < 20:
        return [("step size", 0, warmup)] if warmup else []
    first, last = round(0.15 * warmup), warmup - round(0.10 * warmup)
    phases = [("step size", 0, first)]
    start, length = first, max(10, round(0.05 * warmup))
    while start < last:
        stop = start + length if start + 3 * length <= last else last
        phases.append(("mass", start, stop))
        start, length = stop, 2 * length
    return [*phases, ("step size", last, warmup)]
