"""Settings and networks that MC-Dropout refuses."""

import math

import pytest
from dropout_networks import LABELS, Y32, X, build, dropped_mlp, f64, wrap
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Categorical, Gaussian, Survival


@pytest.mark.parametrize("rate", [0, 1, 0.0, 1.0, -0.1, 1.5, True, math.nan, "half", (0.1, 0.0), [], (0.1, None)])
def test_bad_rates(rate):
    with pytest.raises(
        cr.InputError, match=r"rate must be (strictly between 0 and 1|a number or several of them), got "
    ):
        cr.MCDropout(rate=rate)


@pytest.mark.parametrize("tau", [0, -1, True, math.inf, math.nan, (1.0, 0.0), []])
def test_bad_precisions(tau):
    with pytest.raises(cr.InputError, match=r"tau must be (a positive number|a number or several of them), got "):
        cr.MCDropout(tau=tau)


@pytest.mark.parametrize("passes", [0, -1, 2.5, True, None])
def test_bad_numbers_of_passes(passes):
    with pytest.raises(cr.InputError, match="passes must be a positive integer, got "):
        wrap(dropped_mlp()).predict(X, passes=passes)


@pytest.mark.parametrize("rate", [{"*": 0.0}, {"*": 1.0}, {"*": "a"}, {}, [0.1, {"*": -0.1}]], ids=str)
def test_bad_rates_by_layer(rate):
    with pytest.raises(
        cr.InputError, match="rate must be (strictly between 0 and 1|above 0 for at least one layer), got "
    ):
        cr.MCDropout(rate=rate)


def test_rates_of_layers_that_do_not_exist():
    with pytest.raises(cr.InputError, match=r"rate: pattern '7' matches no dropout layer. They are 0, 3"):
        cr.MCDropout(rate={"7": 0.1}).fit(build(dropped_mlp()))
    with pytest.raises(cr.InputError, match=r"rate must be strictly between 0 and 1, got 0\.0"):
        cr.MCDropout(rate={"0": 0.0, "*": 0.1}, concrete=True)


@pytest.mark.parametrize("folds", [0, 2.0, True])
def test_bad_folds(folds):
    with pytest.raises(cr.InputError, match=f"folds must be a positive integer, got {folds}"):
        cr.MCDropout(folds=folds)


def test_more_folds_than_rows():
    with pytest.raises(cr.InputError, match="folds must be at most the number of rows, 40, got 41"):
        cr.MCDropout(folds=41, rate=(0.1, 0.2)).fit(build(dropped_mlp()))


def test_concrete_takes_one_rate():
    with pytest.raises(
        cr.InputError,
        match=r"rate must be one initial rate with concrete=True, got \(0.1, 0.2\). Concrete Dropout learns",
    ):
        cr.MCDropout(rate=(0.1, 0.2), concrete=True)


def test_no_dropout_layer_is_an_error():
    message = 'net: has no dropout layer. Add nn.Dropout layers, or pass insert="\\*"'
    with pytest.raises(cr.InputError, match=message):
        cr.MCDropout(steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    with pytest.raises(cr.InputError, match=message):
        wrap(mlp(3, 4, 1, dtype=f64))


def test_dropout_inside_a_recurrent_or_attention_layer_is_named():
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
        cr.InputError, match=r"no dropout layer \(rnn, mix apply dropout internally, which cannot be controlled\)"
    ):
        cr.MCDropout(steps=3).fit(problem, seed=0)


def test_layers_that_cannot_be_dropped():
    with pytest.raises(cr.InputError, match="insert: pattern 'head' matches no Linear .* These layers are 0, 2"):
        cr.MCDropout(insert="head", steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    none = r"no dropout layer that is active \(0, 3: rate 0\).* or rate= for the existing layers"
    with pytest.raises(cr.InputError, match=none):
        cr.MCDropout(steps=3).fit(build(dropped_mlp(first=0.0, second=0.0)), seed=0)


def test_tau_needs_a_likelihood_with_a_learned_scale():
    with pytest.raises(
        cr.InputError, match=r"tau must be None with Gaussian, got 2\.0.* likelihoods with a learned scale"
    ):
        cr.MCDropout(tau=2.0, steps=3).fit(build(dropped_mlp()), seed=0)
    labels = build(dropped_mlp(outputs=3), (X, LABELS), Categorical())
    with pytest.raises(cr.InputError, match=r"tau must be None with Categorical, got \(1\.0, 2\.0\)"):
        cr.MCDropout(tau=(1.0, 2.0), steps=3).fit(labels, seed=0)
    times = build(dropped_mlp(), (X, 1 + X[:, 0].abs()), Survival("lognormal"))
    for tau in ("held-out", 2.0):
        with pytest.raises(cr.InputError, match=f"tau must be None with Survival, got {tau!r}.*Gaussian and StudentT"):
            cr.MCDropout(tau=tau, steps=3).fit(times, seed=0)


@pytest.mark.parametrize(
    "prior",
    [
        cr.priors.Laplace(),
        cr.priors.StudentT(),
        cr.priors.ScaleMixture(),
        cr.priors.Normal(1.0, loc=0.5),
        {"1.*": cr.priors.Normal(), "4.weight": cr.priors.Laplace(), "*": cr.priors.Normal()},
    ],
    ids=["Laplace", "StudentT", "ScaleMixture", "off centre", "one of several"],
)
def test_priors_without_the_derived_decay(prior):
    problem = build(dropped_mlp(), likelihood=Gaussian(), prior=prior)
    with pytest.raises(cr.InputError, match=r"prior must be Normal with mean zero for MC-Dropout\. Use priors\.Normal"):
        cr.MCDropout(steps=3).fit(problem, seed=0)


@pytest.mark.parametrize("options", [{"rate": (0.1, 0.2)}, {"concrete": True}], ids=str)
def test_alpha_dropout_has_one_rate_in_a_fit(options):
    """Its rescaling depends on the rate and is part of the network, which all members of a fit share."""
    net = nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(6, 1)).double()
    with pytest.raises(
        cr.InputError, match="rate must be a single fixed rate for alpha dropout, which '2' is. Pass one rate"
    ):
        cr.MCDropout(steps=3, **options).fit(build(net), seed=0)
