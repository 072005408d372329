"""Number of threads of a fit. It is stored in the run folder, as another number would change how sums round."""

from __future__ import annotations

import torch

from credibly.inference.method import Method
from credibly.inference.training.settings import GAUSS_NEWTON
from credibly.problem import Problem

# Values in a layer up to which more threads cost more than they gain; the second limit is for chains of HMC.
SMALL = 500_000
SMALL_CHAINS = 20_000
# Width of a layer from which its matrix products keep several threads busy, whatever the number of rows.
WIDE = 128


def threads_for(problem: Problem, method: Method) -> int:
    """Return 1 for a small network: on a loaded machine, threads that wait for each other cost more than they gain."""
    together = int(getattr(method, "chains", getattr(method, "members", 1)))
    rows = problem.n if method.name == "hmc" else min(problem.n, getattr(method, "batch_size", None) or 128)
    if getattr(method, "optimiser", None) == GAUSS_NEWTON:
        # Members are trained in turn, each by products of its Jacobian.
        return 1 if problem.n * problem.layout.dim <= SMALL else torch.get_num_threads()
    width = max((e.shape[0] for e in problem.layout.entries if len(e.shape) == 2), default=1)
    most = SMALL_CHAINS if method.name == "hmc" else SMALL
    return 1 if together * rows * width <= most and width < WIDE else torch.get_num_threads()
