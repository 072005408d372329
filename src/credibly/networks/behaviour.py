"""Check that a network is a deterministic function of its weights and each row alone, and does not modify its input."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, call, map_inputs, row_count, tensors_of
from credibly.errors import InputError
from credibly.networks.layout import Layout
from credibly.networks.refusals import unchanged_buffers

# Largest difference between the outputs for a row in two batches, relative to the largest output: solvers with adaptive
# steps reach 1e-3. Where a layer takes sequences along the first axis, mixed rows are likely, and only rounding is
# allowed: with initial weights, the differences of LSTMs and transformers are about 0.1, but at times below 0.01.
ROW_TOLERANCE = 1e-2
# The same for batches of one row and of several equal ones: products with one row round differently in low precision.
ROUNDING_TOLERANCE = 1e-1
_BATCH_FIRST = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


def check_behaviour(layout: Layout, rows: Inputs, first: Tensor) -> None:
    """Raise if the network edits its input, changes a buffer, mixes rows, or returns other outputs than before.

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
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        _check_rows(layout, rows, second)


def _check_rows(layout: Layout, rows: Inputs, output: Tensor) -> None:
    """Raise if the output for the last row differs between a batch of several rows and a batch of this row."""
    count = row_count(rows)
    if count == 1:
        return

    def run(copies: int) -> Tensor:
        return layout.output(call(layout.module, map_inputs(lambda t: torch.cat([t[-1:]] * copies), rows))).detach()

    try:
        with warnings.catch_warnings():
            # Of statistics over one row, which are not finite.
            warnings.simplefilter("ignore")
            alone = run(1)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        advice = "Predictions of one row need it: no statistics over rows, and .squeeze(-1) instead of .squeeze()"
        raise InputError("net", f"cannot take one row alone ({reason})", advice) from error
    if alone.ndim != output.ndim or len(alone) != 1:
        found = f"returned shape {tuple(alone.shape)} for one row and {tuple(output.shape)} for {count}"
        advice = "The first axis of its output must be the rows, also for one row: .squeeze(-1) instead of .squeeze()"
        raise InputError("net", found, advice)
    last = output[-1:]
    dynamic = any("quantized.dynamic" in type(part).__module__ for part in layout.module.modules())
    # Padding to the longest row of a batch may shorten outputs. The scales of dynamic quantisation depend on the batch.
    if alone.shape != last.shape or not output.is_floating_point() or dynamic:
        return
    size, eps = _gap(output, output)[1], torch.finfo(output.dtype).eps
    sequence_first = _sequence_first(layout.module)
    tolerance = max(0.0 if sequence_first else ROW_TOLERANCE, eps**0.5) * size
    if _close(last, alone, tolerance):
        return
    # Outputs that cancel may be nothing but rounding.
    rounding = max(ROUNDING_TOLERANCE * size, 1000 * eps)
    if _close(last, alone, rounding) and _close(last, run(count)[-1:], tolerance):
        return
    found = f"mixes rows: its output for one row alone and within a batch differs by {_gap(last, alone)[0]:.3g}"
    if not bool((last.isfinite() == alone.isfinite()).all()):
        found = "mixes rows: its output for one row alone or within a batch is not finite"
    advice = "Use dim=-1, not 0, in softmax, mean or normalisation, and statistics of the data as constants"
    if sequence_first:
        advice = f"Rows are the first axis: pass batch_first=True to {sequence_first}"
    raise InputError("net", found, advice)


def _sequence_first(net: nn.Module) -> str:
    """Return the first layer that takes sequences along the first axis and rows along the second, or ""."""
    for name, part in net.named_modules():
        if isinstance(part, _BATCH_FIRST) and not getattr(getattr(part, "self_attn", part), "batch_first", True):
            return f"{type(part).__name__} ({name!r})" if name else type(part).__name__
    return ""


def _close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Return whether two outputs agree, and are finite in the same elements."""
    if first.shape != second.shape or not bool((first.isfinite() == second.isfinite()).all()):
        return False
    return _gap(first, second)[0] <= tolerance


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
