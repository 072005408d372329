"""Bayes by Backprop: a richer family contains the poorer one, so it may not end with a lower ELBO."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.gaussians.families import MeanField
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods import bbb
from credibly.methods.bbb import BayesByBackprop
from credibly.priors.elementwise import Normal


def curve():
    """1-30-1 on two clusters of a noisy sine."""
    x = torch.cat([torch.linspace(-1, -0.3, 25), torch.linspace(0.3, 1, 25)]).unsqueeze(1)
    y = torch.sin(4 * x[:, 0]) + 0.1 * randn(50)
    return cr.Problem(mlp(1, 30, 1), data=(x, y), likelihood=Gaussian(0.1), prior=Normal(1.0))


def diabetes(hidden=5):
    """10-5-1 on real data, with learned noise."""
    data = cr.data.embedded("diabetes", seed=0)
    rows = (data.x_train, data.y_train)
    return cr.Problem(mlp(10, hidden, 1), data=rows, likelihood=Gaussian(), prior=Normal(1.0, fan_in=True))


def quadrants():
    """2-10-2 on an exclusive-or of signs."""
    x = randn(150, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return cr.Problem(mlp(2, 10, 2), data=(x, y), likelihood=Categorical(), prior=Normal(1.0))


NETWORKS = {"1-30-1": curve, "10-5-1": diabetes, "2-10-2": quadrants}


@contextmanager
def mean_field_trained_once():
    """Reuse the first mean-field fit: it is also the first stage of the other families, as a test below checks."""
    train, known = BayesByBackprop._train, []

    def once(self, fit, data, chosen, *rest):
        if not isinstance(chosen, MeanField):
            return train(self, fit, data, chosen, *rest)
        if not known:
            known.append(train(self, fit, data, chosen, *rest))
        return copy.deepcopy(known[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BayesByBackprop, "_train", once)
        yield


def check_order(problem, samples=1000, **options):
    """Compare ELBOs, each by the same seed's draws, up to three Monte Carlo standard errors of their difference."""
    found = {}
    with mean_field_trained_once():
        for name in ("mean-field", "low-rank", "full-rank"):
            posterior = BayesByBackprop(family=name, **options).fit(problem, seed=0, progress=False)
            found[name] = posterior.elbo(problem, samples=samples, seed=1)
    mean, low, full = found.values()

    def slack(a, b):
        return 3 * math.hypot(float(a.standard_error), float(b.standard_error))

    assert float(low.value) >= float(mean.value) - slack(low, mean), found
    assert float(full.value) >= float(low.value) - slack(full, low), found
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param("1-30-1", marks=pytest.mark.nightly), "10-5-1", pytest.param("2-10-2", marks=pytest.mark.nightly)],
)
def test_richer_families_have_no_lower_elbo(name):
    check_order(NETWORKS[name](), samples=500, steps=300, compile=False)


@pytest.mark.nightly
def test_richer_families_have_no_lower_elbo_by_default():
    check_order(curve(), samples=2000)


@pytest.mark.parametrize("family", ["low-rank", "full-rank"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_failed_refinement_keeps_the_mean_field_fit(monkeypatch, family, members):
    """At an absurd learning rate the second stage ruins the fit, and the Gaussian of the first is returned."""
    problem, options = quadrants(), {"steps": 60, "members": members, "compile": False, "learn_prior_scale": True}
    before = BayesByBackprop(**options).fit(problem, seed=0)
    monkeypatch.setattr(bbb, "RELATIVE_RATE", 1e3)
    after = BayesByBackprop(family=family, **options).fit(problem, seed=0)
    assert after.record.history["improved"] == [False] * members
    torch.testing.assert_close(after.loc, before.loc, rtol=0, atol=0)
    torch.testing.assert_close(after.covariance(), before.covariance(), rtol=1e-5, atol=1e-9)
    scales = [fit.record.history["prior_scale_factor"] for fit in (before, after)]
    assert scales[0] == scales[1]


def test_the_mean_field_stage_is_a_mean_field_fit():
    """With the same settings and seed; its ELBO is reported beside the final one, which is higher."""
    problem = quadrants()
    plain = BayesByBackprop(steps=200, compile=False).fit(problem, seed=0)
    full = BayesByBackprop(steps=200, compile=False, family="full-rank").fit(problem, seed=0)
    history = full.record.history
    assert history["mean_field_elbo"] == pytest.approx(plain.record.history["elbo"], rel=1e-5)
    assert history["improved"] == [True]
    assert history["elbo"] > history["mean_field_elbo"]
