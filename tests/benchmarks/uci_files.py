"""A folder with one small data set in the form of the UCI benchmark."""

from __future__ import annotations

import numpy as np


def write_uci(folder, name="yacht", splits=2, rows=48):
    """Write uci/NAME.npz with a noisy wave of three inputs, and return the folder."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    y = 5 + 2 * np.sin(x[:, 0]) + 0.2 * rng.normal(size=rows)
    order = np.stack([rng.permutation(rows) for _ in range(splits)])
    (folder / "uci").mkdir()
    np.savez(folder / "uci" / f"{name}.npz", X=x, y=y, train_idx=order[:, 8:], test_idx=order[:, :8])
    return folder
