"""Minibatch steps of wide networks in C++ and float32, and the normal numbers that they use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp import api, api_wide
from credibly.backends.cpp.density import MIN_THREADED
from credibly.backends.cpp.likelihood import likelihood_struct, supports
from credibly.backends.cpp.stack import Stack
from credibly.core.rng import CHUNK
from credibly.core.threads import native_threads
from credibly.likelihoods import Likelihood

MIN_THREADED_NORMALS = 2**16  # normal numbers below which starting threads costs more than it saves
MIN_THREADED_CHAIN = 2**24  # batch size times parameters from which several threads may share a chain
MAX_CALL = 2e10  # multiplications per call, a fraction of a second: Ctrl-C is checked between calls


class WideDensity:
    """weights[0] * log likelihood + weights[1] * log prior of a stack that `takes` accepts, for minibatch steps."""

    def __init__(
        self, stack: Stack, x: Any, y: Tensor, likelihood: Likelihood, prior: Any, weights: tuple[float, float]
    ) -> None:
        targets = y.to(stack.dtype)
        targets = (targets.unsqueeze(1) if targets.ndim == 1 else targets).contiguous()
        inputs = x.to(stack.dtype).contiguous()
        loc = _whole_chunks(prior.loc.to(stack.dtype))
        precision = _whole_chunks((weights[1] / prior.std.double() ** 2).to(stack.dtype))
        vectors = (loc, precision, *_by_chunk(loc, precision))
        self.stack, self.n = stack, len(x)
        self._kept = (inputs, targets, vectors)  # the struct holds their addresses
        data = likelihood_struct(likelihood, stack.layout, stack, targets.shape[1], weights[0])
        data.rows = len(x)
        table = api_wide.Table(api.address(inputs), api.address(targets), targets.shape[1])
        self.struct = api_wide.WideDensity(stack.struct, data, table, api_wide.ChunkedPrior(*map(api.address, vectors)))
        self._steps = api_wide.function("wide_steps")

    def steps_per_call(self, chains: int, batch: int) -> int:
        """Return the number of steps per call that keeps Ctrl-C responsive."""
        return max(1, int(MAX_CALL / (3 * chains * batch * self.stack.dim)))

    def minibatch_steps(
        self,
        theta: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        root: Tensor | None,
        value: Tensor,
        rows: Tensor | None,
        scale: float,
        keys: Any,
        schedule: Tensor,
    ) -> None:
        """Take the steps of `CppDensity.minibatch_steps`, given the keys of the noise as an array (K, C, 2)."""
        assert keys.flags.c_contiguous
        padded = None if root is None else _whole_chunks(root)
        batch = self.n if rows is None else rows.shape[-1]
        work = batch * self.stack.dim
        arguments = api_wide.WideSteps(
            chains=len(theta),
            threads=native_threads() if keys.size // 2 * work > MIN_THREADED else 1,
            count=len(schedule),
            single_thread=work < MIN_THREADED_CHAIN,
            theta=api.address(theta),
            momentum=api.address(momentum),
            gradient=api.address(gradient),
            root=api.address(padded),
            log_likelihood=api.address(value),
            rows=api.address(rows),
            batch=batch,
            scale=scale,
            keys=keys.ctypes.data,
            schedule=api.address(schedule),
        )
        self._steps(self.struct, arguments)


def supports_wide(stack: Stack | None, x: Any, y: Tensor, likelihood: Likelihood, prior: Any) -> bool:
    """Return whether `WideDensity` supports the network, likelihood, prior and data, if the library is available."""
    if stack is None or stack.dtype != torch.float32 or stack.layout.device.type != "cpu":
        return False
    return supports(x, y, likelihood, prior)


def fill_normal(out: Tensor, keys: tuple[int, int]) -> None:
    """Fill `out`, an integer number of chunks, with the numbers of `rng.fill_normal`, on all threads."""
    assert len(out) % CHUNK == 0
    threads = native_threads() if len(out) >= MIN_THREADED_NORMALS else 1
    arguments = api_wide.Normals(keys=api_wide.Keys(*keys), count=len(out), threads=threads, out=api.address(out))
    api_wide.function("fill_normal")(arguments)


def _whole_chunks(values: Tensor) -> Tensor:
    """Return (D,) padded with its last value to a multiple of the chunk size."""
    return torch.cat([values, values[-1:].expand(-len(values) % CHUNK)])


def _by_chunk(loc: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and precision per chunk, with the precision NaN if either varies within the chunk."""
    locs, precisions = loc.view(-1, CHUNK), precision.view(-1, CHUNK)
    constant = (locs == locs[:, :1]).all(1) & (precisions == precisions[:, :1]).all(1)
    return locs[:, 0].contiguous(), torch.where(constant, precisions[:, 0], torch.nan)
