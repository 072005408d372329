"""Agreement with MAPIE on the same scores: absolute residuals, quantile regression, CV+ and randomised APS."""

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

from credibly.conformal import CalibratedPredictive, Settings, calibrate, calibration, cross_calibrate
from credibly.conformal.calibration import half_width
from tests.conformal.simulated import gaussian, labels

pytest.importorskip("mapie", reason="MAPIE is not installed (pip install credibly[peers])")

LEVEL = 0.85


def table(rows, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 3))
    return x, x @ [1.0, -2.0, 0.5] + (0.3 + np.abs(x[:, 0])) * generator.standard_t(3, rows)


class Shifted(RegressorMixin, BaseEstimator):
    """A quantile of a Gaussian whose scale depends on the first column."""

    def __init__(self, z=0.0):
        self.z = z

    def fit(self, X, y):
        self.fitted_ = True
        return self

    def predict(self, X):
        return X[:, 1] + self.z * (0.2 + np.abs(X[:, 0]))


def constant(mean):
    """A Gaussian predictive of constant scale, whose score is the absolute residual."""
    return gaussian(torch.as_tensor(mean).unsqueeze(0), 0.7)


def assert_same(mine, theirs):
    for bound, other in zip(mine, (theirs[:, 0, 0], theirs[:, 1, 0])):
        np.testing.assert_allclose(bound.numpy(), other, rtol=1e-6, atol=1e-6)


def test_split_intervals():
    from mapie.regression import SplitConformalRegressor

    x, y = table(80, 0)
    x_new, _ = table(30, 1)
    model = LinearRegression().fit(*table(50, 2))
    peer = SplitConformalRegressor(model, confidence_level=LEVEL, prefit=True).conformalize(x, y)
    own = CalibratedPredictive(constant(model.predict(x_new)), calibrate(constant(model.predict(x)), y))
    assert_same(own.interval(LEVEL), peer.predict_interval(x_new)[1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantile_intervals():
    from mapie.regression import ConformalizedQuantileRegressor

    x, y = table(80, 0)
    x_new, _ = table(30, 1)
    z = half_width(LEVEL)
    models = [Shifted(s).fit(x, y) for s in (-z, z, 0.0)]
    peer = ConformalizedQuantileRegressor(models, confidence_level=LEVEL, prefit=True).conformalize(x, y)

    def mine(rows):
        return gaussian(
            torch.as_tensor(rows[:, 1]).unsqueeze(0), torch.as_tensor(0.2 + np.abs(rows[:, 0])).unsqueeze(0)
        )

    own = CalibratedPredictive(mine(x_new), calibrate(mine(x), y, settings=Settings("cqr")))
    # Quantiles are linear in z between the nodes for a Gaussian, so they are the peer's.
    assert_same(own.interval(LEVEL), peer.predict_interval(x_new, symmetric_correction=True)[1])


@pytest.mark.parametrize("folds", [2, 5])
def test_cross_intervals(folds):
    from mapie.regression import CrossConformalRegressor

    x, y = table(63, 0)
    x_new, _ = table(30, 1)
    splits = list(KFold(folds).split(x))
    peer = CrossConformalRegressor(LinearRegression(), confidence_level=LEVEL, cv=KFold(folds), method="plus")
    peer.fit_conformalize(x, y)
    fits = [LinearRegression().fit(x[train], y[train]) for train, _ in splits]
    held_out = [(constant(fit.predict(x[test])), y[test]) for fit, (_, test) in zip(fits, splits)]
    own = CalibratedPredictive(
        constant(LinearRegression().fit(x, y).predict(x_new)),
        cross_calibrate(held_out),
        folds=[constant(fit.predict(x_new)) for fit in fits],
    )
    assert_same(own.interval(LEVEL), peer.predict_interval(x_new)[1])


class Known(ClassifierMixin, BaseEstimator):
    """Probabilities by a softmax of the columns."""

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X):
        return np.exp(X) / np.exp(X).sum(1, keepdims=True)

    def predict(self, X):
        return self.predict_proba(X).argmax(1)


def test_randomised_sets(monkeypatch):
    from mapie.classification import SplitConformalClassifier

    generator = np.random.default_rng(0)
    x, x_new = generator.normal(size=(70, 4)) * 2, generator.normal(size=(200, 4)) * 2
    y = np.array([generator.choice(4, p=p) for p in Known().predict_proba(x / 2)])
    model = Known().fit(x, y)
    peer = SplitConformalClassifier(model, LEVEL, "aps", prefit=True, random_state=5).conformalize(x, y)
    _, theirs = peer.predict_set(x_new, conformity_score_params={"include_last_label": "randomized"})

    def drawn(inputs, seed, event):
        # The peer subtracts u p from the sum that includes the label, we add u p to the one that does not.
        return 1 - torch.from_numpy(np.random.RandomState(5).uniform(size=len(inputs)))

    monkeypatch.setattr(calibration, "uniforms", drawn)
    p, p_new = (labels(torch.from_numpy(model.predict_proba(rows))) for rows in (x, x_new))
    own = CalibratedPredictive(p_new, calibrate(p, y, settings=Settings("aps", allow_empty=True)))
    found = own.prediction_set(LEVEL).numpy()
    assert 1 < found.sum(1).mean() < 4
    np.testing.assert_array_equal(found, theirs[:, :, 0])
