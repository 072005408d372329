"""Updates of a module's parameters: fused Adam and SGD with learning-rate groups, or the user's own torch optimiser.

The mathematics is that of `inference.kernels.optimisers`, in one pass over each parameter, and a Normal prior centred
at zero enters as the weight decay of that pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from credibly.errors import InputError
from credibly.inference.kernels.optimisers import Adam, optimiser
from credibly.inference.module_leaves import EntryPrior, ModuleLeaves

# Number of weights whose updates share one call: on a GPU calls take longer than the updates of small parameters.
BUCKETS = {"cpu": 0, "cuda": 2**21}

MakeOptimiser = Callable[[Any], torch.optim.Optimizer]


class Rule(ABC):
    """An update rule of leaves, given the gradients of the likelihood's part of the loss."""

    # Whether leaves may be updated one by one, before all gradients are known.
    one_by_one: bool = True

    @abstractmethod
    def begin(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Prepare step 0, 1, ...; `factor` is the schedule's. Both are tensors in a CUDA graph."""

    @abstractmethod
    def update(self, index: int, leaf: Tensor, gradient: Tensor, prior: EntryPrior | None) -> None:
        """Update one leaf. The gradient may be overwritten; `prior` is None if it is in the gradient already."""

    def end(self, leaves: Sequence[Tensor]) -> None:
        """Finish the step, after the last leaf."""
        return


class FusedRule(Rule):
    """Adam or SGD by torch's fused kernels.

    Args:
        name, momentum: as in `Training`.
        rates: learning rates of the leaves.
        leaves: the leaves of the flat vector, bound to theta.
        theta: the flat vector (1, D).
        scale: preconditioner of every coordinate, (D,), that multiplies the gradients; None for none.
    """

    def __init__(
        self,
        name: str,
        momentum: float,
        rates: Sequence[float],
        leaves: ModuleLeaves,
        theta: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        self.rule = optimiser(name, momentum)
        self.rates = rates
        self.factor: float | Tensor = 1.0
        keeps = isinstance(self.rule, Adam) or momentum > 0
        # Zero pages of a fresh allocation cost nothing until a leaf is first updated.
        self.state = self.rule.init(theta) if keeps else ()
        self.moments = [leaves.views(tensor[0]) for tensor in self.state]
        self.scale = None if scale is None else leaves.views(scale)
        self.count = torch.zeros((), dtype=torch.float32, device=theta.device)
        self.bucket = BUCKETS.get(theta.device.type, BUCKETS["cuda"])
        self.pending: dict[tuple[float, float], list[tuple[int, Tensor, Tensor]]] = {}
        self.waiting = 0

    def begin(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Set the learning rates and Adam's count of steps."""
        self.factor = factor
        self.count.fill_(step + 1)
        self.pending, self.waiting = {}, 0

    def update(self, index: int, leaf: Tensor, gradient: Tensor, prior: EntryPrior | None) -> None:
        """Update one leaf, or several at a time, in one pass.

        A prior other than N(0, s^2) and a preconditioner take additional passes.
        """
        decay = None if prior is None else prior.plain_decay
        if prior is not None and (decay is None or self.scale is not None):
            prior.add_to(gradient, leaf)
        if self.scale is not None:
            gradient.mul_(self.scale[index])
            decay = None
        self.pending.setdefault((self.rates[index], decay or 0.0), []).append((index, leaf, gradient))
        self.waiting += leaf.numel()
        if self.waiting >= self.bucket:
            self._flush()

    def end(self, leaves: Sequence[Tensor]) -> None:
        """Update what is still pending."""
        self._flush()

    def _flush(self) -> None:
        for (rate, decay), updates in self.pending.items():
            # A tensor where a CUDA graph reads it at every replay; the fused kernels take both.
            lr: Any = self.factor * rate
            indices, leaves, gradients = (list(column) for column in zip(*updates))
            state = [[moment[index] for index in indices] for moment in self.moments]
            if isinstance(self.rule, Adam):
                torch._fused_adam_(
                    leaves,
                    gradients,
                    state[0],
                    state[1],
                    [],
                    [self.count] * len(leaves),
                    lr=lr,
                    beta1=self.rule.beta1,
                    beta2=self.rule.beta2,
                    weight_decay=decay,
                    eps=self.rule.eps,
                    amsgrad=False,
                    maximize=False,
                )
            else:
                torch._fused_sgd_(
                    leaves,
                    gradients,
                    state[0] if state else [],
                    weight_decay=decay,
                    momentum=self.rule.momentum,
                    lr=lr,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )
        self.pending, self.waiting = {}, 0


class OwnRule(Rule):
    """A torch optimiser returned by the user's function; its learning rates follow the schedule."""

    one_by_one = False

    def __init__(self, make: MakeOptimiser, leaves: Sequence[nn.Parameter], rates: Sequence[float] | None) -> None:
        groups: Any = list(leaves)
        if rates is not None:
            groups = [
                {"params": [leaf for leaf, own in zip(leaves, rates) if own == rate], "lr": rate}
                for rate in dict.fromkeys(rates)
            ]
        made = make(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(
                "optimiser",
                f"must return a torch.optim.Optimizer, got {type(made).__name__}",
                "Pass a function of the parameters, such as lambda p: torch.optim.AdamW(p, lr=1e-3)",
            )
        known = {id(p) for group in made.param_groups for p in group["params"]}
        if known != {id(leaf) for leaf in leaves}:
            raise InputError("optimiser", "must optimise the parameters that it is given", "Pass all of them on")
        self.made = made
        self.rates = [float(group["lr"]) for group in made.param_groups]

    def begin(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Set the learning rates of all groups."""
        for group, rate in zip(self.made.param_groups, self.rates):
            group["lr"] = factor * rate

    def update(self, index: int, leaf: Tensor, gradient: Tensor, prior: EntryPrior | None) -> None:
        """Keep the gradient, with the prior's, for the end of the step."""
        if prior is not None:
            prior.add_to(gradient, leaf)
        leaf.grad = gradient

    def end(self, leaves: Sequence[Tensor]) -> None:
        """Take the optimiser's step and drop the gradients."""
        self.made.step()
        for leaf in leaves:
            leaf.grad = None


def rates_by_name(lr: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """Return the learning rate of each name: that of the first pattern that matches."""
    rates, used = [], set()
    for name in names:
        pattern = next((p for p in lr if fnmatchcase(name, p)), None)
        if pattern is None:
            raise InputError("lr", f"no pattern matches parameter {name!r}", 'Add one, or "*" for all others')
        used.add(pattern)
        rates.append(float(lr[pattern]))
    unused = [p for p in lr if p not in used and p != "*"]
    if unused:
        known = f"The names are {', '.join(list(names)[:12])}"
        raise InputError("lr", f"pattern {unused[0]!r} matches no parameter that an earlier pattern does not", known)
    return rates
