"""Settings and networks that MC-Dropout refuses."""

import math

import pytest
from dropout_networks import LABELS, Y32, X, build, dropped_mlp, f64, wrap
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Categorical, Gaussian


@pytest.mark.parametrize("rate", [0, 1, 0.0, 1.0, -0.1, 1.5, True, math.nan, "half", (0.1, 0.0), [], (0.1, None)])
def test_bad_rates(rate):
    with pytest.raises(cr.InputError, match="rate: found"):
        cr.MCDropout(rate=rate)


@pytest.mark.parametrize("tau", [0, -1, True, math.inf, math.nan, (1.0, 0.0), []])
def test_bad_precisions(tau):
    with pytest.raises(cr.InputError, match="tau: found"):
        cr.MCDropout(tau=tau)


@pytest.mark.parametrize("passes", [0, -1, 2.5, True, None])
def test_bad_numbers_of_passes(passes):
    with pytest.raises(cr.InputError, match="passes: found .* Pass a number of passes from 1 up"):
        wrap(dropped_mlp()).predict(X, passes=passes)


@pytest.mark.parametrize("rate", [{"*": 0.0}, {"*": 1.0}, {"*": "a"}, {}, [0.1, {"*": -0.1}]], ids=str)
def test_bad_rates_by_place(rate):
    with pytest.raises(cr.InputError, match="rate: found"):
        cr.MCDropout(rate=rate)


def test_rates_of_places_that_are_not_there():
    with pytest.raises(cr.InputError, match=r"rate: pattern '7' matches no place of dropout. They are 0, 3"):
        cr.MCDropout(rate={"7": 0.1}).fit(build(dropped_mlp()))
    with pytest.raises(cr.InputError, match=r"rate: found 0\.0"):
        cr.MCDropout(rate={"0": 0.0, "*": 0.1}, concrete=True)


@pytest.mark.parametrize("folds", [0, 2.0, True])
def test_bad_folds(folds):
    with pytest.raises(cr.InputError, match="folds: found"):
        cr.MCDropout(folds=folds)


def test_more_folds_than_rows():
    with pytest.raises(cr.InputError, match="folds: found 41 for 40 rows"):
        cr.MCDropout(folds=41, rate=(0.1, 0.2)).fit(build(dropped_mlp()))


def test_concrete_takes_one_rate():
    with pytest.raises(cr.InputError, match="rate: .* with concrete=True.* pass one to start from"):
        cr.MCDropout(rate=(0.1, 0.2), concrete=True)


def test_no_dropout_layer_is_an_error():
    message = 'net: has no dropout layer. Add nn.Dropout layers, or pass insert="\\*"'
    with pytest.raises(cr.InputError, match=message):
        cr.MCDropout(steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    with pytest.raises(cr.InputError, match=message):
        wrap(mlp(3, 4, 1, dtype=f64))


def test_dropout_inside_a_recurrent_or_attention_layer_is_mentioned():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(2, 4, num_layers=2, dropout=0.2, batch_first=True)
            self.mix = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            h = self.rnn(x)[0]
            return self.head(self.mix(h, h, h)[0][:, -1])

    problem = cr.Problem(Deep(), (randn(8, 3, 2), Y32[:8]), Gaussian(0.3), cr.priors.Normal())
    with pytest.raises(
        cr.InputError, match=r"no dropout layer \(rnn, mix drop inside, where it cannot be controlled\)"
    ):
        cr.MCDropout(steps=3).fit(problem, seed=0)


def test_bad_places():
    with pytest.raises(cr.InputError, match="insert: pattern 'head' matches no Linear .* They are 0, 2"):
        cr.MCDropout(insert="head", steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    with pytest.raises(cr.InputError, match=r"rate: layer '0' drops with probability 0\.0"):
        cr.MCDropout(steps=3).fit(build(dropped_mlp(first=0.0)), seed=0)


def test_precision_of_a_likelihood_that_has_none_to_set():
    with pytest.raises(cr.InputError, match=r"tau: found 2\.0 with Gaussian.* likelihoods with a learned scale"):
        cr.MCDropout(tau=2.0, steps=3).fit(build(dropped_mlp()), seed=0)
    labels = build(dropped_mlp(outputs=3), (X, LABELS), Categorical())
    with pytest.raises(cr.InputError, match=r"tau: found \(1\.0, 2\.0\) with Categorical"):
        cr.MCDropout(tau=(1.0, 2.0), steps=3).fit(labels, seed=0)


@pytest.mark.parametrize(
    "prior",
    [
        cr.priors.Laplace(),
        cr.priors.StudentT(),
        cr.priors.ScaleMixture(),
        cr.priors.Normal(1.0, loc=0.5),
        {"0*": cr.priors.Normal(), "1.*": cr.priors.Normal(), "4.weight": cr.priors.Laplace(), "*": cr.priors.Normal()},
    ],
    ids=["Laplace", "StudentT", "ScaleMixture", "off centre", "one of several"],
)  # fmt: skip
def test_priors_without_the_derived_decay(prior):
    prior = {k: v for k, v in prior.items() if k != "0*"} if isinstance(prior, dict) else prior
    problem = build(dropped_mlp(), likelihood=Gaussian(), prior=prior)
    with pytest.raises(cr.InputError, match=r"prior: .* Normal priors centred at zero.* Use priors\.Normal"):
        cr.MCDropout(steps=3).fit(problem, seed=0)


@pytest.mark.parametrize("options", [{"rate": (0.1, 0.2)}, {"concrete": True}], ids=str)
def test_alpha_dropout_has_one_rate_in_a_fit(options):
    """Its rescaling depends on the rate and is part of the network, which a grid and learned rates share."""
    net = nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(6, 1)).double()
    with pytest.raises(cr.InputError, match="rate: '2' is alpha dropout.* Pass one rate"):
        cr.MCDropout(steps=3, **options).fit(build(net), seed=0)
