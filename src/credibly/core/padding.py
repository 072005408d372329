"""Ragged sequences as one batch: padded to one length, with a mask of the real positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.core.batch_items import names_of, split_item, target_name
from credibly.core.checks import check_integer
from credibly.errors import InputError


@dataclass(frozen=True)
class Pad:
    """Collate rows whose sequences differ in length: `DataLoader(dataset, collate_fn=credibly.data.Pad())`.

    Sequences are padded at their end, on their first axis. A batch is a dict of the padded inputs, a mask (1 for real
    positions, 0 for padding) and "labels". Targets that are sequences themselves are padded with `target_value`, which
    `Categorical(ignore_index=-100)` leaves out of the likelihood. Inputs without a name are called `name`.

    Args:
        length: pad to this length; None uses the longest sequence of each batch. Rows that are kept in memory need one
            length for all.
        value: padding of the inputs.
        target_value: padding of the targets.
        mask: name of the mask; None leaves it out.
        name: name of the inputs if rows are pairs.
        target: name of the target in rows that have names, see `Stream`.
    """

    length: int | None = None
    value: float = 0
    target_value: int = -100
    mask: str | None = "attention_mask"
    name: str = "x"
    target: str | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            check_integer("length", self.length)

    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        columns: dict[str, list[Tensor]] = {}
        targets = []
        for row in rows:
            x, y = split_item(row, self.target)
            named = names_of(row)
            name = None if named is None else target_name(named, self.target)
            if named is not None and name is not None:
                x = {key: value for key, value in named.items() if key != name}
            elif isinstance(x, tuple):
                advice = "Rows are pairs (sequence, target), or have names"
                raise InputError("data", "its rows have several inputs without names", advice)
            targets.append(y)
            for key, value in (x if isinstance(x, Mapping) else {self.name: x}).items():
                columns.setdefault(key, []).append(torch.as_tensor(value))
        lengths = [max((len(c[i]) for c in columns.values() if c[i].ndim), default=0) for i in range(len(rows))]
        most = max(lengths) if self.length is None else self.length
        if max(lengths) > most:
            raise InputError("length", f"must be at least {max(lengths)}, the longest sequence, got {most}")
        batch = {key: self._stack(values, most, self._value(key)) for key, values in columns.items()}
        if self.mask is not None and self.mask not in batch:
            batch[self.mask] = (torch.arange(most) < torch.tensor(lengths).unsqueeze(1)).long()
        batch["labels"] = self._stack([torch.as_tensor(y) for y in targets], most, self.target_value)
        return batch

    def _value(self, key: str) -> float:
        return 0 if key == self.mask else self.value

    @staticmethod
    def _stack(values: list[Tensor], most: int, value: float) -> Tensor:
        if values[0].ndim == 0:
            return torch.stack(values)
        return torch.stack([torch.cat([v, v.new_full((most - len(v), *v.shape[1:]), value)]) for v in values])
