"""Bayes by Backprop: settings, problems and calls that raise an error."""

import math
import re

import pytest
import torch
from bbb_models import X, f64, fit, posterior_of, problem

import credibly as cr
from conftest import mlp
from credibly.likelihoods import Gaussian

INVALID = {
    "family": ("cauchy",),
    "rank": (0, 1.5),
    "samples": (0, 2.0, True),
    "members": (0, "two"),
    "estimator": ("magic",),
    "init_scale": (0.0, -1.0, math.inf, math.nan, "wide", True),
    "kl_weights": ("cosine",),
    "kl_warmup": (-1, 2.5, True),
    "learn_prior_scale": ("yes", 1),
    "steps": (0,),
    "lr": (-1.0,),
    "batch_size": (0,),
    "epochs": (0,),
    "validation": (1.5,),
    "patience": (0,),
    "clip_norm": (0.0,),
    "optimiser": ("newton",),
    "schedule": ("none",),
    "momentum": (1.0,),
    "warmup": (-1,),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_settings_are_named(name, value):
    with pytest.raises(cr.InputError, match=rf"^{name}(: found| must be .*, got) {re.escape(repr(value))}") as caught:
        cr.BayesByBackprop(**{name: value})
    assert caught.value.argument == name


def test_settings_that_do_not_fit_the_problem():
    for warmup in (20, 100):
        with pytest.raises(cr.InputError, match=f"kl_warmup must be below the number of steps, 20, got {warmup}"):
            cr.BayesByBackprop(steps=20, kl_warmup=warmup).fit(problem(), seed=0)
    cr.BayesByBackprop(steps=20, kl_warmup=19).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="init must be one of .*'network', 'fresh', 'prior', got 'best'"):
        cr.BayesByBackprop(init="best").fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match=r"init must be a finite tensor of shape \(1, 26\), got shape \(1, 3\)"):
        cr.BayesByBackprop(init=torch.zeros(1, 3)).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="batch_size must be at most the number of training rows, 40, got 41"):
        cr.BayesByBackprop(batch_size=41).fit(problem(), seed=0)
    with pytest.raises(
        cr.InputError, match='family: "full-rank" supports at most 4000 parameters, this problem has 5001'
    ):
        cr.BayesByBackprop(family="full-rank", steps=2).fit(problem(mlp(3, 1000, 1, dtype=f64)), seed=0)


@pytest.mark.parametrize("method, other", [("log_prob", "sample"), ("sample", "log_prob")])
def test_a_prior_without_sample_or_log_prob_raises(method, other):
    partial = type("Half", (), {other: lambda self, *args: None, "fan_in": False})()
    with pytest.raises(
        cr.InputError, match=rf"prior: Half for '\*' has no method {method}\. Pass one of credibly.priors.elementwise"
    ):
        problem(prior=partial)
    with pytest.raises(cr.InputError, match="prior: object for '[*]' has no method log_prob and no sample"):
        problem(prior={"*": object()})


def test_invalid_calls_of_the_posterior():
    p, posterior = problem(likelihood=Gaussian()), fit(steps=5)
    for draws in (0, -1, 2.0, True):
        with pytest.raises(cr.InputError, match=rf"draws must be a positive integer, got {draws!r}"):
            posterior.predict(X, draws=draws)
        with pytest.raises(cr.InputError, match=rf"count must be a positive integer, got {draws!r}"):
            posterior.sample(draws)
    for samples in (0, 1, 2.5):
        with pytest.raises(
            cr.InputError,
            match=f"samples must be an integer of at least 2, got {samples!r}",
        ):
            posterior.elbo(p, samples=samples)
    for fraction in (-0.1, 1.0, 2, math.nan, "half", True):
        with pytest.raises(cr.InputError, match=f"fraction must be at least 0 and below 1, got {fraction!r}"):
            posterior.prune(fraction)
    with pytest.raises(cr.InputError, match="seed must be a non-negative integer .*got -1"):
        posterior.sample(3, seed=-1)
    with pytest.raises(cr.InputError, match="family must be mean-field to prune single weights, got FullRank"):
        fit(steps=5, family="full-rank").prune(0.5)
    with pytest.raises(cr.InputError, match=r"phi must have shape \(components, \d+\), got \(1, 3\)"):
        posterior_of(p, torch.zeros(1, 3, dtype=f64))
