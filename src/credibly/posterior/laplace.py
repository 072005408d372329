"""LaplacePosterior: a Gaussian around a trained network with a blockwise precision, and its linearised predictive.

q(w) = N(w*, P^-1)          f(x, w) ~ f(x, w*) + J(x) (w - w*),   so   f(x) ~ N(f(x, w*), J P^-1 J')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.core.checks import check_integer
from credibly.core.inputs import blank_row
from credibly.core.rng import check_seed, stream
from credibly.curvature import Block, DiagonalBlock, KronBlock, Parts, block_from_tensors, find_parts
from credibly.errors import InputError
from credibly.gaussians.block_precisions import Blocks, Kronecker
from credibly.gaussians.precisions import Dense, Diagonal, Precision
from credibly.posterior.base import Posterior
from credibly.posterior.draws import WeightDraws
from credibly.posterior.linearised import FunctionDraws, OutputDraws
from credibly.posterior.loaders import reads_loaders
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.heads import predictive_of
from credibly.predictive.source import DrawSource
from credibly.priors.gaussian import GaussianPrior, signature
from credibly.storage.record import Record


class LaplacePosterior(Posterior):
    """N(w*, P^-1) over the selected parameters; the others stay at w*.

    Attributes:
        loc: w*, (D,).
        precision_blocks: the blocks of P, each with separate terms of likelihood and prior. A block's `source` is
            a layer's name, "rest" (other parameters), "all" (structure "full") or "likelihood" (learned noise).
        names: the network's parameters that the Gaussian covers.
        log_likelihood, log_prior: at w*, before tempering; the prior is that of the covered parameters.
    """

    kind: ClassVar[str] = "laplace"
    joint_settings: ClassVar[Mapping[str, Any]] = {"joint": True}

    def __init__(
        self,
        model: Model,
        loc: Tensor,
        blocks: Sequence[Block],
        names: Sequence[str],
        record: Record,
        *,
        log_likelihood: float,
        log_prior: float,
    ) -> None:
        super().__init__(model, record)
        if loc.shape != (model.layout.dim,):
            raise InputError("loc", f"must have shape ({model.layout.dim},), got {tuple(loc.shape)}")
        self.loc = loc
        self.precision_blocks = tuple(blocks)
        self.names = tuple(names)
        self.log_likelihood, self.log_prior = log_likelihood, log_prior

    # -- the Gaussian
    @cached_property
    def parts(self) -> Parts:
        """The network's layers and other parameters that the Gaussian covers."""
        layout = self.model.forward_layout
        return find_parts(layout, self.names, blank_row(self.model.forward_row, layout.device))

    def places(self, block: Block) -> Tensor:
        """Return the indices of a block's coordinates in the flat vector, in the block's own order."""
        if block.source == "all":
            return self.parts.indices
        if block.source == "rest":
            return self.parts.rest_indices
        if block.source == "likelihood":
            return torch.arange(self.layout.network_dim, self.layout.dim, device=self.layout.device)
        for layer in self.parts.layers:
            if layer.name == block.source:
                return layer.indices.flatten()
        raise InputError(
            "net",
            f"its forward also uses the weight of {block.source!r} outside its call, which the stored curvature lacks",
            "Fit the posterior again",
        )

    @cached_property
    def blocks(self) -> tuple[tuple[Block, Tensor], ...]:
        """The blocks in the network's dtype, each with the indices of its coordinates."""
        return tuple((block.to(self.loc.dtype), self.places(block)) for block in self.precision_blocks)

    @property
    def count(self) -> int:
        """Number of parameters that the Gaussian covers."""
        return sum(block.size for block in self.precision_blocks)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every weight, (D,); zero for fixed ones."""
        std = torch.zeros_like(self.loc)
        for block, (_, indices) in zip(self.precision_blocks, self.blocks):
            std[indices] = block.variance().sqrt().to(std)
        return std

    def covariance(self) -> Tensor:
        """Return the covariance (D, D); for small networks."""
        dim = self.layout.dim
        if dim > 20_000:
            raise InputError("covariance", f"would have {dim:,} x {dim:,} values", "Use std, or sample")
        covariance = torch.zeros(dim, dim, dtype=torch.float64, device=self.loc.device)
        for block, (_, indices) in zip(self.precision_blocks, self.blocks):
            covariance[indices.unsqueeze(1), indices] = block.covariance()
        return covariance

    @property
    def log_evidence(self) -> float:
        """Laplace estimate of log p(D) in nats: log p(D|w*) + log p(w*) + (d/2) log 2 pi - (1/2) log |P|.

        Exact for linear-Gaussian models. At other temperatures it is the log integral of the tempered product.
        Parameters that stay at w* are treated as given: neither their prior nor their volume enters.
        """
        tempering = self.record.tempering
        value = self.log_likelihood / tempering.get("likelihood", 1.0) + self.log_prior / tempering.get("prior", 1.0)
        log_det = sum(block.log_det() for block in self.precision_blocks)
        return value + 0.5 * self.count * math.log(2 * math.pi) - 0.5 * log_det

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw weights (count, D). Draw i does not depend on `count`."""
        check_integer("count", count)
        generator = stream(check_seed(seed), "laplace draws", device=self.loc.device)
        noise = torch.empty(count, self.layout.dim, dtype=self.loc.dtype, device=self.loc.device)
        # Draw by draw: filled as one block, the numbers would depend on its length.
        for draw in noise.unbind(0):
            draw.normal_(generator=generator)
        draws = self.loc.expand(count, -1).clone()
        for block, indices in self.blocks:
            draws[:, indices] += block.root(noise[:, indices])
        return draws

    @property
    def draws(self) -> Tensor:
        """A fixed set of 100 draws, (1, draw, D)."""
        return self.sample(100).unsqueeze(0)

    def module(self) -> nn.Module:
        """Return a plain `nn.Module` with the weights w*."""
        return self.layout.write(self.loc)

    def as_prior(self) -> GaussianPrior:
        """Return this Gaussian as the prior of a problem with other data and the same network.

        It must cover all parameters.
        """
        if self.count < self.layout.dim:
            raise InputError(
                "as_prior",
                f"the Gaussian covers {self.count} of {self.layout.dim} parameters; the others are fixed",
                "Choose the random parameters by Problem(..., random=...), and leave Laplace's random at None",
            )
        blocks = [_block_precision(block.to(self.loc.dtype)) for block in self.precision_blocks]
        precision: Precision = Blocks(*blocks, indices=torch.cat([indices for _, indices in self.blocks]))
        if all(isinstance(block, Diagonal) for block in blocks):
            precision = Diagonal(precision.diagonal())
        return GaussianPrior(self.loc, precision, signature(self.layout), self.record.method)

    # -- prediction
    @reads_loaders
    def predict(
        self,
        x: Any,
        *,
        linearised: bool = True,
        joint: bool = False,
        draws: int = 128,
        seed: int = 0,
        grad: bool = False,
    ) -> Predictive:
        """Return the Bayesian model average at x.

        Args:
            x: inputs.
            linearised: use f(x, w*) + J(x) (w - w*), the model that the Gaussian is a posterior of. False evaluates the
                network itself at draws of the weights, which predicts worse for all but linear networks.
            joint: with `linearised`, make each draw one function, so that rows are correlated as in the posterior;
                costs a forward pass per draw. Otherwise every row has its own N(f, J P^-1 J') over its outputs, rows
                are not drawn jointly, and each row's mean and covariance are exact with more than twice as many draws
                as outputs.
            draws: number of draws.
            seed: seed of the draws.
            grad: whether results are differentiable in x; linearised predictions are then always joint.
        """
        check_integer("draws", draws)
        check_seed(seed)
        inputs = self.model.inputs(x, grad)
        source: DrawSource
        if not linearised:
            source = WeightDraws(self.model, self.sample(draws, seed=seed))
        elif joint or grad:
            source = FunctionDraws(self.model, self.loc, self.sample(draws, seed=seed) - self.loc)
        else:
            source = OutputDraws(self.model, self.loc, self.parts, [b for b, _ in self.blocks], inputs, draws, seed)
        return predictive_of(source, inputs)

    # -- storage
    def tensors(self) -> dict[str, Tensor]:
        """Return w* and the concatenated tensors of all blocks."""
        flat = [tensor.flatten() for block in self.precision_blocks for tensor in block.tensors]
        return {"loc": self.loc, "blocks": torch.cat(flat)}

    def description(self) -> Any:
        """Return the blocks' kinds and shapes, and the density at w*."""
        blocks = [
            {"kind": b.kind, "source": b.source, "shapes": [list(t.shape) for t in b.tensors]}
            for b in self.precision_blocks
        ]
        return {
            "names": list(self.names),
            "blocks": blocks,
            "log_likelihood": self.log_likelihood,
            "log_prior": self.log_prior,
        }

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """Rebuild the posterior from its flat tensors and the description of the blocks."""
        blocks, start, flat = [], 0, tensors["blocks"]
        for block in description["blocks"]:
            parts = []
            for shape in block["shapes"]:
                parts.append(flat[start : start + math.prod(shape)].reshape(shape).clone())
                start += math.prod(shape)
            blocks.append(block_from_tensors(block["kind"], block["source"], parts))
        return cls(
            model,
            tensors["loc"],
            blocks,
            description["names"],
            record,
            log_likelihood=description["log_likelihood"],
            log_prior=description["log_prior"],
        )

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({b.kind for b in self.precision_blocks}))
        return f"LaplacePosterior({self.count} of {self.layout.dim} parameters, {kinds})"


def _block_precision(block: Block) -> Precision:
    """Return a block's precision in the form that priors use."""
    if isinstance(block, KronBlock):
        _, outer, _, inner, prior = block.tensors
        return Kronecker(outer, inner, 1 + block.ratios, prior.sqrt())
    if isinstance(block, DiagonalBlock):
        return Diagonal(block.prior * (1 + block.eigenvalues))
    return Dense.of_precision(block.precision())
