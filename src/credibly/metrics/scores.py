"""Measures of predictions, as plain functions on tensors. They know nothing of methods or of how a prediction was made.

Every argument is checked before any work: shapes must agree exactly (nothing is broadcast), NaN is refused, labels must
be whole numbers within range. Scalars come back as 0-dim tensors. A proper score takes reduction="none" to keep its
value for each row.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.metrics.information import check_probabilities

Reduction = Literal["mean", "none"]


class Calibration(NamedTuple):
    """Top-label calibration in bins of equal width; a bin without rows has confidence, accuracy and count 0.

    Shapes: ece and mce scalars, edges (bins + 1,), the others (bins,).
    """

    ece: Tensor
    mce: Tensor
    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor  # type: ignore[assignment]  # a column here, where tuple has a method


class RiskCoverage(NamedTuple):
    """The mean loss (risk) of the share of rows (coverage) that are most certain, each (N,), and the area below."""

    coverage: Tensor
    risk: Tensor
    area: Tensor


# -- regression


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root of the mean of (mean - y)^2 over every entry. mean and y have one shape."""
    m, t = _numbers(finite=True, mean=mean, y=y)
    return (m - t).square().mean().sqrt()


def mae(mean: Tensor, y: Tensor) -> Tensor:
    """Mean of |mean - y| over every entry. mean and y have one shape."""
    m, t = _numbers(finite=True, mean=mean, y=y)
    return (m - t).abs().mean()


def crps_from_samples(samples: Tensor, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Continuous ranked probability score E|X - y| - E|X - X'|/2, from draws samples (n, ...) against y (...).

    The fair estimator: pairs are averaged over i != j, so its mean does not depend on n, and a value may be below 0.
    """
    if not isinstance(samples, Tensor) or samples.dim() < 1 or len(samples) < 2:
        raise InputError("samples", "fewer than 2 draws", "Give draws (n, ...) with n at least 2.")
    (draws,) = _numbers(finite=True, samples=samples)
    one, t = _numbers(finite=True, one_draw=draws[0], y=y)
    n = len(samples)
    # Centred at y so that a large offset does not cancel. Sorted, sum_ij |x_i - x_j| = 2 sum_i (2i - n - 1) x_(i).
    error = (draws.to(one.dtype) - t).sort(0).values
    weight = torch.arange(1 - n, n, 2, dtype=error.dtype, device=error.device).reshape(-1, *(1,) * t.dim())
    spread = (weight * error).sum(0) / (n * (n - 1))
    return _reduce(error.abs().mean(0) - spread, reduction)


def crps_gaussian(mean: Tensor, sd: Tensor, y: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """CRPS of N(mean, sd^2): sd [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)] with z = (y - mean)/sd. One shape."""
    m, s, t = _numbers(finite=True, mean=mean, sd=sd, y=y)
    if not bool((s > 0).all()):
        raise InputError("sd", f"values down to {float(s.min()):.3g}", "Standard deviations are above 0.")
    z = (t - m) / s
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return _reduce(s * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)), reduction)


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """Share of y within [lower, upper], both ends included. The three have one shape; bounds may be infinite."""
    low, high, t = _interval(lower, upper, y)
    return ((low <= t) & (t <= high)).to(t.dtype).mean()


def coverage_standard_error(level: float, count: int) -> float:
    """sqrt(level (1 - level) / count): the spread of the observed coverage of intervals that truly cover `level`."""
    if not 0 < level < 1:
        raise InputError("level", repr(level), "Give a number between 0 and 1, as 0.9.")
    if count < 1:
        raise InputError("count", repr(count), "Give the number of rows, at least 1.")
    return math.sqrt(level * (1 - level) / count)


def width(lower: Tensor, upper: Tensor) -> Tensor:
    """Mean of upper - lower."""
    low, high = _interval(lower, upper)
    return (high - low).mean()


def regression_calibration(cdf_values: Tensor, levels: Tensor) -> Tensor:
    """Observed share of rows whose y lies below each quantile: mean_i [F_i(y_i) <= level]. Shape: that of levels.

    Args:
        cdf_values: F_i(y_i), the predictive CDF at the observed y (the PIT), (N,). Of a calibrated predictive they are
            uniform and the result equals levels.
        levels: within (0, 1).
    """
    values, at = _numbers(same=False, cdf_values=cdf_values, levels=levels)
    if not bool(((values >= -1e-6) & (values <= 1 + 1e-6)).all()):
        raise InputError("cdf_values", "values outside [0, 1]", "Give the predictive CDF at the observed y.")
    if not bool(((at > 0) & (at < 1)).all()):
        raise InputError("levels", "values outside (0, 1)", "Give probabilities such as 0.05, 0.5, 0.95.")
    below = torch.searchsorted(values.flatten().sort().values, at.contiguous(), right=True)
    return below.to(at.dtype) / values.numel()


def regression_calibration_error(cdf_values: Tensor, levels: Tensor | None = None) -> Tensor:
    """Mean over levels (default 0.01, 0.02, ... 0.99) of |observed share - level|; see `regression_calibration`."""
    if levels is None:
        (values,) = _numbers(cdf_values=cdf_values)
        levels = torch.arange(1, 100, dtype=values.dtype, device=values.device) / 100
    return (regression_calibration(cdf_values, levels) - levels).abs().mean()


# -- classification


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest probability (the first, if tied) is at the label. (..., K) and (...)."""
    p, t = _labelled(probabilities, labels)
    return (p.argmax(-1) == t).to(p.dtype).mean()


def brier(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Mean over rows of sum_k (p_k - [k = label])^2, from 0 (best) to 2. (..., K) and (...)."""
    p, t = _labelled(probabilities, labels)
    return _reduce((p - torch.nn.functional.one_hot(t, p.shape[-1])).square().sum(-1), reduction)


def log_score(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Mean over rows of log p_label, at most 0; higher is better; -inf if a label had no probability at all."""
    p, t = _labelled(probabilities, labels)
    return _reduce(p.gather(-1, t[..., None])[..., 0].log(), reduction)


def negative_log_likelihood(probabilities: Tensor, labels: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Mean over rows of -log p_label; lower is better. (..., K) and (...)."""
    return -log_score(probabilities, labels, reduction=reduction)


def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Confidence against accuracy of the top label, in bins (edge_b, edge_b+1] of equal width on [0, 1].

    ece = sum_b (n_b / N) |accuracy_b - confidence_b|, and mce is the largest of these gaps. (..., K) and (...).
    """
    if not isinstance(bins, int) or bins < 1:
        raise InputError("bins", repr(bins), "Give the number of bins, at least 1.")
    p, t = _labelled(probabilities, labels)
    confidence, top = p.reshape(-1, p.shape[-1]).max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype, device=p.device)
    where = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(where, minlength=bins)
    # in double precision: the sums run over as many rows as there are
    totals = torch.zeros(2, bins, dtype=torch.float64, device=p.device)
    totals[0].index_add_(0, where, confidence.detach().double())
    totals[1].index_add_(0, where, (top == t.flatten()).double())
    means = totals / count.clamp(min=1)
    gap = (means[0] - means[1]).abs()
    found = [x.to(p.dtype) for x in ((gap * count).sum() / count.sum(), gap.max(), *means)]
    return Calibration(found[0], found[1], edges, found[2], found[3], count)


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Expected calibration error of the top label; see `calibration`."""
    return calibration(probabilities, labels, bins).ece


# -- two predictives


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """Share of rows where p and q have their largest probability at the same label. Both (..., K)."""
    a, b = _two(p, q)
    return (a.argmax(-1) == b.argmax(-1)).to(a.dtype).mean()


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Mean over rows of sum_k |p_k - q_k| / 2, from 0 to 1. Both (..., K)."""
    a, b = _two(p, q)
    return (a - b).abs().sum(-1).mean() / 2


def total_variation_from_cdf(p: Tensor, q: Tensor) -> Tensor:
    """Mean over rows of 1/2 integral |dP - dQ|, from 0 to 1, by the distribution functions of real or whole-number targets.

    Args:
        p: P(y_g) at G rising points y_g, (G, ...): the points come first, and each row may have points of its own.
        q: Q at the same points, same shape.

    The points cut the line into G + 1 cells, both ends open, and the value is that of the probabilities of the cells: never
    above the true one. It falls short only in cells where the two densities cross, by a square of their width.
    """
    a, b = _numbers(p=p, q=q)
    for name, values in (("p", a), ("q", b)):
        rising = values.dim() > 0 and bool((values.diff(dim=0) >= -1e-5).all())
        if not rising or not bool(((values >= -1e-5) & (values <= 1 + 1e-5)).all()):
            found = f"values from {float(values.min()):.3g} to {float(values.max()):.3g} that do not rise within [0, 1]"
            raise InputError(name, found, "Give the distribution function at rising points, (G, ...), points first.")
    gap = (a - b).double()
    inner = gap.diff(dim=0).abs().sum(0)
    return ((gap[0].abs() + inner + gap[-1].abs()).mean() / 2).to(a.dtype)


# -- out of distribution: a higher score means more out of distribution, and such rows are the positives


def auroc(score_in: Tensor, score_out: Tensor) -> Tensor:
    """P(score_out > score_in) + P(equal)/2 of two rows at random: 0.5 for no skill, 1 for perfect separation.

    Args:
        score_in: scores of rows like the training data, (N,).
        score_out: scores of rows from elsewhere, (M,).
    """
    from sklearn.metrics import roc_auc_score

    truth, rank, like = _ranked(score_in, score_out)
    return like.new_tensor(float(roc_auc_score(truth.numpy(), rank.numpy())))


def aupr(score_in: Tensor, score_out: Tensor) -> Tensor:
    """Area under precision and recall (average precision) of finding score_out; M / (N + M) for no skill."""
    from sklearn.metrics import average_precision_score

    truth, rank, like = _ranked(score_in, score_out)
    return like.new_tensor(float(average_precision_score(truth.numpy(), rank.numpy())))


def fpr95(score_in: Tensor, score_out: Tensor) -> Tensor:
    """Share of score_in flagged (score >= threshold), at the highest threshold that flags 95 % or more of score_out."""
    inside, outside = _numbers(same=False, score_in=score_in, score_out=score_out)
    needed = -(-95 * outside.numel() // 100)  # whole numbers: 0.95 * M may round up past a whole number
    threshold = outside.flatten().sort(descending=True).values[needed - 1]
    return (inside >= threshold).to(inside.dtype).mean()


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Mean loss of the k most certain rows for k = 1..N; the area is the mean of these risks over k. Both (N,).

    Rows of equal uncertainty share their mean loss, the average over every order they could come in, so that the order
    of the rows does not matter.
    """
    u, value = _numbers(uncertainty=uncertainty, loss=loss)
    if u.dim() != 1:
        raise InputError("uncertainty", f"shape {tuple(u.shape)}", "Give one number for each row, (N,).")
    _, group, count = torch.unique(u, return_inverse=True, return_counts=True)  # in rising order
    total = torch.zeros(len(count), dtype=torch.float64, device=u.device).index_add_(0, group, value.double())
    rows = torch.arange(1, len(u) + 1, dtype=torch.float64, device=u.device)
    risk = (total / count).repeat_interleave(count).cumsum(0) / rows
    return RiskCoverage((rows / len(u)).to(value.dtype), risk.to(value.dtype), risk.mean().to(value.dtype))


# -- checks


def _numbers(*, finite: bool = False, same: bool = True, **given: Tensor) -> list[Tensor]:
    """The arguments in one floating-point type, or InputError for what is empty, NaN or of another shape."""
    dtype, first = torch.float32, next(iter(given))
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.is_complex() or x.numel() == 0:
            found = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(name, found, "Give a tensor of real numbers, not empty.")
        if bool(x.isnan().any()) or (finite and not bool(x.isfinite().all())):
            raise InputError(name, "NaN" if bool(x.isnan().any()) else "infinite values", "Remove those rows first.")
        if same and x.shape != given[first].shape:
            advice = f"It must have the shape of {first}, {tuple(given[first].shape)}."
            raise InputError(name, f"shape {tuple(x.shape)}", advice)
        dtype = torch.promote_types(dtype, x.dtype)
    return [x.to(dtype) for x in given.values()]


def _interval(lower: Tensor, upper: Tensor, y: Tensor | None = None) -> list[Tensor]:
    out = _numbers(lower=lower, upper=upper) if y is None else _numbers(lower=lower, upper=upper, y=y)
    if bool((out[0] > out[1]).any()):
        raise InputError("lower", "values above upper", "Give the two bounds in order.")
    return out


def _labelled(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    p = check_probabilities("probabilities", probabilities)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        found = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError("labels", found, "Give a tensor of whole numbers.")
    if labels.shape != p.shape[:-1]:
        advice = f"Probabilities {tuple(p.shape)} go with labels {tuple(p.shape[:-1])}."
        raise InputError("labels", f"shape {tuple(labels.shape)}", advice)
    t = labels.long()
    if not 0 <= int(t.min()) <= int(t.max()) < p.shape[-1]:
        found = f"values from {int(t.min())} to {int(t.max())}"
        raise InputError("labels", found, f"There are {p.shape[-1]} classes, numbered from 0.")
    return p, t


def _two(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    a, b = check_probabilities("p", p), check_probabilities("q", q)
    if a.shape != b.shape:
        raise InputError("q", f"shape {tuple(b.shape)}", f"It must have the shape of p, {tuple(a.shape)}.")
    return a, b


def _ranked(score_in: Tensor, score_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows are positive, and the scores' ranks in place of the scores: scikit-learn refuses infinite ones."""
    inside, outside = _numbers(same=False, score_in=score_in, score_out=score_out)
    scores = torch.cat([inside.flatten(), outside.flatten()])
    truth = torch.arange(scores.numel()) >= inside.numel()
    return truth, torch.unique(scores, return_inverse=True)[1].cpu(), inside


def _reduce(score: Tensor, reduction: Reduction) -> Tensor:
    if reduction not in ("mean", "none"):
        raise InputError("reduction", repr(reduction), 'Give "mean" or "none".')
    return score.mean() if reduction == "mean" else score
