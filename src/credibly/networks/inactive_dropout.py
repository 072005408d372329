"""Dropout that MC-Dropout does not control: rates of zero, layers that are not called, and dropout without a layer.

Transformers have all three. timm puts `nn.Dropout(0.0)` everywhere. Hugging Face and timm keep a layer for the dropout
of attention weights only to read its rate, and pass that to a fused kernel in training mode. Stochastic depth drops
entire branches. DeBERTa drops relative positions, a tensor without an axis of rows. None of these has a mask to set,
and none acts in evaluation mode: passes differ by the other layers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from torch import nn

log = logging.getLogger("credibly")

ZERO, UNCALLED, ROWLESS, OTHER = "rate 0", "not called", "no axis of rows", "no layer of torch"


def inactive_dropout(
    module: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    masked: Collection[str],
    called: Collection[str],
    silenced: Sequence[str] = (),
    rowless: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return the names of modules whose dropout stays off, by the reason; reasons without a module are left out.

    Args:
        module: the network, without masks.
        kinds: the dropout layers of torch, which masks replace.
        masked: the dropout layers that got a mask.
        called: those that a forward pass called.
        silenced: modules that apply dropout internally; their rates are zero in the network of a problem.
        rowless: those that act on a tensor whose first axis is not the rows, such as an embedding of positions.
    """
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in kinds}
    found = {
        ZERO: [name for name, layer in layers.items() if name not in masked and not getattr(layer, "p", 0)],
        UNCALLED: [name for name in masked if name not in called and name not in rowless],
        ROWLESS: list(rowless),
        OTHER: [
            name or "the network"
            for name, part in module.named_modules()
            if name not in layers and (name in silenced or _own_rate(part) > 0)
        ],
    }
    return {reason: names for reason, names in found.items() if names}


def describe_inactive(found: Mapping[str, Sequence[str]], most: int = 3) -> str:
    """Return the modules by reason in one line, at most `most` names for each."""
    lines = []
    for reason, names in found.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        lines.append(f"{', '.join(names[:most])}{more}: {reason}")
    return "; ".join(lines)


def log_inactive(found: Mapping[str, Sequence[str]]) -> None:
    """Log which dropout stays off, and why."""
    if found:
        log.info("dropout that stays off: %s", describe_inactive(found))


def _own_rate(part: nn.Module) -> float:
    """Return the largest rate that a module keeps as a number, 0 if it has none."""
    named = [value for name, value in vars(part).items() if "dropout" in name]
    if "Drop" in type(part).__name__ or type(part).__name__ == "StochasticDepth":
        named += [vars(part).get(name) for name in ("p", "prob", "drop_prob")]
    return max((float(v) for v in named if isinstance(v, (int, float)) and not isinstance(v, bool)), default=0.0)
