"""Batch selection: the highest scores, a random sample weighted by score, or the most informative rows jointly.

The rows with the highest scores may all carry the same information. `batch_bald` (Kirsch, van Amersfoort & Gal 2019)
greedily picks rows whose labels jointly have the highest mutual information with the weights:

    gain(x | B) = I(y; w | x, y_B) = E_{y_B} [ H[ sum_s r_s p_s(y|x) ] - sum_s r_s H[p_s(y|x)] ],   r = p(w_s | y_B)

The expectation sums over all labellings of B while there are few, then over labellings sampled from the predictive.
Each gain is a mutual information under weights r, so it is never negative. The joint information is submodular: no gain
exceeds the row's own BALD score, and the greedy batch reaches at least 1 - 1/e of the optimum. For real targets the
labels are jointly Gaussian, and a gain is half the log ratio of conditional variance to noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.active.acquisition import bald, check_fits, log_probabilities
from credibly.core.checks import check_integer, is_real
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.predictive.base import Predictive

CANDIDATES = 1_000  # rows of highest BALD that a batch is chosen from
CACHED_VALUES = 2**18  # probabilities per chunk, to stay within the CPU caches
LABELLINGS = 1_000  # labellings of a batch to enumerate, or to sample where there are more


class Batch(NamedTuple):
    """Rows in selection order, (B,), and the joint information in nats up to and including each of them, (B,)."""

    rows: Tensor
    information: Tensor


def top(scores: Tensor, count: int) -> Tensor:
    """Return the rows with the highest scores, best first, (count,); ties go to the lower row number."""
    _check_count(count, scores)
    return scores.argsort(descending=True, stable=True)[:count]


def stochastic(scores: Tensor, count: int, *, power: float = 1.0, seed: int = 0) -> Tensor:
    """Sample rows without replacement with probabilities proportional to score^power, (count,).

    As cheap as `top`, with more diverse batches; a high power approaches `top`. Scores must be non-negative, as those
    of BALD are; rows with score zero come last.
    """
    _check_count(count, scores)
    if not is_real(power) or power < 0:
        raise InputError("power", f"must be a non-negative number, got {power!r}")
    allowed = scores > -math.inf
    if bool((scores[allowed] < 0).any()):
        raise InputError("scores", "must be non-negative, got negative values", 'Use choose="top", or shift the scores')
    uniform = torch.rand(len(scores), generator=stream(check_seed(seed), "stochastic batch"), dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
    keys = power * torch.log(scores.double().cpu().clamp_min(1e-300)) + gumbel
    return top(keys.masked_fill(~allowed.cpu(), -math.inf), count)


def batch_bald(
    predictive: Predictive,
    count: int,
    *,
    rows: Tensor | None = None,
    candidates: int = CANDIDATES,
    labellings: int = LABELLINGS,
    seed: int = 0,
) -> Batch:
    """Choose the batch whose labels are jointly most informative about the weights, greedily.

    Args:
        predictive: predictions for the pool.
        count: batch size.
        rows: rows that may be chosen; None for all.
        candidates: number of rows with the highest BALD to consider, which bounds memory. The choice equals that from
            the whole pool wherever a gain exceeds the BALD of every row left out.
        labellings: enumerate the labellings of the rows chosen so far up to this number, then sample this many.
        seed: random seed for sampled labellings.
    """
    check_fits("batch_bald", predictive)
    allowed = torch.arange(predictive.rows) if rows is None else rows.cpu()
    check_integer("count", count, most=len(allowed))
    check_integer("candidates", candidates)
    check_integer("labellings", labellings)
    if len(allowed) > max(candidates, count):
        scores = bald(predictive).cpu()[allowed]
        allowed = allowed[top(scores, max(candidates, count)).sort().values]
    some = predictive.subset(allowed)
    real = predictive.likelihood.support == "real"
    chosen = _gaussian(some, count) if real else _labels(some, count, labellings, check_seed(seed))
    return Batch(allowed[chosen.rows], chosen.information)


def joint_information(predictive: Predictive, *, labellings: int = LABELLINGS, seed: int = 0) -> float:
    """Return the mutual information of all labels jointly and the weights in nats: the sum of the gains row by row."""
    check_fits("batch_bald", predictive)
    if predictive.likelihood.support == "real":
        return float(_gaussian(predictive, predictive.rows).information[-1])
    p, each = _probabilities(predictive)
    total = 0.0
    for n in range(predictive.rows):
        responsibility, weights = _labelled(p, list(range(n)), labellings, seed)
        total += float(_gains(responsibility, weights, p[:, n : n + 1], each[:, n : n + 1]))
    return total


# -- labels ------------------------------------------------------------------------------------------------------------
def _probabilities(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return p (S, N, K) and the entropy per draw (S, N)."""

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        return log_probabilities(predictive.likelihood, output).exp()

    p = torch.cat(list(predictive.map_blocks(block)), 1)
    return p, torch.special.entr(p).sum(-1)


def _labels(predictive: Predictive, count: int, labellings: int, seed: int) -> Batch:
    p, each = _probabilities(predictive)
    chosen: list[int] = []
    information: list[float] = []
    for _ in range(count):
        responsibility, weights = _labelled(p, chosen, labellings, seed)
        gains = _gains(responsibility, weights, p, each)
        gains[chosen] = -math.inf  # choose each row once
        best = int(gains.argmax())
        chosen.append(best)
        information.append((information[-1] if information else 0.0) + float(gains[best]))
    return Batch(torch.tensor(chosen), torch.tensor(information, dtype=torch.float64))


def _labelled(p: Tensor, chosen: list[int], most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return p(w_s | labelling) for labellings of the chosen rows, (C, S), and the weight of each labelling, (C,)."""
    draws, _, classes = p.shape
    if classes ** len(chosen) <= most:
        joint = p.new_ones(draws, 1)
        for row in chosen:
            joint = (joint.unsqueeze(-1) * p[:, row].unsqueeze(1)).flatten(1)
        joint = joint.T / draws
        weights = joint.sum(1)
        return joint / weights.clamp_min(torch.finfo(p.dtype).tiny).unsqueeze(1), weights
    # The same number of labellings from every draw of the weights (stratified sampling) lowers the variance.
    source = torch.arange(most, device=p.device) % draws
    generator = stream(seed, "labellings", len(chosen), device=p.device)
    table = p[:, chosen]  # (S, B, K)
    labels = torch.multinomial(table[source].flatten(0, 1), 1, replacement=True, generator=generator)
    labels = labels.reshape(most, len(chosen))
    log_table = table.clamp_min(torch.finfo(p.dtype).tiny).log()
    log_likelihood = p.new_zeros(most, draws)
    for i in range(len(chosen)):
        log_likelihood += log_table[:, i].T[labels[:, i]]
    return torch.softmax(log_likelihood, 1), p.new_full((most,), 1 / most)


def _gains(responsibility: Tensor, weights: Tensor, p: Tensor, each: Tensor) -> Tensor:
    """Return sum_c w_c ( H[r_c p] - r_c H[p] ) for every row, (N,), in chunks of bounded memory."""
    draws, _, classes = p.shape
    found, least = [], torch.finfo(p.dtype).tiny
    expected = (weights @ responsibility) @ each  # (N,)
    for some in p.split(max(1, CACHED_VALUES // (len(weights) * classes)), 1):
        mixed = responsibility @ some.reshape(draws, -1)  # (C, n K)
        terms = mixed.clamp_min(least).log_().mul_(mixed)
        found.append(-(weights @ terms).reshape(-1, classes).sum(1))
    return (torch.cat(found) - expected).clamp_min(0)


# -- real targets ------------------------------------------------------------------------------------------------------
def _gaussian(predictive: Predictive, count: int) -> Batch:
    """Choose greedily by conditional variance: each step conditions all rows on the chosen one (pivoted Cholesky)."""
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor, Tensor]:
        mean, noise = (part[..., 0].double() for part in likelihood.moments(output, extra))
        return mean, noise.mean(0), noise.log().mean(0)

    means, noise, log_noise = (torch.cat(part, -1) for part in zip(*predictive.map_blocks(block)))
    centred = (means - means.mean(0)) / math.sqrt(len(means))  # (S, N): its columns' products are the covariances
    variance = centred.square().sum(0)  # epistemic variance given the labels so far
    explained = centred.new_zeros(count, centred.shape[1])
    chosen: list[int] = []
    information: list[float] = []
    for i in range(count):
        gains = (0.5 * ((variance + noise).log() - log_noise)).clamp_min(0)
        gains[chosen] = -math.inf
        best = int(gains.argmax())
        covariance = centred.T @ centred[:, best] - explained[:i].T @ explained[:i, best]
        explained[i] = covariance / (variance[best] + noise[best]).sqrt()
        variance = (variance - explained[i].square()).clamp_min(0)
        chosen.append(best)
        information.append((information[-1] if information else 0.0) + float(gains[best]))
    return Batch(torch.tensor(chosen), torch.tensor(information, dtype=torch.float64))


def _check_count(count: int, scores: Tensor) -> None:
    check_integer("count", count, most=int((scores > -math.inf).sum()))
