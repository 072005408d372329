"""A network whose parameters are views of one row of the flat vector: what a plain training loop runs.

`Forward` evaluates many parameter vectors at once, as a function of the flat (C, D) tensor. For one vector of millions
of weights, the passes over that tensor (its parts as views, the concatenated gradient, temporaries of the update) cost
as much as the network. Here the module itself runs, and each gradient is passed on as soon as autograd has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.autodiff import eager_gradient
from credibly.core.inputs import Inputs, call, map_inputs
from credibly.forward import PRECISIONS
from credibly.networks.layout import Entry
from credibly.priors.elementwise import Normal
from credibly.priors.flat import BoundPrior
from credibly.problem import Problem

# Number of weights from which a step on the module beats one on the flat vector. Smaller networks keep their results.
LARGE = 1_000_000

# Number of values whose log density is evaluated at a time, in float64.
CHUNK = 2**18

# Receives the index of a leaf, the leaf and its gradient.
Receiver = Callable[[int, Tensor, Tensor], None]


def has_leaves(problem: Problem) -> bool:
    """Return whether the random parameters of the network can be views of a flat vector. Its rows must be in memory."""
    forward, layout = problem.forward, problem.layout
    if layout.apart:
        return False
    # A hierarchical prior, a subclass, couples its entries.
    if type(problem.prior) is not BoundPrior:
        return False
    on_gpu = layout.device.type == "cuda"
    if on_gpu and any(isinstance(m, nn.RNNBase) for m in forward.module.modules()):
        # cuDNN keeps its own copy of their weights.
        return False
    parameters = dict(forward.module.named_parameters())
    mine = [e for e in layout.entries if e.name not in layout.extra]
    named = all(
        e.name in parameters and parameters[e.name].dtype == layout.dtype and tuple(parameters[e.name].shape) == e.shape
        for e in mine
    )
    return named and agrees(problem)


class ModuleLeaves:
    """A copy of a problem's network, without its own weights, and leaves for every entry of the flat vector.

    Attributes:
        leaves: one per entry of the layout: parameters of the copy, then those of the likelihood.
        safe: whether a leaf may change as soon as its gradient is known; False if a later part of a backward pass still
            reads it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, forward, layout = problem, problem.forward, problem.layout
        random = {e.name for e in layout.entries}
        memo: dict[int, Any] = {}
        by_name: dict[str, nn.Parameter] = {}
        for name, parameter in forward.module.named_parameters():
            empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            memo[id(parameter)] = by_name[name] = empty if name in random else parameter
        self.module = copy.deepcopy(forward.module, memo)
        blank = torch.empty(0, dtype=layout.dtype, device=layout.device)
        self.leaves = [by_name[e.name] if e.name in by_name else nn.Parameter(blank) for e in layout.entries]
        self.extra = {
            e.name.removeprefix("likelihood."): leaf
            for e, leaf in zip(layout.entries, self.leaves)
            if e.name in layout.extra
        }
        self.safe = True
        self._receiver: Receiver | None = None
        for index, leaf in enumerate(self.leaves):
            leaf.register_post_accumulate_grad_hook(self._hook(index))

    def bind(self, row: Tensor) -> None:
        """Make the leaves views of a row (D,)."""
        for entry, leaf in zip(self.problem.layout.entries, self.leaves):
            leaf.data = row[entry.start : entry.stop].view(entry.shape)

    def release(self) -> None:
        """Release the bound row: the module and its hooks may live on until garbage is collected."""
        for leaf in self.leaves:
            leaf.data = leaf.data.new_empty(0)

    def views(self, row: Tensor) -> list[Tensor]:
        """Return a row (D,) as tensors in the shapes of the leaves."""
        return [row[e.start : e.stop].view(e.shape) for e in self.problem.layout.entries]

    def log_likelihood_rows(self, x: Inputs, y: Tensor) -> Tensor:
        """Return the log likelihood per row, (1, N, ...), as a function of the leaves."""
        forward, likelihood = self.problem.forward, self.problem.likelihood
        x = forward.arranged(x)
        if forward.precision is None:
            output = forward.layout.output(call(self.module, x))
        else:
            with torch.autocast(forward.layout.device.type, PRECISIONS[forward.precision], cache_enabled=False):
                output = forward.layout.output(call(self.module, x))
            output = output.to(forward.layout.dtype)
        extra = {name: leaf.unsqueeze(0) for name, leaf in self.extra.items()}
        return likelihood.log_prob(likelihood.arrange(output.unsqueeze(0), 1), y, extra)

    def evaluate(self, loss: Callable[[], Tensor], receive: Receiver | None) -> Tensor:
        """Return the loss. Gradients are passed to `receive` one by one as they are computed, or stay in the leaves.

        Leaves that the loss does not depend on are passed last, with gradients of zero.
        """
        with torch.enable_grad(), eager_gradient():
            value = loss()
        done: set[int] = set()

        def record(index: int, leaf: Tensor, gradient: Tensor) -> None:
            done.add(index)
            if receive is not None:
                receive(index, leaf, gradient)

        self._receiver = None if receive is None else record
        try:
            value.backward()
        finally:
            self._receiver = None
        if receive is not None:
            with torch.no_grad():
                for index in sorted(set(range(len(self.leaves))) - done):
                    leaf = self.leaves[index]
                    receive(index, leaf, torch.zeros_like(leaf))
        return value.detach()

    def probe(self, row: Tensor) -> None:
        """Test with a backward pass of two rows whether leaves may change during one."""
        problem = self.problem
        x, y = map_inputs(lambda t: t[:2], problem.x), problem.y[:2]
        self.bind(row)

        def changed(index: int, leaf: Tensor, gradient: Tensor) -> None:
            torch.autograd.graph.increment_version(leaf)

        try:
            self.evaluate(lambda: self.log_likelihood_rows(x, y).sum(), changed)
        except RuntimeError:
            self.safe = False
            self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            if self._receiver is None or leaf.grad is None:
                return
            gradient, leaf.grad = leaf.grad, None
            with torch.no_grad():
                self._receiver(index, leaf, gradient.to_dense() if gradient.is_sparse else gradient)

        return hook


def agrees(problem: Problem) -> bool:
    """Return whether a module of leaves gives what the problem gives at two rows, away from the network's own weights.

    A network may have code that its copy does not run, such as the head of a frozen body, which is on a tape.
    """
    layout = problem.layout
    x, y = map_inputs(lambda t: t[:2], problem.x), problem.y[:2]
    weights = layout.read(layout.module)
    theta = torch.cat([weights, weights.new_zeros(layout.dim - layout.network_dim)]).mul_(1.01).add_(0.01)
    try:
        leaves = ModuleLeaves(problem)
        leaves.bind(theta)
        with torch.no_grad():
            expected = problem.log_likelihood_rows(theta.unsqueeze(0), x, y)
            found = leaves.log_likelihood_rows(x, y)
        leaves.release()
        return torch.allclose(found, expected, rtol=1e-2, atol=1e-3, equal_nan=True)
    except Exception:  # a network that cannot be copied, or whose copy cannot run
        return False


class EntryPrior:
    """The gradient of -weight log p(w) for one entry of the flat vector.

    Attributes:
        decay: weight / variance for a Normal prior, which is also the weight decay of an optimiser; None for others.
        loc: the mean of a Normal prior, a number or a tensor in the shape of the entry.
    """

    def __init__(self, prior: BoundPrior, entry: Entry, weight: float, anchor: Tensor | None = None) -> None:
        self.weight = weight
        parts = []
        for segment in prior.segments:
            start, stop = max(segment.start, entry.start), min(segment.stop, entry.stop)
            if start < stop:
                shrink = segment.shrink
                if isinstance(shrink, Tensor):
                    # The factor of fan-in is the same for all of an entry.
                    shrink = float(shrink[start - segment.start])
                parts.append((slice(start - entry.start, stop - entry.start), segment.prior, shrink))
        self.parts = parts
        self.decay: float | None = None
        self.loc: float | Tensor = 0.0
        first = parts[0][1]
        if len(parts) == 1 and isinstance(first, Normal):
            self.decay = weight / (first.scale * parts[0][2]) ** 2
            self.loc = float(first.loc) if anchor is None else anchor

    @property
    def plain_decay(self) -> float | None:
        """The weight decay that is all of this gradient, or None."""
        return self.decay if isinstance(self.loc, float) and self.loc == 0 else None

    def log_prob(self, leaf: Tensor) -> Tensor:
        """Return the log density of the entry, in float64, without the weight."""
        flat = leaf.detach().reshape(-1)
        sums = [
            prior.total_log_prob(some.double().unsqueeze(0), shrink)
            for part, prior, shrink in self.parts
            for some in flat[part].split(CHUNK)
        ]
        return torch.stack(sums).sum()

    def add_to(self, gradient: Tensor, leaf: Tensor) -> None:
        """Add the gradient at the leaf, in place."""
        if not self.weight:
            return
        if self.decay is not None:
            gradient.add_(leaf if self.plain_decay is not None else leaf - self.loc, alpha=self.decay)
            return
        flat = gradient.view(-1)
        for part, prior, shrink in self.parts:
            with torch.enable_grad():
                w = leaf.detach().reshape(-1)[part].requires_grad_()
                value = prior.total_log_prob(w.unsqueeze(0), shrink).sum()
            flat[part].sub_(torch.autograd.grad(value, w)[0], alpha=self.weight)
