"""Lower bounds of times that may be censored, and intervals of several targets together: validity and definitions."""

import math

import pytest
import torch

import credibly as cr
from credibly.conformal import CalibratedPredictive, Settings, calibrate, cross_calibrate, rank
from credibly.conformal.bands import Bands
from tests.conformal.simulated import coverage_error, gaussian, normal, predictive, stream

REPETITIONS, ROWS, TESTS, LEVEL = 1000, 29, 20, 0.9
LIKELIHOOD = cr.likelihoods.Survival(scale=0.5, unit=1.0, squeeze=True)


def calibrated(known, y, new):
    """Calibrated predictions of many repetitions at once: each is a group with calibration rows of its own."""
    before, after = (torch.arange(REPETITIONS).repeat_interleave(n) for n in (ROWS, TESTS))
    return CalibratedPredictive(new, calibrate(known, y, groups=before), groups=after)


def weibull(location, scale, seed):
    """Times exp(location + scale * log E) with E exponential."""
    u = torch.rand(location.shape, generator=stream(seed), dtype=torch.float64)
    return torch.exp(location + scale * torch.log(-torch.log(u)))


def censored_world(rows, seed, wrong):
    """A model of times, the times, and their censoring times, which depend on x and on the time itself."""
    x = normal(seed, rows)
    time = weibull(1 + x, 0.5, seed + 1)
    censoring = time.sqrt() * weibull(1.2 + 0.5 * x, 1.0, seed + 2)
    model = torch.zeros_like(x) if wrong else 1 + x
    return predictive(model.reshape(1, rows, 1), LIKELIHOOD), time, censoring


@pytest.mark.parametrize("wrong", [False, True])
def test_lower_bounds_keep_the_promise(wrong):
    """For min(T, C) exactly k / (n + 1), whatever the model and the censoring; for T at least that."""
    known, time, censoring = censored_world(REPETITIONS * ROWS, 1, wrong)
    event = (time <= censoring).double()
    pairs = torch.stack([torch.minimum(time, censoring), event], 1)
    assert 0.2 < float(event.mean()) < 0.8
    new, new_time, new_censoring = censored_world(REPETITIONS * TESTS, 2, wrong)
    bound = calibrated(known, pairs, new).lower_bound(LEVEL)
    k = rank(ROWS, LEVEL)
    error = coverage_error(ROWS, k, TESTS, REPETITIONS)
    observed = (torch.minimum(new_time, new_censoring) >= bound).double().mean()
    assert abs(float(observed) - k / (ROWS + 1)) < 4 * error
    assert float((new_time >= bound).double().mean()) >= LEVEL - 4 * error


def test_without_censoring_the_bound_is_the_quantile_at_the_threshold():
    known, time, _ = censored_world(99, 3, False)
    calibration = calibrate(known, time)
    signed = calibrate(known, torch.stack([time, torch.ones(99)], 1))
    assert torch.equal(calibration.scores, signed.scores)
    new, _, _ = censored_world(7, 4, False)
    found = CalibratedPredictive(new, calibration)
    limit = calibration.scores.sort().values[rank(99, 0.8) - 1]
    assert torch.allclose(found.lower_bound(0.8), Bands.of(new).at(-limit))
    lower, upper = found.interval(0.8)
    assert torch.equal(lower, found.lower_bound(0.8))
    assert bool(torch.isposinf(upper).all())
    # For the right model the bound is close to the quantile of the model itself: the 20 % quantile.
    assert torch.allclose(found.lower_bound(0.8), new.quantile(0.2), rtol=0.25)


def test_bounds_of_folds_are_order_statistics():
    """The m-th smallest of the lower ends that the calibration rows give, computed one by one."""
    parts = []
    for k in range(3):
        known, time, censoring = censored_world(20, 10 + k, False)
        parts.append((known, torch.where(time <= censoring, time, -censoring)))
    calibration = cross_calibrate(parts)
    folds = [predictive((1 + normal(30 + k, 5)).reshape(1, 5, 1), LIKELIHOOD) for k in range(3)]
    found = CalibratedPredictive(folds[0], calibration, folds=folds).lower_bound(0.9)
    bands = [Bands.of(fold) for fold in folds]
    ends = torch.stack([bands[int(k)].at(-s) for k, s in zip(calibration.fold, calibration.scores)])
    m = math.floor((1 - 0.9) * (60 + 1) + 1e-9)
    expected = ends.sort(0).values[m - 1].clamp_min(0)
    assert torch.allclose(found, expected, atol=1e-9)


def test_a_lower_bound_is_no_negative_time():
    known, time, _ = censored_world(99, 3, False)
    new = predictive(normal(4, 1, 7, 1), cr.likelihoods.Survival(scale=2.0, unit=1.0, squeeze=True))
    # Events long before they were expected.
    bound = CalibratedPredictive(new, calibrate(known, time * 1e-12)).lower_bound(0.9)
    assert float(bound.min()) == 0


def two_targets(rows, seed):
    """Two targets with dependent, heavy-tailed errors of different size, and a model that knows neither."""
    z = normal(seed, rows, 2)
    z[:, 1] = 0.6 * z[:, 0] + 0.8 * z[:, 1]
    y = z / normal(seed + 1, 3, rows, 1).square().mean(0).sqrt() * torch.tensor([1.0, 40.0])
    return gaussian(torch.zeros(1, rows, 2), torch.tensor([0.5, 30.0]).expand(1, rows, 2)), y


def test_joint_intervals_hold_all_targets():
    """Exactly k / (n + 1) for all targets together, where intervals of each alone hold fewer rows."""
    new, y = two_targets(REPETITIONS * TESTS, 6)
    found = calibrated(*two_targets(REPETITIONS * ROWS, 5), new)
    joint, each = ((lower <= y) & (y <= upper) for lower, upper in (found.joint_interval(LEVEL), found.interval(LEVEL)))
    k = rank(ROWS, LEVEL)
    error = coverage_error(ROWS, k, TESTS, REPETITIONS)
    assert abs(float(joint.all(1).double().mean()) - k / (ROWS + 1)) < 4 * error
    assert abs(float(each.double().mean()) - k / (ROWS + 1)) < 4 * error
    assert float(each.all(1).double().mean()) < LEVEL - 4 * error


def test_joint_intervals_of_one_target_are_its_intervals():
    z = normal(7, 50)
    calibration = calibrate(gaussian(torch.zeros(1, 50), torch.ones(1, 50)), z)
    found = CalibratedPredictive(gaussian(torch.zeros(1, 3), torch.ones(1, 3)), calibration)
    for joint, alone in zip(found.joint_interval(0.8), found.interval(0.8)):
        assert torch.equal(joint, alone)


def test_joint_intervals_of_folds_contain_the_cross_conformal_set():
    parts = [two_targets(25, 40 + k) for k in range(4)]
    calibration = cross_calibrate(parts)
    folds = [two_targets(200, 50)[0] for _ in range(4)]
    y = two_targets(200, 51)[1]
    lower, upper = CalibratedPredictive(folds[0], calibration, folds=folds).joint_interval(0.9)
    own = torch.stack([Bands.of(fold).score(y).amax(1) for fold in folds])
    scores = calibration.scores.amax(1)
    reached = torch.stack([own[int(k)] <= s for k, s in zip(calibration.fold, scores)]).sum(0)
    member = reached >= math.floor(0.1 * 101 + 1e-9)
    inside = ((lower <= y) & (y <= upper)).all(1)
    assert bool(inside[member].all())
    assert 0.8 < float(inside.double().mean()) < 1


def test_refusals():
    known, time, _ = censored_world(20, 8, False)
    with pytest.raises(cr.InputError, match="must be 'lower' for times, got 'pit'"):
        calibrate(known, time, settings=Settings("pit"))
    found = CalibratedPredictive(known, calibrate(known, time))
    with pytest.raises(cr.InputError, match="99 calibration rows, there are 20"):
        found.lower_bound(0.99)
    with pytest.raises(cr.InputError, match="joint intervals are made from 'pit' scores, got 'lower'"):
        found.joint_interval(0.5)
    one = gaussian(torch.zeros(1, 20), torch.ones(1, 20))
    real = CalibratedPredictive(one, calibrate(one, normal(9, 20), settings=Settings("cqr")))
    with pytest.raises(cr.InputError, match="got 'cqr'"):
        real.joint_interval(0.5)
    with pytest.raises(cr.InputError, match="is for times that may be censored"):
        real.lower_bound(0.5)
