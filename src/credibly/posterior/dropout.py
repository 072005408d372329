"""DropoutPosterior: the variational posterior of dropout. A draw is the weights with some of their inputs masked.

    q(w):  W_l = diag(z_l) M_l,  z ~ Bernoulli(keep)       E[y*] = mean of passes,  Var[y*] = 1/tau + variance of passes

A forward pass uses ONE mask for all rows, which makes it one draw of q(w), a function: predictions are correlated
across rows. With per_row=True every row has its own masks, as in training.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.backends.cpp.outputs import MIN_MASKED_OUTPUTS, cpp_passes
from credibly.backends.cpp.stack import Stack
from credibly.core.autodiff import attached, grad_for, requires_grad
from credibly.core.checks import check_integer
from credibly.core.inputs import Inputs, blank_row, map_inputs, row_count, tensors_of, to_inputs
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.forward import Forward, try_network
from credibly.networks.dropout_masks import (
    MaskedDropout,
    Site,
    find_sites,
    masked_copy,
    repeated_width,
    sites_of_layers,
)
from credibly.posterior.base import Posterior
from credibly.posterior.loaders import reads_loaders
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.blocks import BLOCK_VALUES, GPU_BLOCK_VALUES
from credibly.predictive.heads import predictive_of
from credibly.storage.record import Record

# Number of rows whose own masks come from one random stream.
ROW_BLOCK = 64


class DropoutPosterior(Posterior):
    """Weights theta (D,) of a network with dropout, and the rate of each dropout site."""

    kind: ClassVar[str] = "dropout"

    def __init__(
        self, model: Model, theta: Tensor, rates: dict[str, float], inserted: tuple[str, ...], record: Record
    ) -> None:
        super().__init__(model, record)
        if theta.shape != (model.layout.dim,):
            raise InputError("theta", f"must have shape ({model.layout.dim},), got {tuple(theta.shape)}")
        self.theta = theta
        self.rates = dict(rates)
        self.inserted = inserted
        # The rate given here is overwritten; the layers' own rates may be zero where another was requested.
        module = model.forward_layout.write(theta, fast=False).requires_grad_(False)
        self.masked, _ = masked_copy(module, inserted, 0.5, only=self.rates)
        set_rates(self.masked, self.rates)
        self._plans: dict[tuple[object, ...], MaskPlan] = {}

    def plan(self, x: Inputs) -> MaskPlan:
        """Return the mask plan for rows of this structure, built on first use."""
        structure = (type(x), *((name, t.shape[1:], t.dtype) for name, t in tensors_of(x)))
        if structure not in self._plans:
            trial = map_inputs(lambda t: t[:1], x)
            try_network(self.model.forward_layout, trial)
            self._plans[structure] = MaskPlan(self, trial)
        return self._plans[structure]

    @reads_loaders
    def predict(
        self, x: Any, *, passes: int = 100, seed: int = 0, per_row: bool = False, grad: bool = False
    ) -> Predictive:
        """Return the average over `passes` forward passes with dropout on. The seed determines the masks.

        With `grad`, results are differentiable in x; see `Posterior.predict`.
        """
        check_integer("passes", passes)
        inputs = self.model.as_fitted(to_inputs(x, self.layout.device, self.layout.input_dtype, convert=True))
        inputs = attached(x, inputs) if grad else inputs
        inputs = inputs if self.model.frozen is None else self.model.frozen.features(inputs)
        return predictive_of(MaskDraws(self, inputs, passes, check_seed(seed), per_row=per_row), inputs)

    def module(self) -> nn.Module:
        """Return the plain network with these weights and dropout off (the weight-averaged prediction)."""
        return self.layout.write(self.theta)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw from q(w), (count, D): the weights with the masked inputs set to zero.

        Dropout must act directly on the inputs of Linear layers; elsewhere a mask does not correspond to masked
        weights.
        """
        sites, shapes = find_sites(self.masked, self.rates, self._blank())
        masks = draw_masks(sites, shapes, count, check_seed(seed), self.theta)
        draws = self.theta.expand(count, -1).clone()
        entries = {e.name: e for e in self.layout.entries}
        names = list(self.layout.aliases.values())
        for site in sites:
            plain = site.direct and not site.alpha and len(shapes[site.name]) == 1
            if not plain or any(
                w not in entries or len(entries[w].shape) != 2 or names.count(w) > 1 for w in site.weights
            ):
                found = (
                    f"dropout {site.name!r} does not act on the inputs of a Linear layer with its own random weights"
                )
                raise InputError("sample", found, "Use predict, which does not need draws of the weights")
            for entry in (entries[w] for w in site.weights):
                part = draws[:, entry.start : entry.stop].reshape(count, *entry.shape)
                draws[:, entry.start : entry.stop] = (part * masks[site.mask]).reshape(count, -1)
        return draws

    @property
    def draws(self) -> Tensor:
        """A fixed set of 100 draws from q(w), (1, draw, D)."""
        return self.sample(100).unsqueeze(0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights."""
        return {"theta": self.theta}

    def description(self) -> Any:
        """Return the rate of each site, and where dropout was inserted."""
        return {"rates": self.rates, "inserted": list(self.inserted)}

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """Rebuild the posterior from stored weights and rates."""
        return cls(model, tensors["theta"], description["rates"], tuple(description["inserted"]), record)

    def _blank(self) -> Inputs:
        return blank_row(self.model.forward_row, self.layout.device)

    def __repr__(self) -> str:
        rates = ", ".join(f"{k} {v:.3g}" for k, v in self.rates.items())
        return f"DropoutPosterior({self.layout.dim} parameters, dropout {rates})"


class MaskPlan:
    """How to run forward passes with dropout on rows of one structure: sites, mask shapes, forward plan and widths."""

    def __init__(self, posterior: DropoutPosterior, trial: Inputs) -> None:
        self.sites, self.shapes = find_sites(posterior.masked, posterior.rates, trial)
        theta = posterior.theta
        varied = {
            s.mask: torch.ones(2, 1, *self.shapes[s.name], dtype=theta.dtype, device=theta.device) for s in self.sites
        }
        self.layout = posterior.model.forward_layout
        self.forward = Forward(self.layout, "auto", trial, module=posterior.masked, varied=varied)
        self.width = self.forward.row_width
        self.width_from_first_mask = repeated_width(posterior.masked, self.sites[0].name, trial)
        with torch.no_grad():
            output = self.forward.apply({name: mask[:1] for name, mask in varied.items()}, trial)
        self.outputs_per_row = output.numel()

    @cached_property
    def cpp_stack(self) -> tuple[Stack, list[str | None]] | None:
        """The network for the C++ backend and each layer's mask; None unless all masks are on Linear inputs."""
        stack = Stack.of(self.layout.module, self.layout) if self.forward.stack is not None else None
        starts = {entry.name: entry.start for entry in self.layout.entries}
        sites = None if stack is None else sites_of_layers(stack.layers, starts, self.sites)
        if stack is None or sites is None or not stack.compiled():
            return None
        return stack, [None if site is None else self.sites[site].mask for site in sites]


class MaskDraws:
    """Network outputs of forward passes with dropout."""

    def __init__(self, posterior: DropoutPosterior, x: Inputs, passes: int, seed: int, *, per_row: bool) -> None:
        self.posterior, self.count, self.seed, self.per_row = posterior, passes, seed, per_row
        self.likelihood = posterior.likelihood
        plan = posterior.plan(x)
        self.sites, self.shapes, self.forward = plan.sites, plan.shapes, plan.forward
        self.plan, self.outputs_per_row = plan, plan.outputs_per_row
        self.masks = {} if per_row else draw_masks(self.sites, self.shapes, passes, seed, posterior.theta)
        # A tile has few rows and all passes, so the layers before the first mask are computed once per row. If the
        # layers after it are too wide for that, a tile has as many passes as fit. A looped forward runs the passes one
        # by one.
        width = plan.width
        repeated = 0 if self.forward.looped else width
        most = GPU_BLOCK_VALUES if posterior.theta.device.type == "cuda" else BLOCK_VALUES
        if passes * row_count(x) * repeated > most:
            repeated = plan.width_from_first_mask
        self.rows_per_tile = max(1, most // max(width, passes * repeated))
        self.passes_per_tile = max(1, most // (self.rows_per_tile * repeated)) if repeated else passes
        self.width = (repeated or width) if per_row else 1

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the arranged outputs of passes start to stop, (stop - start, rows, ..., K)."""
        with grad_for(x):
            if self.per_row:
                passes = [self._row_masks(p, first_row, row_count(x)) for p in range(start, stop)]
                masks = {name: torch.stack([m[name] for m in passes]) for name in passes[0]}
            else:
                masks = {name: mask[start:stop] for name, mask in self.masks.items()}
            return self.likelihood.arrange(self._tiled(masks, x, stop - start), 1)

    def _tiled(self, masks: dict[str, Tensor], x: Inputs, passes: int) -> Tensor:
        rows, tile_rows, tile_passes = row_count(x), self.rows_per_tile, self.passes_per_tile
        if (
            not self.per_row
            and isinstance(x, Tensor)
            and x.ndim == 2
            and passes * rows >= MIN_MASKED_OUTPUTS
            and not requires_grad(x)
            and self.plan.cpp_stack
        ):
            stack, names = self.plan.cpp_stack
            return cpp_passes(stack, self.posterior.theta, x, [None if name is None else masks[name] for name in names])
        if rows <= tile_rows and passes <= tile_passes:
            return self.forward.apply(masks, x)
        strips = []
        for row in range(0, rows, tile_rows):
            here = map_inputs(lambda t, row=row: t[row : row + tile_rows], x)  # type: ignore[misc]
            own = {name: mask[:, row : row + tile_rows] if self.per_row else mask for name, mask in masks.items()}
            strip = [
                self.forward.apply({k: m[p : p + tile_passes] for k, m in own.items()}, here)
                for p in range(0, passes, tile_passes)
            ]
            strips.append(torch.cat(strip))
        return torch.cat(strips, 1)

    def _row_masks(self, number: int, first_row: int, rows: int) -> dict[str, Tensor]:
        """Draw the masks of one pass, (rows, *shape). A row's masks depend on its index, not on the row blocks."""
        first, last = first_row // ROW_BLOCK, (first_row + rows - 1) // ROW_BLOCK
        drawn = [
            draw_masks(self.sites, self.shapes, ROW_BLOCK, self.seed, self.posterior.theta, ("row", number, block))
            for block in range(first, last + 1)
        ]
        here = slice(first_row - first * ROW_BLOCK, first_row - first * ROW_BLOCK + rows)
        return {name: torch.cat([m[name] for m in drawn])[here, 0] for name in drawn[0]}

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters, the same in every pass."""
        return self.posterior.model.extra(self.posterior.theta.expand(stop - start, -1))

    def row_width(self) -> int:
        """Return how many values one row takes with masks per row; otherwise 1, as `outputs` splits them itself."""
        return self.width


def draw_masks(
    sites: tuple[Site, ...],
    shapes: dict[str, tuple[int, ...]],
    count: int,
    seed: int,
    like: Tensor,
    stream_name: tuple[str | int, ...] = (),
) -> dict[str, Tensor]:
    """Draw masks (count, 1, *shape) by name: 1/keep with probability keep, else 0."""
    purpose, *indices = stream_name or ("shared",)
    generator = stream(seed, f"{purpose} masks", *(int(i) for i in indices), device=like.device)
    sizes = [math.prod(shapes[site.name]) for site in sites]
    # One draw for all sites, turned into masks in place: for small networks this dominates the prediction time.
    drawn = torch.rand((count, 1, sum(sizes)), generator=generator, dtype=like.dtype, device=like.device)
    alike = len({(s.rate, s.gain) for s in sites}) == 1
    for s, u in zip(sites[:1], (drawn,)) if alike else zip(sites, drawn.split(sizes, -1)):
        u.lt_(1 - s.rate).mul_(s.gain)
    return {s.mask: u.reshape(count, 1, *shapes[s.name]) for s, u in zip(sites, drawn.split(sizes, -1))}


def set_rates(module: nn.Module, rates: dict[str, float]) -> None:
    """Set the rates of a masked copy's dropout layers (alpha dropout needs them)."""
    for name, rate in rates.items():
        layer = module.get_submodule(name) if name else module
        if isinstance(layer, MaskedDropout):
            layer.keep = 1 - rate
