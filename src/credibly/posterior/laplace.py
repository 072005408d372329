"""LaplacePosterior: a Gaussian around a trained network, its precision by blocks, and the predictive of the linearised network.

q(w) = N(w*, P^-1)          f(x, w) ~ f(x, w*) + J(x) (w - w*),   so   f(x) ~ N(f(x, w*), J P^-1 J')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.core.inputs import blank_row
from credibly.core.rng import check_seed, stream
from credibly.curvature import Block, DiagonalBlock, KronBlock, Parts, find_parts, from_pieces
from credibly.errors import InputError
from credibly.gaussians.block_precisions import Blocks, Kronecker
from credibly.gaussians.precisions import Dense, Diagonal, Precision
from credibly.posterior.base import Model, Posterior, WeightDraws
from credibly.posterior.linearised import FunctionDraws, OutputDraws
from credibly.predictive.base import DrawSource, Predictive
from credibly.priors.gaussian import GaussianPrior, signature
from credibly.storage.record import Record


class LaplacePosterior(Posterior):
    """N(w*, P^-1) over the parameters that were asked for; the others stay at w*.

    Attributes:
        loc: w*, (D,).
        precision_blocks: P by parts of the network, each with its likelihood's and its prior's share apart; their `source`
            is a layer's name, "rest" (other parameters), "all" (structure "full") or "likelihood" (learned noise).
        names: the network's parameters that the Gaussian is over.
        log_likelihood, log_prior: at w*, before tempering; of the prior only what the Gaussian is over.
    """

    kind: ClassVar[str] = "laplace"

    def __init__(
        self, model: Model, loc: Tensor, blocks: Sequence[Block], names: Sequence[str], record: Record, *,
        log_likelihood: float, log_prior: float,
    ) -> None:  # fmt: skip
        super().__init__(model, record)
        if loc.shape != (model.layout.dim,):
            raise InputError("loc", f"has shape {tuple(loc.shape)}", f"Pass ({model.layout.dim},)")
        self.loc = loc
        self.precision_blocks = tuple(blocks)
        self.names = tuple(names)
        self.log_likelihood, self.log_prior = log_likelihood, log_prior

    # -- the Gaussian --------------------------------------------------------------------------------------------------
    @cached_property
    def parts(self) -> Parts:
        """The network's layers and other parameters that the Gaussian is over."""
        return find_parts(self.layout, self.names, blank_row(self.model.row, self.layout.device))

    def places(self, block: Block) -> Tensor:
        """The coordinates of a block in the flat vector, in the block's own order."""
        if block.source == "all":
            return self.parts.places
        if block.source == "rest":
            return self.parts.rest_places
        if block.source == "likelihood":
            return torch.arange(self.layout.network_dim, self.layout.dim, device=self.layout.device)
        return next(layer.places for layer in self.parts.layers if layer.name == block.source).flatten()

    @cached_property
    def blocks(self) -> tuple[tuple[Block, Tensor], ...]:
        """The blocks in the network's dtype, each with its coordinates."""
        return tuple((block.to(self.loc.dtype), self.places(block)) for block in self.precision_blocks)

    @property
    def count(self) -> int:
        """How many parameters the Gaussian is over."""
        return sum(block.size for block in self.precision_blocks)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every weight, (D,); zero for those that are fixed."""
        found = torch.zeros_like(self.loc)
        for block, places in zip(self.precision_blocks, (p for _, p in self.blocks)):
            found[places] = block.variance().sqrt().to(found)
        return found

    def covariance(self) -> Tensor:
        """(D, D); for small networks."""
        dim = self.layout.dim
        if dim > 20_000:
            raise InputError("covariance", f"would have {dim:,} x {dim:,} values", "Use std, or sample")
        found = torch.zeros(dim, dim, dtype=torch.float64, device=self.loc.device)
        for block, places in zip(self.precision_blocks, (p for _, p in self.blocks)):
            found[places.unsqueeze(1), places] = block.covariance()
        return found

    @property
    def log_evidence(self) -> float:
        """log p(D) by Laplace, in nats: log p(D|w*) + log p(w*) + (d/2) log 2 pi - (1/2) log |P|, exact for linear-Gaussian models.

        At other temperatures it is the logarithm of the integral of the tempered product. Parameters that stay at w* count as
        given: neither their prior nor a volume of theirs is in it.
        """
        known = self.record.tempering
        value = self.log_likelihood / known.get("likelihood", 1.0) + self.log_prior / known.get("prior", 1.0)
        log_det = sum(block.log_det() for block in self.precision_blocks)
        return value + 0.5 * self.count * math.log(2 * math.pi) - 0.5 * log_det

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws (count, D); draw number i is the same however many are asked for."""
        _check_count("count", count)
        generator = stream(check_seed(seed), "laplace draws", device=self.loc.device)
        noise = torch.empty(count, self.layout.dim, dtype=self.loc.dtype, device=self.loc.device)
        for draw in noise.unbind(0):  # filled as one block, the numbers would depend on its length
            draw.normal_(generator=generator)
        draws = self.loc.expand(count, -1).clone()
        for block, places in self.blocks:
            draws[:, places] += block.root(noise[:, places])
        return draws

    @property
    def draws(self) -> Tensor:
        """A fixed set of 100 draws as (1, draw, D), always the same ones."""
        return self.sample(100).unsqueeze(0)

    def module(self) -> nn.Module:
        """A plain `nn.Module` with the weights w*."""
        return self.layout.write(self.loc)

    def as_prior(self) -> GaussianPrior:
        """This Gaussian as the prior of a problem with other data and the same network; exact. It has to be over all parameters."""
        if self.count < self.layout.dim:
            raise InputError(
                "as_prior",
                f"the Gaussian is over {self.count} of {self.layout.dim} parameters; the others have no spread",
                "Say which are random in the problem (Problem(..., random=...)), and leave Laplace's random at None",
            )
        shapes = [_shape(block.to(self.loc.dtype)) for block in self.precision_blocks]
        shape: Precision = Blocks(*shapes, places=torch.cat([places for _, places in self.blocks]))
        if all(isinstance(part, Diagonal) for part in shapes):
            shape = Diagonal(shape.diagonal())
        return GaussianPrior(self.loc, shape, signature(self.layout), self.record.method)

    # -- prediction ----------------------------------------------------------------------------------------------------
    def predict(
        self, x: Any, *, linearised: bool = True, joint: bool = False, draws: int = 128, seed: int = 0
    ) -> Predictive:
        """The Bayesian model average at x.

        Args:
            x: inputs.
            linearised: outputs are f(x, w*) + J(x) (w - w*), which is what the Gaussian was made for; False puts draws of the
                weights into the network itself, which for all but linear networks predicts worse.
            joint: with `linearised`, each draw is one function, so that its rows belong together, at a pass a draw. Otherwise
                every row has its own N(f, J P^-1 J') over its outputs, and draws of two rows are not jointly those of the
                posterior; mean and covariance of the draws are exact for every row once there are more than twice its outputs.
            draws: how many. seed: of the draws.
        """
        _check_count("draws", draws)
        check_seed(seed)
        inputs = self.model.inputs(x)
        source: DrawSource
        if not linearised:
            source = WeightDraws(self.model, self.sample(draws, seed=seed))
        elif joint:
            source = FunctionDraws(self.model, self.loc, self.sample(draws, seed=seed) - self.loc)
        else:
            source = OutputDraws(self.model, self.loc, self.parts, [b for b, _ in self.blocks], inputs, draws, seed)
        return Predictive(source, inputs)

    # -- storage -------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """w*, and the pieces of all blocks one after another."""
        pieces = [piece.flatten() for block in self.precision_blocks for piece in block.pieces]
        return {"loc": self.loc, "blocks": torch.cat(pieces)}

    def description(self) -> Any:
        """What the blocks are, and the density at w*."""
        blocks = [
            {"kind": b.kind, "source": b.source, "shapes": [list(p.shape) for p in b.pieces]}
            for b in self.precision_blocks
        ]
        return {
            "names": list(self.names), "blocks": blocks,
            "log_likelihood": self.log_likelihood, "log_prior": self.log_prior,
        }  # fmt: skip

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """From stored pieces and what they are."""
        blocks, place, flat = [], 0, tensors["blocks"]
        for known in description["blocks"]:
            pieces = []
            for shape in known["shapes"]:
                pieces.append(flat[place : place + math.prod(shape)].reshape(shape).clone())
                place += math.prod(shape)
            blocks.append(from_pieces(known["kind"], known["source"], pieces))
        return cls(
            model, tensors["loc"], blocks, description["names"], record,
            log_likelihood=description["log_likelihood"], log_prior=description["log_prior"],
        )  # fmt: skip

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({b.kind for b in self.precision_blocks}))
        return f"LaplacePosterior({self.count} of {self.layout.dim} parameters, {kinds})"


def _shape(block: Block) -> Precision:
    """A block's precision as a prior has it."""
    if isinstance(block, KronBlock):
        _, outer, _, inner, prior = block.pieces
        return Kronecker(outer, inner, 1 + block.ratios, prior.sqrt())
    if isinstance(block, DiagonalBlock):
        return Diagonal(block.prior * (1 + block.eigenvalues))
    return Dense.of_precision(block.precision())


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(name, f"found {value!r}", "Pass a whole number from 1 up")
