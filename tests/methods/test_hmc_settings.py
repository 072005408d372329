"""HMC: settings, networks and starting points that raise an error."""

import math
import re

import numpy as np
import pytest
import torch
from hmc_targets import DOUBLE, SHORT, X, density, hmc, problem, skewed, wide
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"chains": 0}, "chains must be a positive integer, got 0"),
        ({"chains": 2.0}, "chains must be a positive integer, got 2.0"),
        ({"chains": True}, "chains must be a positive integer, got True"),
        ({"draws": 0}, "draws must be a positive integer, got 0"),
        ({"draws": -3}, "draws must be a positive integer, got -3"),
        ({"warmup": -1}, "warmup must be a non-negative integer, got -1"),
        (
            {"warmup": 10},
            "warmup must be an integer of at least 20, got 10. The step size is found during warm-up; pass more "
            "iterations or a step_size",
        ),
        (
            {"mass": "low-rank", "warmup": 15, "step_size": 0.01},
            "warmup must be an integer of at least 20, got 15. mass='low-rank' adapts during warm-up; pass more "
            'iterations, or mass="prior" or a posterior',
        ),
        ({"mass": "diagonal", "warmup": 0, "step_size": 0.01}, "mass='diagonal' adapts during warm-up"),
        ({"mass": "block", "warmup": 19, "step_size": 0.01}, "mass='block' adapts during warm-up"),
        ({"thin": 0}, "thin must be a positive integer, got 0"),
        ({"max_steps": 0}, "max_steps must be a positive integer, got 0"),
        ({"step_size": 0.0}, "step_size must be a positive number, got 0.0"),
        ({"step_size": -0.1}, "step_size must be a positive number, got -0.1"),
        ({"step_size": math.nan}, "step_size must be a positive number, got nan"),
        ({"step_size": math.inf}, "step_size must be a positive number, got inf"),
        ({"trajectory_length": 0}, "trajectory_length must be a positive number, got 0"),
        (
            {"trajectory_length": "long"},
            "trajectory_length must be 'tuned', got 'long'. Or pass a positive number or None",
        ),
        (
            {"trajectory_length": "tuned", "warmup": 50},
            "warmup must be an integer of at least 60, got 50. The trajectory length is tuned during warm-up",
        ),
        ({"target_accept": 1.0}, "target_accept must be strictly between 0 and 1, got 1.0"),
        ({"target_accept": math.nan}, "target_accept must be strictly between 0 and 1, got nan"),
        ({"jitter": 1.0}, "jitter must be a fraction from 0 to below 1 or None, got 1.0"),
        ({"jitter": -0.1}, "jitter must be a fraction from 0 to below 1 or None, got -0.1"),
        ({"refresh": 0.0}, "refresh must be a fraction above 0 and at most 1, got 0.0"),
        ({"refresh": 1.1}, "refresh must be a fraction above 0 and at most 1, got 1.1"),
        (
            {"mass": "dense"},
            "mass must be one of 'auto', 'identity', 'prior', 'diagonal', 'low-rank', 'block', got 'dense'. Or pass a "
            "posterior of the same problem",
        ),
        ({"integrator": "yoshida"}, "integrator must be one of 'leapfrog', 'minimum-error', got 'yoshida'"),
        (
            {"init": "zeros"},
            "init must be one of 'prior', 'map', 'ensemble', 'network', 'fresh', a (chains, D) tensor or a posterior, "
            "got 'zeros'",
        ),
        ({"init": None}, "a (chains, D) tensor or a posterior, got None"),
        ({"init": np.zeros((4, 2))}, "init must be one of 'prior', 'map'"),
        ({"draw_dtype": "int8"}, "draw_dtype must be one of 'float64', 'float32', 'float16', 'bfloat16', got 'int8'"),
    ],
    ids=str,
)
def test_invalid_settings(settings, message):
    with pytest.raises(cr.InputError, match=re.escape(message)):
        cr.HMC(**settings)


def test_a_mass_that_was_not_requested_needs_no_warmup():
    for mass in ("auto", "identity", "prior"):
        cr.HMC(mass=mass, warmup=0, step_size=0.01)
    cr.HMC(mass="low-rank", warmup=20, step_size=0.01)
    with pytest.raises(cr.InputError, match="mass='block' adapts during warm-up"):
        cr.NUTS(mass="block", warmup=10, step_size=0.01)
    with pytest.raises(cr.InputError, match="mass='diagonal' adapts during warm-up"):
        cr.ParallelTempering(mass="diagonal", temperatures=(1.0, 2.0), warmup=10, step_size=0.01)


@pytest.mark.parametrize("kind", ["problem", "density"])
def test_a_step_size_that_diverges_at_once_raises_with_one_that_works(kind):
    target = problem() if kind == "problem" else wide()
    settings = {"chains": 4, "draws": 30, "warmup": 0, "mass": "identity"}
    with pytest.raises(cr.SamplingError, match=r"every trajectory diverged in the first 10 iterations") as error:
        hmc(target, step_size=50.0, trajectory_length=500.0, init="prior", **settings)
    message = str(error.value)
    assert "with step size 50 " in message
    found = float(re.search(r"median energy error ([\d.e+]+|inf) over \d+ steps", message)[1])
    assert found > 1000
    hint = float(re.search(r"Try step_size=([\d.e-]+) or less", message)[1])
    assert hint < 5
    posterior = hmc(target, step_size=hint, trajectory_length=10 * hint, init="prior", **settings)
    assert float(posterior.statistics["acceptance"].mean()) > 0.3


def test_a_run_continues_while_one_chain_does_not_diverge():
    """Half of the chains start where every step diverges; the run continues and counts them."""
    cliff = cr.Density(lambda w: -0.5 * w[:, 0] ** 2 * torch.where(w[:, 0].abs() < 50, 1.0, 1e12), 1, batched=True)
    start = torch.tensor([[0.0], [100.0]])
    posterior = hmc(cliff, chains=2, draws=40, warmup=0, step_size=0.5, mass="identity", init=start)
    assert posterior.record.history["divergences"] == [0, 40]
    assert bool((posterior.draws[1] == 100.0).all())


class Hidden(nn.Module):
    """Dropout as a function call, which is not a module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, training=True))


def test_a_network_with_dropout_inside_its_forward_raises():
    with pytest.raises(cr.InputError, match="net: is not deterministic: two passes over the same rows differ"):
        cr.Problem(Hidden(), data=(randn(6, 3), randn(6)), likelihood=Gaussian(1.0), prior=cr.priors.Normal())


class Recurrent(nn.Module):
    def __init__(self, rate):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.LSTM(3, 4, num_layers=2, dropout=rate, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.inner(x)[0][:, -1])


def layers(rate):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(rate), nn.Linear(4, 1))


@pytest.mark.parametrize("build", [layers, Recurrent])
@pytest.mark.parametrize("method", [cr.HMC, cr.SGLD, cr.SGHMC, cr.MAP])
def test_dropout_is_off_in_the_density(build, method):
    x = randn(6, 3) if build is layers else randn(6, 2, 3)
    settings = (
        {"steps": 5}
        if method is cr.MAP
        else {"chains": 2, "warmup": 4, "draws": 3, "thin": 1, "init": "prior", "step_size": 0.05}
    )
    fits = []
    for rate in (0.5, 0.0):
        # In training mode, as a user may have left it.
        net = build(rate).train()
        p = cr.Problem(net, data=(x, randn(6)), likelihood=Gaussian(1.0), prior=cr.priors.Normal())
        assert ("dropout off in" in repr(p)) == (rate > 0)
        fits.append(method(compile=False, **settings).fit(p, seed=0, progress=False))
    off, without = fits
    assert torch.equal(off.draws, without.draws)
    assert off.record.history["dropout_off"] == {"evaluation mode": ["1" if build is layers else "inner"]}
    assert "dropout_off" not in without.record.history


def test_dropout_of_rate_zero_is_accepted():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 1)).double()
    assert hmc(problem(net), **SHORT).draws.shape == (5, 8, 21)


def test_batch_norm_raises():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with pytest.raises(cr.InputError, match="net: 1 layer keeps batch statistics"):
        problem(net)


def test_a_non_finite_start_names_the_chain():
    hole = cr.Density(lambda w: torch.log(w).sum(-1) - w.sum(-1), 2, batched=True)
    start = torch.ones(3, 2)
    start[2, 0] = -1.0
    for method in (cr.HMC, cr.SGLD, cr.SGHMC):
        with pytest.raises(cr.InputError, match="init: the likelihood is nan at the starting point of chain 2"):
            method(chains=3, draws=5, init=start, compile=False).fit(hole, seed=0)


def test_a_non_finite_gradient_names_the_chain():
    kink = cr.Density(lambda w: -w.abs().sqrt().sum(-1), 2, batched=True)
    start = torch.ones(3, 2)
    start[1] = 0.0
    with pytest.raises(cr.InputError, match="init: the gradient is nan at the starting point of chain 1"):
        hmc(kink, chains=3, draws=5, init=start)


@pytest.mark.parametrize("target", [density, problem])
def test_starts_of_the_wrong_shape(target):
    target = target()
    dim = target.dim
    shape = rf"init must be a finite tensor of shape \(3, {dim}\), got shape "
    for wrong in (torch.zeros(2, dim), torch.zeros(3, dim + 1), torch.zeros(dim), torch.full((3, dim), torch.nan)):
        with pytest.raises(cr.InputError, match=shape + re.escape(str(tuple(wrong.shape)))):
            hmc(target, chains=3, draws=2, warmup=20, init=wrong)


def test_a_posterior_of_another_network_is_not_a_start():
    other = cr.MAP(steps=5).fit(problem(mlp(3, 2, 1, dtype=DOUBLE)), seed=0)
    with pytest.raises(cr.InputError, match=r"init must be a finite tensor of shape \(3, 31\), got shape \(3, 11\)"):
        hmc(problem(), chains=3, draws=2, warmup=20, init=other)


def test_invalid_seeds_folders_and_problems(tmp_path):
    for seed in (-1, 1.5, True, None):
        with pytest.raises(cr.InputError, match=rf"seed must be a non-negative integer .*got {re.escape(repr(seed))}"):
            cr.HMC(draws=2).fit(density(), seed=seed)
    with pytest.raises(cr.StoreError, match="out: .* already exists"):
        hmc(density(), draws=2, out=tmp_path)
    with pytest.raises(cr.InputError, match="problem must be a credibly.Problem or a credibly.Density, got function"):
        cr.HMC(draws=2).fit(skewed, seed=0)


def test_an_invalid_start_leaves_no_folder(tmp_path):
    """The same call works once the start is fixed."""
    hole = cr.Density(lambda w: torch.log(w).sum(-1) - w.sum(-1), 2, batched=True)
    with pytest.raises(cr.InputError, match="init: the likelihood is nan"):
        hmc(hole, chains=2, draws=5, init=-torch.ones(2, 2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_flat_density_has_no_step_size():
    flat = cr.Density(lambda w: 0.0 * w.sum(-1), 2, batched=True)
    with pytest.raises(cr.SamplingError, match="no step size was found: even at .* accepted. The density may be flat"):
        hmc(flat, chains=2, draws=5)


def test_a_density_posterior_does_not_predict():
    posterior = hmc(density(), chains=2, draws=5, warmup=20)
    assert posterior.draws.shape == (2, 5, 3)
    assert posterior.sample(7, seed=1).shape == (7, 3)
    with pytest.raises(cr.InputError, match="predict: a density has no network"):
        posterior.predict(X)
