"""credibly: Bayesian deep learning for PyTorch. Any nn.Module in, credible predictions out.

problem = credibly.Problem(net, data=(x, y), likelihood=..., prior=...)
posterior = credibly.DeepEnsemble(members=10).fit(problem, seed=0)
p = posterior.predict(x_new)      # p.mean, p.aleatoric, p.epistemic, p.interval(0.9), p.log_prob(y_new)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credibly import (
        active,
        comparing,
        continual,
        data,
        decide,
        diagnostics,
        evaluation,
        information,
        likelihoods,
        metrics,
        plot,
        plot_chains,
        priors,
        zoo,
    )
    from credibly.comparing import compare_models
    from credibly.dropout_posterior import DropoutPosterior
    from credibly.errors import InputError, Interrupted, PeerError, SamplingError, StoreError, TrainingError
    from credibly.estimators import BayesianClassifier, BayesianRegressor
    from credibly.evaluation import evaluate
    from credibly.gaussian_posterior import GaussianPosterior
    from credibly.gaussian_prior import GaussianPrior
    from credibly.laplace_posterior import LaplacePosterior
    from credibly.layout import Layout
    from credibly.methods import (
        HMC,
        MAP,
        METHODS,
        MLE,
        SGHMC,
        SGLD,
        SWAG,
        BayesByBackprop,
        DeepEnsemble,
        Laplace,
        MCDropout,
    )
    from credibly.norms import replace_batchnorm
    from credibly.plain_density import Density
    from credibly.posterior import DensityPosterior, DrawsPosterior, Posterior
    from credibly.predictive import Predictive
    from credibly.problem import Problem, Tempering
    from credibly.resuming import resume
    from credibly.store import load

__version__ = "0.1.0"

# Matrix products then round alike wherever their numbers lie in memory, so that a chain has the same bits among any others and on
# any process. It costs nothing that could be measured. Read by the library at its first product; what is set already stays.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = [
    "HMC",
    "MAP",
    "METHODS",
    "MLE",
    "SGHMC",
    "SGLD",
    "SWAG",
    "BayesByBackprop",
    "BayesianClassifier",
    "BayesianRegressor",
    "DeepEnsemble",
    "Density",
    "DensityPosterior",
    "DrawsPosterior",
    "DropoutPosterior",
    "GaussianPosterior",
    "GaussianPrior",
    "InputError",
    "Interrupted",
    "Laplace",
    "LaplacePosterior",
    "Layout",
    "MCDropout",
    "PeerError",
    "Posterior",
    "Predictive",
    "Problem",
    "SamplingError",
    "StoreError",
    "Tempering",
    "TrainingError",
    "__version__",
    "active",
    "compare_models",
    "comparing",
    "continual",
    "data",
    "decide",
    "diagnostics",
    "evaluate",
    "evaluation",
    "information",
    "likelihoods",
    "load",
    "metrics",
    "plot",
    "plot_chains",
    "priors",
    "replace_batchnorm",
    "resume",
    "zoo",
]

# Where each public name lives. They are looked up when first used, so that `credibly --help` starts without torch.
_HOMES = {
    "credibly.comparing": ("compare_models",),
    "credibly.dropout_posterior": ("DropoutPosterior",),
    "credibly.errors": ("InputError", "Interrupted", "PeerError", "SamplingError", "StoreError", "TrainingError"),
    "credibly.estimators": ("BayesianClassifier", "BayesianRegressor"),
    "credibly.evaluation": ("evaluate",),
    "credibly.gaussian_posterior": ("GaussianPosterior",),
    "credibly.gaussian_prior": ("GaussianPrior",),
    "credibly.laplace_posterior": ("LaplacePosterior",),
    "credibly.layout": ("Layout",),
    "credibly.methods": (
        "HMC",
        "MAP",
        "METHODS",
        "MLE",
        "SGHMC",
        "SGLD",
        "SWAG",
        "BayesByBackprop",
        "DeepEnsemble",
        "Laplace",
        "MCDropout",
    ),
    "credibly.norms": ("replace_batchnorm",),
    "credibly.posterior": ("DensityPosterior", "DrawsPosterior", "Posterior"),
    "credibly.predictive": ("Predictive",),
    "credibly.problem": ("Problem", "Tempering"),
    "credibly.resuming": ("resume",),
    "credibly.store": ("load",),
    "credibly.plain_density": ("Density",),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = (
    "active", "comparing", "continual", "data", "decide", "diagnostics", "evaluation", "information", "likelihoods", "metrics",
    "plot", "plot_chains", "priors", "zoo",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"credibly.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'credibly' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
