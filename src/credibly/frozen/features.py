"""Activations of a frozen body for all rows of the data: in memory or, beyond a size, in a memory-mapped file."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from typing import Any

import torch
from torch import Tensor

from credibly.core.autodiff import requires_grad
from credibly.core.inputs import Inputs, arguments, describe, map_inputs, row_count, tensors_of
from credibly.forward import Forward, Plan
from credibly.frozen.body import Body, moved_values, split
from credibly.frozen.replay import NotSplit
from credibly.frozen.trace import Trace
from credibly.networks.calling import call_with
from credibly.networks.layout import Layout

log = logging.getLogger("credibly")
# Activations above this size are kept in a file on disk: 4 GiB.
MEMORY_BYTES = 2**32
# Number of network values of the body in memory at a time: 128 MiB in float32.
BODY_VALUES = 2**25


class Frozen:
    """A network in two parts: a body that is run once per row, and a head that is run for every parameter vector.

    Attributes:
        body: the frozen part.
        whole: forward passes of the full network.
        forward: forward passes of the head, on activations.
        row: structure, shapes and dtypes of the activations of one row.
    """

    def __init__(self, layout: Layout, whole: Forward, body: Body, plan: Plan) -> None:
        self.body, self.whole = body, whole
        features = map_inputs(lambda t: t[:2], body.trial.features)
        self.row = describe(features)
        self.forward = Forward(layout.on(body.head), plan, features)

    @staticmethod
    def of(layout: Layout, whole: Forward, x: Inputs, plan: Plan, trace: Trace | None = None) -> Frozen | None:
        """Return the network in two parts, or None, with the reason in the log.

        `trace` is the record of a pass over the first two rows of x, if there is one.
        """
        if not layout.has_fixed:
            return None
        try:
            if whole.precision is not None:
                raise NotSplit("it runs under autocast")
            return Frozen(layout, whole, split(layout, whole.module, whole.arranged(_tried(x)), trace), plan)
        except NotSplit as reason:
            log.info("frozen body: no activations are stored: %s", reason)
            return None

    def features(self, x: Inputs) -> Inputs:
        """Return the activations of all rows of x, computed in chunks of rows."""
        rows = row_count(x)
        chunk = max(1, min(rows, BODY_VALUES // self.whole.row_width))
        chunk = math.ceil(rows / math.ceil(rows / chunk))
        if requires_grad(x):
            return self.body(self.whole.arranged(x))
        stored: list[Tensor] = []
        like: Inputs = x
        for start in range(0, rows, chunk):
            some = self.body(self.whole.arranged(map_inputs(lambda t, s=start: t[s : s + chunk], x)))  # type: ignore[misc]
            if chunk == rows:
                return map_inputs(lambda t: t.contiguous(), some)
            parts = [t for _, t in tensors_of(some)]
            if not stored:
                like, stored = some, _allocate(parts, rows)
            for target, part in zip(stored, parts):
                target[start : start + len(part)] = part
        each = iter(stored)
        return map_inputs(lambda _: next(each), like)

    def agrees(self, x: Inputs, features: Inputs) -> bool:
        """Return whether head and network give the same outputs for the first and last rows of x, up to rounding."""
        layout, trial = self.forward.layout, self.body.trial
        moved = moved_values(layout, self.body.module)
        rows = self.whole.arranged(_tried(x))
        with torch.no_grad():
            whole = trial.output
            if not _equal(rows, trial.x):
                whole = layout.output(call_with(self.whole.module, moved, *arguments(rows)))
            head = layout.output(call_with(self.body.head, moved, *arguments(_tried(features))))
        # Products with a different number of rows round differently.
        atol = 100 * max(torch.finfo(t.dtype).eps for t in (whole, *_floating(features))) * float(whole.abs().max())
        return torch.allclose(whole, head, rtol=0.0, atol=atol, equal_nan=True)

    def facts(self, features: Inputs) -> dict[str, Any]:
        """Return the entries that describe the activations in a record."""
        size = sum(t.numel() * t.element_size() for _, t in tensors_of(features))
        return {"boundary": self.body.where, "bytes": size, "on_disk": size > MEMORY_BYTES}


def _tried(x: Inputs) -> Inputs:
    """Return the first two rows and the last one, the first ones again if there are too few."""
    count = row_count(x)
    return map_inputs(lambda t: t[torch.tensor([0, 1 % count, count - 1], device=t.device)], x)


def _equal(a: Inputs, b: Inputs) -> bool:
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(torch.equal(one.nan_to_num(), two.nan_to_num()) for (_, one), (_, two) in pairs)


def _floating(x: Inputs) -> list[Tensor]:
    return [t for _, t in tensors_of(x) if t.is_floating_point()]


def _allocate(parts: list[Tensor], rows: int) -> list[Tensor]:
    """Return empty tensors for all rows; in memory-mapped files if they are large, which are freed with the tensors."""
    size = sum(part[0].numel() * part.element_size() * rows for part in parts)
    if size <= MEMORY_BYTES or parts[0].device.type != "cpu":
        return [part.new_empty((rows, *part.shape[1:])) for part in parts]
    tensors = []
    for part in parts:
        handle, path = tempfile.mkstemp(prefix="credibly-features-")
        os.close(handle)
        count = rows * part[0].numel()
        flat = torch.from_file(path, shared=True, size=count, dtype=part.dtype)
        tensors.append(flat.reshape(rows, *part.shape[1:]))
        # The mapping stays valid without the name.
        os.unlink(path)
    return tensors
