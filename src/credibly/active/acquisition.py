"""Acquisition functions: score each row by the information its label would add, from a `Predictive` alone.

    bald      I(y; w | x)       = H[y | x] - E_w H[y | x, w]            information about the weights
    epig      E_x* I(y; y* | x, x*)                                    information about other predictions
    entropy   H[y | x]                                                 predictive entropy
    variance  Var_w E[y | x, w], or all of Var[y | x]                  predictive variance

For labels these are exact given the draws. For real targets the mixture over draws is approximated by a Gaussian with
the same variance (and covariance). That is exact where the posterior over weights is Gaussian and the network is linear
in them; the mutual information of the finite mixture itself could not exceed log(draws). A row with several targets or
pixels scores their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.checks import check_choice
from credibly.core.inputs import map_inputs
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.likelihoods import Categorical, Likelihood
from credibly.likelihoods.base import Extra
from credibly.likelihoods.continuous import LocationScale
from credibly.predictive.base import Predictive
from credibly.predictive.blocks import BLOCK_VALUES

Acquisition = Callable[..., Tensor]  # (predictive, **keywords) -> scores (N,)


# -- the functions -----------------------------------------------------------------------------------------------------
def bald(predictive: Predictive) -> Tensor:
    """Return the mutual information of label and weights in nats, (N,): high where confident draws disagree.

    For labels H[mean of p] - mean of H[p]; for real targets 1/2 (log Var[y] - mean of log Var[y | w]).
    """
    check_fits("bald", predictive)
    likelihood, single_draw = predictive.likelihood, predictive.draws == 1

    def block(output: Tensor, extra: Extra, start: int) -> Tensor:
        if single_draw:
            return output.new_zeros(output.shape[1])
        if likelihood.support == "real":
            mean, noise = likelihood.moments(output, extra)
            total = mean.var(0, correction=0) + noise.mean(0)
            return _by_row(0.5 * (total.log() - noise.log().mean(0)).clamp_min(0))
        log_p = log_probabilities(likelihood, output)
        p = log_p.exp()
        # log p is finite wherever outputs are, so 0 log 0 does not arise.
        negative_entropy = log_p.mul_(p).sum(-1).mean(0)
        return _by_row((_entropy(p.mean(0)) + negative_entropy).clamp_min(0))

    return _scores(predictive, block)


def entropy(predictive: Predictive) -> Tensor:
    """Return the predictive entropy in nats, (N,); for real targets that of a Gaussian with the predictive variance."""
    check_fits("entropy", predictive)
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: Extra, start: int) -> Tensor:
        if likelihood.support == "real":
            mean, noise = likelihood.moments(output, extra)
            total = mean.var(0, correction=0) + noise.mean(0)
            return _by_row(0.5 * (math.log(2 * math.pi * math.e) + total.log()))
        return _by_row(_entropy(log_probabilities(likelihood, output).exp().mean(0)))

    return _scores(predictive, block)


def variance(predictive: Predictive, *, kind: Literal["epistemic", "total"] = "epistemic") -> Tensor:
    """Return the variance of the draws' means ("epistemic") or of y ("total"), (N,); for labels summed over classes."""
    check_choice("kind", kind, ("epistemic", "total"))
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: Extra, start: int) -> Tensor:
        if likelihood.support in ("class", "binary"):
            p = log_probabilities(likelihood, output).exp()
            mean = p.mean(0)
            return _by_row((p.var(0, correction=0) if kind == "epistemic" else mean * (1 - mean)).sum(-1))
        mean, noise = likelihood.moments(output, extra)
        epistemic = mean.var(0, correction=0)
        return _by_row(epistemic if kind == "epistemic" else epistemic + noise.mean(0))

    return _scores(predictive, block)


def epig(predictive: Predictive, targets: Predictive) -> Tensor:
    """Return the expected information gain about predictions at target inputs in nats, (N,): the mean of I(y; y*).

    Args:
        predictive: predictions for the rows to score.
        targets: predictions at the inputs of interest (a few hundred rows), with the same posterior, draws and seed.
    """
    check_fits("epig", predictive)
    _check_targets(predictive, targets)
    likelihood = predictive.likelihood
    if likelihood.support == "real":
        there, noise_there = (torch.cat(part, 1)[..., 0] for part in zip(*targets.map_blocks(_moments_of(likelihood))))
        total_there = there.var(0, correction=0) + noise_there.mean(0)
        there = there - there.mean(0)

        def gaussian(output: Tensor, extra: Extra, start: int) -> Tensor:
            mean, noise = (part[..., 0] for part in likelihood.moments(output, extra))
            total = mean.var(0, correction=0) + noise.mean(0)
            shared = (mean - mean.mean(0)).T @ there / len(mean)  # (rows, targets)
            rest = 1 - shared.square() / (total.unsqueeze(1) * total_there)
            return (-0.5 * rest.clamp_min(torch.finfo(rest.dtype).eps).log()).mean(1)

        return _scores(predictive, gaussian)

    far = torch.cat(
        list(targets.map_blocks(lambda output, extra, start: log_probabilities(likelihood, output).exp())), 1
    )
    rows_there, classes = far.shape[1:]
    mean_there = _entropy(far.mean(0)).mean()
    far = far.flatten(1)  # (S, targets * K)

    def block(output: Tensor, extra: Extra, start: int) -> Tensor:
        p = log_probabilities(likelihood, output).exp()
        here = _entropy(p.mean(0))
        joint = []
        for some in p.split(max(1, BLOCK_VALUES // (classes * far.shape[1])), 1):
            both = some.flatten(1).T @ far / len(p)  # (rows * K, targets * K): p(y, y*) of every pair
            joint.append(_entropy_terms(both).reshape(some.shape[1], -1).sum(1) / rows_there)
        return (here + mean_there - torch.cat(joint)).clamp_min(0)

    return _scores(predictive, block)


def random(predictive: Predictive, *, seed: int = 0) -> Tensor:
    """Return uniform random scores, (N,): the baseline for every other acquisition."""
    return torch.rand(predictive.rows, generator=stream(check_seed(seed), "random acquisition"))


ACQUISITIONS: dict[str, Acquisition] = {
    "bald": bald,
    "variance": variance,
    "entropy": entropy,
    "epig": epig,
    "random": random,
}

# The tasks that each acquisition supports, as `task_of` names them.
LABELS, PARTS, REAL, SEVERAL, COUNTS = (
    "labels",
    "labels of many parts",
    "real targets",
    "several real targets",
    "counts",
)
FITS: dict[str, tuple[str, ...]] = {
    "bald": (LABELS, PARTS, REAL, SEVERAL),
    "variance": (LABELS, PARTS, REAL, SEVERAL, COUNTS),
    "entropy": (LABELS, PARTS, REAL, SEVERAL),
    "epig": (LABELS, REAL),
    "random": (LABELS, PARTS, REAL, SEVERAL, COUNTS),
    "batch_bald": (LABELS, REAL),
}


def task_of(predictive: Predictive) -> str:
    """Return the kind of target in a row: one label, one label per pixel or target, one or several reals, counts."""
    support, single = predictive.likelihood.support, _elements(predictive) == 1
    if support in ("class", "binary"):
        return LABELS if single else PARTS
    return COUNTS if support == "count" else REAL if single else SEVERAL


def check_fits(acquisition: str, predictive: Predictive) -> None:
    """Raise unless the acquisition supports the task; the message lists those that do."""
    if acquisition not in FITS:
        raise InputError("acquisition", f"must be one of {', '.join(FITS)} or a function, got {acquisition!r}")
    task = task_of(predictive)
    if task not in FITS[acquisition]:
        supported = ", ".join(name for name, tasks in FITS.items() if task in tasks)
        raise InputError("acquisition", f"{acquisition!r} does not support {task}", f"Use one of {supported}")
    likelihood = predictive.likelihood
    infinite = isinstance(likelihood, LocationScale) and math.isinf(likelihood.standard_variance())
    if infinite and acquisition not in ("variance", "random"):
        raise InputError(
            "acquisition",
            f"{acquisition!r} needs noise of finite variance, got {likelihood!r}",
            "Use 'variance', or a StudentT with df > 2",
        )


# -- helpers -----------------------------------------------------------------------------------------------------------
def log_probabilities(likelihood: Likelihood, output: Tensor) -> Tensor:
    """Return log p of each label, (S, N, ..., K), in memory the caller may overwrite; a Bernoulli has K = 2.

    Classes are the outermost dimension in memory: softmax and sums over a short innermost one are five times slower.
    """
    if type(likelihood) is Categorical:
        return torch.log_softmax(output.movedim(-1, 0).contiguous(), 0).movedim(0, -1)
    if isinstance(likelihood, Categorical):
        return likelihood.log_probabilities(output)
    both = torch.stack([F.logsigmoid(-output), F.logsigmoid(output)], -1)
    return both.squeeze(-2) if both.shape[-2] == 1 else both  # a single target has no axis


def _scores(predictive: Predictive, block: Callable[[Tensor, dict[str, Tensor], int], Tensor]) -> Tensor:
    found: Iterator[Tensor] = predictive.map_blocks(block)
    return torch.cat(list(found))


def _moments_of(likelihood: Likelihood) -> Callable[[Tensor, dict[str, Tensor], int], tuple[Tensor, Tensor]]:
    return lambda output, extra, start: likelihood.moments(output, extra)


def _by_row(values: Tensor) -> Tensor:
    """Average over the targets or pixels within each row."""
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def _entropy_terms(p: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(p)
    return terms


def _entropy(p: Tensor) -> Tensor:
    return _entropy_terms(p).sum(-1)


def _elements(predictive: Predictive) -> int:
    """Return the number of labels or targets in a row."""
    one = predictive.source.outputs(map_inputs(lambda t: t[:1], predictive.x), 0, 1)
    mean = predictive.likelihood.moments(one, predictive.source.extra(0, 1))[0]
    return mean[0, 0].numel() // (mean.shape[-1] if predictive.likelihood.support == "class" else 1)


def _check_targets(predictive: Predictive, targets: Predictive) -> None:
    if not isinstance(targets, Predictive):
        found = f"must be a Predictive, got {type(targets).__name__}"
        raise InputError("targets", found, "Pass posterior.predict(x) at the inputs of interest")
    if targets.draws != predictive.draws or targets.likelihood != predictive.likelihood:
        raise InputError(
            "targets",
            f"has {targets.draws} draws of {type(targets.likelihood).__name__}, the pool has {predictive.draws} of "
            f"{type(predictive.likelihood).__name__}",
            "Predict both with the same posterior, draws and seed",
        )


def acquisition_name(acquisition: str | Callable[..., Any]) -> str:
    """Return the key of an acquisition, or the name of a function."""
    return acquisition if isinstance(acquisition, str) else getattr(acquisition, "__name__", "function")
