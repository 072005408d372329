"""Outputs of a linearised network, f(x, w*) + J(x) (w - w*) with w - w* ~ N(0, P^-1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from credibly.core.autodiff import grad_for
from credibly.core.inputs import Inputs, map_inputs, row_count
from credibly.core.rng import stream, stream_seed
from credibly.curvature import Block, DenseBlock, KronBlock, Parts, RowPass, gauss_newton
from credibly.curvature.gauss_newton import row_gradients, rows_per_block
from credibly.curvature.parts import Captured
from credibly.curvature.scores import output_vectors
from credibly.posterior.model import Model


class FunctionDraws:
    """Draws of functions, by a Jacobian-vector product along each draw (S, D) of w - w*; rows are joint."""

    def __init__(self, model: Model, loc: Tensor, offsets: Tensor) -> None:
        self.model, self.loc, self.offsets = model, loc, offsets
        self.likelihood, self.count = model.likelihood, len(offsets)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the arranged outputs of draws start to stop, (stop - start, rows, ..., K)."""
        offsets = self.offsets[start:stop]
        # Fused attention has no forward-mode derivative.
        with grad_for(x), sdpa_kernel(SDPBackend.MATH):
            value, slope, *_ = torch.func.jvp(
                lambda theta: self.model.forward(theta, x), (self.loc.expand_as(offsets).contiguous(),), (offsets,)
            )
            result: Tensor = value + slope
            return self.likelihood.arrange(result, 1)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""
        return self.model.extra(self.loc + self.offsets[start:stop])

    def row_width(self) -> int:
        """Return how many values one row takes: every network value and its derivative."""
        return 2 * self.model.forward.row_width


class OutputDraws:
    """Draws of each row's outputs from N(f, J P^-1 J').

    All rows share one set of quasi-random normal points (Sobol, scrambled by the seed), whitened to mean zero and
    identity covariance. A row's mean and covariance are then exact, and everything else (densities, quantiles, averaged
    probabilities) converges faster than with independent draws. If outputs have further axes (pixels), each element is
    drawn from its own covariance.
    """

    def __init__(
        self, model: Model, loc: Tensor, parts: Parts, blocks: list[Block], x: Inputs, draws: int, seed: int
    ) -> None:
        self.model, self.loc, self.parts, self.count = model, loc, parts, draws
        self.likelihood = model.likelihood
        self.blocks = [block for block in blocks if block.source != "likelihood"]
        self.passes = RowPass(model.forward_layout, model.likelihood, model.forward, loc, parts)
        with torch.no_grad():
            trial = model.forward(loc.unsqueeze(0), map_inputs(lambda t: t[:1], x))
        shape = self.likelihood.arrange(trial, 1).shape
        self.width, self.outputs_per_row = shape[-1], trial.numel()
        own = model.layout.dim - model.layout.network_dim
        noise = normal_points(draws, self.width + own, seed).to(loc)
        self.noise = noise[:, : self.width]
        self.own = loc[model.layout.network_dim :].expand(draws, -1)
        for block in blocks:
            if block.source == "likelihood":
                self.own = self.own + block.root(noise[:, self.width :])
        dense = len(parts.indices) if any(isinstance(b, DenseBlock) for b in self.blocks) else len(parts.rest_indices)
        self.rows = rows_per_block(model.forward.row_width, parts, self.width * dense, loc.device)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the arranged outputs of draws start to stop, (stop - start, rows, ..., K)."""
        chunks = []
        for row in range(0, row_count(x), self.rows):
            mean, root = self.moments(map_inputs(lambda t, row=row: t[row : row + self.rows], x))  # type: ignore[misc]
            chunks.append(mean + torch.einsum("n...kl,sl->sn...k", root, self.noise[start:stop]))
        return torch.cat(chunks, 1)

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return the outputs' means (N, ..., K) and square roots (N, ..., K, K) of their covariances."""
        captured = self.passes(x)
        mean = captured.output
        elements = mean.shape[1:-1]
        eye = torch.eye(self.width, dtype=mean.dtype, device=mean.device)
        gradients, covariances = [], []
        for vector in output_vectors(eye.expand(*mean.shape, self.width)):
            gradients.append(captured.pull_back(vector))
            # The K outputs of one element are complete.
            if len(gradients) == self.width:
                layers = [torch.stack(g) for g in zip(*(of_layers for of_layers, _ in gradients))]
                rest = [of_rest for _, of_rest in gradients if of_rest is not None]
                covariances.append(self._covariance(captured, layers, torch.stack(rest) if rest else None))
                gradients = []
        covariance = torch.stack(covariances, 1) if elements else covariances[0]
        return mean, _root(covariance).reshape(*mean.shape, self.width)

    def _covariance(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> Tensor:
        """Return J P^-1 J' (N, K, K) from gradients (K, N, T, out) in the layers' outputs and (K, N, P) in the rest."""
        total = torch.zeros(len(captured.output), self.width, self.width, dtype=self.loc.dtype, device=self.loc.device)
        numbers = {layer.name: i for i, layer in enumerate(self.parts.layers)}
        for block in self.blocks:
            if isinstance(block, DenseBlock):
                rows = [
                    row_gradients(captured.inputs, [g[k] for g in layers], None if rest is None else rest[k])
                    for k in range(self.width)
                ]
                white = block.whitened(torch.stack(rows))
                total += torch.einsum("knp,mnp->nkm", white, white)
            elif block.source == "rest":
                assert rest is not None
                total += torch.einsum("knp,p,mnp->nkm", rest, block.variance(), rest)
            else:
                i = numbers[block.source]
                total += _layer_covariance(block, captured.inputs[i], layers[i])
        return total

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""
        network = self.loc[: self.model.layout.network_dim].expand(stop - start, -1)
        return self.model.extra(torch.cat([network, self.own[start:stop]], -1))

    def row_width(self) -> int:
        """Return 1: `outputs` splits the rows into blocks itself."""
        return 1


def _layer_covariance(block: Block, a: Tensor, g: Tensor) -> Tensor:
    """Return the term (N, K, K) of a layer with inputs a (N, T, in) and output gradients g (K, N, T, out)."""
    if isinstance(block, KronBlock):
        _, outer, _, inner, prior = block.tensors
        a, g = (a * prior.rsqrt()) @ inner, g @ outer
        variance = 1 / (1 + block.ratios)
    else:
        variance = block.variance().reshape(g.shape[-1], a.shape[-1])
    if a.shape[1] == 1:
        weight = a.squeeze(1).square() @ variance.mT
        g = g.squeeze(2)
        result: Tensor = torch.einsum("kno,no,mno->nkm", g, weight, g)
        return result
    size = max(1, gauss_newton.block_values(g.device) // (len(g) * variance.numel()))
    chunks = []
    for g_chunk, a_chunk in zip(g.split(size, 1), a.split(size)):
        rows = torch.einsum("knto,nti->knoi", g_chunk, a_chunk)
        chunks.append(torch.einsum("knoi,oi,mnoi->nkm", rows, variance, rows))
    return torch.cat(chunks)


def _root(covariance: Tensor) -> Tensor:
    """Return L with L L' = covariance, up to rounding of the covariance if that is numerically singular.

    L is a continuous function of the covariance, up to the square root of that rounding: the draws of a row must not
    depend on how its covariance is rounded, which the other rows of a block affect.
    """
    wide = covariance.double()
    wide = 0.5 * (wide + wide.mT)
    root, info = torch.linalg.cholesky_ex(wide)
    rounding = 10 * torch.finfo(covariance.dtype).eps * wide.diagonal(dim1=-2, dim2=-1).sum(-1)
    singular = (info > 0) | (root.diagonal(dim1=-2, dim2=-1).square().amin(-1) < rounding)
    if bool(singular.any()):
        part = wide[singular]
        extra = torch.diag_embed(rounding[singular].unsqueeze(-1).expand(part.shape[:-1]))
        padded, info = torch.linalg.cholesky_ex(part + extra)
        if bool((info > 0).any()):
            values, basis = torch.linalg.eigh(part[info > 0])
            padded[info > 0] = (basis * values.clamp_min(0).sqrt().unsqueeze(-2)) @ basis.mT
        root[singular] = padded
    result: Tensor = root.to(covariance.dtype)
    return result


def normal_points(count: int, dim: int, seed: int) -> Tensor:
    """Return quasi-random normal points (count, dim) in float64 with mean zero and, if count > 2 dim, covariance I.

    The covariance is the population covariance: the sum of squares divided by count.
    """
    points: Tensor
    if dim > torch.quasirandom.SobolEngine.MAXDIM:
        points = torch.randn(count, dim, generator=stream(seed, "output draws"), dtype=torch.float64)
    else:
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=stream_seed(seed, "output draws") % 2**31)
        uniform = engine.draw(count, dtype=torch.float64).clamp(2.0**-40, 1 - 2.0**-40)
        points = torch.special.ndtri(uniform)
    if count == 1:
        return torch.zeros_like(points)
    points = points - points.mean(0)
    if count <= 2 * dim:
        return points
    half = torch.linalg.cholesky(points.mT @ points / count)
    white: Tensor = torch.linalg.solve_triangular(half, points.mT, upper=False)
    return white.mT
