"""Adaptation in warm-up: step size by dual averaging, diagonal mass by a running variance, trajectory length by trial. Then frozen."""

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


class LengthTrial:
    """Which of a few trajectory lengths makes the most of its gradients, by how far it carries what the chains are for.

    The full length is set against two trajectories of half of it, four of a quarter and eight of an eighth: the same number
    of gradients each. f are features of the state, such as predictions at some rows, and f' those after such a block,
    rejections included. The correlation that is left of f is 1 - E (f' - f)^2 / (2 Var f). (One iteration of each would not
    tell: a short trajectory moves the quick part of f, and the slow one counts.) The longest length is taken that leaves no
    more than `SLACK` above the least: the estimates are no finer, and what is too short mixes worse than what is too long.
    """

    SLACK = 0.05
    PARTS = (1.0, 0.5, 0.25, 0.125)
    BLOCKS = tuple(k for k, part in enumerate(PARTS) for _ in range(round(1 / part)))  # the length of every iteration

    def __init__(self, chains: int, features: int, device: torch.device) -> None:
        self.jumps = torch.zeros(len(self.PARTS), chains, features, dtype=torch.float64, device=device)
        self.blocks = torch.zeros(len(self.PARTS), dtype=torch.float64)
        self.begun = torch.zeros(chains, features, dtype=torch.float64, device=device)  # features where the block began
        self.values = Welford(chains, features, device)

    @property
    def part(self) -> float:
        """The length to try next, as a part of the full one."""
        return self.PARTS[self.BLOCKS[self.values.count % len(self.BLOCKS)]]

    def update(self, before: Tensor, after: Tensor) -> None:
        """Takes in the features (C, F) before and after an iteration."""
        at, size = self.values.count % len(self.BLOCKS), len(self.BLOCKS)
        kind = self.BLOCKS[at]
        if at == 0 or self.BLOCKS[at - 1] != kind:
            self.begun = before.clone()
        if at + 1 == size or self.BLOCKS[at + 1] != kind:
            self.jumps[kind] += torch.square(after - self.begun)
            self.blocks[kind] += 1
        self.values.update(after)

    def left(self, jumps: Tensor, means: Tensor, squares: Tensor) -> Tensor:
        """The correlation that each length leaves, on average over the features; one that was not tried leaves all.

        The arguments are jumps, values.mean and values.squares of all chains.
        """
        variance = squares.mean(0) / max(1, self.values.count) + means.var(0, correction=0)
        jump = jumps.mean(1).cpu() / self.blocks.clamp(min=1).unsqueeze(1) / variance.cpu().clamp(min=1e-300)
        return 1 - jump.mean(1) / 2

    def choice(self, left: Tensor) -> float:
        """The part of the full length to keep."""
        size = left.abs()  # what only mirrors the features is no better than what leaves them where they are
        good = size <= size.min() + self.SLACK
        return self.PARTS[int(good.int().argmax())]

    def tensors(self) -> dict[str, Tensor]:
        """All of the state."""
        values = {f"values.{k}": v for k, v in self.values.tensors().items()}
        return {"jumps": self.jumps, "blocks": self.blocks, "begun": self.begun, **values}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        device = self.jumps.device
        self.jumps, self.begun = tensors["jumps"].to(device), tensors["begun"].to(device)
        self.blocks = tensors["blocks"]
        self.values.restore({k.removeprefix("values."): v for k, v in tensors.items() if k.startswith("values.")})


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
