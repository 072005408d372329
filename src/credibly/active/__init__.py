"""Active learning: which rows to label next, and the loop around it."""

from credibly.active.acquisition import ACQUISITIONS, FITS, bald, entropy, epig, random, task_of, variance
from credibly.active.batch import Batch, batch_bald, joint_information, stochastic, top
from credibly.active.learner import ActiveLearner

__all__ = [
    "ACQUISITIONS",
    "FITS",
    "ActiveLearner",
    "Batch",
    "bald",
    "batch_bald",
    "entropy",
    "epig",
    "joint_information",
    "random",
    "stochastic",
    "task_of",
    "top",
    "variance",
]
