"""One run of `active-mnist`: one method with one acquisition rule, from twenty labels until the target accuracy.

The features of a digit are fixed: edges in eight directions, averaged over overlapping squares on a 7 x 7 grid and
normalised to unit length. A 392-64-10 network is trained on them; a fit takes a fraction of a second on a CPU, so every
batch of labels can have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credibly.active import ActiveLearner
from credibly.core.rng import global_stream, stream
from credibly.likelihoods import Categorical
from credibly.methods import BayesByBackprop, DeepEnsemble, MCDropout, Method
from credibly.networks.zoo import mlp
from credibly.posterior.base import Posterior
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from studies import side_by_side as side

RULES = {"random": "random", "bald": "BALD", "batch": "BatchBALD"}
METHODS = ("dropout", "ensemble", "bbb")
ARMS = tuple(f"{rule}-{method}" for method in METHODS for rule in RULES)
HIDDEN, PRIOR = 64, 15.0
DIRECTIONS, GRID = 8, 7
DRAWS = 20  # passes or draws per score and per test; an ensemble uses its members


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        pool: rows to choose from.
        each: initial labels per class.
        batch: labels per round.
        most: the maximum number of labels.
        steps: training steps of an ensemble member.
        members: members of the ensemble.
        target: the accuracy at which a run ends.
    """

    pool: int = 10_000
    each: int = 2
    batch: int = 20
    most: int = 800
    steps: int = 150
    members: int = 8
    target: float = 0.95


QUICK = Size(pool=120, each=1, batch=5, most=25, steps=20, members=3)


@dataclass(frozen=True)
class Digits:
    """Features and labels to choose from and to test on."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def edges(images: Tensor) -> Tensor:
    """Return the strength of edges in each direction at each grid point: bytes (N, 28, 28) to features (N, 392)."""
    parts = []
    for some in images.split(2000):
        padded = nn.functional.pad(some.unsqueeze(1).float() / 255, (1, 1, 1, 1))
        across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
        down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
        length = torch.sqrt(across**2 + down**2).clamp_min(1e-6)
        maps = []
        for number in range(DIRECTIONS):
            angle = 2 * math.pi * number / DIRECTIONS
            along = (across * math.cos(angle) + down * math.sin(angle)).clamp_min_(0)
            # The third power of the cosine: a narrower range of directions.
            maps.append(along * (along / length).square_())
        stacked = torch.cat(maps, 1)
        smooth = nn.functional.avg_pool2d(stacked, 5, stride=1, padding=2)
        grid = nn.functional.avg_pool2d(smooth, 5, stride=4, padding=2).flatten(1)
        parts.append(grid / grid.norm(dim=1, keepdim=True).clamp_min(1e-6))
    return torch.cat(parts)


def prepared(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Digits:
    """Return features centred and scaled by the overall standard deviation of the pool. Uses no labels."""
    pool, test = edges(x), edges(x_test)
    centre, scale = pool.mean(0), pool.std()
    return Digits((pool - centre) / scale, y, (test - centre) / scale, y_test)


def method_of(name: str, size: Size) -> Method:
    """Return the method with this study's settings. With a decaying learning rate the members would be alike."""
    if name == "dropout":
        return MCDropout(rate=0.5, insert="*", steps=2 * size.steps, compile=False)
    if name == "ensemble":
        return DeepEnsemble(members=size.members, steps=size.steps, lr=0.02, schedule="constant", compile=False)
    return BayesByBackprop(steps=8 * size.steps // 3, estimator="weights", compile=False)


def run_cell(arm: str, seed: int, digits: Digits, size: Size, device: str = "cpu") -> dict[str, Any]:
    """Run one arm. Return the accuracy after every batch and the labels needed (None if the target was missed)."""
    rule, name = arm.split("-")
    start, rest = _beginning(digits, seed, size)
    with global_stream(seed, "study network"):
        net = mlp(digits.x.shape[1], (HIDDEN,), 10)
    prior = Normal(PRIOR, fan_in=True)
    problem = Problem(net, (digits.x[start], digits.y[start]), Categorical(), prior, device=device)
    truth = digits.y[rest]
    x_test, y_test = digits.x_test.to(device), digits.y_test.to(device)

    def accuracy(posterior: Posterior) -> dict[str, float]:
        found = _predict(posterior, x_test).argmax(-1)
        return {"accuracy": float((found == y_test).double().mean())}

    learner = ActiveLearner(
        problem,
        digits.x[rest].to(device),
        "batch_bald" if rule == "batch" else rule,
        batch=size.batch,
        method=method_of(name, size),
        oracle=lambda rows, x: truth[rows],
        draws=DRAWS,
        seed=seed,
        progress=False,
    )
    with side.one_thread():
        history = learner.run(
            labels=size.most - len(start), evaluate=accuracy, until=lambda metrics: metrics["accuracy"] >= size.target
        )
    labels = [len(start) + entry["labels"] for entry in history]
    reached = [entry["figures"]["accuracy"] for entry in history]
    needed = labels[-1] if reached[-1] >= size.target else None
    return {"arm": arm, "seed": seed, "labels": labels, "accuracy": reached, "needed": needed}


def _beginning(digits: Digits, seed: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return the initial rows, balanced over classes, and the pool: the same for all arms of a seed."""
    order = torch.randperm(len(digits.y), generator=stream(seed, "active rows"))[: size.pool]
    start = torch.cat([order[digits.y[order] == k][: size.each] for k in range(10)])
    return start, order[~torch.isin(order, start)]


def _predict(posterior: Posterior, x: Tensor) -> Tensor:
    if isinstance(posterior, DropoutPosterior):
        return posterior.predict(x, passes=DRAWS).mean
    return (
        posterior.predict(x, draws=DRAWS).mean
        if isinstance(posterior, GaussianPosterior)
        else posterior.predict(x).mean
    )
