"""MC-Dropout around a network that was trained elsewhere."""

import copy
import math

import pytest
import torch
from dropout_networks import (
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
from credibly.likelihoods import Gaussian
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
