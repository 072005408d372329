"""Metrics of a predictive, against the same metrics computed by hand."""

import math

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from credibly.metrics.evaluation import compare
from tests.conformal.simulated import predictive

X, Y = randn(60, 3), randn(60, 3).sum(1) + 0.2 * randn(60, seed=1)


def fitted(outputs, y, likelihood):
    problem = cr.Problem(mlp(3, 6, outputs), data=(X, y), likelihood=likelihood, prior=cr.priors.Normal())
    return cr.DeepEnsemble(members=4, steps=150).fit(problem, seed=0).predict(X)


def test_real_targets():
    p = fitted(1, Y, Gaussian())
    values = cr.evaluate(p, Y)
    lower, upper = p.interval(0.9)
    assert values["rmse"] == pytest.approx(float((p.mean - Y).square().mean().sqrt()), rel=1e-5)
    assert values["log_density"] == pytest.approx(float(p.log_prob(Y).mean()), rel=1e-5)
    assert values["coverage"] == pytest.approx(float(((lower <= Y) & (upper >= Y)).float().mean()))
    assert values["width"] == pytest.approx(float((upper - lower).mean()), rel=1e-5)
    assert 0 < values["crps"] < values["rmse"]
    below = torch.stack([(p.cdf(Y) <= q).float().mean() for q in torch.arange(1, 100) / 100])
    assert values["calibration_error"] == pytest.approx(
        float((below - torch.arange(1, 100) / 100).abs().mean()), abs=1e-5
    )
    assert cr.evaluate(p, Y.numpy()) == values


def test_wider_predictions_cover_more_and_score_worse():
    narrow, wide = fitted(1, Y, Gaussian(0.3)), fitted(1, Y, Gaussian(3.0))
    a, b = cr.evaluate(narrow, Y), cr.evaluate(wide, Y)
    assert b["coverage"] == 1.0 >= a["coverage"]
    assert b["log_density"] < a["log_density"]
    assert b["calibration_error"] > a["calibration_error"]


@pytest.mark.parametrize("likelihood, outputs", [(Bernoulli(), 1), (Categorical(), 2)])
def test_labels(likelihood, outputs):
    labels = (Y > 0).long()
    p = fitted(outputs, labels, likelihood)
    values = cr.evaluate(p, labels)
    assert values["accuracy"] == pytest.approx(float((p.probabilities.argmax(-1) == labels).float().mean()))
    assert values["log_density"] == pytest.approx(float(p.log_prob(labels).mean()), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(labels, 2)
    assert values["brier"] == pytest.approx(float((p.probabilities - one_hot).square().sum(-1).mean()), rel=1e-4)
    assert values["coverage"] >= values["accuracy"]
    assert 1 <= values["set_size"] <= 2


def test_counts_have_no_calibration_error():
    counts = Y.exp().round().clamp(max=20)
    values = cr.evaluate(fitted(1, counts, Poisson()), counts)
    assert set(values) == {"log_density", "rmse", "crps", "coverage", "width"}
    assert 0.7 < values["coverage"] <= 1


class TestCompare:
    def test_real_targets_against_the_integral_of_the_densities(self):
        a, b = fitted(1, Y, Gaussian()), fitted(1, 0.7 * Y + 0.1, Gaussian(0.4))
        found = compare(a, b)
        step = 0.005
        grid = torch.arange(-12, 12, step)
        densities = [
            torch.stack([p.log_prob(torch.full_like(Y, float(y))).double().exp() for y in grid]) for p in (a, b)
        ]
        expected = (densities[0] - densities[1]).abs().sum(0).mul(step / 2).mean()
        assert found["total_variation"] == pytest.approx(float(expected), abs=2e-3)
        assert 0.05 < found["total_variation"] < 0.95
        assert found["mean_shift"] == pytest.approx(float(((a.mean - b.mean).abs() / b.std).mean()), rel=1e-5)
        assert compare(b, a)["total_variation"] == pytest.approx(found["total_variation"], abs=1e-6)

    def test_disjoint_and_equal_predictions(self):
        a, far = fitted(1, Y * 0, Gaussian(0.01)), fitted(1, Y * 0 + 2, Gaussian(0.01))
        assert compare(a, a) == {"total_variation": 0.0, "mean_shift": 0.0}
        assert compare(a, far)["total_variation"] == pytest.approx(1, abs=1e-5)

    def test_a_spike_within_a_wide_band_is_resolved(self):
        """Widths 1 and 20: the default cells match the closed form of two Gaussians with nearly equal means."""
        a, b = fitted(1, Y * 0, Gaussian(0.05)), fitted(1, Y * 0, Gaussian(1.0))
        ratio = 20.0
        c = (2 * ratio**2 * math.log(ratio) / (ratio**2 - 1)) ** 0.5
        expected = math.erf(c / 2**0.5) - math.erf(c / ratio / 2**0.5)
        assert compare(a, b)["total_variation"] == pytest.approx(expected, abs=0.02)

    def test_labels(self):
        a, b = fitted(2, (Y > 0).long(), Categorical()), fitted(2, (Y > 0.5).long(), Categorical())
        p, q = a.probabilities, b.probabilities
        assert compare(a, b) == {
            "total_variation": pytest.approx(float((p - q).abs().sum(-1).mean() / 2), rel=1e-5),
            "agreement": pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean())),
        }

    def test_counts_are_exact(self):
        counts = Y.exp().round().clamp(max=20)
        a, b = fitted(1, counts, Poisson()), fitted(1, counts + 1, Poisson())
        masses = [
            torch.stack([p.log_prob(torch.full_like(Y, float(k))).double().exp() for k in range(80)]) for p in (a, b)
        ]
        expected = (masses[0] - masses[1]).abs().sum(0).mean() / 2
        assert compare(a, b)["total_variation"] == pytest.approx(float(expected), abs=1e-4)

    def test_other_inputs_or_another_support_are_refused(self):
        a = fitted(1, Y, Gaussian())
        with pytest.raises(cr.InputError, match="reference: is binary of shape"):
            compare(a, fitted(1, (Y > 0).long(), Bernoulli()))
        problem = cr.Problem(mlp(3, 6, 1), data=(X, Y), likelihood=Gaussian(), prior=cr.priors.Normal())
        fewer = cr.MAP(steps=5).fit(problem, seed=0).predict(X[:3])
        with pytest.raises(cr.InputError, match=r"real of shape \(3,\), the predictive real of shape \(60,\)"):
            compare(a, fewer)


def test_noise_that_overflows_has_infinite_scores_instead_of_an_error():
    outputs = torch.tensor([[0.0, 0.0], [1.0, 200.0]])  # exp(200) is infinite in float32
    p = predictive(outputs.unsqueeze(0), HeteroscedasticGaussian(squeeze=True))
    values = cr.evaluate(p, torch.tensor([0.1, 0.9]))
    assert values["crps"] == values["width"] == math.inf
    assert values["coverage"] == 1.0
    assert values["rmse"] == pytest.approx(0.1, rel=1e-5)


def test_posteriors_and_data_sets_in_place_of_predictions_and_targets_are_refused():
    x, y = torch.randn(12, 3), torch.randn(12)
    problem = cr.Problem(torch.nn.Linear(3, 1), (x, y), cr.likelihoods.Gaussian(1.0), cr.priors.Normal())
    posterior = cr.MAP(steps=2).fit(problem, seed=0, progress=False)
    with pytest.raises(cr.InputError, match=r"got DrawsPosterior. .*evaluate\(posterior.predict\(x\), y\)"):
        cr.evaluate(posterior, y)
    rows = torch.utils.data.TensorDataset(x, y)
    with pytest.raises(cr.InputError, match=r"got a TensorDataset. .*predictive.targets"):
        cr.evaluate(posterior.predict(x), rows)
    predictive = posterior.predict(rows)
    assert cr.evaluate(predictive, predictive.targets).keys() >= {"rmse", "log_density"}
