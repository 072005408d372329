"""Scores, order statistics and maps of probabilities against closed forms and brute force."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

import credibly as cr
from credibly.conformal import CalibratedPredictive, Settings, calibrate, cross_calibrate, fit_probabilities, rank
from credibly.conformal.bands import NODES, Bands
from credibly.conformal.labels import label_scores, uniforms
from credibly.conformal.ranks import rows_needed
from tests.conformal.simulated import gaussian, labels, normal, predictive, stream


@pytest.mark.parametrize("y", [-1e4, -40.0, -3.0, -0.7, 0.0, 0.3, 2.9, 40.0, 1e6])
def test_score_of_a_gaussian_is_the_absolute_z_score(y):
    """Also where its CDF rounds to 0 or 1."""
    bands = Bands.of(gaussian(torch.full((1, 1), 2.0), 0.5))
    assert float(bands.score(torch.tensor([2 + 0.5 * y]))) == pytest.approx(abs(y), rel=1e-6, abs=1e-6)
    assert float(bands.at(y)) == pytest.approx(2 + 0.5 * y, rel=1e-6)


def test_score_of_a_mixture_follows_its_cdf():
    p = gaussian(
        torch.tensor([[-1.0, 0.0], [1.0, 5.0], [1.5, 0.0]]), torch.tensor([[0.5, 1.0], [1.0, 0.2], [0.3, 1.0]])
    )
    bands = Bands.of(p)
    for level in (0.07, 0.3, 0.5, 0.62, 0.9, 0.99):
        y = p.quantile(level)
        z = float(torch.special.ndtri(torch.tensor(level)))
        # Both lie between the same nodes, which are half a unit apart.
        assert bool(((bands.score(y) - abs(z)).abs() < 0.5).all())
        node = min(NODES, key=lambda t: abs(t - z))
        exact = p.quantile(float(torch.special.ndtr(torch.tensor(node, dtype=torch.float64))))
        assert torch.allclose(bands.score(exact), torch.tensor(abs(node), dtype=torch.float64), atol=1e-6)


def test_an_interval_contains_what_scores_at_most_its_index():
    nodes = torch.tensor(NODES, dtype=torch.float64)
    # Steep, flat and skewed parts, and one without any width.
    rows = torch.stack([nodes**3, nodes.exp(), (nodes * 2).floor(), 0 * nodes + 4, nodes.clamp(-0.6, 1.2)], 1)
    bands = Bands(nodes, rows)
    for y, t in itertools.product([-30.0, -1.3, -0.6, 0.0, 0.2, 1.2, 4.0, 9.0], [0.0, 0.4, 1.0, 2.2, 3.0, 8.0]):
        inside = (bands.at(-t) <= y) & (y <= bands.at(t))
        assert torch.equal(inside, bands.score(torch.full((5,), y, dtype=torch.float64)) <= t), (y, t)


@pytest.mark.parametrize("level, needed", [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99), (0.999, 999)])
def test_rows_needed_for_a_level(level, needed):
    assert rows_needed(level) == needed
    assert rank(needed, level) == needed
    with pytest.raises(cr.InputError, match=f"at least {needed} calibration rows, there are {needed - 1}"):
        rank(needed - 1, level)


def test_rank_is_the_smallest_that_keeps_the_promise():
    for n, tenths in itertools.product(range(1, 200), range(1, 10)):
        level = tenths / 10
        if n >= rows_needed(level):
            # In integers, without rounding.
            assert rank(n, level) == next(k for k in range(1, n + 1) if 10 * k >= (n + 1) * tenths)


def worlds(rows, seed):
    """Two targets, one with a skewed mixture."""
    mean = normal(seed, 3, rows, 2) + 2 * normal(seed + 1, rows, 2)
    return gaussian(mean, 0.3 + normal(seed + 2, 3, rows, 2).abs()), 3 * normal(seed + 3, rows, 2)


@pytest.mark.parametrize("score", ["pit", "cqr"])
def test_cross_intervals_are_order_statistics(score):
    """CV+ by its definition: the m-th smallest and largest ends of one interval per calibration row."""
    sizes, level = (11, 7, 9), 0.8
    held_out = [worlds(size, 10 * k) for k, size in enumerate(sizes)]
    new = [worlds(6, 100 + 10 * k)[0] for k in range(3)]
    calibration = cross_calibrate(held_out, settings=Settings(score))
    found = CalibratedPredictive(new[0], calibration, folds=new).interval(level)
    z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
    lower, upper = [], []
    for (own, y), there in zip(held_out, new):
        here, bands = Bands.of(own), Bands.of(there)
        scores = here.score(y) if score == "pit" else torch.maximum(here.at(-z) - y, y - here.at(z))
        for r in scores:
            lower.append(bands.at(-r) if score == "pit" else bands.at(-z) - r)
            upper.append(bands.at(r) if score == "pit" else bands.at(z) + r)
    n = sum(sizes)
    smallest, largest = rank(n, level), n + 1 - rank(n, level)
    assert torch.allclose(found[0], torch.stack(lower).sort(0).values[largest - 1], rtol=1e-10, atol=1e-10)
    assert torch.allclose(found[1], torch.stack(upper).sort(0).values[smallest - 1], rtol=1e-10, atol=1e-10)


def test_folds_together_and_one_by_one_give_the_same_bits(monkeypatch):
    sizes = (11, 7, 9)
    calibration = cross_calibrate([worlds(size, 10 * k) for k, size in enumerate(sizes)])
    new = [worlds(6, 100 + 10 * k)[0] for k in range(3)]
    together = CalibratedPredictive(new[0], calibration, folds=new).interval(0.8)
    monkeypatch.setattr("credibly.conformal.cross.TOGETHER", 0)
    one_by_one = CalibratedPredictive(new[0], calibration, folds=new).interval(0.8)
    assert all(torch.equal(*ends) for ends in zip(together, one_by_one))


def test_one_fit_for_all_folds_is_split_conformal():
    (p, y), (new, _) = worlds(30, 0), worlds(8, 50)
    halves = torch.arange(30).split(15)
    cross = cross_calibrate([(p.subset(half), y[half]) for half in halves])
    split = CalibratedPredictive(new, calibrate(p, y)).interval(0.9)
    for one, other in zip(CalibratedPredictive(new, cross, folds=[new, new]).interval(0.9), split):
        assert torch.allclose(one, other, rtol=1e-10)


def test_cross_sets_by_their_definition():
    sizes, level, classes = (9, 8, 10), 0.7, 4

    def world(rows, seed):
        return labels(torch.softmax(normal(seed, rows, classes), -1))

    held_out = [(world(size, k), torch.randint(classes, (size,), generator=stream(k))) for k, size in enumerate(sizes)]
    new = [world(12, 30 + k) for k in range(3)]
    settings = Settings("raps", penalty=0.2, penalty_from=1, allow_empty=True, seed=3)
    calibration = cross_calibrate(held_out, settings=settings)
    found = CalibratedPredictive(new[0], calibration, folds=new).prediction_set(level)
    u = uniforms(new[0].x, 3)
    for row, label in itertools.product(range(12), range(classes)):
        below = sum(
            by_hand(own.probabilities[i], int(y[i]), float(uniforms(own.x, 3)[i]))
            < by_hand(there.probabilities[row], label, float(u[row]))
            for (own, y), there in zip(held_out, new)
            for i in range(own.rows)
        )
        assert bool(found[row, label]) == (below < level * (sum(sizes) + 1))


def by_hand(p, label, u, penalty=0.2, penalty_from=1):
    before = [other for other in range(len(p)) if p[other] > p[label]]
    return float(sum(p[other] for other in before) + u * p[label]) + penalty * max(0, len(before) + 1 - penalty_from)


def test_label_scores_by_hand():
    p, u = torch.softmax(normal(1, 20, 6), -1), torch.rand(20, generator=stream(1), dtype=torch.float64)
    scores = label_scores(p, u, 0.2, 1)
    for row, label in itertools.product(range(20), range(6)):
        assert float(scores[row, label]) == pytest.approx(by_hand(p[row], label, float(u[row])))


def test_randomisation_depends_on_the_row_alone():
    x = normal(0, 500, 3)
    u = uniforms(x, 0)
    order = torch.randperm(500, generator=stream(0))
    assert torch.equal(uniforms(x[order], 0), u[order])
    assert not torch.equal(uniforms(x, 1), u)
    ordered = u.sort().values
    # Kolmogorov-Smirnov, 0.1 % level.
    assert float((ordered - torch.arange(500) / 500).abs().max()) < 1.95 / 500**0.5
    assert uniforms(x, 0, (4, 2)).shape == (500, 4, 2)


def test_isotonic_is_that_of_scikit_learn():
    p = torch.rand(300, generator=stream(0), dtype=torch.float64).mul(40).round().div(40)
    y = (torch.rand(300, generator=stream(1), dtype=torch.float64) < p**2).long()
    mapped = fit_probabilities("isotonic", torch.stack([1 - p, p], -1), y)
    grid = torch.linspace(0, 1, 203, dtype=torch.float64)
    peer = IsotonicRegression(y_min=1 / 302, y_max=1 - 1 / 302, out_of_bounds="clip").fit(p, y).predict(grid)
    np.testing.assert_allclose(mapped(torch.stack([1 - grid, grid], -1))[:, 1], peer, atol=1e-12)


def test_isotonic_of_several_classes_is_normalised():
    p = torch.softmax(normal(0, 400, 3), -1)
    y = torch.multinomial(p**2, 1, generator=stream(2)).squeeze(1)
    found = fit_probabilities("isotonic", p, y)(p)
    assert torch.allclose(found.sum(-1), torch.ones(400, dtype=torch.float64))
    own = found.gather(1, y.unsqueeze(1)).log().mean()
    assert own > p.gather(1, y.unsqueeze(1)).log().mean()
    parts = [IsotonicRegression().fit(p[:, c], y == c).predict(p[:, c]).clip(1 / 402, 401 / 402) for c in range(3)]
    np.testing.assert_allclose(found, np.stack(parts, 1) / np.sum(parts, 0)[:, None], atol=1e-12)


def test_temperature_is_recovered_and_maximises_the_likelihood():
    logits = 2 * normal(0, 60_000, 3)
    y = torch.multinomial(torch.softmax(logits, -1), 1, generator=stream(3)).squeeze(1)
    overconfident = torch.softmax(2.5 * logits, -1)
    mapped = fit_probabilities("temperature", overconfident, y)
    assert mapped.temperature == pytest.approx(2.5, rel=0.03)

    def likelihood(temperature):
        log_p = torch.log_softmax(2.5 * logits / temperature, -1)
        return float(log_p.gather(1, y.unsqueeze(1)).mean())

    best = likelihood(mapped.temperature)
    assert best >= max(likelihood(mapped.temperature * f) for f in (0.99, 0.999, 1.001, 1.01))
    assert torch.allclose(mapped(overconfident), torch.softmax(2.5 * logits / mapped.temperature, -1))


def test_counts_have_integer_bounds_that_keep_the_promise():
    """The rate is three times what the model says; every target is a repetition."""
    repetitions, rows, level = 1500, 40, 0.9

    def world(size, seed):
        rate = torch.rand(size, repetitions, generator=stream(seed), dtype=torch.float64) * 4 + 0.5
        y = torch.poisson(3 * rate, generator=stream(seed + 1))
        return predictive(rate.log().unsqueeze(0), cr.likelihoods.Poisson()), y

    p, y = world(rows, 0)
    new, y_new = world(10, 10)
    lower, upper = CalibratedPredictive(new, calibrate(p, y)).interval(level)
    covered = float(((lower <= y_new) & (y_new <= upper)).double().mean())
    assert torch.equal(lower, lower.round())
    assert torch.equal(upper, upper.round())
    assert float(lower.min()) >= 0
    # At least the level: counts have ties. Far below it without calibration.
    assert level - 0.005 < covered < level + 0.08
    bayesian = new.interval(level)
    assert float(((bayesian[0] <= y_new) & (y_new <= bayesian[1])).double().mean()) < 0.7


def test_bounds_stay_within_the_range_of_a_transformed_target():
    """Far outside of the nodes the interval continues in a straight line, which would leave the positive numbers."""
    from credibly.predictive.transformed import in_original_units
    from credibly.predictive.transforms import Transform

    def world(rows, seed):
        z = gaussian(normal(seed, 2, rows), 0.05)
        likelihood = cr.likelihoods.Gaussian(0.05, squeeze=True)
        plain = predictive(z.functions().unsqueeze(-1), likelihood)
        return in_original_units(plain, (Transform("log"),), (0.0,), (1.0,))

    p, new = world(60, 0), world(10, 5)
    y = (2 * normal(9, 60)).exp()
    lower, upper = CalibratedPredictive(new, calibrate(p, y)).interval(0.9)
    assert float(lower.min()) >= 0
    assert bool((upper > lower).all())
    assert float(Bands.of(new).at(-200.0).min()) < 0


def test_bounds_of_proportions_stay_within_0_and_1():
    likelihood = cr.likelihoods.Beta(precision=200.0, margin=0.005, squeeze=True)

    def world(rows, seed):
        return predictive(3 + 0.3 * normal(seed, 8, rows, 1), likelihood)

    p, new, y = world(60, 0), world(10, 5), torch.rand(60, generator=stream(3), dtype=torch.float64)
    for score in ("pit", "cqr"):
        lower, upper = CalibratedPredictive(new, calibrate(p, y, settings=Settings(score=score))).interval(0.9)
        assert 0 <= float(lower.min()) <= float(upper.max()) <= 1
        assert bool((upper > lower).all())
    assert float(Bands.of(new).at(-200.0).min()) < 0
    assert float(Bands.of(new).at(200.0).max()) > 1


def test_quantiles_of_proportions_are_not_rounded_past_the_ends():
    outputs = torch.linspace(-12, 12, 200).reshape(1, -1, 1)
    found = predictive(outputs, cr.likelihoods.Beta(precision=5.0, margin=0.05, squeeze=True))
    lower, upper = found.interval(0.9)
    assert float(lower.min()) == 0
    assert float(upper.max()) == 1


def test_many_draws_are_thinned():
    many = gaussian(0.3 * normal(0, 1500, 20), 1.0)
    one, other = (
        Bands.of(many).values,
        many.quantile(torch.special.ndtr(torch.tensor(NODES, dtype=torch.float64)).tolist()),
    )
    # The standard error of a mean of 250 draws of standard deviation 0.3 is 0.019.
    assert 0 < float((one - other).abs().max()) < 0.1


def test_joined_predictions_of_several_fits():
    from credibly.predictive.joined import JoinedPredictive

    (p, y), (new, _), (other, _) = worlds(30, 0), worlds(8, 50), worlds(5, 60)
    joined = JoinedPredictive([new, other], torch.arange(13))
    calibration = calibrate(p, y)
    whole = CalibratedPredictive(joined, calibration)
    parts = [CalibratedPredictive(part, calibration).interval(0.8) for part in (new, other)]
    assert len(whole) == 13
    for bound, pieces in zip(whole.interval(0.8), zip(*parts)):
        assert torch.equal(bound, torch.cat(pieces))
    assert torch.equal(whole.mean, torch.cat([new.mean, other.mean]))
