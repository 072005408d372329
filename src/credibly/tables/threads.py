"""How many threads a fit is given. A run folder keeps the number: with another one sums would round otherwise."""

from __future__ import annotations

import torch

from credibly.inference.method import Method
from credibly.problem import Problem

SMALL = 500_000  # values in a layer up to which threads cost more than they give


def threads_for(problem: Problem, method: Method) -> int:
    """One thread for a small network: threads that wait for each other on a busy machine cost more than they give."""
    together = int(getattr(method, "chains", getattr(method, "members", 1)))
    rows = problem.n if method.name == "hmc" else min(problem.n, getattr(method, "batch_size", None) or 128)
    width = max((e.shape[0] for e in problem.layout.entries if len(e.shape) == 2), default=1)
    return 1 if together * rows * width <= SMALL else torch.get_num_threads()
