"""Priors: elementwise densities, assigned by parameter name, or an earlier posterior."""

from credibly.priors.elementwise import (
    PRIORS,
    Laplace,
    Normal,
    Prior,
    ScaleMixture,
    StudentT,
    student_t_draws,
    student_t_log_prob,
)
from credibly.priors.hierarchical import HalfCauchy, HalfNormal, Hierarchical, layer_scales

__all__ = [
    "PRIORS",
    "HalfCauchy",
    "HalfNormal",
    "Hierarchical",
    "Laplace",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "layer_scales",
    "student_t_draws",
    "student_t_log_prob",
]
