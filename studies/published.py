"""Published results of the UCI regression benchmark: RMSE and log-likelihood per test row, each (mean, error).

dropout: grid search over rate and precision by Mukhoti, Stenetorp & Gal (2018), ± standard error; with the digits of
their run
    logs, which are rounded in their table (concrete, -2.937, to -2.93).
ensemble: Lakshminarayanan et al. (2017), five members, ± standard deviation over splits.
pbp: Hernandez-Lobato & Adams (2015) as quoted by Gal & Ghahramani (2016).
"""

from __future__ import annotations

Scores = dict[str, tuple[tuple[float, float], tuple[float, float]]]  # by data set: RMSE and log-likelihood

PUBLISHED: dict[str, Scores] = {
    "dropout": {
        "boston": ((2.904, 0.177), (-2.402, 0.042)), "concrete": ((4.826, 0.161), (-2.937, 0.025)),
        "energy": ((0.539, 0.013), (-1.212, 0.005)), "kin8nm": ((0.0789, 0.0006), (1.136, 0.007)),
        "naval": ((0.00074, 0.00005), (4.450, 0.002)), "power": ((4.014, 0.037), (-2.808, 0.009)),
        "protein": ((4.274, 0.021), (-2.871, 0.001)), "wine_red": ((0.622, 0.008), (-0.928, 0.013)),
        "yacht": ((0.666, 0.049), (-1.250, 0.015)),
    },
    "ensemble": {
        "boston": ((3.28, 1.00), (-2.41, 0.25)), "concrete": ((6.03, 0.58), (-3.06, 0.18)),
        "energy": ((2.09, 0.29), (-1.38, 0.22)), "kin8nm": ((0.09, 0.00), (1.20, 0.02)),
        "naval": ((0.00, 0.00), (5.63, 0.05)), "power": ((4.11, 0.17), (-2.79, 0.04)),
        "protein": ((4.71, 0.06), (-2.83, 0.02)), "wine_red": ((0.64, 0.04), (-0.94, 0.12)),
        "yacht": ((1.58, 0.48), (-1.18, 0.21)),
    },
    "pbp": {
        "boston": ((3.01, 0.18), (-2.57, 0.09)), "concrete": ((5.67, 0.09), (-3.16, 0.02)),
        "energy": ((1.80, 0.05), (-2.04, 0.02)), "kin8nm": ((0.10, 0.00), (0.90, 0.01)),
        "naval": ((0.01, 0.00), (3.73, 0.01)), "power": ((4.12, 0.03), (-2.84, 0.01)),
        "protein": ((4.73, 0.01), (-2.97, 0.00)), "wine_red": ((0.64, 0.01), (-0.97, 0.01)),
        "yacht": ((1.02, 0.05), (-1.63, 0.02)),
    },
}  # fmt: skip
LABELS = {
    "dropout": "MC-Dropout, grid (2018)",
    "ensemble": "deep ensemble (2017), ± std",
    "pbp": "PBP (2015)",
}
DIGITS = {"dropout": 3, "ensemble": 2, "pbp": 2}
