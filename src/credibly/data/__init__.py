"""Data of a problem: streams, graphs and padded sequences; data sets, toys with a known truth, the UCI benchmark."""

from credibly.core.loading import in_memory
from credibly.core.padding import Pad
from credibly.core.stream import Stream
from credibly.data.sets import EMBEDDED, DataSet, embedded
from credibly.data.toys import (
    Toy,
    gap_regression,
    heteroscedastic_regression,
    sharpening_regression,
    star_classification,
)
from credibly.data.uci import uci, uci_names, uci_splits
from credibly.networks.nodes import Nodes

__all__ = [
    "EMBEDDED",
    "DataSet",
    "Nodes",
    "Pad",
    "Stream",
    "Toy",
    "embedded",
    "gap_regression",
    "heteroscedastic_regression",
    "in_memory",
    "sharpening_regression",
    "star_classification",
    "uci",
    "uci_names",
    "uci_splits",
]
