"""The posteriors by name. This package imports numpy alone: the same functions run under torch and under JAX."""

from benchmarks.posteriordb.models.base import Builder
from benchmarks.posteriordb.models.dynamics import DYNAMICS
from benchmarks.posteriordb.models.hierarchical import HIERARCHICAL
from benchmarks.posteriordb.models.mixtures import MIXTURES
from benchmarks.posteriordb.models.processes import PROCESSES
from benchmarks.posteriordb.models.regression import REGRESSIONS
from benchmarks.posteriordb.models.responses import RESPONSES
from benchmarks.posteriordb.models.series import SERIES

KINDS: dict[str, dict[str, Builder]] = {
    "regression": REGRESSIONS,
    "logistic and Poisson": RESPONSES,
    "hierarchical": HIERARCHICAL,
    "time series": SERIES,
    "mixture": MIXTURES,
    "Gaussian process": PROCESSES,
    "differential equation": DYNAMICS,
}
POSTERIORS: dict[str, Builder] = {name: build for group in KINDS.values() for name, build in group.items()}
