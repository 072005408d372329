"""Embeddings whose padding vector stays zero.

`nn.Embedding(padding_idx=...)` starts with zeros at the padding index, and torch gives that row no gradient: in plain
training it never changes. As a random parameter it would be drawn like any other row, so the output would depend on it
where autograd sees no dependence. Here the layer returns zeros for padding whatever its weight is.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class PaddedEmbedding(nn.Embedding):
    """An embedding that returns zeros at `padding_idx`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the given indices."""
        return super().forward(input).masked_fill(input.eq(self.padding_idx or 0).unsqueeze(-1), 0.0)


def hold_padding(module: nn.Module, random: Collection[str]) -> None:
    """Let embeddings with a random weight return zeros for padding, in place, where they do so now.

    Tied weights are left alone: another layer uses the same row. So are rows that hold other values.
    """
    owners = [id(p) for part in module.modules() for p in part._parameters.values()]
    for prefix, part in module.named_modules():
        if type(part) is not nn.Embedding or part.padding_idx is None or owners.count(id(part.weight)) > 1:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        if name in random and not bool(part.weight[part.padding_idx].any()):
            part.__class__ = PaddedEmbedding


def release_padding(module: nn.Module) -> None:
    """Replace these embeddings by plain ones with zeros at the padding index, in place."""
    for part in module.modules():
        if type(part) is PaddedEmbedding:
            part.weight.data[part.padding_idx] = 0.0
            part.__class__ = nn.Embedding  # type: ignore[assignment]


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer before `hold_padding`."""
    return nn.Embedding if type(module) is PaddedEmbedding else type(module)
