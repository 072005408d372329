"""Finite-sample coverage over 2,000 repetitions, of good and of badly wrong models, on both sides of the promise."""

import pytest
import torch

from credibly.conformal import CalibratedPredictive, Settings, calibrate, cross_calibrate, rank
from tests.conformal.simulated import coverage_error, gaussian, labels, normal, stream

REPETITIONS = 2000
TESTS = 20


def noise(kind, seed, rows):
    """Real noise of a simulated world, (rows, repetitions)."""
    z = normal(seed, rows, REPETITIONS)
    if kind == "normal":
        return z
    # Student-t with 2 degrees of freedom: no variance.
    return z / normal(seed + 1, 2, rows, REPETITIONS).square().mean(0).sqrt()


# The world is y = 2 x + (0.2 + |x|) e; the model's mean, and its std relative to the truth.
MODELS = {
    "right": (lambda x: 2 * x, 1.0, "normal"),
    "mean off, ten times too narrow": (lambda x: 2 * x + 1.5, 0.1, "normal"),
    "no trend, too wide": (lambda x: 0 * x, 7.0, "normal"),
    "too narrow for heavy tails": (lambda x: 2 * x, 0.3, "heavy"),
}


def world(model, rows, seed):
    """A predictive of several draws and what happened, (rows, repetitions)."""
    mean, narrow, kind = MODELS[model]
    x = normal(seed, rows, REPETITIONS)
    y = 2 * x + (0.2 + x.abs()) * noise(kind, seed + 10, rows)
    wiggle = torch.tensor([-0.1, 0.0, 0.2], dtype=torch.float64).reshape(3, 1, 1)
    return gaussian(mean(x) + wiggle * narrow, narrow * (0.2 + x.abs()).expand(3, -1, -1)), y


def within(predictions, y, level):
    lower, upper = predictions.interval(level)
    assert bool((lower <= upper).all())
    assert bool(torch.isfinite(upper - lower).all())
    return ((lower <= y) & (y <= upper)).double()


@pytest.mark.parametrize("score", ["pit", "cqr"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows, level", [(19, 0.9), (50, 0.5)])
def test_split_intervals_keep_the_promise_exactly(model, score, rows, level):
    calibration = calibrate(*world(model, rows, 100), settings=Settings(score))
    predictive, y = world(model, TESTS, 200)
    covered = within(CalibratedPredictive(predictive, calibration), y, level).mean()
    k = rank(rows, level)
    error = coverage_error(rows, k, TESTS, REPETITIONS)
    assert abs(covered - k / (rows + 1)) < 4 * error
    assert level - 4 * error < covered < level + 1 / (rows + 1) + 4 * error


def test_bayesian_intervals_of_the_wrong_models_do_not():
    """The promise is not kept by accident."""
    for model in list(MODELS)[1:]:
        predictive, y = world(model, TESTS, 200)
        assert abs(within(predictive, y, 0.9).mean() - 0.9) > 0.05


def test_promise_within_each_group():
    """Groups with different noise, of which the model knows nothing: only the calibration by group is right in each."""
    sizes = {"a": 30, "b": 60, 7: 45}
    groups = [label for label, size in sizes.items() for _ in range(size)]
    factor = {"a": 0.2, "b": 1.0, 7: 5.0}
    scale = torch.tensor([factor[g] for g in groups], dtype=torch.float64).unsqueeze(1)
    y = scale * normal(1, len(groups), REPETITIONS)
    new = [label for label in sizes for _ in range(TESTS)]
    y_new = torch.tensor([factor[g] for g in new], dtype=torch.float64).unsqueeze(1) * normal(2, len(new), REPETITIONS)
    flat = gaussian(torch.zeros(1, len(groups), REPETITIONS), 1.0)
    flat_new = gaussian(torch.zeros(1, len(new), REPETITIONS), 1.0)
    calibration = calibrate(flat, y, groups=groups)
    covered = within(CalibratedPredictive(flat_new, calibration, groups=new), y_new, 0.8)
    pooled = within(CalibratedPredictive(flat_new, calibration), y_new, 0.8)
    for place, (label, size) in enumerate(sizes.items()):
        rows = slice(place * TESTS, (place + 1) * TESTS)
        k = rank(size, 0.8)
        assert abs(covered[rows].mean() - k / (size + 1)) < 4 * coverage_error(size, k, TESTS, REPETITIONS), label
        assert abs(pooled[rows].mean() - 0.8) > 0.1
    mixture = calibrate(flat, y).rows
    assert mixture == sum(sizes.values())


def label_world(rows, seed, sharpness, classes=5):
    """Labels from softmax logits, and a model whose logits are too sharp and shuffled a little, (rows, repetitions)."""
    logits = 1.5 * normal(seed, rows, REPETITIONS, classes)
    true = torch.softmax(logits, -1)
    y = torch.multinomial(true.reshape(-1, classes), 1, generator=stream(seed + 1)).reshape(rows, REPETITIONS)
    wrong = sharpness * (logits + 0.5 * normal(seed + 2, rows, REPETITIONS, classes))
    return labels(torch.softmax(wrong, -1)), y


@pytest.mark.parametrize("score", ["aps", "raps"])
@pytest.mark.parametrize("sharpness", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("rows, level", [(40, 0.9), (25, 0.7)])
def test_randomised_sets_keep_the_promise_exactly(score, sharpness, rows, level):
    calibration = calibrate(*label_world(rows, 1, sharpness), settings=Settings(score, allow_empty=True))
    predictive, y = label_world(TESTS, 5, sharpness)
    sets = CalibratedPredictive(predictive, calibration).prediction_set(level)
    covered = sets.gather(-1, y.unsqueeze(-1)).double().mean()
    k = rank(rows, level)
    assert abs(covered - k / (rows + 1)) < 4 * coverage_error(rows, k, TESTS, REPETITIONS)


def test_randomisation_breaks_the_ties_of_a_constant_model():
    """All rows have the same probabilities, so without it whole classes would be in every set or in none."""
    rows, level = 30, 0.8
    true = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def world(size, seed):
        y = torch.multinomial(true, size * REPETITIONS, replacement=True, generator=stream(seed))
        return labels(torch.tensor([0.6, 0.3, 0.1]).expand(size, REPETITIONS, 3)), y.reshape(size, REPETITIONS)

    calibration = calibrate(*world(rows, 0), settings=Settings("aps", allow_empty=True))
    predictive, y = world(TESTS, 1)
    sets = CalibratedPredictive(predictive, calibration).prediction_set(level)
    covered = sets.gather(-1, y.unsqueeze(-1)).double().mean()
    k = rank(rows, level)
    assert abs(covered - k / (rows + 1)) < 4 * coverage_error(rows, k, TESTS, REPETITIONS)


def test_sets_are_never_empty_by_default_and_cover_no_less():
    rows, level = 40, 0.5
    loose, default = (
        calibrate(*label_world(rows, 1, 8.0), settings=Settings("aps", allow_empty=flag)) for flag in (True, False)
    )
    predictive, y = label_world(TESTS, 5, 8.0)
    with_empty, without = (CalibratedPredictive(predictive, c).prediction_set(level) for c in (loose, default))
    assert int((~with_empty.any(-1)).sum()) > 0
    assert bool(without.any(-1).all())
    assert bool((without | with_empty == without).all())
    assert without.gather(-1, y.unsqueeze(-1)).double().mean() > with_empty.gather(-1, y.unsqueeze(-1)).double().mean()


def fold_world(rows, folds, seed):
    """Rows of a world with an unknown mean, and the predictives of fits without each fold: means of the other rows."""
    y = normal(seed, rows, REPETITIONS) * 3 + 10
    fold = torch.arange(rows) % folds
    fits = [y[fold != k].mean(0) for k in range(folds)]
    held_out = [(fitted(fits[k], int((fold == k).sum())), y[fold == k]) for k in range(folds)]
    return y, fits, held_out


def fitted(mean, rows):
    return gaussian(mean.expand(1, rows, -1), 0.4)


@pytest.mark.parametrize("score", ["pit", "cqr"])
@pytest.mark.parametrize("rows, folds, level", [(30, 5, 0.8), (20, 10, 0.9), (40, 2, 0.9)])
def test_cross_intervals_keep_the_weak_promise_and_nearly_the_strong_one(score, rows, folds, level):
    y, fits, held_out = fold_world(rows, folds, 3)
    calibration = cross_calibrate(held_out, settings=Settings(score))
    y_new = normal(77, 6, REPETITIONS) * 3 + 10
    new = [fitted(fit, 6) for fit in fits]
    covered = within(CalibratedPredictive(fitted(y.mean(0), 6), calibration, folds=new), y_new, level).mean()
    assert covered >= 2 * level - 1
    assert level - 0.01 < covered < level + 0.05


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_cross_sets_keep_the_promise_in_practice(score):
    folds, rows, level = 4, 40, 0.8
    parts = [label_world(rows // folds, 10 * k, 2.0) for k in range(folds)]
    calibration = cross_calibrate(parts, settings=Settings(score, allow_empty=True))
    predictive, y = label_world(TESTS, 500, 2.0)
    sets = CalibratedPredictive(predictive, calibration, folds=[predictive] * folds).prediction_set(level)
    covered = sets.gather(-1, y.unsqueeze(-1)).double().mean()
    # Folds with one and the same fit are split conformal, whose coverage is known.
    k = rank(rows, level)
    assert abs(covered - k / (rows + 1)) < 4 * coverage_error(rows, k, TESTS, REPETITIONS)


@pytest.mark.parametrize("folds", [0, 5])
def test_a_row_whose_noise_overflows_has_an_infinite_interval(folds):
    model, y = world("right", 50, 100)
    if folds:
        rows = torch.arange(50).chunk(folds)
        calibration = cross_calibrate([(model.subset(part), y[part]) for part in rows])
    else:
        calibration = calibrate(model, y)
    std = torch.full((3, 2, REPETITIONS), 1.0, dtype=torch.float64)
    std[:, 1] = torch.inf
    new = gaussian(torch.zeros(3, 2, REPETITIONS, dtype=torch.float64), std)
    lower, upper = CalibratedPredictive(new, calibration, folds=[new] * folds).interval(0.9)
    assert bool(torch.isfinite(upper[0] - lower[0]).all())
    assert bool((lower[1] == -torch.inf).all())
    assert bool((upper[1] == torch.inf).all())
