"""Data sets: those of scikit-learn, toys with a known truth, and the UCI benchmark from a folder of files."""

from credibly.data.sets import EMBEDDED, DataSet, embedded
from credibly.data.toys import (
    Toy,
    gap_regression,
    heteroscedastic_regression,
    sharpening_regression,
    star_classification,
)
from credibly.data.uci import uci, uci_names, uci_splits

__all__ = [
    "EMBEDDED",
    "DataSet",
    "Toy",
    "embedded",
    "gap_regression",
    "heteroscedastic_regression",
    "sharpening_regression",
    "star_classification",
    "uci",
    "uci_names",
    "uci_splits",
]
