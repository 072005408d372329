"""HMC and NUTS with a mass that has correlations: exact draws, fewer gradients, starts that are far away."""

import math

import pytest
import torch
from hmc_targets import DOUBLE, density, hmc, problem, skewed_moments

import credibly as cr
from chains import assert_moments
from conftest import mlp, randn
from credibly.backends.cpp.library import library
from credibly.diagnostics.convergence import ess, rhat
from credibly.gaussians.mass import CorrelatedMass, Factor
from credibly.inference.kernels.hmc import INTEGRATORS, LEAPFROG, kinetic, metropolis
from credibly.inference.sampling.mass import given_mass
from credibly.inference.target import to_target
from credibly.likelihoods import Gaussian

DIM = 50
EQUAL = 0.01 * torch.eye(DIM, dtype=DOUBLE) + 0.99
PRECISION = torch.linalg.inv(EQUAL)


def equicorrelated():
    """All correlations are 0.99: one direction is 70 times as wide as the others."""
    return cr.Density(lambda w: -0.5 * ((w @ PRECISION) * w).sum(-1), DIM, batched=True)


def correlated(dim=3, dtype=DOUBLE):
    vectors = torch.linalg.qr(randn(dim, 2, seed=5, dtype=DOUBLE)).Q.to(dtype)
    scale = torch.linspace(0.5, 1.5, dim, dtype=dtype)
    return CorrelatedMass(scale, (Factor(0, vectors, torch.tensor([6.0, 0.2], dtype=dtype)),))


def worst(posterior):
    """Return the worst R-hat and effective sample size of a coordinate."""
    columns = posterior.draws.unbind(-1)
    return max(float(rhat(c)) for c in columns), min(float(ess(c)) for c in columns)


# -- the integrator ----------------------------------------------------------------------------------------------------
def wells(theta):
    theta = theta.detach().requires_grad_()
    value = -(theta**4).sum(-1) + 0.5 * theta.sum(-1) ** 2
    return value.detach(), torch.autograd.grad(value.sum(), theta)[0]


@pytest.mark.parametrize("scheme", INTEGRATORS.values(), ids=INTEGRATORS)
def test_trajectories_are_reversible_and_keep_the_energy_to_second_order(scheme):
    mass, theta, momentum = correlated(), randn(6, 3, dtype=DOUBLE), randn(6, 3, seed=1, dtype=DOUBLE)

    def travel(theta, momentum, steps, length=0.5):
        gradient, size = wells(theta)[1], torch.full((6, 1), length / steps, dtype=DOUBLE)
        for _ in range(steps):
            theta, momentum, gradient, value = scheme.step(theta, momentum, gradient, size, mass, wells)
        return theta, momentum, kinetic(momentum, mass) - value

    before = kinetic(momentum, mass) - wells(theta)[0]
    there = travel(theta, momentum, 100)
    back = travel(there[0], -there[1], 100)
    torch.testing.assert_close(back[0], theta, rtol=0, atol=1e-10)
    torch.testing.assert_close(back[1], -momentum, rtol=0, atol=1e-10)
    coarse, fine = (float((travel(theta, momentum, n)[2] - before).abs().mean()) for n in (100, 200))
    assert coarse / fine == pytest.approx(4, rel=0.1)


# -- exact draws -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, draws", [(cr.HMC, 150), (cr.NUTS, 60)])
def test_a_skewed_target_with_a_low_rank_mass(method, draws):
    posterior = method(chains=32, draws=draws, warmup=100, mass="low-rank", compile=False).fit(
        density(), progress=False
    )
    assert_moments(posterior.draws, *skewed_moments())


@pytest.mark.parametrize("mass", ["low-rank", "block"])
def test_conjugate_regression(conjugate, mass):
    given = conjugate.problem(temperature=cr.Tempering(0.3, 1.0))
    posterior = hmc(given, chains=32, draws=60, warmup=60, mass=mass, jitter=0.3, init="prior")
    assert_moments(posterior.draws, *conjugate.exact(0.3, 1.0))
    # All random parameters are of one layer.
    assert posterior.record.history["mass"]["kind"] == mass


def test_a_strongly_correlated_gaussian_takes_a_tenth_of_the_gradients():
    """At about equal gradients a diagonal mass has not mixed; the factor in ESS per gradient is above 50."""
    settings = {"chains": 8, "draws": 100, "warmup": 100}
    plain, low = (hmc(equicorrelated(), mass=mass, **settings) for mass in ("diagonal", "low-rank"))
    gradients = [p.record.history["gradients"] for p in (plain, low)]
    assert gradients[1] < 1.5 * gradients[0]
    (slow, few), (mixed, many) = worst(plain), worst(low)
    assert mixed < 1.05 < 1.2 < slow
    assert many / gradients[1] > 10 * few / gradients[0]
    found = low.record.history["mass"]
    assert found["rank"] < 5
    # The variances of the widest direction and the others are 49.51 and 0.01; the estimate is shrunk.
    assert 1000 < found["condition"] < 6000
    variance = low.draws.var((0, 1))
    assert float(variance.mean()) == pytest.approx(1, abs=4.5 * math.sqrt(2 / many))


# -- starts that are far away ------------------------------------------------------------------------------------------
def far_start(chains=6, dim=6, distance=1e3):
    start = randn(chains, dim, dtype=DOUBLE)
    start[2] = distance
    return start


def heavy(w):
    """Student's t with ten degrees of freedom: far away it is wide and flat, and chains take long to return."""
    return -8.0 * torch.log1p(w.square().sum(-1) / 10)


@pytest.mark.parametrize("mass", ["low-rank", "diagonal"])
def test_a_chain_that_starts_far_away_does_not_poison_the_mass(mass):
    """After the first window the mass is that of the other chains; the far chain is counted as left out."""
    target = to_target(cr.Density(heavy, 6, batched=True))
    found = []
    for start in (far_start(), far_start(distance=0.5)):
        sampler = cr.HMC(chains=6, draws=5, warmup=100, mass=mass, compile=False).sampler(target, 0)
        sampler.start(start)
        first = next(end for name, _, end in sampler.adaptation.phases if name == "mass")
        while sampler.done < first:
            sampler.advance(lambda: False)
        found.append(sampler.adaptation.mass)
    assert (found[0].excluded, found[1].excluded) == (1, 0)
    (_, high), (_, usual) = (mass.range() for mass in found)
    assert high < 3 * usual


def test_chains_arrive_from_far_away():
    posterior = hmc(equicorrelated(), chains=6, draws=60, warmup=150, mass="low-rank", init=far_start(dim=DIM))
    assert worst(posterior)[0] < 1.1


# -- a posterior as mass -----------------------------------------------------------------------------------------------
FITS = {
    "laplace": cr.Laplace(structure="full", steps=300),
    "laplace, kron": cr.Laplace(structure="kron", steps=300),
    "swag": cr.SWAG(steps=300, rank=3, iterates=6, batch_size=5),
    "bbb": cr.BayesByBackprop(steps=300),
    "bbb, low-rank": cr.BayesByBackprop(steps=200, family="low-rank", rank=2),
}


@pytest.mark.parametrize("name", FITS)
def test_a_posterior_gives_its_covariance(name):
    given = problem()
    q = FITS[name].fit(given, progress=False)
    mass = given_mass("mass", q, to_target(given))
    found = torch.diag(mass) if isinstance(mass, torch.Tensor) else mass.matrix()
    torch.testing.assert_close(found, q.covariance().reshape(found.shape).to(found), rtol=1e-6, atol=1e-9)


def test_a_fixed_mass_from_a_laplace_fit_of_a_linear_model(conjugate):
    """The Laplace posterior is exact, so trajectories of pi/2 are exact circles of independent draws."""
    given = conjugate.problem()
    q = cr.Laplace(structure="full", steps=500).fit(given, progress=False)
    posterior = hmc(given, chains=32, draws=50, warmup=30, mass=q, init="prior")
    assert_moments(posterior.draws, *conjugate.exact())
    history = posterior.record.history
    assert history["mass"]["kind"] == "posterior"
    assert [phase["name"] for phase in history["phases"]] == ["step size", "sampling"]
    assert history["steps"] <= 8


def test_a_posterior_starts_the_adaptation():
    given = problem()
    q = cr.Laplace(structure="diag", steps=100).fit(given, progress=False)
    method = cr.HMC(mass="block", mass_start=q, chains=2, draws=3, warmup=30, max_steps=4, init="prior", compile=False)
    sampler = method.sampler(to_target(given), 0)
    torch.testing.assert_close(sampler.adaptation.inverse_mass, q.std.square())
    assert method.fit(given, progress=False).record.history["mass"]["kind"] == "block"


# -- native code -------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype, atol", [(DOUBLE, 1e-9), (torch.float32, 5e-3)], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", ["hmc", "nuts"])
def test_native_draws_are_those_of_torch(kind, dtype, atol):
    x = randn(30, 3, dtype=dtype)
    p = cr.Problem(mlp(3, 6, 1, dtype=dtype), (x, x.sum(1)), Gaussian(0.5), cr.priors.Normal(0.7))
    dim = p.dim
    vectors = torch.linalg.qr(randn(dim, 3, dtype=DOUBLE)).Q.to(dtype)
    first, second = Factor(0, vectors, torch.tensor([4.0, 0.3, 2.5], dtype=dtype)), correlated(5, dtype).factors[0]
    values = torch.tensor([1.5, 0.5], dtype=dtype)
    for factors in ((first,), (Factor(2, second.vectors, values), Factor(20, second.vectors, values))):
        mass = CorrelatedMass(torch.linspace(0.5, 1, dim, dtype=dtype), factors)
        settings = {"chains": 3, "draws": 8, "warmup": 0, "step_size": 0.05, "init": "prior", "mass": mass}
        extra = {"max_depth": 5} if kind == "nuts" else {"trajectory_length": 1.0, "refresh": 0.5}
        method = cr.NUTS if kind == "nuts" else cr.HMC
        native, plain = (method(**settings, **extra, compile=c).fit(p, progress=False) for c in ("auto", False))
        assert native.record.history["native"]
        assert not plain.record.history["native"]
        torch.testing.assert_close(native.draws, plain.draws, rtol=0, atol=atol)
        torch.testing.assert_close(native.statistics["energy"], plain.statistics["energy"], rtol=1e-3, atol=10 * atol)


@pytest.mark.nightly
def test_compiled_steps_are_those_of_eager_code():
    """Windows change the rank, and with it the shapes of compiled code."""
    settings = {"chains": 2, "draws": 4, "warmup": 25, "mass": "low-rank", "max_steps": 9}
    compiled, plain = (hmc(density(), compile=compile, **settings) for compile in (True, False))
    assert compiled.record.history["compiled"]
    torch.testing.assert_close(compiled.draws, plain.draws, rtol=0, atol=1e-6)


def test_a_divergence_is_rejected_with_any_mass():
    target, mass = to_target(density()), correlated()
    sampler = cr.HMC(chains=2, draws=3, warmup=0, step_size=1e3, mass=mass, compile=False).sampler(target, 0)
    sampler.start(randn(2, 3, dtype=DOUBLE))
    before = sampler.theta.clone()
    assert bool(sampler.advance(lambda: False)["divergent"].all())
    assert torch.equal(sampler.theta, before)
    state = sampler.state._replace(momentum=torch.ones_like(before))
    assert metropolis(state, state, mass, torch.zeros(2), (1.0, 1.0))[1].acceptance.tolist() == [1.0, 1.0]
    assert LEAPFROG.gradients == 1


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_bad_settings_are_refused():
    given = problem()
    q = cr.Laplace(structure="diag", steps=20).fit(given, progress=False)
    for settings, words in (
        ({"mass_rank": 0}, "mass_rank must be a positive integer, got 0"),
        ({"mass": 3}, "mass must be one of 'auto', 'identity', 'prior', 'diagonal', 'low-rank', 'block', got 3"),
        ({"mass_start": "prior"}, "mass_start must be a posterior of the same problem or None, got 'prior'"),
        (
            {"mass_start": q, "mass": "prior"},
            "mass_start must be None unless mass is one of 'diagonal', 'low-rank', 'block', got mass='prior'",
        ),
    ):
        for method in (cr.HMC, cr.NUTS):
            with pytest.raises(cr.InputError, match=words):
                method(**settings)


def test_posteriors_of_something_else_are_refused():
    given, other = problem(), problem(mlp(3, 5, 1, dtype=DOUBLE))
    q = cr.Laplace(structure="diag", steps=20).fit(other, progress=False)
    with pytest.raises(cr.InputError, match="mass must be a posterior of this network, got one with"):
        hmc(given, mass=q)
    with pytest.raises(cr.InputError, match="mass_start must be a posterior of this network"):
        hmc(given, mass="diagonal", mass_start=q)
    with pytest.raises(cr.InputError, match="mass must not be a posterior for a density, which has no network"):
        hmc(density(), mass=q)
    with pytest.raises(cr.InputError, match='mass must not be "block" for a density, which has no layers'):
        hmc(density(), mass="block")
    point = cr.MAP(steps=5).fit(given, progress=False)
    with pytest.raises(cr.InputError, match="mass must have the covariance of one Gaussian, got"):
        hmc(given, mass=point)
    with pytest.raises(cr.InputError, match="mass must be 31 positive variances, got a tensor of shape"):
        hmc(given, mass=torch.ones(3))
