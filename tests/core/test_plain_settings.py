"""Numbers of numpy and torch as settings: they become Python numbers, so that the description of a run is JSON."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core.plain_settings import plain
from credibly.core.specs import to_spec
from credibly.likelihoods import Gaussian, NegativeBinomial, Quantiles, StudentT
from credibly.priors import Normal, ScaleMixture

X, Y = randn(20, 3), randn(20, seed=1)
HALVES = [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)]


@pytest.mark.parametrize("half", HALVES, ids=repr)
def test_scales_are_plain_floats(half):
    made = [
        Gaussian(half),
        StudentT(half, df=half),
        NegativeBinomial(half),
        Quantiles((0.1, 0.9), scale=half),
        Normal(half),
        ScaleMixture(pi=half),
        cr.Tempering(half, half),
        cr.MAP(lr=half),
        cr.MAP(lr={"*": half}),
        cr.HMC(step_size=half),
    ]
    assert made == [
        Gaussian(0.5),
        StudentT(0.5, df=0.5),
        NegativeBinomial(0.5),
        Quantiles((0.1, 0.9), scale=0.5),
        Normal(0.5),
        ScaleMixture(pi=0.5),
        cr.Tempering(0.5, 0.5),
        cr.MAP(lr=0.5),
        cr.MAP(lr={"*": 0.5}),
        cr.HMC(step_size=0.5),
    ]
    for one in made:
        json.dumps(to_spec(one))
    assert type(made[0].scale) is type(made[4].scale) is type(made[7].lr) is type(made[8].lr["*"]) is float


@pytest.mark.parametrize("four", [4, np.int64(4), np.int32(4), np.array(4), torch.tensor(4)], ids=repr)
def test_counts_are_plain_integers(four):
    for method in (cr.HMC, cr.NUTS, cr.ChEES, cr.MCLMC, cr.MILE, cr.SGHMC, cr.ParallelTempering):
        assert method(chains=four) == method(chains=4)
        assert type(method(chains=four).chains) is int
    for made in (cr.MAP(steps=four), cr.DeepEnsemble(members=four), cr.SWAG(steps=four), cr.IVON(steps=four)):
        json.dumps(to_spec(made))


def test_the_standard_deviation_of_y_as_a_scale_saved_and_loaded(tmp_path):
    problem = cr.Problem(
        mlp(3, 4, 1), (X, Y), Gaussian(Y.std()), Normal(np.float32(0.5)), temperature=torch.tensor(0.5)
    )
    posterior = cr.MAP(steps=np.int64(5), lr=np.float32(0.01)).fit(problem, seed=0, out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 4, 1))
    assert loaded.likelihood == posterior.likelihood
    assert posterior.likelihood.scale == float(Y.std())
    assert loaded.record.settings["steps"] == 5
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)


@pytest.mark.parametrize(
    "bad", [True, np.True_, torch.tensor(True), torch.tensor(float("nan")), torch.ones(1)], ids=repr
)
def test_what_is_no_number_is_still_refused(bad):
    for make in (Gaussian, Normal, lambda value: cr.HMC(step_size=value)):
        with pytest.raises(cr.InputError, match="must be a positive number, got"):
            make(bad)
    with pytest.raises(cr.InputError, match="chains must be a positive integer, got"):
        cr.HMC(chains=bad)


def test_other_values_are_left_alone():
    for value in (None, "a", (1, 2.0), [1, "b"], {"a": 1}, torch.ones(2), np.ones(2), Normal(), 1j, mlp(3, 4, 1)):
        assert plain(value) is value
    assert plain((np.int64(1), (np.float32(0.5),))) == (1, (0.5,))


@pytest.mark.parametrize("method", [cr.HMC, cr.NUTS, cr.ChEES, cr.MCLMC, cr.SGLD, cr.ParallelTempering])
def test_a_dtype_of_draws_by_name_or_as_a_dtype(method):
    assert method(draw_dtype=torch.float16) == method(draw_dtype="float16")
    with pytest.raises(cr.InputError, match="draw_dtype must be one of 'float64', .*, got 'int8'"):
        method(draw_dtype=torch.int8)
