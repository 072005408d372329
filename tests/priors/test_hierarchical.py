"""Hierarchical priors: densities against scipy, and the posterior of a linear model against quadrature."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian
from credibly.priors import HalfCauchy, HalfNormal, Hierarchical, Laplace, Normal, layer_scales

f64 = torch.float64
N, D, NOISE = 12, 4, 0.5
X = randn(N, D, dtype=f64)
Y = X @ torch.tensor([0.9, -0.4, 0.1, 0.7], dtype=f64) + NOISE * randn(N, seed=1, dtype=f64)


def linear(prior):
    return cr.Problem(nn.Linear(D, 1, bias=False).double(), (X, Y), Gaussian(NOISE), prior)


@pytest.mark.parametrize(
    "prior, exact", [(HalfCauchy(0.7), stats.halfcauchy(scale=0.7)), (HalfNormal(2.0), stats.halfnorm(scale=2.0))]
)
def test_hyperpriors(prior, exact):
    """The density of log s is that of s times s."""
    u = torch.tensor([-9.0, -1.0, 0.3, 2.0], dtype=f64)
    expected = exact.logpdf(u.exp().numpy()) + u.numpy()
    assert prior.log_prob(u).tolist() == pytest.approx(expected.tolist(), rel=1e-10)
    drawn = prior.sample((20_000,), torch.Generator().manual_seed(0), dtype=f64)
    assert stats.kstest(drawn.exp().numpy(), exact.cdf).pvalue > 1e-3
    assert float(drawn.std()) == pytest.approx(prior.std, rel=0.05)
    slope = torch.tensor(prior.centre, dtype=f64, requires_grad=True)
    assert float(torch.autograd.grad(prior.log_prob(slope), slope)[0]) == pytest.approx(0, abs=1e-12)


def test_the_density_of_weights_and_scales():
    tensors = Hierarchical(HalfNormal(2.0), Normal(0.5, fan_in=True), per="tensor")
    p = cr.Problem(mlp(3, 5, 1, dtype=f64), (X[:, :3], Y), Gaussian(), {"*.weight": tensors, "*": Normal(3.0)})
    assert p.layout.extra == ("likelihood.log_scale", "prior_scale.0.weight", "prior_scale.2.weight")
    theta = 0.4 * randn(3, p.dim, seed=2, dtype=f64)
    network, extra = p.layout.split(theta)
    normal = torch.distributions.Normal
    expected = p.likelihood.parameters()["log_scale"].prior.log_prob(extra["likelihood.log_scale"])
    for layer, fan in (("0", 3), ("2", 5)):
        u = extra[f"prior_scale.{layer}.weight"]
        s = 0.5 * u.exp() / math.sqrt(fan)
        expected = expected + HalfNormal(2.0).log_prob(u)
        expected = expected + normal(0.0, s[:, None]).log_prob(network[f"{layer}.weight"].flatten(1)).sum(1)
        expected = expected + normal(0.0, 3.0).log_prob(network[f"{layer}.bias"]).sum(1)
    torch.testing.assert_close(p.prior.log_prob(theta), expected)
    drawn = p.prior.sample(4000, torch.Generator().manual_seed(0))
    network, extra = p.layout.split(drawn)
    z = network["0.weight"][:, 0, 0] / (extra["prior_scale.0.weight"].exp() * 0.5 / math.sqrt(3))
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3


def test_hmc_has_the_marginals_of_quadrature():
    """Given s the model is conjugate: p(s | y) and E[w | y] follow from integrals over one dimension."""
    hyper, u = HalfCauchy(0.5), torch.linspace(-9, 6, 1501, dtype=f64)
    covariance = NOISE**2 * torch.eye(N, dtype=f64) + torch.exp(2 * u)[:, None, None] * (X @ X.T)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=f64), covariance).log_prob(Y)
    p = torch.softmax(hyper.log_prob(u) + evidence, 0)
    precision = X.T @ X / NOISE**2 + torch.exp(-2 * u)[:, None, None] * torch.eye(D, dtype=f64)
    means = torch.linalg.solve(precision, (X.T @ Y / NOISE**2).expand(len(u), D))
    mean = (p * u).sum()
    std = (p * (u - mean).square()).sum().sqrt()
    fit = cr.HMC(chains=200, draws=20, warmup=80, thin=2, compile=False, trajectory_length=0.7)
    posterior = fit.fit(linear(Hierarchical(hyper)), seed=0)
    draws = posterior.draws[..., -1]
    # 200 independent chains: the standard error comes from their means.
    error = float(draws.mean(1).std()) / math.sqrt(200)
    assert error < 0.08 * float(std)
    assert float(draws.mean()) == pytest.approx(float(mean), abs=4 * error)
    assert float(draws.std()) == pytest.approx(float(std), rel=0.08)
    weights = posterior.draws[..., :D]
    errors = weights.mean(1).std(0) / math.sqrt(200)
    assert bool(((weights.mean((0, 1)) - (p[:, None] * means).sum(0)).abs() < 4 * errors).all())
    torch.testing.assert_close(layer_scales(posterior)["network"], draws.exp())


METHODS = {
    "hmc": {"chains": 2, "draws": 4, "warmup": 20, "compile": False, "trajectory_length": 0.2, "start_steps": 100},
    "sghmc": {"chains": 2, "draws": 4, "warmup": 20, "compile": False, "init": "prior", "step_size": 1e-4, "thin": 2},
    "sgld": {"chains": 2, "draws": 4, "warmup": 20, "compile": False, "init": "fresh", "step_size": 1e-5, "thin": 2},
    "bbb": {"steps": 30},
    "mle": {"steps": 5},
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_infer_scales(name, tmp_path):
    net = mlp(D, 5, 1, dtype=f64)
    p = cr.Problem(net, (X, Y), Gaussian(), Hierarchical(base=Normal(fan_in=True)))
    assert p.layout.extra[1:] == ("prior_scale.0", "prior_scale.2")
    posterior = cr.METHODS[name](**METHODS[name]).fit(p, seed=0, out=tmp_path / "run")
    assert bool(torch.isfinite(posterior.draws).all())
    loaded = cr.load(tmp_path / "run", mlp(D, 5, 1, dtype=f64, seed=3))
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)
    if name == "hmc":
        # Starts at modes of the weights given scales of 1, not at the singularity.
        assert float(posterior.draws[..., -2:].min()) > -10


@pytest.mark.parametrize("method", [cr.MAP(), cr.DeepEnsemble(), cr.Laplace(), cr.SWAG()])
def test_methods_that_need_a_mode_are_refused(method):
    """The joint density really has none."""
    p = linear(Hierarchical())
    line = torch.linspace(-1, -30, 8, dtype=f64)
    points = torch.cat([line.exp()[:, None].expand(8, D), line[:, None]], 1)
    density = p.log_density(points)
    assert bool((density.diff() > 0).all())
    with pytest.raises(cr.InputError, match="prior: is Hierarchical, and .* has no mode.* Use HMC"):
        method.fit(p, seed=0)


def test_a_run_resumes_with_its_scales(tmp_path):
    p = linear(Hierarchical(HalfNormal(0.5)))
    method = cr.HMC(chains=2, draws=6, warmup=20, compile=False, trajectory_length=0.5)
    whole = method.fit(p, seed=0, out=tmp_path / "run")
    assert torch.equal(cr.resume(tmp_path / "run").draws, whole.draws)
    assert cr.load(tmp_path / "run", nn.Linear(D, 1, bias=False).double()).record.prior["kind"] == "priors.Hierarchical"


def test_errors():
    with pytest.raises(cr.InputError, match="per must be one of"):
        Hierarchical(per="neuron")
    with pytest.raises(cr.InputError, match="base must be centred at 0"):
        Hierarchical(base=Normal(1.0, 2.0))
    with pytest.raises(cr.InputError, match="scale must be a prior, got 1.0"):
        Hierarchical(1.0)
    both = {"*.weight": Hierarchical(), "*": Hierarchical(base=Laplace())}
    with pytest.raises(cr.InputError, match=r"prior: '\*.weight' and '\*' both have the scale of '0'"):
        cr.Problem(mlp(3, 5, 1, dtype=f64), (X[:, :3], Y), Gaussian(), both)
