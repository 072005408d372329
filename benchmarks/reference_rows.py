"""Which training rows did a published reference see? The public HMC reference on IMDB does not say.

    python -m benchmarks.reference_rows --root DIR      # a minute on one core

Linear classifiers of words are fitted with and without the reviews in question. If the reference was trained on them,
its logits follow what these reviews change, beyond what a classifier without them explains: the partial correlation is
as large as for reviews that the reference is known to have seen, and larger than for as many test reviews, which it
cannot have seen and which serve as the control.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.linear_model import LogisticRegression

Array = npt.NDArray[Any]

VOCABULARY = 20_000
# Reviews whose influence is tested, and reviews of the test set for the control; the others are evaluated.
KNOWN, DOUBTFUL, CONTROL = slice(15_000, 20_000), slice(20_000, 25_000), slice(0, 5_000)
EVALUATED = slice(5_000, 25_000)
# Inverse strength of the penalty of the linear classifiers.
INVERSE_PENALTY = 0.05


def words(tokens: Array) -> sparse.csr_matrix:
    """Return which words are in each review, (N, VOCABULARY)."""
    rows = np.repeat(np.arange(len(tokens)), tokens.shape[1])
    pairs = np.unique(np.stack([rows, tokens.ravel().astype(np.int64)]), axis=1)
    return sparse.csr_matrix((np.ones(pairs.shape[1], np.float32), pairs), shape=(len(tokens), VOCABULARY))


def logits(x: sparse.csr_matrix, y: Array, at: sparse.csr_matrix) -> Array:
    """Return the logits of a linear classifier of some reviews at others."""
    found: Array = LogisticRegression(C=INVERSE_PENALTY, max_iter=300).fit(x, y).decision_function(at)
    return found


def influence(reference: Array, without: Array, added: Array) -> float:
    """Return the correlation of what added reviews change with what a classifier without them does not explain."""
    explained = np.polyval(np.polyfit(without, reference, 3), without)
    return float(np.corrcoef(reference - explained, added - without)[0, 1])


def main() -> None:
    """Print the partial correlations."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_rows", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder with imdb_100.npz and hmc_reference/")
    root = parser.parse_args().root
    with np.load(root / "imdb_100.npz", allow_pickle=False) as stored:
        train, test = words(stored["x_train"]), words(stored["x_test"])
        y_train, y_test = stored["y_train"], stored["y_test"]
    with np.load(root / "hmc_reference" / "imdb_cnnlstm.npz", allow_pickle=False) as stored:
        log_probs = np.log(stored["probs"].astype(np.float64))
    at, reference = test[EVALUATED], (log_probs[:, 1] - log_probs[:, 0])[EVALUATED]
    least = logits(train[: KNOWN.start], y_train[: KNOWN.start], at)
    some = logits(train[: DOUBTFUL.start], y_train[: DOUBTFUL.start], at)
    every = logits(train, y_train, at)
    x_control = sparse.vstack([train[: DOUBTFUL.start], test[CONTROL]])
    control = logits(x_control, np.concatenate([y_train[: DOUBTFUL.start], y_test[CONTROL]]), at)
    error = 1 / np.sqrt(len(reference))
    for name, value in {
        "training reviews 15,000 to 20,000": influence(reference, least, some),
        "training reviews 20,000 to 25,000": influence(reference, some, every),
        "as many test reviews (control)": influence(reference, some, control),
    }.items():
        print(f"{name:36} {value:+.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
