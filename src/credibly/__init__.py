"""credibly: Bayesian deep learning for PyTorch. Any nn.Module in, credible predictions out.

problem = credibly.Problem(net, data=(x, y), likelihood=..., prior=...)
posterior = credibly.DeepEnsemble(members=10).fit(problem, seed=0)
p = posterior.predict(x_new)      # p.mean, p.aleatoric, p.epistemic, p.interval(0.9), p.log_prob(y_new)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from credibly import runtime

if TYPE_CHECKING:
    from credibly import (
        active,
        comparing,
        conformal,
        continual,
        data,
        decide,
        diagnostics,
        integrations,
        likelihoods,
        metrics,
        peft,
        plot,
        priors,
    )
    from credibly.comparing import compare_models
    from credibly.errors import InputError, Interrupted, PeerError, SamplingError, StoreError, TrainingError
    from credibly.inference.density import Density
    from credibly.methods import (
        HMC,
        IVON,
        MAP,
        MCLMC,
        METHODS,
        MILE,
        MLE,
        NUTS,
        SGHMC,
        SGLD,
        SWAG,
        BayesByBackprop,
        ChEES,
        DeepEnsemble,
        Laplace,
        MCDropout,
        ParallelTempering,
    )
    from credibly.methods.resuming import resume
    from credibly.metrics import evaluation, information
    from credibly.metrics.evaluation import evaluate
    from credibly.networks import zoo
    from credibly.networks.layout import Layout
    from credibly.networks.normalisation import replace_batchnorm
    from credibly.plot import chains as plot_chains
    from credibly.posterior.base import CalibratedPosterior, Posterior
    from credibly.posterior.draws import DensityPosterior, DrawsPosterior
    from credibly.posterior.dropout import DropoutPosterior
    from credibly.posterior.gaussian import GaussianPosterior
    from credibly.posterior.laplace import LaplacePosterior
    from credibly.posterior.loading import load
    from credibly.predictive.base import Predictive
    from credibly.priors.gaussian import GaussianPrior
    from credibly.problem import Problem, Tempering
    from credibly.tables.estimators import BayesianClassifier, BayesianRegressor

__version__ = "0.1.0"

__all__ = [
    "HMC",
    "IVON",
    "MAP",
    "MCLMC",
    "METHODS",
    "MILE",
    "MLE",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SWAG",
    "BayesByBackprop",
    "BayesianClassifier",
    "BayesianRegressor",
    "CalibratedPosterior",
    "ChEES",
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
    "ParallelTempering",
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
    "conformal",
    "continual",
    "data",
    "decide",
    "diagnostics",
    "evaluate",
    "evaluation",
    "information",
    "integrations",
    "likelihoods",
    "load",
    "metrics",
    "peft",
    "plot",
    "plot_chains",
    "priors",
    "replace_batchnorm",
    "resume",
    "zoo",
]

# The module of each public name. Names are resolved on first use, so that `credibly --help` starts without torch.
_HOMES = {
    "credibly.comparing": ("compare_models",),
    "credibly.errors": ("InputError", "Interrupted", "PeerError", "SamplingError", "StoreError", "TrainingError"),
    "credibly.inference.density": ("Density",),
    "credibly.methods": (
        "HMC",
        "IVON",
        "MAP",
        "MCLMC",
        "METHODS",
        "MILE",
        "MLE",
        "NUTS",
        "SGHMC",
        "SGLD",
        "SWAG",
        "BayesByBackprop",
        "ChEES",
        "DeepEnsemble",
        "Laplace",
        "MCDropout",
        "ParallelTempering",
    ),
    "credibly.methods.resuming": ("resume",),
    "credibly.metrics.evaluation": ("evaluate",),
    "credibly.networks.layout": ("Layout",),
    "credibly.networks.normalisation": ("replace_batchnorm",),
    "credibly.posterior.base": ("CalibratedPosterior", "Posterior"),
    "credibly.posterior.draws": ("DensityPosterior", "DrawsPosterior"),
    "credibly.posterior.dropout": ("DropoutPosterior",),
    "credibly.posterior.gaussian": ("GaussianPosterior",),
    "credibly.posterior.laplace": ("LaplacePosterior",),
    "credibly.posterior.loading": ("load",),
    "credibly.predictive.base": ("Predictive",),
    "credibly.priors.gaussian": ("GaussianPrior",),
    "credibly.problem": ("Problem", "Tempering"),
    "credibly.tables.estimators": ("BayesianClassifier", "BayesianRegressor"),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = (
    "active",
    "comparing",
    "conformal",
    "continual",
    "data",
    "decide",
    "diagnostics",
    "integrations",
    "likelihoods",
    "metrics",
    "peft",
    "plot",
    "priors",
    "tables",
)
# Public modules that live inside a package. `credibly.zoo` and `import credibly.zoo` both give credibly.networks.zoo.
_ALIASES = {
    "estimators": "credibly.tables.estimators",
    "evaluation": "credibly.metrics.evaluation",
    "information": "credibly.metrics.information",
    "plot_chains": "credibly.plot.chains",
    "recipe": "credibly.tables.recipe",
    "tuning": "credibly.tables.tuning",
    "units": "credibly.predictive.rescaling",
    "zoo": "credibly.networks.zoo",
}

runtime.set_up()
runtime.alias_modules({f"credibly.{name}": home for name, home in _ALIASES.items()})


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or name in _ALIASES:
        return importlib.import_module(f"credibly.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'credibly' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
