"""Convergence diagnostics of chains in weight space and in function space, with a verdict."""

from credibly.diagnostics.summary import ColumnSource, Diagnostics, diagnose
from credibly.diagnostics.verdict import Mixing

__all__ = ["ColumnSource", "Diagnostics", "Mixing", "diagnose"]
