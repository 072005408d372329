"""Metrics of predictions: plain functions on tensors, independent of methods and posteriors.

Arguments are checked before any work: shapes must match exactly (nothing is broadcast), NaN is rejected, labels must be
integers within range. Scalars are returned as 0-dim tensors. A proper score takes reduction="none" to return its value
per row.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.metrics.information import check_probabilities

Reduction = Literal["mean", "none"]


class Calibration(NamedTuple):
    """Top-label calibration in bins of equal width; an empty bin has confidence, accuracy and count 0.

    Shapes: ece and mce are scalars, edges is (bins + 1,), the others (bins,).
    """

    ece: Tensor
    mce: Tensor
    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor  # type: ignore[assignment]  # a field here, a method of tuple


class RiskCoverage(NamedTuple):
    """Mean loss (risk) of the most certain fraction of rows (coverage), each (N,), and the area under the curve."""

    coverage: Tensor
    risk: Tensor
    area: Tensor


# -- regression


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Return the root mean square of mean - y over all entries. Both have the same shape."""
    m, t = _real(finite=True, mean=mean, y=y)
    return (m - t).square().mean().sqrt()


def mae(mean: Tensor, y: Tensor) -> Tensor:
    """Return the mean of |mean - y| over all entries. Both have the same shape."""
    m, t = _real(finite=True, mean=mean, y=y)
    return (m - t).abs().mean()


def crps_from_samples(samples: Tensor, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the continuous ranked probability score E|X - y| - E|X - X'|/2, from samples (n, ...) against y (...).

    The estimator is fair: pairs are averaged over i != j, so its mean does not depend on n, and it may be negative.
    """
    if not isinstance(samples, Tensor) or samples.dim() < 1 or len(samples) < 2:
        raise InputError("samples", "must be a tensor (n, ...) of at least 2 draws")
    (draws,) = _real(finite=True, samples=samples)
    one, t = _real(finite=True, one_draw=draws[0], y=y)
    n = len(samples)
    # Centred at y, so a large offset loses no digits. Sorted, sum_ij |x_i - x_j| = 2 sum_i (2i - n - 1) x_(i).
    error = (draws.to(one.dtype) - t).sort(0).values
    weight = torch.arange(1 - n, n, 2, dtype=error.dtype, device=error.device).reshape(-1, *(1,) * t.dim())
    half_distance = (weight * error).sum(0) / (n * (n - 1))
    return _reduce(error.abs().mean(0) - half_distance, reduction)


def crps_gaussian(mean: Tensor, sd: Tensor, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the CRPS of N(mean, sd^2): sd [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)] with z = (y - mean)/sd.

    All have the same shape.
    """
    m, s, t = _real(finite=True, mean=mean, sd=sd, y=y)
    if not bool((s > 0).all()):
        raise InputError("sd", f"must be positive, got values down to {float(s.min()):.3g}")
    z = (t - m) / s
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return _reduce(s * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)), reduction)


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of y within [lower, upper], inclusive. All have the same shape; bounds may be infinite."""
    low, high, t = _interval(lower, upper, y)
    return ((low <= t) & (t <= high)).to(t.dtype).mean()


def coverage_standard_error(level: float, count: int) -> float:
    """Return sqrt(level (1 - level) / count), the standard error of the coverage of calibrated intervals."""
    if not 0 < level < 1:
        raise InputError("level", f"must be strictly between 0 and 1, got {level!r}")
    if count < 1:
        raise InputError("count", f"must be a positive integer, got {count!r}")
    return math.sqrt(level * (1 - level) / count)


def width(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the mean of upper - lower."""
    low, high = _interval(lower, upper)
    return (high - low).mean()


def regression_calibration(cdf_values: Tensor, levels: Tensor) -> Tensor:
    """Return the observed fraction of rows below each predicted quantile, mean_i [F_i(y_i) <= level], per level.

    Args:
        cdf_values: F_i(y_i), the predictive CDF at the observed y (the PIT), (N,). For calibrated predictions it is
            uniform and the result equals levels.
        levels: probabilities within (0, 1).
    """
    values, at = _real(same=False, cdf_values=cdf_values, levels=levels)
    if not bool(((values >= -1e-6) & (values <= 1 + 1e-6)).all()):
        raise InputError("cdf_values", "must lie within [0, 1]", "Pass the predictive CDF at the observed y")
    if not bool(((at > 0) & (at < 1)).all()):
        raise InputError("levels", "must be strictly between 0 and 1")
    below = torch.searchsorted(values.flatten().sort().values, at.contiguous(), right=True)
    return below.to(at.dtype) / values.numel()


def regression_calibration_error(cdf_values: Tensor, levels: Tensor | None = None) -> Tensor:
    """Return the mean over levels of |observed fraction - level|, see `regression_calibration`.

    The levels are 0.01, 0.02, ... 0.99 by default.
    """
    if levels is None:
        (values,) = _real(cdf_values=cdf_values)
        levels = torch.arange(1, 100, dtype=values.dtype, device=values.device) / 100
    return (regression_calibration(cdf_values, levels) - levels).abs().mean()


# -- classification


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of rows whose largest probability (first if tied) is at the label. (..., K) and (...)."""
    p, t = _labelled(probabilities, labels)
    return (p.argmax(-1) == t).to(p.dtype).mean()


def brier(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the mean over rows of sum_k (p_k - [k = label])^2, from 0 (best) to 2. (..., K) and (...)."""
    p, t = _labelled(probabilities, labels)
    return _reduce((p - torch.nn.functional.one_hot(t, p.shape[-1])).square().sum(-1), reduction)


def log_score(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the mean over rows of log p_label, at most 0; higher is better; -inf if some label had probability 0."""
    p, t = _labelled(probabilities, labels)
    return _reduce(p.gather(-1, t[..., None])[..., 0].log(), reduction)


def negative_log_likelihood(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the mean over rows of -log p_label; lower is better. (..., K) and (...)."""
    return -log_score(probabilities, labels, reduction=reduction)


def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Return confidence and accuracy of the top label in bins (edge_b, edge_b+1] of equal width on [0, 1].

    ece = sum_b (n_b / N) |accuracy_b - confidence_b|, and mce is the largest of these gaps. (..., K) and (...).
    """
    if not isinstance(bins, int) or bins < 1:
        raise InputError("bins", f"must be a positive integer, got {bins!r}")
    p, t = _labelled(probabilities, labels)
    confidence, top = p.reshape(-1, p.shape[-1]).max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype, device=p.device)
    index = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(index, minlength=bins)
    # In float64, as the sums run over all rows.
    totals = torch.zeros(2, bins, dtype=torch.float64, device=p.device)
    totals[0].index_add_(0, index, confidence.detach().double())
    totals[1].index_add_(0, index, (top == t.flatten()).double())
    means = totals / count.clamp(min=1)
    gap = (means[0] - means[1]).abs()
    found = [x.to(p.dtype) for x in ((gap * count).sum() / count.sum(), gap.max(), *means)]
    return Calibration(found[0], found[1], edges, found[2], found[3], count)


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error of the top label; see `calibration`."""
    return calibration(probabilities, labels, bins).ece


# -- two predictives


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """Return the fraction of rows where p and q have the same most probable label. Both (..., K)."""
    a, b = _pair(p, q)
    return (a.argmax(-1) == b.argmax(-1)).to(a.dtype).mean()


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return the mean over rows of sum_k |p_k - q_k| / 2, from 0 to 1. Both (..., K)."""
    a, b = _pair(p, q)
    return (a - b).abs().sum(-1).mean() / 2


def total_variation_from_cdf(p: Tensor, q: Tensor) -> Tensor:
    """Return the mean over rows of 1/2 integral |dP - dQ|, from 0 to 1, by the CDFs of real or integer targets.

    Args:
        p: P(y_g) at G increasing points y_g, (G, ...). The points come first, and each row may have its own.
        q: Q at the same points, same shape.

    The points divide the line into G + 1 cells, with both ends open, and the value is that of the cells' probabilities.
    It is a lower bound, short only in cells where the two densities cross, by the square of their width.
    """
    a, b = _real(p=p, q=q)
    for name, values in (("p", a), ("q", b)):
        increasing = values.dim() > 0 and bool((values.diff(dim=0) >= -1e-5).all())
        if not increasing or not bool(((values >= -1e-5) & (values <= 1 + 1e-5)).all()):
            found = f"got values from {float(values.min()):.3g} to {float(values.max()):.3g}"
            raise InputError(name, f"must be a CDF that increases along the first axis within [0, 1], {found}")
    gap = (a - b).double()
    inner = gap.diff(dim=0).abs().sum(0)
    return ((gap[0].abs() + inner + gap[-1].abs()).mean() / 2).to(a.dtype)


# -- out-of-distribution detection: higher scores mean further out of distribution, and those rows are the positives


def auroc(score_in: Tensor, score_out: Tensor) -> Tensor:
    """Return P(score_out > score_in) + P(equal)/2 of two random rows: 0.5 for no skill, 1 for perfect separation.

    Args:
        score_in: scores of in-distribution rows, (N,).
        score_out: scores of out-of-distribution rows, (M,).
    """
    inside, outside = _real(same=False, score_in=score_in, score_out=score_out)
    ordered, found = inside.flatten().sort().values, outside.flatten().contiguous()
    # Rows of score_in below each of score_out, once with and once without equal ones: ties count half.
    below = torch.searchsorted(ordered, found) + torch.searchsorted(ordered, found, right=True)
    return inside.new_tensor(int(below.sum()) / (2 * ordered.numel() * found.numel()))


def aupr(score_in: Tensor, score_out: Tensor) -> Tensor:
    """Return the area under the precision-recall curve (average precision) of score_out; M / (N + M) for no skill."""
    from sklearn.metrics import average_precision_score

    truth, rank, like = _ranked(score_in, score_out)
    return like.new_tensor(float(average_precision_score(truth.numpy(), rank.numpy())))


def fpr95(score_in: Tensor, score_out: Tensor) -> Tensor:
    """Return the fraction of score_in flagged (>= threshold) at the highest threshold that flags 95 % of score_out."""
    inside, outside = _real(same=False, score_in=score_in, score_out=score_out)
    needed = -(-95 * outside.numel() // 100)  # integer arithmetic: 0.95 * M may round up past an integer
    threshold = outside.flatten().sort(descending=True).values[needed - 1]
    return (inside >= threshold).to(inside.dtype).mean()


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Return the mean loss of the k most certain rows for k = 1..N; the area is the mean of these risks. Both (N,).

    Rows of equal uncertainty all get their mean loss, the average over their possible orders, so the order of the rows
    does not matter.
    """
    u, value = _real(uncertainty=uncertainty, loss=loss)
    if u.dim() != 1:
        raise InputError("uncertainty", f"must have shape (N,), got {tuple(u.shape)}")
    _, group, count = torch.unique(u, return_inverse=True, return_counts=True)  # in increasing order
    total = torch.zeros(len(count), dtype=torch.float64, device=u.device).index_add_(0, group, value.double())
    rows = torch.arange(1, len(u) + 1, dtype=torch.float64, device=u.device)
    risk = (total / count).repeat_interleave(count).cumsum(0) / rows
    return RiskCoverage((rows / len(u)).to(value.dtype), risk.to(value.dtype), risk.mean().to(value.dtype))


# -- checks


def _real(*, finite: bool = False, same: bool = True, **given: Tensor) -> list[Tensor]:
    """Return the arguments in a common floating-point dtype. Raise if one is empty, has NaN or has another shape."""
    dtype, first = torch.float32, next(iter(given))
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.is_complex() or x.numel() == 0:
            found = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(name, f"must be a non-empty real tensor, got {found}")
        if bool(x.isnan().any()) or (finite and not bool(x.isfinite().all())):
            found = "NaN" if bool(x.isnan().any()) else "infinite values"
            raise InputError(name, f"has {found}", "Remove those rows first")
        if same and x.shape != given[first].shape:
            raise InputError(name, f"has shape {tuple(x.shape)}, {first} has shape {tuple(given[first].shape)}")
        dtype = torch.promote_types(dtype, x.dtype)
    return [x.to(dtype) for x in given.values()]


def _interval(lower: Tensor, upper: Tensor, y: Tensor | None = None) -> list[Tensor]:
    out = _real(lower=lower, upper=upper) if y is None else _real(lower=lower, upper=upper, y=y)
    if bool((out[0] > out[1]).any()):
        raise InputError("lower", "must not exceed upper")
    return out


def _labelled(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    p = check_probabilities("probabilities", probabilities)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        found = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError("labels", f"must be an integer tensor, got {found}")
    if labels.shape != p.shape[:-1]:
        raise InputError("labels", f"must have shape {tuple(p.shape[:-1])}, got {tuple(labels.shape)}")
    t = labels.long()
    if not 0 <= int(t.min()) <= int(t.max()) < p.shape[-1]:
        found = f"got values from {int(t.min())} to {int(t.max())}"
        raise InputError("labels", f"must be from 0 to {p.shape[-1] - 1}, {found}")
    return p, t


def _pair(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    a, b = check_probabilities("p", p), check_probabilities("q", q)
    if a.shape != b.shape:
        raise InputError("q", f"has shape {tuple(b.shape)}, p has shape {tuple(a.shape)}")
    return a, b


def _ranked(score_in: Tensor, score_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are positive, and ranks instead of scores, as scikit-learn refuses infinite scores."""
    inside, outside = _real(same=False, score_in=score_in, score_out=score_out)
    scores = torch.cat([inside.flatten(), outside.flatten()])
    truth = torch.arange(scores.numel()) >= inside.numel()
    return truth, torch.unique(scores, return_inverse=True)[1].cpu(), inside


def _reduce(score: Tensor, reduction: Reduction) -> Tensor:
    check_choice("reduction", reduction, get_args(Reduction))
    return score.mean() if reduction == "mean" else score
