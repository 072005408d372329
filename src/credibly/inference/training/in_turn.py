"""Members that are trained one after another, as if they had been trained together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from credibly.inference.training.data import Data
from credibly.inference.training.objectives import Objective


def member_objective(objective: Objective, member: int) -> Objective:
    """Return the objective of one member alone."""
    one = copy.copy(objective)
    one.own = tuple(tensor[member : member + 1] for tensor in objective.own)
    return one


def member_data(data: Data, member: int) -> Data:
    """Return the rows of one member alone."""
    resampled = None if data.resampled is None else data.resampled[member : member + 1]
    return dataclasses.replace(data, held=data.held[member : member + 1], resampled=resampled)


def joined_history(histories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one history; a member that stopped early keeps its last values to the end."""
    longest = max(histories, key=lambda history: int(history["steps"]))

    def columns(tables: list[list[list[float]]]) -> list[list[float]]:
        length = max(len(table) for table in tables)
        return [[table[min(k, len(table) - 1)][0] for table in tables if table] for k in range(length)]

    joined = {**longest}
    joined["loss"] = columns([history["loss"] for history in histories])
    joined["validation"] = columns([history["validation"] for history in histories])
    joined["parts"] = {name: columns([h["parts"][name] for h in histories]) for name in longest["parts"]}
    joined["gradients"] = round(sum(float(history["gradients"]) for history in histories), 6)
    return joined
