"""Check that a network is a deterministic function of its weights and inputs, and does not modify its input."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, call, map_inputs, tensors_of
from credibly.errors import InputError
from credibly.networks.layout import Layout
from credibly.networks.refusals import unchanged_buffers


def check_behaviour(layout: Layout, rows: Inputs, first: Tensor) -> None:
    """Raise if the network edits its input, changes a buffer, or returns other outputs than before.

    Args:
        layout: the network.
        rows: a few rows of the data. They are copied first: the caller's tensors never change.
        first: its output for these rows in an earlier pass.
    """
    # Random numbers of a network must not advance the caller's generators.
    devices = [layout.device] if layout.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        given = map_inputs(torch.clone, rows)
        with unchanged_buffers(layout.module):
            second = layout.output(call(layout.module, given)).detach().clone()
        edited = [name for (name, a), (_, b) in zip(tensors_of(rows), tensors_of(given)) if not _same(a, b)]
        if edited:
            raise InputError(
                "net",
                f"edits its input in place: {' and '.join(edited)} changed in a forward pass",
                "Copy it first, x = x.clone(), or make its first operation one that is not in place, such as "
                "nn.ReLU() for nn.ReLU(inplace=True)",
            )
        if not _alike(first, second):
            # The first pass of all may fill a cache; those after it must agree.
            first, second = second, layout.output(call(layout.module, map_inputs(torch.clone, rows))).detach()
    if first.shape != second.shape:
        raise _random(f"two passes over the same rows returned shapes {tuple(first.shape)} and {tuple(second.shape)}")
    if not _alike(first, second):
        raise _random(f"two passes over the same rows differ by up to {_gap(first, second)[0]:.3g}")


def _alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return True
    gap, size = _gap(first, second)
    # Sums on a GPU may be taken in any order.
    return bool(gap <= torch.finfo(first.dtype).eps ** 0.5 * size)


def _gap(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the largest difference over elements that are finite in both, and the largest value among them."""
    both = torch.isfinite(first) & torch.isfinite(second)
    if not bool(both.any()):
        return 0.0, 0.0
    return float((first - second)[both].abs().max()), float(first[both].abs().max())


def _random(found: str) -> InputError:
    return InputError(
        "net",
        f"is not deterministic: {found}",
        "The density must be a function of the weights. Dropout belongs in nn.Dropout modules, which are off in "
        "evaluation mode (not in F.dropout, which is on by default); move other random numbers out of forward",
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
