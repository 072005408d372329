"""Methods: each turns a Problem into a Posterior. METHODS names those that the demo, the command line and the tests use."""

from credibly.methods.bbb import BayesByBackprop
from credibly.methods.dropout import MCDropout
from credibly.methods.ensemble import DeepEnsemble
from credibly.methods.method import Method
from credibly.methods.point import MAP, MLE

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (MLE, MAP, DeepEnsemble, MCDropout, BayesByBackprop)
}

__all__ = ["MAP", "METHODS", "MLE", "BayesByBackprop", "DeepEnsemble", "MCDropout", "Method"]
