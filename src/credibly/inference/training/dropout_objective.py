"""The objective of MC-Dropout: -ELBO / N of networks whose dropout acts through masks.

The derivation is in `credibly.methods.dropout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from credibly.core.autodiff import grad_and_aux
from credibly.core.inputs import Inputs, Tensors, map_inputs
from credibly.core.rng import stream
from credibly.core.rows import sum_rows
from credibly.errors import InputError
from credibly.forward import Forward
from credibly.inference.training.objectives import Objective, effective_rows
from credibly.networks.dropout_masks import DROPOUT, find_sites, masked_copy
from credibly.networks.inactive_dropout import ZERO, describe_inactive, inactive_dropout, log_inactive
from credibly.networks.shared_dropout import shared_dropout
from credibly.problem import Problem

# Forward passes per held-out score, for early stopping and for a grid.
SCORING_PASSES = 20
GRID_PASSES = 200
# Limit on the outputs of passes that are kept at once, to choose the noise by them.
KEPT_VALUES = 2**25
# Limit on the values that the passes over held-out rows compute; larger problems get fewer passes.
GRID_VALUES = 2**31
CONCRETE_TEMPERATURE = 0.1


class Dropped:
    """A network with explicit dropout masks: the masked copy, its dropout sites, and which weights each one drops."""

    def __init__(
        self,
        problem: Problem,
        insert: str | Sequence[str] | None,
        rate: float | None,
        include: Sequence[str] = (),
    ) -> None:
        trial = map_inputs(lambda t: t[:2], problem.sample.x)
        shared = shared_dropout(problem.layout.module, DROPOUT, trial)
        self.module, masked = masked_copy(problem.layout.module, insert, rate, include=include, shared=shared)
        rowless: list[str] = []
        self.sites, self.shapes = find_sites(self.module, masked, trial, rowless)
        if not self.sites:
            find_sites(self.module, masked, trial)
        self.rates = {site.name: site.rate for site in self.sites}
        silenced = problem.layout.silenced
        self.inactive = inactive_dropout(problem.layout.module, DROPOUT, masked, self.rates, silenced, rowless)
        if not self.rates:
            also = f" ({', '.join(silenced)} apply dropout internally, which cannot be controlled)" if silenced else ""
            if not silenced and self.inactive:
                also = f" that is active ({describe_inactive(self.inactive)})"
            raise InputError(
                "net",
                f"has no dropout layer{also}",
                'Add nn.Dropout layers, or pass insert="*" for dropout before every layer'
                + (", or rate= for the existing layers" if ZERO in self.inactive else ""),
            )
        log_inactive(self.inactive)
        self.inserted = tuple(name for name in self.rates if not _is_dropout(self.module, name))
        self.forward = Forward(
            problem.layout, "looped" if problem.forward.looped else "auto", trial, module=self.module
        )
        # `owner` maps each coordinate to a row of `groups` (groups, sites): the sites that drop its inputs. Row 0 has
        # none. Alpha dropout is left out: it keeps the variance, so E_q ||w||^2 = ||W||^2 + ||b||^2 as without dropout.
        layout = problem.layout
        dropped = [{layout.aliases[w] for w in site.weights} if not site.alpha else set() for site in self.sites]
        rows: list[tuple[bool, ...]] = [(False,) * len(self.sites)]
        self.owner = torch.zeros(problem.dim, dtype=torch.int64, device=problem.device)
        for entry in layout.entries:
            row = tuple(entry.name in names for names in dropped)
            rows += [row] if row not in rows else []
            self.owner[entry.start : entry.stop] = rows.index(row)
        self.groups = torch.tensor(rows, dtype=layout.dtype, device=problem.device)

    def rate_row(self, rate: float | Mapping[str, float] | None) -> list[float]:
        """Return the rate of every site: the given one, that of the first pattern matching its name, or its own."""
        if isinstance(rate, Mapping):
            found = [[r for pattern, r in rate.items() if site.matches(pattern)] for site in self.sites]
            return [rates[0] if rates else site.rate for rates, site in zip(found, self.sites)]
        return [rate if rate is not None else site.rate for site in self.sites]


class DropoutObjective(Objective):
    """-ELBO / N of M dropout networks, each with its own rates (and its own noise scale, if a grid has several)."""

    part_names = ("misfit", "decay")

    def __init__(
        self,
        problem: Problem,
        network: Dropped,
        n: int,
        rates: Tensor,
        *,
        batch: int,
        seed: int,
        concrete: bool,
        fixed_scale: bool,
    ) -> None:
        self.problem, self.network, self.n, self.batch, self.seed = problem, network, n, batch, seed
        self.concrete, self.fixed_scale = concrete, fixed_scale
        self.weights, self.effective = problem.relative_weight, effective_rows(problem, n)
        self.own = (rates,)
        self.looped = network.forward.looped
        self.precision = 1 / torch.square(problem.prior.std)
        self.centre = problem.prior.loc
        self.inputs = torch.tensor(
            [math.prod(network.shapes[s.name]) for s in network.sites], dtype=rates.dtype, device=rates.device
        )

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """Draw uniform numbers (M, B, *shape) for the masks of each site."""
        generator = stream(self.seed, "dropout", step, device=self.problem.device)
        return self.uniforms(len(self.own[0]), self.batch, generator)

    def uniforms(self, members: int, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw uniform numbers for `rows` masks per site. Members share them: a grid compares on equal noise."""
        shapes = [self.network.shapes[site.name] for site in self.network.sites]
        dtype = self.problem.layout.dtype
        drawn = [
            torch.rand((1, rows, *shape), generator=generator, dtype=dtype, device=self.problem.device)
            for shape in shapes
        ]
        return tuple(u.expand(members, *u.shape[1:]) for u in drawn)

    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return misfit under masks and decay, and the gradient of their sum."""
        if rows is not None:
            x, y = map_inputs(lambda t: t[rows], x), y[rows]
        count, row_weights = self.n if rows is None else rows.shape[-1], self.weights_of(rows)
        if self.shard is not None:
            noise = tuple(u[:, self.shard] for u in noise)

        def total(values: Tensor) -> tuple[Tensor, Tensor]:
            weights, rates = self._split(values, own[0])
            log_lik = sum_rows(self.log_likelihood(weights, self.masks(rates, noise), x, y), row_weights)
            misfit = -log_lik / (count * self.problem.tempering.likelihood)
            decay = self.complexity(weights, rates) / self.effective
            parts = torch.stack([misfit, decay], -1)
            return parts.sum(), parts

        gradient, parts = grad_and_aux(total, theta)
        if self.fixed_scale:
            # The noise scale keeps the value given by tau.
            dim, network = self.problem.dim, self.problem.layout.network_dim
            gradient = torch.cat(
                [gradient[:, :network], torch.zeros_like(gradient[:, network:dim]), gradient[:, dim:]], -1
            )
        return parts.detach(), gradient

    def log_likelihood(self, weights: Tensor, masks: dict[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
        """Return the log likelihood of the rows (M, B, ...) of each member under its masks."""
        parameters = {**self.problem.layout.split(weights)[0], **masks}
        output = self.problem.likelihood.arrange(self.network.forward.apply(parameters, x), 1)
        return self.problem.likelihood.log_prob(output, y, self.problem.extra(weights))

    def complexity(self, weights: Tensor, rates: Tensor) -> Tensor:
        """Return E_q[log q - (1/T_prior) log p] up to a constant, (M,): KL(q || p) at T_prior = 1.

        That is the decay of the weights, less the entropy of the masks if their rates are learned.
        """
        decay = 0.5 * (torch.square(weights - self.centre) * self.decay(rates)).sum(-1)
        if not self.concrete:
            return decay
        entropy: Tensor = torch.special.entr(rates) + torch.special.entr(1 - rates)
        return decay - (self.inputs * entropy).sum(-1)

    def decay(self, rates: Tensor) -> Tensor:
        """Return the tempered decay per coordinate (M, D): prior precision over the keep probability of its sites."""
        keep = torch.exp(torch.log1p(-rates) @ self.network.groups.T)
        return self.precision / (self.problem.tempering.prior * keep[:, self.network.owner])

    def masks(self, rates: Tensor, noise: tuple[Tensor, ...], *, hard: bool = False) -> dict[str, Tensor]:
        """Return masks (M, B, *shape) from uniform numbers: hard, or relaxed and differentiable in the rates."""
        masks = {}
        for index, (site, u) in enumerate(zip(self.network.sites, noise)):
            rate = rates[:, index].reshape(-1, *(1,) * (u.ndim - 1))
            if self.concrete and not hard:
                u = u.clamp(1e-6, 1 - 1e-6)
                logit = torch.log(rate) - torch.log1p(-rate) + torch.log(u) - torch.log1p(-u)
                kept = 1 - torch.sigmoid(logit / CONCRETE_TEMPERATURE)
            else:
                kept = (u < 1 - rate).to(u.dtype)
            masks[site.mask] = kept if site.alpha else kept / (1 - rate)
        return masks

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the mean log predictive density per row (M,), over passes whose masks are shared by all rows."""
        return self.densities(theta, slice(0, len(theta)), held_out, passes=SCORING_PASSES)

    def densities(self, theta: Tensor, members: slice, held_out: Problem, passes: int | None = None) -> Tensor:
        """Return the score of some members, (M,)."""
        weights, rates = (values[members] for values in self._split(theta, self.own[0]))
        drawn = self._scoring_masks(rates, passes or self._affordable(len(weights), held_out))
        total = torch.zeros(len(weights), dtype=theta.dtype, device=theta.device)
        for x, y, row_weights in held_out.blocks(len(weights)):
            rows = self.log_likelihood(weights, drawn[0], x, y)
            for masks in drawn[1:]:
                rows = torch.logaddexp(rows, self.log_likelihood(weights, masks, x, y))
            total += sum_rows(rows - math.log(len(drawn)), row_weights)
        return total / held_out.total_weight

    def outputs(self, theta: Tensor, member: int, held_out: Problem) -> Tensor:
        """Return the arranged outputs of a member's passes at held-out rows, (passes, N, ..., K) in float64."""
        weights, rates = (values[member : member + 1] for values in self._split(theta, self.own[0]))
        passes = min(self._affordable(1, held_out), max(SCORING_PASSES, KEPT_VALUES // held_out.y.numel()))
        drawn = self._scoring_masks(rates, passes)
        parameters, arrange = self.problem.layout.split(weights)[0], self.problem.likelihood.arrange
        with torch.no_grad():
            blocks = [
                torch.cat([arrange(self.network.forward.apply({**parameters, **masks}, x), 1) for masks in drawn])
                for x, _, _ in held_out.blocks(1)
            ]
        return torch.cat(blocks, 1).double()

    def _affordable(self, members: int, held_out: Problem) -> int:
        """Return a number of passes: the log of a mean over few is biased low, and most if the passes differ a lot."""
        affordable = GRID_VALUES // (members * held_out.n * max(1, self.network.forward.row_width))
        return max(SCORING_PASSES, min(GRID_PASSES, affordable))

    def _scoring_masks(self, rates: Tensor, passes: int) -> list[dict[str, Tensor]]:
        """Return the masks of each pass, for members with the given rates (M, sites)."""
        generator = stream(self.seed, "dropout scoring", device=self.problem.device)
        return [self.masks(rates, self.uniforms(len(rates), 1, generator), hard=True) for _ in range(passes)]

    def final_rates(self, theta: Tensor) -> list[dict[str, float]]:
        """Return the rates of each member by site, learned or given."""
        rates = self._split(theta, self.own[0])[1].detach()
        return [{site.name: float(rate) for site, rate in zip(self.network.sites, row)} for row in rates]

    def _split(self, values: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (M, D) and rates (M, sites)."""
        dim = self.problem.dim
        return values[:, :dim], torch.sigmoid(values[:, dim:]) if self.concrete else rates


def _is_dropout(module: nn.Module, name: str) -> bool:
    """Return whether the submodule is a dropout layer of the network, not a layer before which dropout was inserted."""
    return "Dropout" in type(module.get_submodule(name) if name else module).__name__
