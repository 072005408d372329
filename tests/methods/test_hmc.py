"""HMC against known posteriors, importance sampling, and simulation-based calibration."""

import pytest
import torch
from hmc_targets import DOUBLE, SIZES, density, hmc, simulated_networks, skewed_moments
from torch import nn

import credibly as cr
from chains import assert_moments, assert_weighted_prior, assert_zero
from conftest import mlp, randn
from credibly.inference.target import ProblemTarget
from credibly.likelihoods import Categorical, Gaussian

# -- targets whose moments are known -----------------------------------------------------------------------------------
VARIANTS = {
    "defaults": {},
    "jittered": {"jitter": 0.4},
    "partial refreshment": {"refresh": 0.3, "trajectory_length": 1.0},
    "tuned length": {"trajectory_length": "tuned"},
    "tuned length, unit mass": {"trajectory_length": "tuned", "mass": "identity", "draws": 150, "warmup": 100},
    "step size per chain": {"pooled": False},
    "minimum error": {"integrator": "minimum-error"},
    "unit mass": {"mass": "identity"},
    "prior mass": {"mass": "prior"},
    "thinned": {"thin": 3, "draws": 60},
    "fixed step size": {"step_size": 0.4, "mass": "prior"},
    "fixed step size, adapted mass": {"step_size": 0.4, "mass": "diagonal"},
    "truncated trajectories": {"max_steps": 1, "thin": 4},
    "low acceptance": {"step_size": 0.8, "mass": "identity", "trajectory_length": 2.4, "thin": 4},
    "common start": {"init": torch.ones(32, 3)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skewed_target_whatever_the_settings(variant):
    posterior = hmc(density(), **{**SIZES, **VARIANTS[variant]})
    assert_moments(posterior.draws, *skewed_moments())


def test_a_skewed_target_in_float32():
    posterior = hmc(density(torch.float32), **SIZES)
    assert posterior.draws.dtype == torch.float32
    assert_moments(posterior.draws, *skewed_moments())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), DOUBLE])
def test_a_correlated_gaussian_of_very_different_scales(dtype):
    scale = torch.logspace(-1, 1, 5, dtype=DOUBLE)
    covariance = (0.4 * torch.eye(5, dtype=DOUBLE) + 0.6) * scale[:, None] * scale
    precision, mean = torch.linalg.inv(covariance), torch.tensor([3.0, 0.0, -2.0, 10.0, 1.0], dtype=DOUBLE)
    bowl = cr.Density(
        lambda w: -0.5 * (((w - mean.to(w)) @ precision.to(w)) * (w - mean.to(w))).sum(-1), 5, batched=True, dtype=dtype
    )
    posterior = hmc(bowl, mass="diagonal", jitter=0.3, chains=32, draws=100, warmup=120)
    assert_moments(posterior.draws, mean, covariance)
    low, high = posterior.record.history["inverse_mass_range"]
    assert low == pytest.approx(0.01, rel=0.3)
    assert high == pytest.approx(100.0, rel=0.3)


def test_the_recorded_energy_is_the_hamiltonian():
    """Its kinetic part has mean D/2 in equilibrium, whatever the mass."""
    statistics = hmc(density(), **SIZES).statistics
    kinetic = statistics["energy"] + statistics["log_likelihood"] + statistics["log_prior"]
    assert float(kinetic.min()) > 0
    assert_zero((kinetic - 1.5).unsqueeze(-1), precision=0.05)


# -- networks, against importance sampling from the prior --------------------------------------------------------------
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def picture():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2))


INPUT = randn(5, 2)


NETWORKS = {
    "regression": (lambda: mlp(2, 3, 1), INPUT, INPUT.sum(1), Gaussian(1.0), 40_000),
    "classes": (lambda: mlp(2, 3, 3), INPUT, torch.tensor([0, 1, 2, 0, 0]), Categorical(), 40_000),
    "convolution": (picture, randn(4, 1, 4, 4), torch.tensor([0, 1, 1, 0]), Categorical(), 2000),
    "recurrent": (Sequence, randn(4, 3, 2), torch.tensor([0.5, -1.0, 0.3, 1.5]), Gaussian(0.8), 2000),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n == "convolution" else n for n in NETWORKS]
)
def test_predictions_of_small_networks_agree_with_importance_sampling(name):
    make, x, y, likelihood, count = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = cr.Problem(make(), data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.7))
    looped = name in ("convolution", "recurrent")
    assert p.forward.looped == looped
    settings = {"chains": 8, "draws": 15} if looped else {"chains": 24, "draws": 100}
    posterior = hmc(p, **settings, warmup=10, init="prior", step_size=0.3, trajectory_length=1.2, jitter=0.3)
    assert_weighted_prior(p, posterior.draws, count)
    assert posterior.predict(x).mean.shape[0] == len(x)


def test_a_learned_noise_scale():
    """A linear model: Gaussian given the scale, and a one-dimensional integral over the scale on a grid."""
    x = randn(12, 2, dtype=DOUBLE)
    y = x @ torch.tensor([1.0, -0.5], dtype=DOUBLE) + 0.7 * randn(12, seed=4, dtype=DOUBLE)
    net = nn.Linear(2, 1, bias=False).double()
    likelihood = Gaussian(scale_prior=cr.priors.Normal(1.0, -1.0))
    p = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.8))
    grid = torch.linspace(-4, 3, 4001, dtype=DOUBLE)  # of the log scale, which has prior N(-1, 1)
    noise = grid.exp().square()[:, None, None] * torch.eye(12, dtype=DOUBLE)
    covariance = 0.64 * x @ x.T + noise
    evidence = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=DOUBLE), covariance).log_prob(y)
    weight = torch.softmax(evidence - 0.5 * (grid + 1).square(), 0)
    inside = torch.linalg.inv(x.T @ x / grid.exp().square()[:, None, None] + torch.eye(2, dtype=DOUBLE) / 0.64)
    middle = inside @ x.T @ y / grid.exp().square()[:, None]
    known = torch.cat([middle, grid[:, None]], 1)
    mean = weight @ known
    total = torch.einsum("g,gi,gj->ij", weight, known - mean, known - mean)
    total[:2, :2] += torch.einsum("g,gij->ij", weight, inside)
    posterior = hmc(p, chains=32, draws=60, warmup=50, jitter=0.3, init=torch.zeros(32, 3))
    assert posterior.record.history["mass"]["kind"] == "prior"  # the scales of the two priors differ
    assert_moments(posterior.draws, mean, total)


# -- calibration -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_simulation_based_calibration_of_a_tiny_network():
    """Weights from the prior, data from the weights: the rank of the truth among posterior draws is uniform.

    One chain per data set, all at once: chain c sees the targets of data set c.
    """
    from scipy import stats

    sets, kept = 1000, 9
    target, output, truth = simulated_networks(sets)
    settings = {"mass": "identity", "step_size": 0.3, "trajectory_length": 1.8, "jitter": 0.4}
    posterior = hmc(target, chains=sets, draws=kept, thin=8, warmup=40, **settings)
    assert min(posterior.record.history["acceptance"]) > 0.2  # no chain was stuck

    def functions(theta):
        near = output(theta)
        return torch.cat([near, theta.square().sum(-1, keepdim=True), target(theta).unsqueeze(-1)], -1)

    known = functions(truth)
    seen = torch.stack([functions(posterior.draws[:, s]) for s in range(kept)], 1)
    ranks = (seen < known.unsqueeze(1)).sum(1)  # (set, function), 0 to 9
    for column in ranks.T:
        counts = torch.bincount(column, minlength=kept + 1).numpy()
        assert stats.chisquare(counts).pvalue > 1e-4


def test_gradients_in_bf16_have_energies_in_full_precision():
    """Draws are exact for the float32 network: acceptance uses its log likelihood, not that of bf16 outputs."""
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1)
    net = mlp(3, 20, 1)
    low, full = (
        cr.Problem(net, (x, y), cr.likelihoods.Gaussian(0.1), cr.priors.Normal(1.0), precision=p)
        for p in ("bf16", None)
    )
    method = cr.HMC(chains=2, draws=6, warmup=0, step_size=2e-3, trajectory_length=2e-2, init="network", compile=False)
    posterior = method.fit(low, seed=0, progress=False)
    theta = posterior.draws.flatten(0, 1)
    found = posterior.statistics["log_likelihood"].flatten()
    exact = ProblemTarget(full).likelihood_and_grad(theta)[0]
    rounded = ProblemTarget(low).likelihood_and_grad(theta)[0]
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-4)
    assert float((rounded - exact).abs().max()) > 0.1
    assert ProblemTarget(full).full_likelihood(theta) is None
