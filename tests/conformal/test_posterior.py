"""`posterior.calibrate` and `calibrate_by_loo`: what the calibrated predictions are, saving, groups and bad input."""

import json
import math

import pytest
import torch

import credibly as cr
from credibly.conformal import CalibratedPredictive, Calibration, Settings, calibrate, cross_calibrate, rank
from credibly.conformal.loo import loo_calibrate
from tests.conformal.simulated import gaussian, normal, stream


def waves(rows, seed):
    x = normal(seed, rows, 2).float()
    return x, (2 * x[:, 0] + (0.2 + x[:, 1].abs()) * normal(seed + 1, rows)).float()


def points(rows, seed, classes):
    x = normal(seed, rows, 2).float()
    weights = torch.linspace(-2, 2, 2 * classes).reshape(2, classes)
    return x, torch.multinomial(torch.softmax(x @ weights, -1), 1, generator=stream(seed)).squeeze(1)


def fitted(data, likelihood, outputs, members=4):
    torch.manual_seed(0)
    net = cr.zoo.mlp(2, (8,), outputs)
    problem = cr.Problem(net, data, likelihood, cr.priors.Normal(2.0, fan_in=True))
    return cr.DeepEnsemble(members=members, steps=60).fit(problem, seed=0), net


@pytest.fixture(scope="module")
def real():
    return fitted(waves(60, 0), cr.likelihoods.Gaussian(), 1)


@pytest.fixture(scope="module")
def classes():
    return fitted(points(60, 0, 3), cr.likelihoods.Categorical(), 3)


@pytest.fixture(scope="module")
def binary():
    x, y = points(60, 0, 2)
    return fitted((x, y.float()), cr.likelihoods.Bernoulli(), 1)


def test_everything_but_intervals_is_the_bayesian_prediction(real):
    posterior, _ = real
    x, y = waves(40, 20)
    calibrated = posterior.calibrate(*waves(50, 10))
    p, plain = calibrated.predict(x), posterior.predict(x)
    assert isinstance(p, cr.Predictive)
    for name in ("mean", "std", "total", "aleatoric", "epistemic"):
        assert torch.equal(getattr(p, name), getattr(plain, name)), name
    assert torch.equal(p.log_prob(y), plain.log_prob(y))
    assert torch.equal(p.quantile(0.3), plain.quantile(0.3))
    assert torch.equal(p.sample(3, seed=1), plain.sample(3, seed=1))
    for one, other in zip(p.bayesian.interval(0.9), plain.interval(0.9)):
        assert torch.equal(one, other)
    assert not torch.allclose(p.interval(0.9)[0], plain.interval(0.9)[0])
    assert p.interval(0.9)[0].dtype == plain.interval(0.9)[0].dtype
    rows = torch.tensor([3, 17, 5])
    assert torch.allclose(p.subset(rows).interval(0.9)[1], p.interval(0.9)[1][rows], rtol=1e-5)
    assert torch.equal(calibrated.sample(4, seed=2), posterior.sample(4, seed=2))
    assert cr.evaluate(p, y) is not None


def test_an_interval_is_the_threshold_on_the_scores(real):
    posterior, _ = real
    x, y = waves(50, 10)
    calibrated = posterior.calibrate(x, y)
    lower, upper = calibrated.predict(x).interval(0.8)
    # At the calibration rows themselves, exactly the k smallest scores lie inside.
    assert abs(int(((lower <= y) & (y <= upper)).sum()) - rank(50, 0.8)) <= 1


@pytest.mark.parametrize("score", ["pit", "cqr"])
def test_saving_intervals(real, tmp_path, score):
    posterior, net = real
    x, y = waves(50, 10)
    groups = ["a", "b"] * 25
    calibrated = posterior.calibrate(x, y, groups=groups, score=score)
    calibrated.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", net)
    assert isinstance(loaded, cr.CalibratedPosterior)
    new, own = waves(20, 30)[0], ["b"] * 20
    for one, other in zip(*(c.predict(new, groups=own).interval(0.9) for c in (calibrated, loaded))):
        assert torch.equal(one, other)
    stored = json.loads(json.dumps(calibrated.calibration.to_dict()))
    again = CalibratedPredictive(posterior.predict(new), Calibration.from_dict(stored), groups=own)
    assert torch.equal(again.interval(0.9)[0], loaded.predict(new, groups=own).interval(0.9)[0])


@pytest.mark.parametrize("probabilities", [None, "temperature", "isotonic"])
def test_saving_sets(classes, tmp_path, probabilities):
    posterior, net = classes
    calibrated = posterior.calibrate(*points(80, 10, 3), probabilities=probabilities, score="raps")
    calibrated.save(tmp_path / "run")
    x, y = points(30, 20, 3)
    one, other = (c.predict(x) for c in (calibrated, cr.load(tmp_path / "run", net)))
    assert torch.equal(one.prediction_set(0.9), other.prediction_set(0.9))
    assert torch.equal(one.probabilities, other.probabilities)
    assert torch.equal(one.log_prob(y), other.log_prob(y))
    assert torch.allclose(one.log_prob(y), one.probabilities.gather(1, y.unsqueeze(1)).squeeze(1).log())
    changed = probabilities is not None
    assert torch.equal(one.probabilities, one.bayesian.probabilities) != changed
    assert torch.equal(one.mean, one.probabilities)
    # Sets are those of the model's own probabilities, so their guarantee needs no further rows.
    plain = posterior.calibrate(*points(80, 10, 3), score="raps").predict(x)
    assert torch.equal(one.prediction_set(0.9), plain.prediction_set(0.9))


def test_two_classes_with_one_logit(binary):
    posterior, _ = binary
    x, y = points(80, 10, 2)
    p = posterior.calibrate(x, y.float(), probabilities="temperature").predict(points(30, 20, 2)[0])
    assert p.prediction_set(0.8).shape == (30, 2)
    assert torch.allclose(p.mean, p.probabilities[:, 1])
    ones = torch.ones(30)
    assert torch.allclose(p.log_prob(ones), p.mean.log())
    # A set does not depend on the other rows.
    whole = p.prediction_set(0.8)
    assert torch.equal(torch.cat([p.subset(torch.tensor([row])).prediction_set(0.8) for row in range(30)]), whole)


def test_groups_that_cannot_keep_the_promise(real):
    posterior, _ = real
    x, y = waves(50, 10)
    groups = ["a"] * 45 + ["b"] * 5
    calibrated = posterior.calibrate(x, y, groups=groups)
    new = waves(4, 30)[0]
    assert len(calibrated.predict(new, groups=["a"] * 4).interval(0.9)[0]) == 4
    with pytest.raises(cr.InputError, match=r"'b' has 5 calibration rows, a level of 0.9 needs 9.*pooled"):
        calibrated.predict(new, groups=["a", "a", "b", "a"]).interval(0.9)
    with pytest.raises(cr.InputError, match=r"'c' has no calibration rows; known groups are 'a', 'b'"):
        calibrated.predict(new, groups=["a", "a", "c", "a"]).interval(0.9)
    pooled = posterior.calibrate(x, y, groups=groups, fallback="pooled")
    everything = pooled.predict(new).interval(0.9)[0]
    mixed = pooled.predict(new, groups=["c", "a", "b", "a"]).interval(0.9)[0]
    own = calibrated.predict(new, groups=["a"] * 4).interval(0.9)[0]
    assert torch.equal(mixed[[0, 2]], everything[[0, 2]])
    assert torch.equal(mixed[[1, 3]], own[[1, 3]])


def test_bad_input(real, classes):
    posterior, labels = real[0], classes[0]
    x, y = waves(50, 10)
    calibrated = posterior.calibrate(x, y)
    p = calibrated.predict(x)
    for level in (0, 1, -0.1, 1.5, math.nan, "0.9", True, None):
        with pytest.raises(cr.InputError, match="level must be strictly between 0 and 1"):
            p.interval(level)
    with pytest.raises(cr.InputError, match=r"0.99 needs at least 99 calibration rows, there are 20.*at most 0.952"):
        posterior.calibrate(x[:20], y[:20]).predict(x).interval(0.99)
    with pytest.raises(cr.InputError, match="y"):
        posterior.calibrate(x, y[:49])
    with pytest.raises(cr.InputError, match="y"):
        posterior.calibrate(x, torch.cat([y[:49], torch.tensor([math.nan])]))
    with pytest.raises(cr.InputError, match=r"groups must have one label per row, got 3 labels for 50 rows"):
        posterior.calibrate(x, y, groups=[1, 2, 3])
    with pytest.raises(cr.InputError, match=r"groups must be one label per row, got str"):
        posterior.calibrate(x, y, groups="a" * 50)
    with pytest.raises(cr.InputError, match=r"groups must be strings or numbers, got None in row 1"):
        posterior.calibrate(x, y, groups=["a", None] * 25)
    with pytest.raises(cr.InputError, match="groups must be None: the calibration has no groups"):
        calibrated.predict(x, groups=["a"] * 50)
    with pytest.raises(cr.InputError, match="score must be 'pit' or 'cqr' for real targets and counts, got 'aps'"):
        posterior.calibrate(x, y, score="aps")
    with pytest.raises(cr.InputError, match="score must be 'aps' or 'raps' for labels, got 'pit'"):
        labels.calibrate(*points(50, 0, 3), score="pit")
    with pytest.raises(cr.InputError, match="score must be one of"):
        posterior.calibrate(x, y, score="best")
    with pytest.raises(cr.InputError, match="probabilities must be None for real targets"):
        posterior.calibrate(x, y, probabilities="temperature")
    with pytest.raises(cr.InputError, match="probabilities must be one of 'temperature', 'isotonic'"):
        labels.calibrate(*points(50, 0, 3), probabilities="platt")
    with pytest.raises(cr.InputError, match="penalty must be a non-negative number"):
        labels.calibrate(*points(50, 0, 3), score="raps", penalty=-1)
    with pytest.raises(cr.InputError, match="seed must be"):
        labels.calibrate(*points(50, 0, 3), seed=-1)
    with pytest.raises(cr.InputError, match="outcomes have no quantiles"):
        labels.calibrate(*points(50, 0, 3)).predict(x).interval(0.9)
    with pytest.raises(cr.InputError, match="not one of labels"):
        p.prediction_set(0.9)
    with pytest.raises(cr.InputError, match="folds must be at least 2, got 1"):
        cross_calibrate([(posterior.predict(x), y)])
    folds = [(posterior.predict(x), y)] * 2
    with pytest.raises(cr.InputError, match="groups must have an entry per fold"):
        cross_calibrate(folds, groups=[["a"] * 50])
    with pytest.raises(cr.InputError, match="folds must be predictions of 50 rows by 2 fits, got \\[50\\]"):
        CalibratedPredictive(posterior.predict(x), cross_calibrate(folds), folds=[posterior.predict(x)])
    with pytest.raises(cr.InputError, match="'pit' scores, the likelihood is Categorical"):
        CalibratedPredictive(labels.predict(x), calibrated.calibration)


def test_folds_with_groups():
    """Every group uses its own rows in all folds; a fold without rows of a group is no obstacle."""
    p, y = gaussian(normal(0, 2, 30), 1.0), normal(1, 30)
    half = torch.arange(30).split(15)
    held_out = [(p.subset(h), y[h]) for h in half]
    grouped = cross_calibrate(held_out, groups=[["a"] * 15, ["b"] * 15])
    found = CalibratedPredictive(p, grouped, groups=["a"] * 30, folds=[p, p]).interval(0.8)
    alone = CalibratedPredictive(p, calibrate(*held_out[0])).interval(0.8)
    assert torch.allclose(found[0], alone[0], rtol=1e-10)


# -- jackknife+ from leave-one-out weights
def test_jackknife_against_exact_leave_one_out_fits(conjugate):
    """In a linear model the posterior without a row is known: compare with its exact intervals."""
    problem = conjugate.problem()
    mean, covariance = conjugate.exact()
    chol = torch.linalg.cholesky(covariance)
    draws = mean + normal(0, 20_000, len(mean)) @ chol.T
    posterior = posterior_of(problem, draws)
    calibrated = posterior.calibrate_by_loo(problem)
    new = normal(5, 7, 3)
    level = 0.8
    found = calibrated.predict(new).interval(level)
    lower, upper = [], []
    rows = torch.cat([new, torch.ones(7, 1, dtype=torch.float64)], 1)
    for i in range(len(conjugate.x)):
        kept = torch.arange(len(conjugate.x)) != i
        design = conjugate.design[kept]
        precision = design.T @ design / conjugate.noise**2
        own = torch.linalg.inv(precision + torch.eye(len(mean), dtype=torch.float64) / conjugate.prior**2)
        centre = own @ design.T @ conjugate.y[kept] / conjugate.noise**2

        def at(points, own=own, centre=centre):
            return points @ centre, ((points @ own * points).sum(-1) + conjugate.noise**2).sqrt()

        m, s = at(conjugate.design[i])
        r = (conjugate.y[i] - m).abs() / s
        m, s = at(rows)
        lower.append(m - r * s)
        upper.append(m + r * s)
    n = len(lower)
    k = rank(n, level)
    width = float((found[1] - found[0]).mean())
    # Monte Carlo error of the weights: 20,000 draws.
    assert torch.allclose(found[0], torch.stack(lower).sort(0).values[n - k], atol=0.02 * width)
    assert torch.allclose(found[1], torch.stack(upper).sort(0).values[k - 1], atol=0.02 * width)
    assert calibrated.calibration.bad_k == 0


def posterior_of(problem, draws):
    from credibly.posterior.model import Model
    from credibly.storage.record import Record

    return cr.DrawsPosterior(Model.of(problem), draws.unsqueeze(0), Record())


@pytest.fixture(scope="module")
def label_problem():
    x, y = points(50, 0, 3)
    torch.manual_seed(0)
    problem = cr.Problem(cr.zoo.mlp(2, (), 3), (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    centre = cr.MAP(steps=200).fit(problem, seed=0).draws.reshape(-1)
    return problem, posterior_of(problem, centre + 0.2 * normal(3, 400, len(centre)).float())


def test_jackknife_sets_by_their_definition(label_problem):
    from credibly.conformal.labels import label_scores, uniforms

    problem, posterior = label_problem
    calibrated = posterior.calibrate_by_loo(problem, allow_empty=True, seed=4)
    new = points(6, 40, 3)[0]
    found = calibrated.predict(new).prediction_set(0.8)
    weights = calibrated.calibration.weights
    assert torch.allclose(weights.sum(0), torch.ones(50, dtype=torch.float64))
    own, there = (posterior.predict(x).functions().double() for x in (problem.x, new))
    counts = torch.zeros(6, 3)
    for i in range(50):
        here = (weights[:, i, None] * own[:, i]).sum(0)
        score = label_scores(here[None], uniforms(problem.x[i : i + 1], 4))[0, problem.y[i]]
        at_new = label_scores(torch.einsum("s,snk->nk", weights[:, i], there), uniforms(new, 4))
        counts += score < at_new
    assert torch.equal(found, counts < 0.8 * 51)


def test_jackknife_is_saved_and_capped(label_problem, tmp_path):
    problem, posterior = label_problem
    calibrated = posterior.calibrate_by_loo(problem, rows=30, score="raps")
    assert calibrated.calibration.rows == 30
    calibrated.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", problem.layout.module)
    x = points(6, 40, 3)[0]
    assert torch.equal(loaded.predict(x).prediction_set(0.8), calibrated.predict(x).prediction_set(0.8))
    assert loaded.calibration.bad_k == calibrated.calibration.bad_k


def test_jackknife_keeps_the_promise_of_a_wrong_model():
    """A line with a noise three times too small: credible intervals fail, jackknife+ does not."""
    covered, plain = [], []
    for seed in range(40):
        x = normal(seed, 60, 1)
        y = 2 * x[:, 0] + 1.5 * normal(seed + 1000, 60)
        design = torch.cat([x, torch.ones_like(x)], 1)[:40]
        covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(2, dtype=torch.float64))
        mean = covariance @ design.T @ y[:40] / 0.25
        problem = cr.Problem(
            torch.nn.Linear(1, 1).double(), (x[:40], y[:40]), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0)
        )
        draws = mean + normal(seed, 400, 2) @ torch.linalg.cholesky(covariance).T
        p = posterior_of(problem, draws).calibrate_by_loo(problem).predict(x[40:])
        for results, (lower, upper) in ((covered, p.interval(0.8)), (plain, p.bayesian.interval(0.8))):
            results.append(float(((lower <= y[40:]) & (y[40:] <= upper)).double().mean()))
    assert sum(plain) / 40 < 0.45
    # The standard error over 40 tables is about 0.015.
    assert abs(sum(covered) / 40 - 0.8) < 0.05


def test_jackknife_bad_input(real, label_problem, conjugate):
    problem, posterior = label_problem
    x, y = waves(60, 0)
    torch.manual_seed(0)
    plain = cr.Problem(cr.zoo.mlp(2, (8,), 1), (x, y), cr.likelihoods.Gaussian(), cr.priors.Normal())
    with pytest.raises(cr.InputError, match="at least 25 draws, got 4"):
        real[0].calibrate_by_loo(plain)
    with pytest.raises(cr.InputError, match="score must be 'pit' for leave-one-out"):
        real[0].calibrate_by_loo(plain, score="cqr")
    with pytest.raises(cr.InputError, match="rows must be a positive integer"):
        posterior.calibrate_by_loo(problem, rows=0)
    cold = conjugate.problem(temperature=0.5)
    with pytest.raises(cr.InputError, match="tempered"):
        posterior_of(cold, normal(0, 30, 4)).calibrate_by_loo(cold)
    calibrated = posterior.calibrate_by_loo(problem)
    with pytest.raises(cr.InputError, match="leave-one-out calibrations have no groups"):
        calibrated.predict(problem.x, groups=["a"] * 50)
    with pytest.raises(cr.InputError, match="0.99 needs at least 99 calibration rows, there are 50"):
        calibrated.predict(problem.x).prediction_set(0.99)
    with pytest.raises(cr.InputError, match="probabilities must be None for leave-one-out"):
        loo_calibrate(posterior.predict(problem.x), problem.y, settings=Settings(probabilities="temperature"))
