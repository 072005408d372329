"""Convergence diagnostics of chains in weight space and in function space, with a verdict."""

from credibly.diagnostics.arviz_export import to_arviz
from credibly.diagnostics.convergence import e_bfmi, ess, mcse, rhat
from credibly.diagnostics.summary import ColumnSource, Diagnostics, diagnose
from credibly.diagnostics.verdict import Mixing

__all__ = [
    "ColumnSource",
    "Diagnostics",
    "Mixing",
    "diagnose",
    "e_bfmi",
    "ess",
    "mcse",
    "rhat",
    "to_arviz",
]
