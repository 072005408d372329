"""The generalised Gauss-Newton matrix sum_i v_i J_i' F_i J_i of a likelihood at one point, plus the prior's precision.

J_i is the Jacobian of row i's output, F_i its Fisher information (see `scores`), v_i its weight. Three structures:

    full   the matrix itself
    kron   per layer B x A / M, with A = sum a a' over inputs, B = sum g g' over output gradients at M positions (K-FAC)
           (a row of weight v counts v times in A, B and M)
    diag   its diagonal

Rows are processed in blocks, so memory does not grow with their number. Sums are accumulated in float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from credibly.core.progress import Progress
from credibly.core.rows import Rows, sum_rows
from credibly.curvature.blocks import Block, DenseBlock, DiagonalBlock, KronBlock
from credibly.curvature.cost import values_per_row
from credibly.curvature.parts import Captured, Parts, RowPass
from credibly.curvature.prior_precision import prior_off_diagonal, prior_precision
from credibly.curvature.scores import Fisher
from credibly.errors import InputError
from credibly.problem import Problem

STRUCTURES = ("kron", "diag", "full")
# Network values, or gradients per row, in memory at a time: 16 MiB in float32, and 1 GiB on a GPU, which needs
# large blocks and has the memory.
BLOCK_VALUES, GPU_BLOCK_VALUES = 2**22, 2**28


def curvature_blocks(
    problem: Problem,
    theta: Tensor,
    structure: str,
    parts: Parts,
    *,
    fisher: Fisher | None = None,
    progress: bool | None = None,
) -> list[Block]:
    """Return blocks of the precision of log p_T at theta (D,), for these parts and the likelihood's own parameters.

    Both curvatures include their temperature. A layer of "kron" has one prior precision per input: the mean over
    outputs where it differs between them (priors that are not Normal). If the prior is an earlier posterior with
    correlations, "full" keeps all of them and the other structures keep the diagonal of its precision. `fisher` is
    exact by default; the likelihood's own parameters have their second derivative in any case.
    """
    fisher = fisher or Fisher()
    fisher.check(problem.likelihood)
    check_memory(problem, structure, parts)
    precision = prior_precision(problem.prior, theta) / problem.tempering.prior
    sums, own = _summed(problem, theta, structure, parts, fisher, progress)
    blocks = sums.blocks(precision, 1 / problem.tempering.likelihood)
    if problem.layout.extra:
        here = precision[problem.layout.network_dim :]
        blocks.append(DiagonalBlock.of("likelihood", own.clamp_min(0) / problem.tempering.likelihood, here))
    return blocks


def gauss_newton_matrix(problem: Problem, theta: Tensor, parts: Parts) -> Tensor:
    """Return (1/T) sum_i v_i J_i' F_i J_i at theta (D,), without the prior, (P, P) in float64, ordered as `parts`."""
    sums, _ = _summed(problem, theta, "full", parts, Fisher(), False)
    assert isinstance(sums, _Full)
    return sums.total / problem.tempering.likelihood


def _summed(
    problem: Problem, theta: Tensor, structure: str, parts: Parts, fisher: Fisher, progress: bool | None
) -> tuple[_Sums, Tensor]:
    """Return the sums over all rows, and the second derivatives in the likelihood's own parameters."""
    sums = _SUMS[structure](parts, problem)
    passes = RowPass(problem.layout, problem.likelihood, problem.forward, theta, parts)
    extra = problem.extra(theta.unsqueeze(0))
    own = torch.zeros(problem.dim - problem.layout.network_dim, dtype=torch.float64, device=problem.device)
    labels = fisher.generator(problem.device)
    held = max(sums.values_per_row, values_per_row(problem, fisher))
    rows = problem.micro_batch or rows_per_block(problem.forward.row_width, parts, held, problem.device)
    done = 0
    with Progress(f"curvature ({structure})", problem.n, progress) as line:
        for x, y, weight in _blocks(problem, rows):
            captured = passes(x)
            sums.begin(captured, weight)
            for vector in fisher.vectors(problem.likelihood, captured.output, y, extra, labels):
                if weight is not None:
                    vector = vector * weight.sqrt().reshape(-1, *(1,) * (vector.ndim - 1))
                sums.add(captured, *captured.pull_back(vector))
            own += _own_curvature(problem, theta, captured.output, y, weight)
            done += len(y)
            line.update(done, final=done == problem.n)
    return sums, own


def _blocks(problem: Problem, rows: int) -> Iterator[Rows]:
    """Yield the data in blocks of at most this many rows; a stream by one pass over it."""
    for block in [problem.rows] if problem.stream is None else problem.stream.one_pass():
        for start in range(0, len(block.y), rows):
            yield block.at(slice(start, start + rows))


def row_gradients(inputs: list[Tensor], layers: list[Tensor], rest: Tensor | None) -> Tensor:
    """Return each row's gradient in all parts, (N, P), layers first."""
    gradients = [torch.einsum("nto,nti->noi", g, a).flatten(1) for a, g in zip(inputs, layers)]
    return torch.cat(gradients if rest is None else [*gradients, rest], 1)


def rows_per_block(row_width: int, parts: Parts, values_per_row: int, device: torch.device) -> int:
    """Return how many rows to process at a time, from the values per row in the network and outside it."""
    # A convolution's inputs are unfolded: copied for every position that uses them.
    unfolded = 8 if any(layer.convolution for layer in parts.layers) else 1
    return max(1, block_values(device) // max(unfolded * row_width, values_per_row))


def block_values(device: torch.device) -> int:
    """Return how many values may be in memory at a time on a device."""
    return GPU_BLOCK_VALUES if device.type == "cuda" else BLOCK_VALUES


class _Sums:
    """Sums over rows. `values_per_row` counts the values held per row in addition to the forward pass."""

    def __init__(self, parts: Parts, problem: Problem) -> None:
        self.parts = parts
        self.rest_size = len(parts.rest_indices)
        self.device = problem.device
        self.values_per_row = self.rest_size
        self.rest = self._zeros(self.rest_size)

    def begin(self, captured: Captured, weight: Tensor | None) -> None:
        """Start a block of rows with these weights; output vectors are multiplied by their roots already."""

    def add(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> None:
        """Add the gradients of one output vector of the block."""
        if rest is not None:
            self.rest += rest.square().sum(0)

    def blocks(self, precision: Tensor, weight: float) -> list[Block]:
        """Return the blocks, with the likelihood's curvature multiplied by `weight`."""
        if not self.rest_size:
            return []
        return [DiagonalBlock.of("rest", weight * self.rest, precision[self.parts.rest_indices])]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


class _Diagonal(_Sums):
    def __init__(self, parts: Parts, problem: Problem) -> None:
        super().__init__(parts, problem)
        self.layers = [self._zeros(*layer.indices.shape) for layer in parts.layers]
        self.squares: list[Tensor] = []

    def begin(self, captured: Captured, weight: Tensor | None) -> None:
        self.squares = [a.squeeze(1).square() if a.shape[1] == 1 else a for a in captured.inputs]

    def add(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> None:
        super().add(captured, layers, rest)
        for total, a, g in zip(self.layers, self.squares, layers):
            # At a single position the square of a product is the product of squares.
            if a.ndim == 2:
                total += g.squeeze(1).square().mT @ a
            else:
                for some, own in zip(*(t.split(max(1, block_values(total.device) // total.numel())) for t in (g, a))):
                    total += torch.einsum("nto,nti->noi", some, own).square().sum(0)

    def blocks(self, precision: Tensor, weight: float) -> list[Block]:
        layers: list[Block] = [
            DiagonalBlock.of(layer.name, weight * total.flatten(), precision[layer.indices.flatten()])
            for layer, total in zip(self.parts.layers, self.layers)
        ]
        return layers + super().blocks(precision, weight)


class _Kron(_Sums):
    def __init__(self, parts: Parts, problem: Problem) -> None:
        super().__init__(parts, problem)
        self.inner = [self._zeros(layer.indices.shape[1], layer.indices.shape[1]) for layer in parts.layers]
        self.outer = [self._zeros(layer.indices.shape[0], layer.indices.shape[0]) for layer in parts.layers]
        self.counts = [0.0] * len(parts.layers)

    def begin(self, captured: Captured, weight: Tensor | None) -> None:
        for i, a in enumerate(captured.inputs):
            flat = a.flatten(0, 1)
            own = flat if weight is None else (a * weight.reshape(-1, 1, 1)).flatten(0, 1)
            self.inner[i] += own.mT @ flat
            self.counts[i] += len(flat) if weight is None else a.shape[1] * float(weight.double().sum())

    def add(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> None:
        super().add(captured, layers, rest)
        for total, g in zip(self.outer, layers):
            flat = g.flatten(0, 1)
            total += flat.mT @ flat

    def blocks(self, precision: Tensor, weight: float) -> list[Block]:
        layers: list[Block] = []
        for layer, inner, outer, count in zip(self.parts.layers, self.inner, self.outer, self.counts):
            layers.append(KronBlock.of(layer.name, weight * outer, inner / count, precision[layer.indices].mean(0)))
        return layers + super().blocks(precision, weight)


class _Full(_Sums):
    def __init__(self, parts: Parts, problem: Problem) -> None:
        super().__init__(parts, problem)
        size = len(parts.indices)
        self.values_per_row, self.total = size, self._zeros(size, size)
        self.off_diagonal = prior_off_diagonal(problem.prior, parts.indices)
        self.prior_weight = 1 / problem.tempering.prior

    def add(self, captured: Captured, layers: list[Tensor], rest: Tensor | None) -> None:
        rows = row_gradients(captured.inputs, layers, rest)
        self.total += rows.mT @ rows

    def blocks(self, precision: Tensor, weight: float) -> list[Block]:
        here = precision[self.parts.indices]
        if self.off_diagonal is None:
            return [DenseBlock.of("all", weight * self.total, here)]
        return [DenseBlock.of("all", weight * self.total + self.prior_weight * self.off_diagonal, here, -1 + 1e-12)]


_SUMS: dict[str, type[_Sums]] = {"kron": _Kron, "diag": _Diagonal, "full": _Full}


def _own_curvature(problem: Problem, theta: Tensor, output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Return -d^2 / d e^2 of the rows' log likelihood for each of the likelihood's own parameters, (E,)."""
    first = problem.layout.network_dim
    leaf = theta[first:].detach().clone().requires_grad_()
    if not len(leaf):
        return leaf.detach().double()
    with torch.enable_grad():
        whole = torch.cat([theta[:first].detach(), leaf]).unsqueeze(0)
        rows = problem.likelihood.log_prob(output.unsqueeze(0), y, problem.extra(whole)).double()
        value = sum_rows(rows, weight).sum()
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        second = [torch.autograd.grad(slope[i], leaf, retain_graph=True)[0][i] for i in range(len(leaf))]
    return -torch.stack(second).double()


def check_memory(problem: Problem, structure: str, parts: Parts) -> None:
    """Raise if the matrices would take more than half of the memory."""
    sizes = [len(parts.indices)] if structure == "full" else []
    if structure == "kron":
        sizes = [side for layer in parts.layers for side in layer.indices.shape]
    # The matrix, its eigenbasis and the workspace of the decomposition.
    bytes_ = sum(3 * 8 * side**2 for side in sizes)
    if bytes_ > _memory(problem.device) / 2:
        advice = 'structure="kron" needs far less' if structure == "full" else 'structure="diag" needs far less'
        raise InputError(
            "structure",
            f"{structure!r} of {len(parts.indices):,} parameters needs {bytes_ / 2**30:,.1f} GiB ({bytes_:,} bytes)",
            f'{advice}; random="last layer" covers fewer parameters',
        )


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 2.0**34
