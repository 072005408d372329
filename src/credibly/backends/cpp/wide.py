"""Minibatch steps of wide networks in compiled code, in float32, and the normal numbers that go into them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.density import KINDS, SHARED, Rows, noise_scales
from credibly.backends.cpp.library import library
from credibly.backends.cpp.stack import Stack, checked, pointer
from credibly.core.rng import CHUNK
from credibly.likelihoods import Categorical, Likelihood
from credibly.priors.flat import BoundPrior

ALONE = 2**16  # normal numbers that one thread makes before others have started
TOGETHER = 2**24  # rows of a batch times parameters from which on several threads may share a chain
CALL = 2e10  # multiplications in one call, a fraction of a second: Ctrl-C is looked at in between


class _Table(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("columns", ctypes.c_int64)]


class _Prior(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("loc", "precision", "chunk_loc", "chunk_precision")]


class _Steps(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64), ("friction", ctypes.c_int64), ("apart", ctypes.c_int64), ("rows", ctypes.c_void_p),
        ("batch", ctypes.c_int64), ("scale", ctypes.c_double), ("keys", ctypes.c_void_p), ("figures", ctypes.c_void_p),
    ]  # fmt: skip


class WideDensity:
    """weights[0] * log likelihood + weights[1] * log prior of a stack that `takes` knows, for steps on some of its rows."""

    def __init__(
        self, stack: Stack, x: Any, y: Tensor, likelihood: Likelihood, prior: Any, weights: tuple[float, float]
    ) -> None:  # fmt: skip
        targets = y.to(stack.dtype)
        targets = (targets.unsqueeze(1) if targets.ndim == 1 else targets).contiguous()
        count = stack.outputs if isinstance(likelihood, Categorical) else targets.shape[1]
        scale, place, each = noise_scales(likelihood, stack.layout, count)
        scales, inputs = (ctypes.c_double * count)(*scale), x.to(stack.dtype).contiguous()
        precision = (weights[1] / prior.std.double() ** 2).to(stack.dtype)
        vectors = [_whole_chunks(prior.loc.to(stack.dtype)), _whole_chunks(precision)]
        self.stack, self.n = stack, len(x)
        chunks = _by_chunk(*vectors)
        self._kept = (inputs, targets, scales, vectors, chunks)  # the structures only point at them
        self._rows = Rows(len(x), 0, None, None, KINDS[type(likelihood)], count, scales, place, each, weights[0])
        self._table = _Table(inputs.data_ptr(), targets.data_ptr(), targets.shape[1])
        self._prior = _Prior(*(v.data_ptr() for v in (*vectors, *chunks)))
        self._function = _function("wide_steps")

    def steps_in_a_call(self, chains: int, batch: int) -> int:
        """So many that the user's wish to stop is seen soon."""
        return max(1, int(CALL / (3 * chains * batch * self.stack.dim)))

    def minibatch_steps(
        self, theta: Tensor, momentum: Tensor | None, gradient: Tensor | None, value: Tensor, rows: Tensor | None, scale: float,
        keys: Any, figures: Tensor,
    ) -> None:  # fmt: skip
        """As those of `NativeDensity`, with the keys of the noise, an array (K, C, 2), instead of the noise."""
        assert keys.flags.c_contiguous
        batch = self.n if rows is None else rows.shape[-1]
        threads = torch.get_num_threads() if keys.size // 2 * batch * self.stack.dim > SHARED else 1
        plan = _Steps(
            len(figures), momentum is not None, batch * self.stack.dim < TOGETHER, pointer(rows), batch, scale, keys.ctypes.data,
            pointer(figures),
        )  # fmt: skip
        checked(
            self._function(
                ctypes.byref(self.stack.struct), ctypes.byref(self._rows), ctypes.byref(self._table), ctypes.byref(self._prior),
                ctypes.c_int64(len(theta)), ctypes.c_int64(threads), ctypes.byref(plan), pointer(theta), pointer(momentum),
                pointer(gradient), pointer(value),
            )
        )  # fmt: skip


def takes(stack: Stack | None, x: Any, y: Tensor, likelihood: Likelihood, prior: Any) -> bool:
    """Whether the compiled code knows the network, the likelihood, the prior and the form of the data; it may yet be missing."""
    if stack is None or stack.dtype != torch.float32 or stack.layout.device.type != "cpu":
        return False
    if type(likelihood) not in KINDS or not isinstance(prior, BoundPrior) or not prior.is_normal:
        return False
    return isinstance(x, Tensor) and x.ndim == 2 and y.ndim <= 2 and likelihood.axis in (-1, 1)


def fill_normal(out: Tensor, keys: tuple[int, int]) -> None:
    """The numbers of `rng.fill_normal` into out (whole chunks,), by all threads."""
    assert len(out) % CHUNK == 0
    pair, threads = (ctypes.c_uint64 * 2)(*keys), torch.get_num_threads() if len(out) >= ALONE else 1
    _function("normal_numbers")(pair, ctypes.c_int64(len(out)), ctypes.c_int64(threads), pointer(out))


def _function(name: str) -> Any:
    found = getattr(library(), name)
    found.restype = ctypes.c_int64
    return found


def _whole_chunks(values: Tensor) -> Tensor:
    """(D,) and its last value as often as fills the last chunk."""
    return torch.cat([values, values[-1:].expand(-len(values) % CHUNK)])


def _by_chunk(loc: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and precision of every chunk where it has one of each; a precision of nan where it has more."""
    centres, precisions = loc.view(-1, CHUNK), precision.view(-1, CHUNK)
    one = (centres == centres[:, :1]).all(1) & (precisions == precisions[:, :1]).all(1)
    return centres[:, 0].contiguous(), torch.where(one, precisions[:, 0], torch.nan)
