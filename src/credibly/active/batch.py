"""Choosing a batch of rows: the best scores, a random choice that favours them, or rows that tell most together.

Rows with the best scores may all ask the same thing. `batch_bald` (Kirsch, van Amersfoort & Gal 2019) takes those whose
labels together have the highest mutual information with the weights, one after the other:

    gain(x | B) = I(y; w | x, y_B) = E_{y_B} [ H[ sum_s r_s p_s(y|x) ] - sum_s r_s H[p_s(y|x)] ],   r = p(w_s | y_B)

The expectation is a sum over all labellings of B while they are few, later over labellings drawn from the model average; each
gain is the information under weights r, so it is never negative. The information is submodular: no gain exceeds a row's own
BALD score, and greedy choice has at least 1 - 1/e of the best. For real targets the labels are jointly Gaussian, and a gain is
half the logarithm of a conditional variance over the noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.active.acquisition import bald, check_fits, log_probabilities
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.predictive.base import Predictive

CANDIDATES = 1_000  # rows of highest BALD that a batch is chosen from
CACHED_VALUES = 2**18  # probabilities looked at together: what caches hold
LABELLINGS = 1_000  # labellings of a batch that are summed over; where there are more, so many are drawn


class Batch(NamedTuple):
    """Rows in the order they were chosen, (B,), and what they tell together after each of them, in nats, (B,)."""

    rows: Tensor
    information: Tensor


def top(scores: Tensor, count: int) -> Tensor:
    """The rows of the highest scores, best first, (count,); of equal scores the first row."""
    _check_count(count, scores)
    return scores.argsort(descending=True, stable=True)[:count]


def stochastic(scores: Tensor, count: int, *, power: float = 1.0, seed: int = 0) -> Tensor:
    """Rows drawn without replacement with probabilities proportional to score^power, (count,).

    It costs nothing more than the best scores and gives batches that are less alike; a high power comes near to `top`. Scores
    are to be non-negative, as those of BALD are; rows of score zero come last.
    """
    _check_count(count, scores)
    if isinstance(power, bool) or not isinstance(power, (int, float)) or not (math.isfinite(power) and power >= 0):
        raise InputError("power", f"found {power!r}", "Pass a number from 0 up")
    allowed = scores > -math.inf
    if bool((scores[allowed] < 0).any()):
        raise InputError("scores", "some are negative", 'Choose by how="top", or shift them')
    uniform = torch.rand(len(scores), generator=stream(check_seed(seed), "stochastic batch"), dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
    keys = power * torch.log(scores.double().cpu().clamp_min(1e-300)) + gumbel
    return top(keys.masked_fill(~allowed.cpu(), -math.inf), count)


def batch_bald(
    predictive: Predictive, count: int, *, rows: Tensor | None = None, candidates: int = CANDIDATES,
    labellings: int = LABELLINGS, seed: int = 0,
) -> Batch:  # fmt: skip
    """The batch whose labels together tell most about the weights, chosen greedily.

    Args:
        predictive: at the pool.
        count: rows in the batch.
        rows: those that may be chosen; None for all.
        candidates: only so many rows of highest BALD are looked at, which bounds memory. The choice is that from the whole
            pool wherever a gain is above the BALD of all rows left out.
        labellings: exact while the labellings of the rows chosen so far are at most so many; then so many are drawn.
        seed: of those drawn.
    """
    check_fits("batch_bald", predictive)
    allowed = torch.arange(predictive.rows) if rows is None else rows.cpu()
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(allowed):
        raise InputError(
            "count", f"found {count!r} for {len(allowed)} rows", "Pass a number of rows from 1 up to those"
        )
    for name, value in (("candidates", candidates), ("labellings", labellings)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(name, f"found {value!r}", "Pass a whole number from 1 up")
    if len(allowed) > max(candidates, count):
        scores = bald(predictive).cpu()[allowed]
        allowed = allowed[top(scores, max(candidates, count)).sort().values]
    some = predictive.subset(allowed)
    real = predictive.likelihood.support == "real"
    chosen = _gaussian(some, count) if real else _labels(some, count, labellings, check_seed(seed))
    return Batch(allowed[chosen.rows], chosen.information)


def joint_information(predictive: Predictive, *, labellings: int = LABELLINGS, seed: int = 0) -> float:
    """Mutual information in nats of all labels of these rows together and the weights: the sum of the gains, row by row."""
    check_fits("batch_bald", predictive)
    if predictive.likelihood.support == "real":
        return float(_gaussian(predictive, predictive.rows).information[-1])
    p, each = _probabilities(predictive)
    total = 0.0
    for n in range(predictive.rows):
        responsibility, weights = _labelled(p, list(range(n)), labellings, seed)
        total += float(_gains(responsibility, weights, p[:, n : n + 1], each[:, n : n + 1]))
    return total


# -- labels --------------------------------------------------------------------------------------------------------------
def _probabilities(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """p (S, N, K) in float64 where that is cheap, and the entropies of the draws (S, N)."""

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
        gains[chosen] = -math.inf  # a row is asked once
        best = int(gains.argmax())
        chosen.append(best)
        information.append((information[-1] if information else 0.0) + float(gains[best]))
    return Batch(torch.tensor(chosen), torch.tensor(information, dtype=torch.float64))


def _labelled(p: Tensor, chosen: list[int], most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labellings of the chosen rows: p(w_s | labelling) as (C, S), and the probability of each, or even weights, (C,)."""
    draws, _, classes = p.shape
    if classes ** len(chosen) <= most:
        joint = p.new_ones(draws, 1)
        for row in chosen:
            joint = (joint.unsqueeze(-1) * p[:, row].unsqueeze(1)).flatten(1)
        joint = joint.T / draws
        weights = joint.sum(1)
        return joint / weights.clamp_min(torch.finfo(p.dtype).tiny).unsqueeze(1), weights
    # From each draw of the weights as many labellings as from any other, which leaves less to chance.
    source = torch.arange(most, device=p.device) % draws
    generator = stream(seed, "labellings", len(chosen), device=p.device)
    table = p[:, chosen]  # (S, B, K)
    labels = torch.multinomial(table[source].flatten(0, 1), 1, replacement=True, generator=generator)
    labels = labels.reshape(most, len(chosen))
    log_table = table.clamp_min(torch.finfo(p.dtype).tiny).log()
    evidence = p.new_zeros(most, draws)
    for place in range(len(chosen)):
        evidence += log_table[:, place].T[labels[:, place]]
    return torch.softmax(evidence, 1), p.new_full((most,), 1 / most)


def _gains(responsibility: Tensor, weights: Tensor, p: Tensor, each: Tensor) -> Tensor:
    """sum_c w_c ( H[r_c p] - r_c H[p] ) for every row, (N,), in pieces of bounded memory."""
    draws, _, classes = p.shape
    found, least = [], torch.finfo(p.dtype).tiny
    expected = (weights @ responsibility) @ each  # (N,)
    for some in p.split(max(1, CACHED_VALUES // (len(weights) * classes)), 1):
        mixed = responsibility @ some.reshape(draws, -1)  # (C, n K)
        terms = mixed.clamp_min(least).log_().mul_(mixed)
        found.append(-(weights @ terms).reshape(-1, classes).sum(1))
    return (torch.cat(found) - expected).clamp_min(0)


# -- real targets --------------------------------------------------------------------------------------------------------
def _gaussian(predictive: Predictive, count: int) -> Batch:
    """Greedy by conditional variance: each choice takes out of all rows what it explains of them (a pivoted Cholesky)."""
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor, Tensor]:
        mean, noise = (part[..., 0].double() for part in likelihood.moments(output, extra))
        return mean, noise.mean(0), noise.log().mean(0)

    means, noise, log_noise = (torch.cat(part, -1) for part in zip(*predictive.map_blocks(block)))
    centred = (means - means.mean(0)) / math.sqrt(len(means))  # (S, N): its columns' products are the covariances
    left = centred.square().sum(0)  # epistemic variance given the labels so far
    explained = centred.new_zeros(count, centred.shape[1])
    chosen: list[int] = []
    information: list[float] = []
    for place in range(count):
        gains = (0.5 * ((left + noise).log() - log_noise)).clamp_min(0)
        gains[chosen] = -math.inf
        best = int(gains.argmax())
        covariance = centred.T @ centred[:, best] - explained[:place].T @ explained[:place, best]
        explained[place] = covariance / (left[best] + noise[best]).sqrt()
        left = (left - explained[place].square()).clamp_min(0)
        chosen.append(best)
        information.append((information[-1] if information else 0.0) + float(gains[best]))
    return Batch(torch.tensor(chosen), torch.tensor(information, dtype=torch.float64))


def _check_count(count: int, scores: Tensor) -> None:
    usable = int((scores > -math.inf).sum())
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= usable:
        raise InputError("count", f"found {count!r} for {usable} rows", "Pass a number of rows from 1 up to those")
