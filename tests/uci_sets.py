"""A small data set in the format of the UCI benchmark."""

import numpy as np


def make(folder, name, *, rows=60, splits=3, change=None, seed=0):
    """Write a data set in the format of the benchmark; `change` alters the test part of the targets and inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)) * [1.0, 10.0, 0.1]
    y = 100 + 20 * x[:, 0] - 2 * x[:, 1] + rng.normal(size=rows)
    orders = [rng.permutation(rows) for _ in range(splits)]
    train, test = np.stack([o[:50] for o in orders]), np.stack([o[50:] for o in orders])
    if change is not None:
        change(x, y, test)
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", X=x, y=y, train_idx=train, test_idx=test, n_hidden=np.array(8))
    return folder
