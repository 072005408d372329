"""MC-Dropout around a network that was trained elsewhere."""

import copy
import math

import pytest
import torch
from dropout_networks import (
    LABELS,
    NOISE,
    X32,
    Y32,
    X,
    Y,
    dropped_mlp,
    f64,
    masks_of,
    seeded,
    wrap,
)
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian, NegativeBinomial, Ordinal, Survival
from credibly.posterior.dropout import DropoutPosterior


def normalised(dtype=torch.float32):
    """A network with BatchNorm whose running statistics have seen data."""
    net = seeded(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    ).to(dtype)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for _ in range(5):
            net(2 * randn(64, 3, dtype=dtype) + 1)
    return net


def test_from_trained_leaves_the_network_as_it_was():
    net = normalised()
    net.train()
    net[2].eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    posterior = cr.MCDropout.from_trained(net, (X32, Y32), Gaussian())
    posterior.predict(X32).mean, posterior.predict(X32, per_row=True).mean
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())
    assert [type(m) for m in net][3] is nn.Dropout


def test_batchnorm_is_in_evaluation_mode_while_dropout_samples():
    net = normalised(f64)
    p = cr.MCDropout.from_trained(net, (X, Y), Gaussian(NOISE), rate=1e-7).predict(X)
    torch.testing.assert_close(p.mean, copy.deepcopy(net).eval()(X).squeeze(1).detach(), rtol=1e-5, atol=1e-5)
    assert (
        float((copy.deepcopy(net).train()(X).detach().squeeze(1) - p.mean).abs().max()) > 0.1
    )  # its batch statistics differ
    # A row's prediction does not depend on the other rows.
    posterior = cr.MCDropout.from_trained(net, (X, Y), Gaussian(NOISE))
    torch.testing.assert_close(posterior.predict(X[:1]).mean, posterior.predict(X).mean[:1])
    # The passes are those of the frozen network, by hand.
    frozen = copy.deepcopy(net).eval()
    mask = masks_of(posterior, X, 100, 0)["3.mask"][7]
    by_hand = frozen[4](frozen[2](frozen[1](frozen[0](X))) * mask).squeeze(1)
    torch.testing.assert_close(posterior.predict(X).functions()[7], by_hand.detach())


def test_from_trained_finds_the_noise_scale():
    """The scale has the highest log density under dropout: neighbouring values and the initial one are lower."""
    posterior = cr.MCDropout.from_trained(normalised(f64), (X, Y), Gaussian())

    def score(log_scale):
        theta = posterior.theta.clone()
        theta[-1] = log_scale
        other = DropoutPosterior(posterior.model, theta, posterior.rates, posterior.inserted, posterior.record)
        return float(other.predict(X, passes=50).log_prob(Y).mean())

    best = float(posterior.theta[-1])
    assert all(score(best) > score(best + step) for step in (-1.0, -0.1, 0.1, 1.0))
    assert score(best) > score(-1.0) + 0.1
    assert posterior.predict(X).aleatoric.tolist() == pytest.approx([math.exp(2 * best)] * 40)


def test_from_trained_with_given_rates_and_layers():
    net = mlp(3, 6, 1, dtype=f64)
    posterior = wrap(net, insert="2", rate=0.4)
    assert (posterior.rates, posterior.inserted) == ({"2": 0.4}, ("2",))
    assert repr(posterior) == "DropoutPosterior(31 parameters, dropout 2 0.4)"
    assert wrap(dropped_mlp()).rates == {"0": 0.2, "3": 0.3}
    assert wrap(dropped_mlp(), rate=0.1).rates == {"0": 0.1, "3": 0.1}
    assert posterior.record.history == {"from_trained": True}


def test_from_trained_saved_and_loaded(tmp_path):
    net = normalised()
    posterior = cr.MCDropout.from_trained(net, (X32, Y32), Gaussian(), insert="0", rate=0.15)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", cr.replace_batchnorm(normalised().train(), "frozen"))
    assert isinstance(loaded, DropoutPosterior)
    assert (loaded.rates, loaded.inserted) == (posterior.rates, ("0",))
    for per_row in (False, True):
        a, b = (q.predict(X32, seed=3, per_row=per_row) for q in (posterior, loaded))
        assert torch.equal(a.functions(), b.functions())
        assert torch.equal(a.log_prob(Y32), b.log_prob(Y32))


def sampled(name, n=300):
    """A network, data that follow it, their likelihood, and the logarithms of its true parameters."""
    x = randn(n, 2, dtype=f64)
    first, e, late = x[:, 0], randn(n, seed=3, dtype=f64), randn(n, seed=4, dtype=f64)
    net = nn.Linear(2, 2 if name == "two targets" else 1).double()
    with torch.no_grad():
        net.weight.zero_(), net.bias.zero_()
        net.weight[0, 0] = 0.5
        if name == "two targets":
            net.weight[1, 0] = 300.0
    if name == "times":
        likelihood = Survival("lognormal", unit=1000.0)
        return net, (x, 1000 * torch.exp(0.5 * first + 0.3 * e)), likelihood, [math.log(0.3)]
    if name == "counts":
        generator = torch.Generator().manual_seed(0)
        gamma = torch._standard_gamma(torch.full((n,), 0.2, dtype=f64), generator=generator) * 5
        rate = 20 * torch.exp(0.5 * first) * gamma
        return net, (x, torch.poisson(rate, generator=generator)), NegativeBinomial(unit=20.0), [math.log(5.0)]
    y = torch.stack([0.5 * first + 0.1 * e, 300 * first + 30 * late], 1)
    return net, (x, y), Gaussian(per_target=True), [math.log(0.1), math.log(30.0)]


@pytest.mark.parametrize("name", ["times", "counts", "two targets"])
def test_from_trained_fits_the_own_parameters_of_every_likelihood(name):
    """With hardly any dropout they are those of the network alone, which are close to the true ones."""
    net, data, likelihood, expected = sampled(name)
    alone = cr.MAP.from_trained(net, data, likelihood)
    dropped = cr.MCDropout.from_trained(net, data, likelihood, insert="*", rate=1e-6)
    found = dropped.theta[dropped.model.layout.network_dim :]
    torch.testing.assert_close(found, alone.draws[0, 0, -len(found) :], atol=2e-3, rtol=0)
    assert found.tolist() == pytest.approx(expected, abs=0.2)
    assert float(dropped.predict(data[0]).log_prob(data[1]).mean()) == pytest.approx(
        float(alone.predict(data[0]).log_prob(data[1]).mean()), abs=1e-3
    )


def test_from_trained_refines_each_scale_under_dropout():
    """Both scales have the highest log density under dropout: neighbouring values are worse."""
    net, data, likelihood, _ = sampled("two targets")
    posterior = cr.MCDropout.from_trained(net, data, likelihood, insert="*", rate=0.05)

    def score(*steps):
        theta = posterior.theta.clone()
        theta[-2:] += torch.tensor(steps, dtype=f64)
        other = DropoutPosterior(posterior.model, theta, posterior.rates, posterior.inserted, posterior.record)
        return float(other.predict(data[0], passes=50).log_prob(data[1]).mean())

    best = score(0.0, 0.0)
    assert all(best > score(*step) for step in [(0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1)])


def test_from_trained_fits_parameters_that_are_not_noise():
    """The cut points of an ordinal likelihood are those of the network without dropout."""
    net = mlp(3, 4, 1, dtype=f64)
    alone = cr.MAP.from_trained(net, (X, LABELS), Ordinal())
    dropped = wrap(net, Ordinal(), (X, LABELS), insert="2", rate=0.1)
    torch.testing.assert_close(dropped.theta[-2:], alone.draws[0, 0, -2:])
