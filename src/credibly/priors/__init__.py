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

__all__ = [
    "PRIORS",
    "Laplace",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "student_t_draws",
    "student_t_log_prob",
]
