"""credibly: Bayesian deep learning for PyTorch. Any nn.Module in, credible predictions out.

problem = credibly.Problem(net, data=(x, y), likelihood=..., prior=...)
posterior = credibly.DeepEnsemble(members=10).fit(problem, seed=0)
p = posterior.predict(x_new)      # p.mean, p.aleatoric, p.epistemic, p.interval(0.9), p.log_prob(y_new)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from credibly import likelihoods, priors
from credibly.errors import InputError, StoreError, TrainingError
from credibly.layout import Layout
from credibly.methods import MAP, METHODS, MLE, DeepEnsemble
from credibly.norms import replace_batchnorm
from credibly.posterior import DrawsPosterior, Posterior
from credibly.predictive import Predictive
from credibly.problem import Problem, Tempering
from credibly.store import load

if TYPE_CHECKING:
    from credibly import data, evaluation, information, metrics, plot

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "METHODS",
    "MLE",
    "DeepEnsemble",
    "DrawsPosterior",
    "InputError",
    "Layout",
    "Posterior",
    "Predictive",
    "Problem",
    "StoreError",
    "Tempering",
    "TrainingError",
    "__version__",
    "data",
    "evaluation",
    "information",
    "likelihoods",
    "load",
    "metrics",
    "plot",
    "priors",
    "replace_batchnorm",
]

_LAZY = ("data", "evaluation", "information", "metrics", "plot")


def __getattr__(name: str) -> Any:
    # Modules that only some programs need, some of them with heavy imports of their own.
    if name in _LAZY:
        return importlib.import_module(f"credibly.{name}")
    raise AttributeError(f"module 'credibly' has no attribute {name!r}")
