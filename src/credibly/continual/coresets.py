"""Coresets: a few representative rows per task, the remaining rows, and the rows of several tasks as one problem."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, tensors_of
from credibly.core.rng import stream
from credibly.problem import Problem


def k_centre(x: Inputs, count: int, seed: int) -> Tensor:
    """Choose rows (count,) by farthest-first traversal from a random row."""
    flat = torch.cat([t.flatten(1).float() for _, t in tensors_of(x)], 1)
    chosen = [int(torch.randint(len(flat), (), generator=stream(seed, "k-centre")))]
    distance = torch.full((len(flat),), torch.inf, device=flat.device)
    while len(chosen) < count:
        distance = torch.minimum(distance, (flat - flat[chosen[-1]]).square().sum(1))
        distance[chosen[-1]] = -1
        chosen.append(int(distance.argmax()))
    return torch.tensor(chosen, device=flat.device)


def choose_rows(problem: Problem, count: int, choose: str, seed: int) -> Tensor:
    """Choose `count` rows of a problem, "random" or by "k-centre"."""
    if choose == "k-centre" and count:
        return k_centre(problem.x, count, seed)
    return torch.randperm(problem.n, generator=stream(seed, "coreset rows"))[:count].to(problem.device)


def other_rows(n: int, rows: Tensor) -> Tensor:
    """Return the indices below n that are not among these, in order."""
    kept = torch.ones(n, dtype=torch.bool, device=rows.device)
    kept[rows] = False
    return kept.nonzero().squeeze(1)
