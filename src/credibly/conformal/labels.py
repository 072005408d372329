"""Scores of labels: adaptive prediction sets (APS) and their regularised form (RAPS), randomised.

With the probabilities of a row in decreasing order, the score of a label is the probability of the labels before it
plus a random fraction u of its own probability,

    s(x, y, u) = sum of p_c over c more probable than y  +  u p_y  +  penalty max(0, rank(y) - penalty_from),

with u uniform on [0, 1] and penalty = 0 for APS (Romano, Sesia and Candes 2020). The penalty of RAPS (Angelopoulos,
Bates, Malik and Jordan 2021) keeps sets small where many classes have a small probability each. Labels of a score up
to the threshold form the set.

u is a hash of the seed and of the row's inputs. Scores are then a fixed function of the row, so calibration rows and
new rows are exchangeable, and a row has the same set whichever other rows are predicted with it.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from credibly.core.inputs import Inputs, row_count, row_key, tensors_of

# Shifts by multiples of the golden ratio are spread evenly over [0, 1].
GOLDEN = (math.sqrt(5) - 1) / 2


def uniforms(x: Inputs, seed: int, event: tuple[int, ...] = ()) -> Tensor:
    """Return a number in [0, 1) per row and element of `event`, (N, *event), from the seed and the row's bytes.

    Elements of one row, such as pixels, have different numbers that are not independent of each other.
    """
    key = int(seed).to_bytes(8, "little")
    # As bytes, which every dtype has.
    parts = [t for _, t in tensors_of(row_key(x))]
    columns = [t.detach().cpu().reshape(len(t), -1).contiguous().view(torch.uint8).numpy() for t in parts]
    found = np.empty(row_count(x))
    for row in range(len(found)):
        digest = hashlib.blake2b(key, digest_size=8)
        for column in columns:
            digest.update(column[row].tobytes())
        # 53 bits fill the significand of a double.
        found[row] = (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53
    own = torch.from_numpy(found).reshape(-1, *[1] * len(event))
    shift = GOLDEN * torch.arange(math.prod(event), dtype=torch.float64).reshape(event)
    return (own + shift) % 1.0


def label_scores(probabilities: Tensor, u: Tensor, penalty: float = 0.0, penalty_from: int = 0) -> Tensor:
    """Return the score of every label, (N, ..., K), from probabilities of that shape and u of shape (N, ...).

    Labels of equal probability are ordered by their index.
    """
    p, order = probabilities.double().sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(1, p.shape[-1] + 1, dtype=torch.float64)
    ordered = p.cumsum(-1) - p + u.unsqueeze(-1) * p + penalty * (ranks - penalty_from).clamp_min(0)
    return torch.empty_like(ordered).scatter(-1, order, ordered)


def with_most_probable(chosen: Tensor, probabilities: Tensor) -> Tensor:
    """Return sets of labels, (N, ..., K) booleans, with the most probable label added to those that are empty."""
    best = torch.zeros_like(chosen).scatter(-1, probabilities.argmax(-1, keepdim=True), True)
    return torch.where(chosen.any(-1, keepdim=True), chosen, best)
