"""Whether chains can be trusted: convergence in weight space and in function space, in words."""

from credibly.diagnostics.summary import ColumnSource, Diagnostics, diagnose
from credibly.diagnostics.verdict import Mixing

__all__ = ["ColumnSource", "Diagnostics", "Mixing", "diagnose"]
