"""Sources of outputs of a linearised network, f(x, w*) + J(x) (w - w*) with w - w* ~ N(0, P^-1)."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, map_inputs, row_count
from credibly.core.rng import stream, stream_seed
from credibly.curvature import Block, DenseBlock, KronBlock, Parts, RowPass, gauss_newton
from credibly.curvature.gauss_newton import block_rows, row_gradients, vectors
from credibly.curvature.parts import Captured
from credibly.posterior.model import Model


class FunctionDraws:
    """Draws of whole functions, by a forward derivative along each draw (S, D) of w - w*: rows of a draw belong together."""

    def __init__(self, model: Model, loc: Tensor, deviations: Tensor) -> None:
        self.model, self.loc, self.deviations = model, loc, deviations
        self.likelihood, self.count = model.likelihood, len(deviations)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Arranged outputs (stop - start, rows, ..., K)."""
        along = self.deviations[start:stop]
        with torch.no_grad():
            value, slope, *_ = torch.func.jvp(
                lambda theta: self.model.forward(theta, x), (self.loc.expand_as(along).contiguous(),), (along,)
            )
            result: Tensor = value + slope
            return self.likelihood.arrange(result, 1)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """The likelihood's own parameters in those draws."""
        return self.model.extra(self.loc + self.deviations[start:stop])

    def row_width(self) -> int:
        """A value and its derivative for everything on the way."""
        return 2 * self.model.forward.row_width


class OutputDraws:
    """Draws of each row's outputs from N(f, J P^-1 J').

    The noise is one set of quasi-random normal points (Sobol, scrambled by the seed) for all rows, moved and turned so that their
    mean is zero and their covariance the identity: mean and covariance of a row's draws are then exact, and everything
    else (densities, quantiles, averaged probabilities) converges faster than with independent ones. Where a row has other
    axes than its targets (pixels), each element is drawn by its own covariance.
    """

    def __init__(
        self, model: Model, loc: Tensor, parts: Parts, blocks: list[Block], x: Inputs, draws: int, seed: int
    ) -> None:
        self.model, self.loc, self.parts, self.count = model, loc, parts, draws
        self.likelihood = model.likelihood
        self.blocks = [block for block in blocks if block.source != "likelihood"]
        self.passes = RowPass(model.layout, model.likelihood, model.forward, loc, parts)
        with torch.no_grad():
            trial = model.forward(loc.unsqueeze(0), map_inputs(lambda t: t[:1], x))
        shape = self.likelihood.arrange(trial, 1).shape
        self.width, self.outputs_a_row = shape[-1], trial.numel()
        own = model.layout.dim - model.layout.network_dim
        noise = normal_points(draws, self.width + own, seed).to(loc)
        self.noise = noise[:, : self.width]
        self.own = loc[model.layout.network_dim :].expand(draws, -1)
        for block in blocks:
            if block.source == "likelihood":
                self.own = self.own + block.root(noise[:, self.width :])
        dense = len(parts.places) if any(isinstance(b, DenseBlock) for b in self.blocks) else len(parts.rest_places)
        self.rows = block_rows(model.forward.row_width, parts, self.width * dense)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Arranged outputs (stop - start, rows, ..., K)."""
        pieces = []
        for row in range(0, row_count(x), self.rows):
            mean, root = self.moments(map_inputs(lambda t, row=row: t[row : row + self.rows], x))  # type: ignore[misc]
            pieces.append(mean + torch.einsum("n...kl,sl->sn...k", root, self.noise[start:stop]))
        return torch.cat(pieces, 1)

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Means (N, ..., K) and roots (N, ..., K, K) of the covariances of the outputs."""
        captured = self.passes(x)
        mean = captured.output
        ride = mean.shape[1:-1]
        eye = torch.eye(self.width, dtype=mean.dtype, device=mean.device)
        pulls, found = [], []
        for vector in vectors(eye.expand(*mean.shape, self.width)):
            pulls.append(captured.pull(vector))
            if len(pulls) == self.width:  # the K outputs of one element
                layers = [torch.stack(g) for g in zip(*(p[0] for p in pulls))]
                rest = [p[1] for p in pulls if p[1] is not None]
                found.append(self._covariance(captured, layers, torch.stack(rest) if rest else None))
                pulls = []
        covariance = torch.stack(found, 1) if ride else found[0]
        return mean, _root(covariance).reshape(*mean.shape, self.width)

    def _covariance(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> Tensor:
        """J P^-1 J' (N, K, K) from gradients (K, N, T, out) in the layers' outputs and (K, N, P) in the rest."""
        total = torch.zeros(len(captured.output), self.width, self.width, dtype=self.loc.dtype, device=self.loc.device)
        places = {layer.name: i for i, layer in enumerate(self.parts.layers)}
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
                i = places[block.source]
                total += _layer_covariance(block, captured.inputs[i], layers[i])
        return total

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """The likelihood's own parameters in those draws."""
        network = self.loc[: self.model.layout.network_dim].expand(stop - start, -1)
        return self.model.extra(torch.cat([network, self.own[start:stop]], -1))

    def row_width(self) -> int:
        """1, as `outputs` makes blocks of rows by itself."""
        return 1


def _layer_covariance(block: Block, a: Tensor, g: Tensor) -> Tensor:
    """The share (N, K, K) of a layer with inputs a (N, T, in) and output gradients g (K, N, T, out)."""
    if isinstance(block, KronBlock):
        _, outer, _, inner, prior = block.pieces
        a, g = (a * prior.rsqrt()) @ inner, g @ outer
        variance = 1 / (1 + block.ratios)
    else:
        variance = block.variance().reshape(g.shape[-1], a.shape[-1])
    if a.shape[1] == 1:
        weight = a.squeeze(1).square() @ variance.mT
        g = g.squeeze(2)
        result: Tensor = torch.einsum("kno,no,mno->nkm", g, weight, g)
        return result
    some = max(1, gauss_newton.BLOCK_VALUES // (len(g) * variance.numel()))
    pieces = []
    for g_some, a_some in zip(g.split(some, 1), a.split(some)):
        rows = torch.einsum("knto,nti->knoi", g_some, a_some)
        pieces.append(torch.einsum("knoi,oi,mnoi->nkm", rows, variance, rows))
    return torch.cat(pieces)


def _root(covariance: Tensor) -> Tensor:
    """L with L L' = covariance; by eigenvectors where a row's is singular to rounding."""
    wide = covariance.double()
    wide = 0.5 * (wide + wide.mT)
    root, info = torch.linalg.cholesky_ex(wide)
    bad = info > 0
    if bool(bad.any()):
        values, basis = torch.linalg.eigh(wide[bad])
        root[bad] = basis * values.clamp_min(0).sqrt().unsqueeze(-2)
    result: Tensor = root.to(covariance.dtype)
    return result


def normal_points(count: int, dim: int, seed: int) -> Tensor:
    """Quasi-random normal points (count, dim) in float64 with mean zero and, where there are enough of them, covariance I.

    The covariance is that of the points taken as all there is, divided by their number.
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
