"""Conformal prediction: intervals and prediction sets with a finite-sample coverage guarantee, from any posterior.

`posterior.calibrate(x, y)` is the short way. The functions here work on predictions, whatever they come from.
"""

from credibly.conformal.calibration import Calibration, Settings, calibrate, cross_calibrate
from credibly.conformal.predictive import CalibratedPredictive
from credibly.conformal.probabilities import ProbabilityMap, fit_probabilities
from credibly.conformal.ranks import rank, rows_needed

__all__ = [
    "CalibratedPredictive",
    "Calibration",
    "ProbabilityMap",
    "Settings",
    "calibrate",
    "cross_calibrate",
    "fit_probabilities",
    "rank",
    "rows_needed",
]
