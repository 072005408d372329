"""Methods: each turns a Problem into a Posterior.

METHODS names those that the demo, the command line and the tests use.
"""

from credibly.inference.method import Method
from credibly.methods.bbb import BayesByBackprop
from credibly.methods.chees import ChEES
from credibly.methods.dropout import MCDropout
from credibly.methods.ensemble import DeepEnsemble
from credibly.methods.hmc import HMC
from credibly.methods.ivon import IVON
from credibly.methods.laplace import Laplace
from credibly.methods.mclmc import MCLMC
from credibly.methods.mile import MILE
from credibly.methods.nuts import NUTS
from credibly.methods.point import MAP, MLE
from credibly.methods.sgmcmc import SGHMC, SGLD
from credibly.methods.swag import SWAG
from credibly.methods.tempering import ParallelTempering

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        MLE,
        MAP,
        DeepEnsemble,
        MCDropout,
        BayesByBackprop,
        IVON,
        Laplace,
        SWAG,
        HMC,
        NUTS,
        ChEES,
        MCLMC,
        MILE,
        ParallelTempering,
        SGLD,
        SGHMC,
    )
}

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
    "ChEES",
    "DeepEnsemble",
    "Laplace",
    "MCDropout",
    "Method",
    "ParallelTempering",
]
